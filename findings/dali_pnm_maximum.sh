#!/usr/bin/env bash
# DALI does not scale a PGM or PPM by the maximum that its header states, and gives no warning. A
# 4-bit picture (maximum 15) comes out nearly black. Pillow and OpenCV scale. Only 255 and 65535
# are read right. Seen with nvidia-dali-cuda120 2.4.0 on a CPU, 2026-11-27:
#     maximum 15: DALI's mean is 11, Pillow's 187
#     maximum 255: DALI's mean is 183, Pillow's 183
#     maximum 1023: DALI's mean is 2, Pillow's 183
#     maximum 65535: DALI's mean is 183, Pillow's 183
# What to do: rewrite such files with a maximum of 255, for instance with Pillow.
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


for maximum, wrong in ((15, 11), (255, 183), (1023, 2), (65535, 183)):
    values = np.full((32, 48, 3), round(maximum * 183 / 255), ">u2" if maximum > 255 else "u1")
    with open("a.ppm", "wb") as file:
        file.write(b"P6 48 32 %d\n" % maximum + values.tobytes())
    dali = np.asarray(decoded("a.ppm").run()[0].at(0)).mean()
    pillow = np.asarray(Image.open("a.ppm")).mean()
    print(f"maximum {maximum}: DALI's mean is {dali:.0f}, Pillow's {pillow:.0f}")
    assert abs(dali - wrong) < 1 and abs(pillow - 183) < 5
END
