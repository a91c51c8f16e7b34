#!/usr/bin/env bash
# RandomSampler draws two permutations from its generator in an epoch that is read to its end, and
# one in an epoch that ends early (islice, --steps, a break). So all later random numbers of a run
# differ between a loop that stops after the last batch and one that lets the loader end by itself,
# and a resume that replays an epoch has to do the same. Seen with torch 2.14.1, 2026-11-27:
#     all 8 numbers, then StopIteration: 2 permutations
#     8 numbers, and no more asked for: 1 permutations
#     3 numbers: 1 permutations
# What to do: seed the generator anew in each epoch.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
"${PYTHON:-python3}" -m pip install -q --target "$work" torch==2.14.1 numpy==2.2.6
cd -- "$work"
PYTHONPATH=$work "${PYTHON:-python3}" - << 'END'
import torch
from torch.utils.data import RandomSampler


def next_number(generator):
    return torch.randint(2 ** 30, (), generator=generator).item()


after = []
for draws in range(4):
    generator = torch.Generator().manual_seed(0)
    for _ in range(draws):
        torch.randperm(8, generator=generator)
    after.append(next_number(generator))
for text, count, wanted in (("all 8 numbers, then StopIteration", 9, 2),
                            ("8 numbers, and no more asked for", 8, 1), ("3 numbers", 3, 1)):
    generator = torch.Generator().manual_seed(0)
    numbers = iter(RandomSampler(range(8), generator=generator))
    for _ in range(count):
        next(numbers, None)
    drawn = after.index(next_number(generator))
    print(f"{text}: {drawn} permutations")
    assert drawn == wanted
END
