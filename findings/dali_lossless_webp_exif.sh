#!/usr/bin/env bash
# DALI refuses some lossless WebP files that have an EXIF block, which Pillow and browsers read. It
# depends on the bytes: of a picture in one colour black is read, this blue is not. Without EXIF, or
# lossy, all are read. With fn.external_source the error names no file. Seen with
# nvidia-dali-cuda120 2.4.0 on a CPU, 2026-11-27:
#     lossy: read
#     lossy with EXIF: read
#     lossless: read
#     lossless with EXIF: refused: nvImageCodec failure: '#17'
# What to do: save such files without EXIF, after turning them as it says.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
"${PYTHON:-python3}" -m pip install -q --target "$work" \
  nvidia-dali-cuda120==2.4.0 numpy==2.2.6 pillow==12.2.0
cd -- "$work"
PYTHONPATH=$work "${PYTHON:-python3}" - << 'END'
import re

import numpy as np
from nvidia.dali import fn, pipeline_def, types
from PIL import Image


@pipeline_def(batch_size=1, num_threads=1, device_id=None)
def decoded(name):
    return fn.decoders.image(fn.external_source(
        lambda: [np.fromfile(name, np.uint8)], dtype=types.UINT8))


exif = Image.Exif()
exif[0x0112] = 1
for lossless in (False, True):
    for block in (None, exif):
        Image.new("RGB", (48, 32), (90, 120, 150)).save("a.webp", lossless=lossless,
                                                        **({"exif": block} if block else {}))
        assert Image.open("a.webp").convert("RGB").size == (48, 32)
        try:
            decoded("a.webp").run()
            said = "read"
        except RuntimeError as error:
            assert "a.webp" not in str(error)
            said = "refused: " + re.search("nvImageCodec failure: '#[0-9]+'", str(error))[0]
        print(("lossless" if lossless else "lossy") + (" with EXIF" if block else ""), said,
              sep=": ")
        assert (said == "read") != (lossless and block is not None)
END
