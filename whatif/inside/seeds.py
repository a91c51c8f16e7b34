"""Shift the seeds that a script sets, so that each run draws other numbers.

Not shifted are generators of the script's own (torch.Generator, numpy.random.RandomState,
random.Random): most of them split a dataset or order it, and runs are compared on the same data.
torch.Generator could not be, either: its method is one of a class in C.
"""

import functools
import multiprocessing
import os
import random
import re
import sys
import threading

import torch

from whatif.imports import after_import, replace

CALLS = threading.local()  # torch.manual_seed calls torch.cuda.manual_seed_all
APART = 1_000_003  # between the seeds of processes that the script starts


def shift_torch(seed, k):
    """Return a seed of torch, which may be up to 2 ** 64 - 1; wrong ones stay as they are."""
    seed = int(seed)
    if seed >= 2**64:
        return seed
    return seed + k if seed + k < 2**64 else seed - k


def shift_numpy(seed, k):
    """Return a seed of numpy; None and wrong ones stay as they are."""
    if isinstance(seed, (bool, str, bytes)) or seed is None:
        return seed
    try:
        if hasattr(seed, "__len__"):
            return [shift_numpy(int(each), k) for each in seed]
        return (int(seed) + k) % 2**32 if 0 <= int(seed) < 2**32 else seed
    except (TypeError, ValueError):
        return seed


def shift_generator(seed, k):
    """Return a seed of numpy.random.default_rng, which takes any number from 0 and much else."""
    is_number = hasattr(seed, "__index__") and not isinstance(seed, bool)
    return int(seed) + k if is_number and int(seed) >= 0 else seed


def shift_python(seed, k):
    """Return a seed of random.seed, which takes None, numbers and text."""
    if isinstance(seed, int):
        return int(seed) + k
    return f"{seed}+{k}" if isinstance(seed, str) and k else seed


def shifted(real, name, shift, k):
    """Return `real` with its seed, the first argument or the one called `name`, shifted by k."""

    @functools.wraps(real)
    def seeded(*args, **options):
        is_outer = not getattr(CALLS, "inside", False)
        CALLS.inside = True
        try:
            if is_outer and args:
                args = (shift(args[0], k), *args[1:])
            elif is_outer and name in options:
                options[name] = shift(options[name], k)
            return real(*args, **options)
        finally:
            if is_outer:
                CALLS.inside = False

    return seeded


def first_seed(k):
    """Return this process's seed while the script sets none; no two processes have the same."""
    name = multiprocessing.current_process().name  # SpawnProcess-1:2
    number = 0
    for part in re.findall(r"\d+", name):
        number = 1000 * number + int(part)
    return k + APART * (1000 * int(os.environ.get("RANK", 0)) + number) % 2**31


def shift_seeds(k):
    """Add k to each seed that the script sets from now on, and set k where it sets none.

    numpy may be imported later. Libraries (transformers, Lightning, accelerate) set their seeds
    by the same functions.
    """
    seed = first_seed(k)
    random.seed(seed)
    torch.manual_seed(seed)
    owners = [
        (random, "seed", "a", shift_python),
        (torch, "manual_seed", "seed", shift_torch),
        (torch.cuda, "manual_seed", "seed", shift_torch),
        (torch.cuda, "manual_seed_all", "seed", shift_torch),
    ]
    put(owners, k)
    after_import("numpy.random", lambda: shift_seeds_of_numpy(k, seed))


def shift_seeds_of_numpy(k, seed):
    numpy_random = sys.modules["numpy.random"]  # may not be an attribute of numpy yet
    numpy_random.seed(seed % 2**32)
    put(
        [
            (numpy_random, "seed", "seed", shift_numpy),
            (numpy_random, "default_rng", "seed", shift_generator),
        ],
        k,
    )


def put(owners, k):
    """Replace functions, (module, name, name of the seed, how to shift it), in all modules."""
    kept = [getattr(owner, name) for owner, name, _, _ in owners]  # so that no id is used again
    replace(
        {
            id(real): shifted(real, seed, shift, k)
            for real, (_, _, seed, shift) in zip(kept, owners, strict=True)
        }
    )
