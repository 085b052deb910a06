"""Decode untrusted images and texts: limits are checked before any work, and every refusal has a reason."""

from __future__ import annotations

import functools
import io
import math
import os
import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from .source import BadSample, EncodedJpeg, ImageRequest, LoadedImage, SufficientSize

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

# Formats that hold only pixels: no PostScript, which Ghostscript would execute, and no format that refers to other files.
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm")
EXIF_ORIENTATION = 0x0112
# The transposition that undoes each EXIF orientation (1 is upright), by Pillow's names: texts are read without Pillow.
TRANSPOSITIONS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
# The transpositions that exchange width and height.
TURNS = ("TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
# Start of a JPEG's frame: sequential, Huffman-coded. The others are progressive, lossless or arithmetic-coded.
SEQUENTIAL_FRAMES, FRAMES = (0xC0, 0xC1), {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
# The last bytes of a JPEG, and where they must be at the latest, counted from the end of the file.
END_OF_IMAGE, LONGEST_TRAILER = b"\xff\xd9", 64
# Pixels of the shorter edge from which on an image is certainly larger than it would be at the next smaller scale, 7/8 or less.
SMALLEST_FOR_TENSOR = 16
# Bytes. A longer text is not a caption but some other file. Tokenizers cut texts that are too long for their tower.
LONGEST_TEXT = 1 << 20


def decode_image(data: bytes | Path, key: str, max_pixels: int, sufficient: SufficientSize | None = None) -> Image.Image:
    """Return the image of a file or its bytes, upright, grey (mode L) or RGB; the first frame of an animation.

    sufficient: lets a JPEG be decoded at 1/2, 1/4 or 1/8 of its size, as long as it keeps at least this size. That takes less time
        than decoding all pixels, and then averaging most of them away. None decodes all pixels.
    BadSample if it has more pixels than `max_pixels`, as its header says, or if it cannot be decoded completely.
    """
    image = read_image(data, key, max_pixels, ImageRequest(sufficient))
    return cast("Image.Image", image)


def read_image(data: bytes | Path, key: str, max_pixels: int, request: ImageRequest) -> LoadedImage:
    """Return the image as `decode_image` does, or in another form that the request allows."""
    from PIL import Image, UnidentifiedImageError

    # Opening a named pipe would block forever.
    if isinstance(data, Path) and not os.path.isfile(data):
        raise BadSample(key, f"there is no image {data.name[:200]!r}")
    try:
        with io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as file, warnings.catch_warnings():
            # Pillow warns of large images, which are refused here, and of broken metadata, which is not used.
            warnings.simplefilter("ignore")
            return _decode(file, key, max_pixels, request)
    except (BadSample, MemoryError):
        raise
    except UnidentifiedImageError:
        raise BadSample(key, f"is not an image of a known format ({', '.join(IMAGE_FORMATS)})") from None
    except Image.DecompressionBombError as error:
        raise BadSample(key, f"is refused by Pillow, whose limit is below data.max_pixels ({error})") from None
    except Exception as error:
        # Decoders raise OSError, SyntaxError, struct.error, KeyError and more.
        raise BadSample(key, f"image cannot be decoded ({type(error).__name__}: {error})") from None


def _decode(file: IO[bytes], key: str, max_pixels: int, request: ImageRequest) -> LoadedImage:
    from PIL import Image

    with Image.open(file, formats=IMAGE_FORMATS) as image:
        width, height = image.size
        if width * height > max_pixels:
            raise BadSample(key, f"has {width} × {height} pixels, more than data.max_pixels = {max_pixels}")
        if not width * height:
            raise BadSample(key, "has no pixels")
        # Other formats have their orientation at the end of the file, or none.
        is_jpeg = image.format == "JPEG"
        transposition = _transposition(image) if is_jpeg else None
        if is_jpeg:
            kept = _encoded(image, file, transposition) if request.encoded else None
            if kept is not None:
                return kept
            if request.sufficient is not None:
                _reduce(image, transposition, request.sufficient)
            decoded = _decode_to_tensor(image, file) if request.tensor and transposition is None else None
            if decoded is not None:
                return decoded
        image.load()
        transposition = transposition if is_jpeg else _transposition(image)
        converted = _as_8_bits(image, key)
        return converted if transposition is None else converted.transpose(transposition)


def _encoded(image: Any, file: IO[bytes], transposition: Image.Transpose | None) -> EncodedJpeg | None:
    """Return the JPEG as it is stored; None if nvJPEG does not decode it, or not to the pixels that libjpeg gives."""
    if not _is_grey_or_ycbcr(image):
        return None
    data = _content(file)
    # Pillow refuses truncated files; nvJPEG need not.
    if _frame_marker(data) not in SEQUENTIAL_FRAMES or END_OF_IMAGE not in data[-LONGEST_TRAILER:]:
        return None
    turned = transposition is not None and transposition.name in TURNS
    width, height = image.size[::-1] if turned else image.size
    return EncodedJpeg(data, width, height, None if transposition is None else transposition.name, image.mode == "L")


def _is_grey_or_ycbcr(image: Any) -> bool:
    """Return whether all decoders agree on the colours of a JPEG."""
    # Three components are taken for YCbCr unless the file says that they are RGB.
    is_ycbcr = image.mode == "RGB" and [layer[0] for layer in image.layer] == [1, 2, 3]
    return (image.mode == "L" or is_ycbcr) and image.info.get("adobe_transform") != 0


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _decode_to_tensor(image: Image.Image, file: IO[bytes]) -> Tensor | None:
    """Return the pixels (height, width, channels) of a JPEG that Pillow has opened, in the size that it would decode; or None.

    simplejpeg decodes by the library that Pillow calls too, to the same values, without copies. What it refuses, Pillow decides.
    """
    width, height = image.size
    simplejpeg = _import_simplejpeg()
    if simplejpeg is None or min(width, height) < SMALLEST_FOR_TENSOR or not _is_grey_or_ycbcr(image):
        return None
    try:
        # The smallest of its sizes, some of which Pillow does not have, that is at least this one.
        pixels = simplejpeg.decode_jpeg(
            _content(file), colorspace="GRAY" if image.mode == "L" else "RGB", min_height=height, min_width=width
        )
    except ValueError:
        return None
    return torch.from_numpy(pixels) if pixels.shape[:2] == (height, width) else None


@functools.cache
def _import_simplejpeg() -> Any:
    """Return the module, or None if it cannot be imported."""
    try:
        import simplejpeg
    # A module that was built for another version of NumPy can raise anything.
    except Exception:
        return None
    return simplejpeg


def _frame_marker(data: bytes) -> int | None:
    """Return the marker of a JPEG's first frame, which says how it is coded."""
    place = 2
    while place + 4 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker in FRAMES:
            return marker
        # Markers may be preceded by any number of 0xFF.
        place += 1 if marker == 0xFF else 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return None


def _reduce(image: Image.Image, transposition: Image.Transpose | None, sufficient: SufficientSize) -> None:
    """Let the decoder of a JPEG skip the frequencies that the sufficient size does not need."""
    turned = transposition is not None and transposition.name in TURNS
    width, height = sufficient(*(image.size[::-1] if turned else image.size))
    size = (height, width) if turned else (width, height)
    image.draft(None, (max(1, math.ceil(size[0])), max(1, math.ceil(size[1]))))


def _transposition(image: Image.Image) -> Image.Transpose | None:
    """Return the transposition that makes the image upright, according to its metadata."""
    from PIL.Image import Transpose

    try:
        name = TRANSPOSITIONS.get(image.getexif().get(EXIF_ORIENTATION, 1))
        return None if name is None else Transpose[name]
    except Exception:
        # The pixels can be fine although the metadata cannot be parsed.
        return None


def _as_8_bits(image: Image.Image, key: str) -> Image.Image:
    if image.mode == "F":
        raise BadSample(key, "has floating-point pixels, whose range is unknown: store it in 8 or 16 bits")
    if image.mode.startswith("I"):
        # 16-bit grey; Pillow's own conversion would make everything above 255 white.
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    mode = "L" if image.mode in ("1", "L") else "RGB"
    return image if image.mode == mode else image.convert(mode)


def as_text(value: Any, key: str, field: str) -> str:
    """Return the text of a stored value (str, or UTF-8 bytes), stripped of white space. BadSample if it is not a text.

    Markup is not interpreted. `field` names the value in messages.
    """
    if isinstance(value, bytes):
        if len(value) > LONGEST_TEXT:
            raise BadSample(key, f"{field} has {len(value)} bytes; a text may have at most {LONGEST_TEXT}")
        value = value.decode("utf-8-sig", "surrogateescape")
    if value is None:
        raise BadSample(key, f"{field} is missing")
    if not isinstance(value, str):
        raise BadSample(key, f"{field} is of type {type(value).__name__}, not a text")
    try:
        # Bytes that are not UTF-8 became lone surrogates, and JSON can hold lone surrogates itself.
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadSample(key, f"{field} is not valid UTF-8 at character {error.start}") from None
    if "\0" in value:
        raise BadSample(key, f"{field} holds a NUL character: is it UTF-16, or not a text at all?")
    if not value.strip():
        raise BadSample(key, f"{field} is empty")
    return value.strip()


def as_texts(value: Any, key: str, field: str) -> tuple[str, ...]:
    """Return the texts of a list, of a single text, or of nothing."""
    if value is None or value == "":
        return ()
    values = value if isinstance(value, (list, tuple)) else [value]
    return tuple(as_text(entry, key, field) for entry in values)


def as_label(value: Any, key: str) -> str:
    """Return the name of a class: a text, or the digits of an integer."""
    return as_text(str(value) if isinstance(value, int) else value, key, "label")


def read_text(path: Path, key: str, field: str) -> str:
    """Return the text in a file. BadSample if it cannot be read or is not a text."""
    if not os.path.isfile(path):
        raise BadSample(key, f"{field}: there is no file {path.name!r}")
    try:
        with path.open("rb") as file:
            return as_text(file.read(LONGEST_TEXT + 1), key, field)
    except OSError as error:
        raise BadSample(key, f"{field}: {path.name!r} cannot be read ({error.strerror})") from None
