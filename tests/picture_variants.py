"""Files of the same picture in over 100 variants: format, bits, colour, orientation, transparency,
colour profile and wrong ending. Each says what a script has to read from it.

    python picture_variants.py FOLDER       writes them all
"""

import io
import struct
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageCms, PngImagePlugin

WIDTH, HEIGHT = 48, 32
ACROSS, DOWN = np.meshgrid(np.linspace(0, 1, WIDTH), np.linspace(0, 1, HEIGHT))
UPRIGHT = np.stack([40 + 180 * ACROSS, 30 + 150 * DOWN, 200 - 90 * ACROSS - 80 * DOWN], 2)
RGB = UPRIGHT.round().astype(np.uint8)  # smooth, and without symmetry
GREY = np.asarray(Image.fromarray(RGB).convert("L"))
ALPHA = np.where(DOWN < 0.5, 255, 90).astype(np.uint8)
# an upright picture of the file's pixels, for each value of EXIF's Orientation
TURN = {
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: np.rot90(x, 3),
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
    8: lambda x: np.rot90(x),
}
XMP = (
    b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-'
    b'syntax-ns#"><rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" '
    b'tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
)
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
# its red, green and blue are rotated: a script that applied it would show other colours
ROTATED = SRGB.replace(b"rXYZ", b"....").replace(b"gXYZ", b"rXYZ").replace(b"bXYZ", b"gXYZ")
ROTATED = ROTATED.replace(b"....", b"bXYZ")


class Variant(NamedTuple):
    """`pixels` is what a script has to read, uint8 (height, width, 3), within `tolerance`.

    It is None if each script has to refuse the file by name.
    """

    name: str
    content: bytes
    pixels: np.ndarray | None
    tolerance: float
    kind: str


