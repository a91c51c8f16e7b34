#!/usr/bin/env bash
# Pillow and OpenCV turn a picture differently if its EXIF is stored in an unusual way: with its
# header twice (Pillow#8348), or as text in a PNG, as ImageMagick wrote it (Pillow#4460). Seen with
# pillow 12.2.0 and opencv-python-headless 5.0.0.93, 2026-11-27, for a picture of 48 x 32 with
# orientation 6:
#     one block: Pillow (32, 48), OpenCV (32, 48)
#     a header twice: Pillow (32, 48), OpenCV (48, 32)
#     text in a PNG: Pillow (32, 48), OpenCV (48, 32)
# What to do: write such pictures upright, without EXIF.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
"${PYTHON:-python3}" -m pip install -q --target "$work" \
  pillow==12.2.0 opencv-python-headless==5.0.0.93
cd -- "$work"
PYTHONPATH=$work "${PYTHON:-python3}" - << 'END'
import io
import struct

import cv2
import numpy as np
from PIL import Image, ImageOps, PngImagePlugin


def block(turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    return exif.tobytes()


def picture(form, **options):
    Image.new("RGB", (48, 32)).save(file := io.BytesIO(), form, **options)
    return file.getvalue()


def jpeg(exif):
    plain = picture("JPEG")
    return plain[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + plain[2:]


text = PngImagePlugin.PngInfo()
text.add_text("Raw profile type exif", f"\nexif\n{len(block(6)):8}\n{block(6).hex()}\n")
for name, content, seen in (("one block", jpeg(block(6)), (32, 48)),
                            ("a header twice", jpeg(b"Exif\0\0" + block(6)), (48, 32)),
                            ("text in a PNG", picture("PNG", pnginfo=text), (48, 32))):
    pillow = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).size
    found = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR).shape[1::-1]
    print(f"{name}: Pillow {pillow}, OpenCV {found}")
    assert pillow == (32, 48) and found == seen
END
