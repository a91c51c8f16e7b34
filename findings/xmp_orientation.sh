#!/usr/bin/env bash
# Pillow's ImageOps.exif_transpose also turns a picture whose orientation stands in XMP only.
# OpenCV (as torchvision and DALI do) knows EXIF's only. So a data set with such files is turned in
# one loader and not in another. Seen with pillow 12.2.0 and opencv-python-headless 5.0.0.93,
# 2026-11-27, for a picture of 48 x 32 with orientation 6:
#     JPEG, EXIF: Pillow (32, 48), OpenCV (32, 48)
#     JPEG, XMP: Pillow (32, 48), OpenCV (48, 32)
#     and the same for WebP and TIFF
# What to do: remove "xmp" and "XML:com.adobe.xmp" from image.info before exif_transpose, or write
# the pictures upright.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
"${PYTHON:-python3}" -m pip install -q --target "$work" \
  pillow==12.2.0 opencv-python-headless==5.0.0.93
cd -- "$work"
PYTHONPATH=$work "${PYTHON:-python3}" - << 'END'
import cv2
import numpy as np
from PIL import Image, ImageOps

XMP = (b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-'
       b'syntax-ns#"><rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" '
       b'tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>')
exif = Image.Exif()
exif[0x0112] = 6
for form in ("JPEG", "WEBP", "TIFF"):
    xmp = {"tiffinfo": {700: XMP}} if form == "TIFF" else {"xmp": XMP}
    for place, options in (("EXIF", {"exif": exif}), ("XMP", xmp)):
        Image.new("RGB", (48, 32)).save("a", form, **options)
        pillow = ImageOps.exif_transpose(Image.open("a")).size
        height, width = cv2.imdecode(np.fromfile("a", np.uint8), cv2.IMREAD_COLOR).shape[:2]
        print(f"{form}, {place}: Pillow {pillow}, OpenCV {width, height}")
        assert pillow == (32, 48) and (width, height) == (pillow if place == "EXIF" else (48, 32))
END