def save(pixels, format, **options):
    """Return an array or a Pillow image as the bytes of a file."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(file := io.BytesIO(), format, **options)
    return file.getvalue()


def exif(orientation):
    """Return an EXIF block."""
    block = Image.Exif()
    block[0x0112] = orientation
    return block


def pnm(magic, pixels, maximum, comment=b""):
    """Return a PGM (P5, P2) or PPM (P6, P3) whose values go from 0 to `maximum`."""
    values = np.rint(pixels / 255 * maximum).astype(">u2" if maximum > 255 else "u1")
    header = b"%s\n%s%d %d\n%d\n" % (magic, comment, pixels.shape[1], pixels.shape[0], maximum)
    if magic in (b"P2", b"P3"):
        return header + b"\n".join(
            b" ".join(b"%d" % value for value in row.flatten()) for row in values
        )
    return header + values.tobytes()


def png(pixels, bits, colour, *chunks):
    """Return a PNG of `pixels`, (height, width) or (height, width, channels) of 0 to 2**bits - 1."""

    def chunk(name, content):
        return (
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
        )

    rows = pixels.reshape(len(pixels), -1)
    if bits == 16:
        rows = rows.astype(">u2").view(np.uint8)
    elif bits < 8:
        rows = np.packbits(
            ((rows[..., None] >> np.arange(bits)[::-1]) & 1)
            .astype(np.uint8)
            .reshape(len(rows), -1),
            axis=1,
        )
    else:
        rows = rows.astype(np.uint8)
    content = b"".join(b"\0" + row.tobytes() for row in rows)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(
            b"IHDR", struct.pack(">IIBBBBB", pixels.shape[1], len(pixels), bits, colour, 0, 0, 0)
        )
        + b"".join(chunk(*each) for each in chunks)
        + chunk(b"IDAT", zlib.compress(content))
        + chunk(b"IEND", b"")
    )


def tiff(pixels, order="<", photometric=None, kind=1, turn=1, alpha=None):
    """Return an uncompressed TIFF. `kind`: 1 unsigned, 2 signed, 3 floating point."""
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    if photometric is None:
        photometric = 1 if channels < 3 else 2
    data = pixels.astype(pixels.dtype.newbyteorder(order)).tobytes()
    bits = 8 * pixels.dtype.itemsize
    tags = [
        (256, 4, [pixels.shape[1]]),
        (257, 4, [pixels.shape[0]]),
        (258, 3, [bits] * channels),
        (259, 3, [1]),
        (262, 3, [photometric]),
        (273, 4, [8]),
        (274, 3, [turn]),
        (277, 3, [channels]),
        (278, 4, [pixels.shape[0]]),
        (279, 4, [len(data)]),
        (284, 3, [1]),
    ]
    tags += [(338, 3, [alpha])] if alpha is not None else []
    tags += [(339, 3, [kind] * channels)]
    start = 8 + len(data) + len(data) % 2
    at, entries, further = start + 2 + 12 * len(tags) + 4, b"", b""
    for tag, form, values in tags:
        packed = struct.pack(order + ("H" if form == 3 else "I") * len(values), *values)
        if len(packed) > 4:
            entries += struct.pack(order + "HHII", tag, form, len(values), at + len(further))
            further += packed
        else:
            entries += struct.pack(order + "HHI", tag, form, len(values)) + packed.ljust(4, b"\0")
    return (
        struct.pack(order + "2sHI", b"II" if order == "<" else b"MM", 42, start)
        + data
        + b"\0" * (len(data) % 2)
        + struct.pack(order + "H", len(tags))
        + entries
        + bytes(4)
        + further
    )


def bmp(pixels, bits):
    """Return a BMP of 16 (5 bits a colour) or 32 bits a pixel."""
    if bits == 16:
        five = pixels.astype(np.uint16) >> 3
        rows = (five[..., 0] << 10 | five[..., 1] << 5 | five[..., 2]).astype("<u2")
    else:
        rows = np.dstack([pixels[..., ::-1], ALPHA])
    data = rows[::-1].tobytes()
    return (
        struct.pack("<2sIHHI", b"BM", 54 + len(data), 0, 0, 54)
        + struct.pack(
            "<IiiHHIIiiII", 40, pixels.shape[1], pixels.shape[0], 1, bits, 0, len(data), 0, 0, 0, 0
        )
        + data
    )


def rgb(grey):
    """Return a grey picture with three channels."""
    return np.repeat(np.asarray(grey, np.uint8)[..., None], 3, 2)


def levels(pixels, bits):
    """Return `pixels` as numbers of so many bits, and as they have to be seen."""
    numbers = np.rint(pixels / 255 * (2**bits - 1)).astype(int)
    return numbers, np.rint(numbers / (2**bits - 1) * 255).astype(np.uint8)


def variants():
    """Return all variants."""
    made = []

    def add(name, content, pixels=RGB, tolerance=0.0, kind="plain"):
        made.append(Variant(name, content, pixels, tolerance, kind))

    image, grey = Image.fromarray(RGB), Image.fromarray(GREY)
    clear = Image.fromarray(np.dstack([RGB, ALPHA]))
    jpeg, lossless = dict(quality=95, subsampling=0), dict(lossless=True, exact=True)
    palette = image.quantize(64)
    seen = np.asarray(palette.convert("RGB"))
    black_and_white = np.where(GREY > 110, 255, 0).astype(np.uint8)
    forms = {
        "jpg": ("JPEG", jpeg, 3),
        "png": ("PNG", {}, 0),
        "tif": ("TIFF", {}, 0),
        "webp": ("WEBP", dict(quality=95), 8),
        "lossless.webp": ("WEBP", lossless, 0),
    }

    # colour and bits
    for ending, (format, options, tolerance) in forms.items():
        add(f"rgb.{ending}", save(image, format, **options), RGB, tolerance)
        add(f"grey.{ending}", save(grey, format, **options), rgb(GREY), tolerance)
    add("progressive.jpg", save(image, "JPEG", progressive=True, **jpeg), RGB, 3)
    add("420.jpg", save(image, "JPEG", quality=95), RGB, 8)
    add("cmyk.jpg", save(image.convert("CMYK"), "JPEG", **jpeg), RGB, 5)
    add(
        "two pictures.jpg",
        save(image, "MPO", save_all=True, append_images=[image], quality=95),
        RGB,
        8,
    )
    for bits in (1, 2, 4, 8, 16):
        numbers, wanted = levels(GREY, bits)
        kind = "more than 8 bits" if bits > 8 else "plain"
        add(f"grey {bits} bits.png", png(numbers, bits, 0), rgb(wanted), 1, kind)
    numbers, wanted = levels(UPRIGHT, 16)
    add("rgb 16 bits.png", png(numbers, 16, 2), wanted, 1, "more than 8 bits")
    for bits in (1, 2, 4, 8):
        few = image.quantize(2**bits)
        colours = bytes(few.getpalette())[: 3 * 2**bits]
        add(
            f"palette {bits} bits.png",
            png(np.asarray(few), bits, 3, (b"PLTE", colours)),
            np.asarray(few.convert("RGB")),
        )
    add("gamma.png", png(RGB, 8, 2, (b"gAMA", struct.pack(">I", 100_000))))
    add("palette.bmp", save(palette, "BMP"), seen)
    add("grey.bmp", save(grey, "BMP"), rgb(GREY))
    add(
        "1 bit.bmp",
        save(Image.fromarray(black_and_white).convert("1"), "BMP"),
        rgb(black_and_white),
    )
    add("rgb.bmp", save(image, "BMP"))
    add("16 bits a pixel.bmp", bmp(RGB, 16), RGB, 8)
    for maximum in (1, 15, 100, 255, 1023, 4095, 65535):
        kind = "more than 8 bits" if maximum > 255 else "plain" if maximum == 255 else "maximum"
        for magic, pixels, name in ((b"P5", GREY, "pgm"), (b"P6", RGB, "ppm")):
            wanted = np.rint(np.rint(pixels / 255 * maximum) / maximum * 255)
            wanted = (wanted if wanted.ndim == 3 else rgb(wanted)).astype(np.uint8)
            add(f"maximum {maximum}.{name}", pnm(magic, pixels, maximum), wanted, 1, kind)
    add("comment.pgm", pnm(b"P5", GREY, 255, b"# 15\n"), rgb(GREY))
    add("text.pgm", pnm(b"P2", GREY, 255), rgb(GREY), kind="other format")
    add("text.ppm", pnm(b"P3", RGB, 255), RGB, kind="other format")
    for name, options in (
        ("lzw", dict(compression="tiff_lzw")),
        ("deflate", dict(compression="tiff_adobe_deflate")),
    ):
        add(f"{name}.tif", save(image, "TIFF", **options))
    add("jpeg inside.tif", save(image, "TIFF", compression="jpeg", quality=95), RGB, 6)
    add("palette.tif", save(palette, "TIFF"), seen)
    add("cmyk.tif", save(image.convert("CMYK"), "TIFF"), RGB, 2, "cmyk tiff")
    add(
        "1 bit.tif",
        save(Image.fromarray(black_and_white).convert("1"), "TIFF"),
        rgb(black_and_white),
        kind="1 bit tiff",
    )
    add("white is zero.tif", tiff(255 - GREY, photometric=0), rgb(GREY))
    add("two pages.tif", save(image, "TIFF", save_all=True, append_images=[grey]))
    for order, name in (("<", "little"), (">", "big")):
        for pixels, colour in ((GREY, "grey"), (RGB, "rgb")):
            numbers, wanted = levels(pixels, 16)
            wanted = wanted if wanted.ndim == 3 else rgb(wanted)
            add(
                f"{colour} 16 bits {name}.tif",
                tiff(numbers.astype(np.uint16), order),
                wanted,
                1,
                "more than 8 bits",
            )
    fraction = (GREY / 255).astype(np.float32)
    for name, pixels, kind in (
        ("float to 1", fraction, 3),
        ("float to 255", 255 * fraction, 3),
        ("float rgb", (RGB / 255).astype(np.float32), 3),
        ("half", fraction.astype(np.float16), 3),
        ("double", fraction.astype(np.float64), 3),
        ("int32", GREY.astype(np.int32), 2),
        ("int32 to 65535", GREY.astype(np.int32) * 257, 2),
        ("uint32", GREY.astype(np.uint32) * 16_843_009, 1),
        ("int16", GREY.astype(np.int16) * 128, 2),
    ):
        add(f"{name}.tif", tiff(pixels, kind=kind), None, kind="float, signed or 32 bits")

    # orientation
    for turn in range(1, 9):
        for ending, (format, options, tolerance) in forms.items():
            if ending != "jpg" and turn not in (1, 3, 6):
                continue
            kind = "lossless WebP with EXIF" if ending == "lossless.webp" else "plain"
            content = (
                tiff(RGB, turn=turn)
                if ending == "tif"
                else save(image, format, exif=exif(turn), **options)
            )
            add(f"exif {turn}.{ending}", content, TURN[turn](RGB), tolerance, kind)
    for ending, (format, options, tolerance) in forms.items():
        note = PngImagePlugin.PngInfo()
        note.add_itxt("XML:com.adobe.xmp", XMP.decode())
        options = options | (
            dict(tiffinfo={700: XMP})
            if format == "TIFF"
            else dict(pnginfo=note)
            if format == "PNG"
            else dict(xmp=XMP)
        )
        add(f"xmp 6.{ending}", save(image, format, **options), RGB, tolerance, "XMP only")
        if format != "TIFF":
            add(
                f"exif 1 xmp 6.{ending}",
                save(image, format, exif=exif(1), **options),
                RGB,
                tolerance,
                "lossless WebP with EXIF" if "loss" in ending else "plain",
            )

    # transparency
    add("rgba.png", save(clear, "PNG"), kind="transparent")
    add("la.png", save(clear.convert("LA"), "PNG"), rgb(GREY), kind="transparent")
    sixteen = np.dstack([RGB, ALPHA]).astype(int) * 257
    add("rgba 16 bits.png", png(sixteen, 16, 6), RGB, 1, "transparent")
    add(
        "la 16 bits.png",
        png(np.dstack([GREY, ALPHA]).astype(int) * 257, 16, 4),
        rgb(GREY),
        1,
        "transparent",
    )
    colours = bytes(palette.getpalette())[:192]
    add(
        "palette alpha.png",
        png(np.asarray(palette), 8, 3, (b"PLTE", colours), (b"tRNS", bytes(range(0, 256, 4)))),
        seen,
        kind="transparent",
    )
    add(
        "grey key.png",
        png(GREY, 8, 0, (b"tRNS", struct.pack(">H", int(GREY[3, 3])))),
        rgb(GREY),
        kind="transparent",
    )
    add(
        "rgb key.png",
        png(RGB, 8, 2, (b"tRNS", struct.pack(">HHH", *RGB[3, 3].tolist()))),
        kind="transparent",
    )
    add("rgba.webp", save(clear, "WEBP", quality=95, exact=True), RGB, 8, "transparent")
    add("rgba.lossless.webp", save(clear, "WEBP", **lossless), kind="transparent")
    add("rgba.tif", tiff(np.dstack([RGB, ALPHA]), alpha=2), kind="transparent")
    add("la.tif", tiff(np.dstack([GREY, ALPHA]), alpha=2), rgb(GREY), kind="transparent")
    add("32 bits a pixel.bmp", bmp(RGB, 32), kind="plain")

    # profile: no script applies it
    for ending, (format, options, tolerance) in forms.items():
        add(
            f"profile.{ending}", save(image, format, icc_profile=ROTATED, **options), RGB, tolerance
        )

    # wrong ending
    wrong = {
        "JPEG": save(image, "JPEG", **jpeg),
        "PNG": save(image, "PNG"),
        "WebP": save(image, "WEBP", quality=95),
        "BMP": save(image, "BMP"),
        "TIFF": save(image, "TIFF"),
        "PPM": pnm(b"P6", RGB, 255),
        "GIF": save(palette, "GIF"),
        "AVIF": save(image, "AVIF", quality=95),
        "JPEG 2000": save(image, "JPEG2000"),
    }
    for format, content in wrong.items():
        for ending in ("jpg", "png", "tif"):
            if format != {"jpg": "JPEG", "png": "PNG", "tif": "TIFF"}[ending]:
                add(
                    f"{format} named.{ending}",
                    content,
                    seen if format == "GIF" else RGB,
                    {"JPEG": 3, "WebP": 8, "AVIF": 8}.get(format, 0),
                    "other format" if format in ("GIF", "AVIF", "JPEG 2000") else "plain",
                )
    numbers, wanted = levels(GREY, 16)
    add("grey 16 bits PNG named.jpg", png(numbers, 16, 0), rgb(wanted), 1, "more than 8 bits")
    add(
        "maximum 15 PPM named.jpg",
        pnm(b"P6", RGB, 15),
        np.rint(np.rint(RGB / 17) * 17).astype(np.uint8),
        1,
        "maximum",
    )
    add("float TIFF named.jpg", tiff(fraction, kind=3), None, kind="float, signed or 32 bits")
    return made


if __name__ == "__main__":
    for variant in variants():
        (Path(sys.argv[1]) / variant.name).write_bytes(variant.content)
