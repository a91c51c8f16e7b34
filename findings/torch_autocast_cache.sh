#!/usr/bin/env bash
# torch 2.11 keeps what torch.compile has made on the disk, under a key that tells whether there is
# an autocast, but not of which type. A function that was compiled under autocast of bfloat16 is
# taken for the same one under float16 in the next process: its results have the wrong type. Seen on
# a CPU, 2026-11-27; torch 2.14.1 has the type in its key:
#     2.11.0: bfloat16 gives torch.bfloat16, float16 gives torch.bfloat16
#     2.14.1: bfloat16 gives torch.bfloat16, float16 gives torch.float16
# What to do: TORCHINDUCTOR_AUTOGRAD_CACHE=0, or enter autocast inside of what is compiled.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
cd -- "$work"
cat > seen.py << 'END'
import sys

import torch

net = torch.compile(torch.nn.Linear(64, 8))
with torch.autocast("cpu", getattr(torch, sys.argv[1])):
    output = net(torch.ones(16, 64))
output.float().sum().backward()
print(output.dtype)
END
for wanted in 2.11.0:bfloat16 2.14.1:float16; do
  version=${wanted%:*} said=
  "${PYTHON:-python3}" -m pip install -q --target "$work/$version" "torch==$version" numpy==2.2.6
  for type in bfloat16 float16; do
    found=$(PYTHONPATH=$work/$version TORCHINDUCTOR_CACHE_DIR=$work/cache-$version \
      "${PYTHON:-python3}" seen.py "$type")
    said="$said${said:+, }$type gives $found"
  done
  echo "$version: $said"
  [ "$found" = "torch.${wanted#*:}" ]
  rm -rf -- "${work:?}/$version"
done
