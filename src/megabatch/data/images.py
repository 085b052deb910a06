"""Images from outside: their size is known before they are decoded, and what is wrong with them has a name."""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING

from .source import BadSample

if TYPE_CHECKING:
    from PIL import Image

# Formats that hold pixels and nothing else: no PostScript, which Ghostscript would execute, no format that refers to other files.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
SUFFIXES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm")
ORIENTATION = 0x0112
# EXIF's eight orientations, 1 being upright, and the names of Pillow's transpositions: texts are read where there is no Pillow.
UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def decode(data: bytes | Path, key: str, max_pixels: int) -> Image.Image:
    """The image of a file or its bytes, upright, grey (mode L) or in colours (RGB); the first one of an animation.

    BadSample where it has more pixels than `max_pixels`, known from its header, and where it cannot be decoded to its end.
    """
    from PIL import Image, UnidentifiedImageError

    # A named pipe would be waited for, for ever.
    if isinstance(data, Path) and not os.path.isfile(data):
        raise BadSample(key, f"there is no image {data.name[:200]!r}")
    try:
        with io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as file, warnings.catch_warnings():
            # Pillow warns of large images and of broken metadata; the former are refused here, the latter are not used.
            warnings.simplefilter("ignore")
            return _decode(file, key, max_pixels)
    except (BadSample, MemoryError):
        raise
    except UnidentifiedImageError:
        raise BadSample(key, f"is no image of a known format ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError as error:
        raise BadSample(key, f"is refused by Pillow, whose limit is below data.max_pixels ({error})") from None
    except Exception as error:
        # Decoders raise whatever their parsing ran into: OSError, SyntaxError, struct.error, KeyError and more.
        raise BadSample(key, f"image cannot be decoded ({type(error).__name__}: {error})") from None


def _decode(file: IO[bytes], key: str, max_pixels: int) -> Image.Image:
    from PIL import Image

    with Image.open(file, formats=FORMATS) as image:
        width, height = image.size
        if width * height > max_pixels:
            raise BadSample(key, f"has {width} × {height} pixels, more than data.max_pixels = {max_pixels}")
        if not width * height:
            raise BadSample(key, "has no pixels")
        image.load()
        turn = _turn(image)
        converted = _eight_bits(image, key)
        return converted if turn is None else converted.transpose(turn)


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What makes the image upright, by its metadata."""
    from PIL.Image import Transpose

    try:
        name = UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
        return None if name is None else Transpose[name]
    except Exception:
        # Metadata that cannot be parsed says nothing about the pixels, which are fine.
        return None


def _eight_bits(image: Image.Image, key: str) -> Image.Image:
    if image.mode == "F":
        raise BadSample(key, "has floating-point pixels, whose range is not known: store it in 8 or 16 bits")
    if image.mode.startswith("I"):
        # 16 bits of grey; Pillow's own conversion would make everything above 255 white.
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    return image.convert("L" if image.mode in ("1", "L") else "RGB")
