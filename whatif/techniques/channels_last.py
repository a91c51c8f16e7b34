"""The layout channels_last for the weights of convolutions, their momentum, and images."""

NAMES = ("channels_last",)


def forward(plain, name, run):
    """Return `plain` with images in channels_last."""
    import torch
    from torch.utils._pytree import tree_map_only

    def last_forward(*args, **kwargs):
        args, kwargs = tree_map_only(torch.Tensor, lambda each: each.contiguous(
            memory_format=torch.channels_last) if each.dim() == 4 else each, (args, kwargs))
        return plain(*args, **kwargs)
    return last_forward


def on(run, name):
    """Change the layout of the weights."""
    import torch
    change(run, torch.channels_last)


def off(run, name):
    """Put the layout of before back."""
    change(run, None)


def change(run, layout):
    """Give each weight of four dimensions the layout, or (None) the one it had at first.

    Both copies are kept, because a CUDA graph reads the weights where they were when it was made.
    Momentum and gradients follow: a fused step on mixed layouts is silently wrong.
    """
    import torch
    weights = {id(each): each for module in run.inner_modules() for each in module.parameters()
               if each.dim() == 4}
    with torch.no_grad():
        for key, weight in weights.items():
            copies = run.layouts.setdefault(key, {None: weight.data})
            if layout not in copies:
                copies[layout] = torch.empty_like(weight.data, memory_format=layout)
            if copies[layout].data_ptr() != weight.data_ptr():
                weight.data = copies[layout].copy_(weight.data)
            if weight.grad is not None:
                weight.grad = torch.empty_like(weight.data).copy_(weight.grad)
        for optimizer in run.optimizers:
            for weight, state in optimizer.state.items():
                for name, value in state.items() if id(weight) in weights else ():
                    if getattr(value, "shape", None) == weight.shape:
                        state[name] = torch.empty_like(weight.data, dtype=value.dtype).copy_(value)
