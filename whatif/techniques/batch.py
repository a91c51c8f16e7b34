"""A larger batch, of kept batches joined. It is another training, so no set keeps it."""

NAMES = ("batch x2", "batch x4")


def times(names):
    """Return how many batches are joined under a set of techniques."""
    return next((int(name[-1]) for name in names if name in NAMES), 1)


def is_samples(batch):
    """Return whether a list holds samples: images of several sizes, or dicts, as in detection."""
    import torch
    if not batch or len({type(each) for each in batch}) > 1:
        return False
    if isinstance(batch[0], torch.Tensor):
        return all(each.dim() == 3 for each in batch) and len({each.shape for each in batch}) > 1
    return len(batch) > 1 and not isinstance(batch[0], (list, tuple))


def joined(batches):
    """Return batches as one, or raise ValueError: tensors are joined along their first dimension.

    Lists of samples, as detection has them, are joined as lists.
    """
    import torch
    first = batches[0]
    if isinstance(first, torch.Tensor):
        if not first.dim() or any(each.shape[1:] != first.shape[1:] for each in batches):
            raise ValueError("its batches cannot be joined: their shapes differ")
        whole = torch.cat(batches)
        return whole.pin_memory() if first.is_pinned() else whole
    if isinstance(first, dict):
        return type(first)({key: joined([each[key] for each in batches]) for key in first})
    if isinstance(first, (list, tuple)):
        if is_samples(first):
            return type(first)(sum(map(list, batches), []))
        parts = [joined([*each]) for each in zip(*batches)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(first, (str, bytes, int, float, type(None))):
        return first
    raise ValueError(f"its batches cannot be joined: they hold a {type(first).__name__}")
