"""JPEGs that the training's device decodes: workers pack their bytes, nvJPEG decodes them, and the device crops and resizes.

A worker checks the header and chooses the crop; everything that nvJPEG does not take, it decodes itself. The results are copied to
the batch in host memory, as those of the workers are: what the device holds depends on `GROUP_PIXELS` and not on the batch.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch import packages

from .decoding import decode_image
from .source import BadSample, EncodedJpeg

# Left, top, right and bottom in pixels.
Box = tuple[int, int, int, int]
# decode(jpegs, grey): the bytes of JPEGs, 1-D uint8 tensors in host memory, become uint8 tensors (channels, height, width) on the
# device, as they are stored, with one channel if grey and three otherwise. RuntimeError if one of them cannot be decoded.
Decode = Callable[[list[Tensor], bool], list[Tensor]]
# Pixels that are decoded at a time: 48 MB as RGB, and four times as much as floats, for the resizing.
GROUP_PIXELS = 1 << 24
# What undoes each transposition, by Pillow's names: whether to exchange rows and columns, and the dimensions to mirror afterwards.
UPRIGHT: dict[str | None, tuple[bool, tuple[int, ...]]] = {
    None: (False, ()),
    "FLIP_LEFT_RIGHT": (False, (2,)),
    "ROTATE_180": (False, (1, 2)),
    "FLIP_TOP_BOTTOM": (False, (1,)),
    "TRANSPOSE": (True, ()),
    "ROTATE_270": (True, (2,)),
    "TRANSVERSE": (True, (1, 2)),
    "ROTATE_90": (True, (1,)),
}


class CroppingPrepare(Protocol):
    """A preparation that only crops, mirrors and resizes, to uint8 tensors (channels, size, size): a device can do that too."""

    @property
    def size(self) -> int: ...

    @property
    def channels(self) -> int: ...

    def choose_crop(self, seed: int | None, width: int, height: int) -> tuple[Box, bool]:
        """Return what to cut out of an image of this size, and whether to mirror it."""
        ...


class EncodedRow(NamedTuple):
    """A JPEG to be decoded, what to cut out of it when it is upright, whether to mirror that, and its place in the source."""

    jpeg: EncodedJpeg
    box: Box
    mirrored: bool
    shard: int
    number: int


class PackedJpeg(NamedTuple):
    """An EncodedRow whose bytes are data[start:stop] of `EncodedRows`. row: its number among all rows."""

    row: int
    start: int
    stop: int
    image: EncodedRow

    @property
    def pixels(self) -> int:
        return self.image.jpeg.width * self.image.jpeg.height


class EncodedRows(NamedTuple):
    """Rows of which the device decodes some.

    data: the bytes of all JPEGs, uint8. prepared: the rows that a worker has decoded, stacked; None if there are none.
    prepared_rows: their numbers.
    """

    data: Tensor
    jpegs: list[PackedJpeg]
    prepared: Tensor | None
    prepared_rows: list[int]


def can_defer(prepare: Any) -> bool:
    """Return whether a device can do the work of a preparation."""
    return hasattr(prepare, "choose_crop")


def pack(rows: Sequence[EncodedRow | Tensor], allocate: Callable[[int], Tensor]) -> EncodedRows:
    """Copy the bytes of all JPEGs into one tensor, which `allocate` returns for a number of bytes; stack the other rows."""
    jpegs: list[PackedJpeg] = []
    data = allocate(sum(len(row.jpeg.data) for row in rows if isinstance(row, EncodedRow)))
    start = 0
    with warnings.catch_warnings():
        # Of bytes, which nothing may write to.
        warnings.simplefilter("ignore")
        for number, row in enumerate(rows):
            if isinstance(row, EncodedRow):
                stop = start + len(row.jpeg.data)
                data[start:stop] = torch.frombuffer(row.jpeg.data, dtype=torch.uint8)
                # The bytes travel in the tensor only.
                jpegs.append(PackedJpeg(number, start, stop, row._replace(jpeg=row.jpeg._replace(data=b""))))
                start = stop
    prepared = {number: row for number, row in enumerate(rows) if isinstance(row, Tensor)}
    return EncodedRows(data, jpegs, torch.stack([*prepared.values()]) if prepared else None, [*prepared])


class DeviceDecoder:
    """Decodes, crops and resizes on a device, on a stream of its own, so that the device trains meanwhile.

    max_pixels: of images that are decoded in this process because the device cannot.
    """

    def __init__(self, device: torch.device, max_pixels: int, decode: Decode) -> None:
        self.device = device
        self._max_pixels = max_pixels
        self._decode = decode
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which to decode, and to copy what was decoded."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def rows(self, rows: EncodedRows, prepare: CroppingPrepare, keys: Sequence[str]) -> tuple[Tensor, dict[int, BadSample]]:
        """Return all rows, prepared, on the device, and the numbers of those that cannot be decoded; their pixels are undefined."""
        shape = (len(keys), prepare.channels, prepare.size, prepare.size)
        pixels = torch.empty(shape, dtype=torch.uint8, device=self.device)
        if rows.prepared is not None:
            pixels[torch.tensor(rows.prepared_rows, device=self.device)] = rows.prepared.to(self.device)
        failures: dict[int, BadSample] = {}
        for group in _groups(rows.jpegs, prepare.channels):
            self._prepare(group, rows.data, prepare, pixels, keys, failures)
        return pixels, failures

    def _prepare(
        self,
        group: Sequence[PackedJpeg],
        data: Tensor,
        prepare: CroppingPrepare,
        pixels: Tensor,
        keys: Sequence[str],
        failures: dict[int, BadSample],
    ) -> None:
        """Write the rows of a group to `pixels`. If that fails, smaller groups are tried, and a single image is decoded here."""
        try:
            crops = self._crops(group, data, prepare)
            order, resized = _resize(crops, prepare.size)
            rows = torch.tensor([group[number].row for number in order], device=self.device)
            pixels[rows] = resized.expand(-1, prepare.channels, -1, -1)
            return
        except RuntimeError as error:
            # torchvision turns every error into a plain RuntimeError, with the message of the first.
            out_of_memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
            if out_of_memory and len(group) == 1:
                raise
        # Not in the except clause: while the exception is alive, its frames hold the tensors that must be freed.
        if len(group) > 1:
            # Which of the images is broken, an error does not say.
            size = (len(group) + 1) // 2 if out_of_memory else 1
            for start in range(0, len(group), size):
                self._prepare(group[start : start + size], data, prepare, pixels, keys, failures)
            return
        (jpeg,) = group
        try:
            image = self._decode_on_host(data[jpeg.start : jpeg.stop], keys[jpeg.row], prepare.channels)
        except BadSample as error:
            failures[jpeg.row] = error
        else:
            pixels[jpeg.row] = _resize([_cut(image, jpeg.image)], prepare.size)[1][0]

    def _crops(self, group: Sequence[PackedJpeg], data: Tensor, prepare: CroppingPrepare) -> list[Tensor]:
        images = self._decode([data[jpeg.start : jpeg.stop] for jpeg in group], _is_grey(group[0], prepare.channels))
        upright = [_upright(image, jpeg.image.jpeg.transposition) for image, jpeg in zip(images, group, strict=True)]
        for image, jpeg in zip(upright, group, strict=True):
            size = (jpeg.image.jpeg.height, jpeg.image.jpeg.width)
            if image.shape[1:] != size:
                raise RuntimeError(f"an image was decoded to {tuple(image.shape[1:])} pixels; its header says {size}")
        return [_cut(image, jpeg.image) for image, jpeg in zip(upright, group, strict=True)]

    def _decode_on_host(self, data: Tensor, key: str, channels: int) -> Tensor:
        image = decode_image(bytes(data.tolist()), key, self._max_pixels).convert("L" if channels == 1 else "RGB")
        width, height = image.size
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(height, width, channels)
        return pixels.permute(2, 0, 1).to(self.device)


def open_decoder(device: torch.device, max_pixels: int) -> DeviceDecoder:
    """Return a decoder that uses nvJPEG. ValueError if there is none: it is tried with a small image."""
    if device.type != "cuda":
        raise ValueError(
            f'data.decode is "device", but the run\'s device is {device.type!r}: only CUDA devices decode JPEGs; set'
            ' data.decode="workers", or compute.device="cuda" on a machine that has one'
        )
    packages.require(packages.DEVICE_DECODING, packages.IMAGES)
    decode = nvjpeg(device)
    try:
        decode([_small_jpeg()], False)
    except Exception as error:
        raise ValueError(
            f'data.decode is "device", but torchvision cannot decode JPEGs on {device} ({error}): install a torchvision that was'
            ' built with CUDA for this version of torch, or set data.decode="workers"'
        ) from error
    return DeviceDecoder(device, max_pixels, decode)


def nvjpeg(device: torch.device) -> Decode:
    """Return a function that decodes on a CUDA device, with its JPEG engine if it has one."""
    from torchvision.io import ImageReadMode, decode_jpeg  # type: ignore[import-untyped]

    def decode(jpegs: list[Tensor], grey: bool) -> list[Tensor]:
        # torchvision allocates images on the current stream, and writes them on a stream of its own that does not wait for this
        # one: what still reads memory that was freed here must end first, and after an error, what still writes to it.
        torch.cuda.current_stream(device).synchronize()
        try:
            return decode_jpeg(jpegs, mode=ImageReadMode.GRAY if grey else ImageReadMode.RGB, device=device)
        except RuntimeError:
            torch.cuda.synchronize(device)
            raise

    return decode


def _small_jpeg() -> Tensor:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _is_grey(jpeg: PackedJpeg, channels: int) -> bool:
    return jpeg.image.jpeg.grey or channels == 1


def _groups(jpegs: Sequence[PackedJpeg], channels: int) -> Iterator[list[PackedJpeg]]:
    """Yield groups of JPEGs to decode in one call: all grey or all in colour, with at most GROUP_PIXELS unless it is one image."""
    for grey in (False, True):
        group: list[PackedJpeg] = []
        pixels = 0
        for jpeg in jpegs:
            if _is_grey(jpeg, channels) != grey:
                continue
            if group and pixels + jpeg.pixels > GROUP_PIXELS:
                yield group
                group, pixels = [], 0
            group.append(jpeg)
            pixels += jpeg.pixels
        if group:
            yield group


def _upright(image: Tensor, transposition: str | None) -> Tensor:
    exchanged, mirrored = UPRIGHT[transposition]
    image = image.transpose(1, 2) if exchanged else image
    return image.flip(mirrored) if mirrored else image


def _cut(image: Tensor, row: EncodedRow) -> Tensor:
    left, top, right, bottom = row.box
    crop = image[:, top:bottom, left:right]
    return crop.flip(2) if row.mirrored else crop


def _resize(crops: Sequence[Tensor], size: int) -> tuple[list[int], Tensor]:
    """Return the crops at this size, those of equal shape computed together, and the number of the crop of each row."""
    by_shape: dict[torch.Size, list[int]] = {}
    for number, crop in enumerate(crops):
        by_shape.setdefault(crop.shape, []).append(number)
    resized = []
    for numbers in by_shape.values():
        pixels = torch.stack([crops[number] for number in numbers]).float()
        if pixels.shape[2:] != (size, size):
            pixels = F.interpolate(pixels, (size, size), mode="bicubic", antialias=True)
        resized.append(pixels)
    order = [number for numbers in by_shape.values() for number in numbers]
    return order, torch.cat(resized).round_().clamp_(0, 255).to(torch.uint8)
