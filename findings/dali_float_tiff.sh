#!/usr/bin/env bash
# A TIFF of floating-point numbers: Pillow's convert("RGB") takes them as 0 to 255, DALI as 0 to 1.
# So each shows the other's pictures black or white, without a word. Seen with nvidia-dali-cuda120
# 2.4.0 on a CPU and pillow 12.2.0, 2026-11-27:
#     all 100: Pillow 100, DALI 255
#     all 100 / 255: Pillow 0, DALI 100
# What to do: write such pictures as 8 bits first, by the range that you know them to have.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
"${PYTHON:-python3}" -m pip install -q --target "$work" \
  nvidia-dali-cuda120==2.4.0 numpy==2.2.6 pillow==12.2.0
cd -- "$work"
PYTHONPATH=$work "${PYTHON:-python3}" - << 'END'
import numpy as np
from nvidia.dali import fn, pipeline_def
from PIL import Image


@pipeline_def(batch_size=1, num_threads=1, device_id=None)
def decoded(name):
    return fn.decoders.image(fn.readers.file(files=[name])[0])


for name, value, wanted in (("all 100", 100, (100, 255)), ("all 100 / 255", 100 / 255, (0, 100))):
    Image.new("F", (48, 32), value).save("a.tif")
    pillow = np.asarray(Image.open("a.tif").convert("RGB")).max()
    dali = np.asarray(decoded("a.tif").run()[0].at(0)).max()
    print(f"{name}: Pillow {pillow}, DALI {dali}")
    assert (pillow, dali) == wanted
END
