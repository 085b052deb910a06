"""Measure how fast images are read and prepared: `python -m benchmarks.feeding [FILE] [--device cuda] [--workers N]`.

JPEGs of 640 × 480 pixels with captions, in a tar file, go through megabatch's loader and through the pipeline that OpenCLIP builds
for training: webdataset, Pillow and torchvision's transforms. All run in one process with one thread, in turns, and CPU time is
counted, so that other work on the machine matters little. What feeds a training is this number times the cores.

With `--device cuda` the pairs per second of whole loaders with worker processes are measured too, and JPEGs that the device decodes
(`data.decode = "device"`): the CPU time of a worker, the whole loader, and the time of the device.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import shutil
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks import report
from benchmarks.machine import describe
from megabatch.config import Data
from megabatch.data import open_source
from megabatch.data.collate import ReadTask, SamplePlace, SampleReader
from megabatch.data.device_decoding import DeviceDecoder, EncodedRows, open_decoder
from megabatch.data.loader import PIECE_ROWS, Loader, one_pass
from megabatch.data.sampler import Order
from megabatch.towers.inputs import ByteTokenizer, PrepareImage

WIDTH, HEIGHT, QUALITY, SIZE, CROP = 640, 480, 66, 224, 0.9
IMAGES, ROUNDS = 64, 31
# Seconds for which a whole loader runs before it is measured, and while it is.
WARMUP_S, MEASURED_S = 3.0, 5.0
RESULTS = Path(__file__).parent / "results"
OURS, ALL_PIXELS, ON_DEVICE, THEIRS = (
    "megabatch",
    "megabatch, all pixels",
    "megabatch, decoded on the device",
    "webdataset + torchvision",
)


def natural_image(seed: int) -> Image.Image:
    """Return noise with the spectrum of photographs, amplitudes that fall as 1 / frequency, so that JPEG compresses it alike."""
    generator = torch.Generator().manual_seed(seed)
    frequency = (torch.fft.fftfreq(HEIGHT)[:, None] ** 2 + torch.fft.rfftfreq(WIDTH) ** 2).sqrt().clamp_min(1 / WIDTH)
    noise = torch.fft.irfft2(torch.fft.rfft2(torch.randn(3, HEIGHT, WIDTH, generator=generator)) / frequency, s=(HEIGHT, WIDTH))
    # The channels of a photograph are correlated.
    noise = noise.mean(0, keepdim=True) + 0.3 * noise
    pixels = (128 + 50 * noise / noise.std()).clamp(0, 255).byte().permute(1, 2, 0).contiguous()
    return Image.frombytes("RGB", (WIDTH, HEIGHT), bytes(pixels.flatten().tolist()))


def write_shard(path: Path) -> int:
    """Write the pairs to a tar file; return the mean bytes of an image."""
    total = 0
    with tarfile.open(path, "w") as tar:
        for number in range(IMAGES):
            file = io.BytesIO()
            natural_image(number).save(file, "JPEG", quality=QUALITY)
            total += len(file.getvalue())
            for suffix, data in (("jpg", file.getvalue()), ("txt", f"image number {number}".encode())):
                member = tarfile.TarInfo(f"{number:05}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return total // IMAGES


def loader_of(shards: str, **options: Any) -> Loader:
    source = open_source(Data(source=shards))
    defaults: dict[str, Any] = {"seed": 0, "workers": 0, "rank": 0, "ranks": 1, "ids": True, "classes": None}
    order = Order(source.lengths, sum(source.lengths), 0)
    return Loader(source, order, PrepareImage(SIZE, crop=CROP), ByteTokenizer(77), **(defaults | options))


def ours(shard: Path, **options: Any) -> Callable[[], Iterator[Tensor]]:
    loader = loader_of(str(shard), **options)
    return lambda: (batch.x for batch in loader.batches(one_pass(IMAGES, IMAGES)))


def worker_part(shard: Path) -> Callable[[], Iterator[Tensor]]:
    """Return what a worker does for images that the device decodes."""
    reader = packing_reader(shard)
    task = ReadTask([SamplePlace(number, 0, number) for number in range(IMAGES)], IMAGES, last=True)
    return lambda: iter([reader[task][0].y[None]])  # type: ignore[call-overload]


def packing_reader(shard: Path) -> SampleReader:
    """Return what a worker reads with if the device decodes."""
    return SampleReader(
        open_source(Data(source=str(shard))),
        PrepareImage(SIZE, crop=CROP),
        ByteTokenizer(77),
        seed=0,
        ids=True,
        classes=None,
        negatives=False,
        augment=True,
        reduce_jpegs=True,
        keep_jpegs=True,
    )


def their_preparation() -> Callable[[Image.Image], Tensor]:
    transforms = import_transforms()
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE, scale=(CROP, 1.0), interpolation=transforms.InterpolationMode.BICUBIC),
            _as_rgb,
            transforms.ToTensor(),
            transforms.Normalize((0.481, 0.458, 0.408), (0.269, 0.261, 0.276)),
        ]
    )


def _as_rgb(image: Image.Image) -> Image.Image:
    return image.convert("RGB")


def theirs(shard: Path) -> Callable[[], Iterator[Tensor]]:
    import webdataset

    prepare = their_preparation()

    def batches() -> Iterator[Tensor]:
        pipeline = webdataset.WebDataset(str(shard), shardshuffle=False, empty_check=False).decode("pilrgb").to_tuple("jpg", "txt")
        yield torch.stack([prepare(image) for image, _ in pipeline])

    return batches


def their_loader(shards: list[str], workers: int) -> Iterator[Tensor]:
    """Yield batches without end from worker processes, as OpenCLIP's training reads them."""
    import webdataset

    pipeline = (
        webdataset.WebDataset(shards, resampled=True, shardshuffle=False, empty_check=False).decode("pilrgb").to_tuple("jpg", "txt")
    )
    pipeline = pipeline.map_tuple(their_preparation(), str).batched(PIECE_ROWS, partial=False)
    return (
        images for images, _ in DataLoader(pipeline, batch_size=None, num_workers=workers, pin_memory=torch.cuda.is_available())
    )


def our_loader(shards: str, **options: Any) -> Iterator[Tensor]:
    loader = loader_of(shards, pinned=torch.cuda.is_available(), **options)
    with contextlib.closing(loader.batches((number * PIECE_ROWS, PIECE_ROWS) for number in count())) as batches:
        yield from (batch.x for batch in batches)


def pairs_per_s(batches: Iterator[Tensor]) -> float:
    """Return the pairs per second that a loader yields when its workers have filled their queues."""
    began = time.perf_counter()
    while time.perf_counter() - began < WARMUP_S:
        next(batches)
    began, pairs = time.perf_counter(), 0
    while time.perf_counter() - began < MEASURED_S:
        pairs += len(next(batches))
    seconds = time.perf_counter() - began
    if isinstance(batches, Generator):
        batches.close()
    return pairs / seconds


def device_seconds(shard: Path, decoder: DeviceDecoder) -> dict[str, float]:
    """Return the seconds per image of decoding alone, and of decoding, cropping, resizing and copying to the host."""
    reader = packing_reader(shard)
    places = [SamplePlace(number, 0, number % IMAGES) for number in range(PIECE_ROWS)]
    piece, _ = reader[ReadTask(places, PIECE_ROWS, last=True)]
    assert isinstance(piece.x, EncodedRows)
    rows = piece.x
    jpegs = [rows.data[jpeg.start : jpeg.stop] for jpeg in rows.jpegs]
    works: dict[str, Callable[[], object]] = {
        "decode_s": lambda: decoder._decode(jpegs, False),
        "prepare_s": lambda: decoder.rows(rows, reader.prepare_x, piece.info.keys)[0].cpu(),  # type: ignore[arg-type]
    }
    seconds: dict[str, float] = {}
    with decoder.stream():
        for name, work in works.items():
            times = []
            for _ in range(ROUNDS + 1):
                torch.cuda.synchronize()
                began = time.perf_counter()
                work()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
            seconds[name] = statistics.median(times[1:]) / PIECE_ROWS
    return seconds


def import_transforms() -> Any:
    """Return torchvision.transforms, also where torchvision is built for another torch and its operators are missing."""
    try:
        from torchvision import transforms
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import_transforms.library = library  # type: ignore[attr-defined]
        from torchvision import transforms
    return transforms


def pixel_differences(shard: Path, decoder: DeviceDecoder | None) -> dict[str, float]:
    """Return by how much the reduction of JPEGs, or the device, changes pixels, in levels of 255, without augmentation."""

    def pixels(**options: Any) -> Tensor:
        return torch.cat(list(ours(shard, augment=False, **options)())).float()

    def differences(prefix: str, changed: Tensor) -> dict[str, float]:
        difference = (changed - whole).abs()
        return {f"{prefix}mean_difference": difference.mean().item(), f"{prefix}most_difference": difference.max().item()}

    whole = pixels(reduce_jpegs=False)
    found = differences("", pixels(reduce_jpegs=True))
    return found if decoder is None else found | differences("device_", pixels(decoder=decoder))


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table for the documentation."""
    first, machine = rows[0], rows[0]["machine"]
    loaders = "workers" in first
    headers = ["pipeline", "pairs/s", "speed-up"]
    if loaders:
        headers = ["pipeline", "pairs/s per core", "speed-up", f"pairs/s, {first['workers']} workers", "speed-up "]

    def cells(row: dict[str, Any]) -> list[str]:
        whole = [_number(row["pairs_per_s"]), _factor(row["loader_speed_up"])] if loaders else []
        return [row["pipeline"], _number(row["pairs_per_core_s"]), _factor(row["speed_up"]), *whole]

    caption = (
        f"Pairs per second and core, JPEGs of {WIDTH} × {HEIGHT} pixels and {first['image_bytes'] / 1024:.0f} KiB to {SIZE} ×"
        f" {SIZE}, in turns in one process. Images are noise with the spectrum of photographs; reducing changes their pixels by"
        f" {first['mean_difference']:.1f} of 255 levels in the mean and {first['most_difference']:.0f} at most."
    )
    if "rounds" in first:
        caption += f" The speed-up is the median over {first['rounds']} rounds."
    for row in rows:
        if "decode_s" in row:
            decoded, prepared = (f"{1e6 * row[name]:.0f} µs" for name in ("decode_s", "prepare_s"))
            mean, most = row["device_mean_difference"], row["device_most_difference"]
            caption += (
                f" To decode an image on the device takes one thread {decoded}, and {prepared} with cropping, resizing and the copy"
                f" to the host; its pixels differ from those that the CPU decodes at full size by {mean:.1f} levels in the mean and"
                f" {most:.0f} at most. Its pairs per core count the CPU time of a worker, not that of the training process that"
                " calls the device."
            )
    devices = f"{machine['cpu']}, {machine['gpu']}" if "gpu" in machine else machine["cpu"]
    caption += f" {devices}, torch {machine['torch']}, {machine['date'][:10]}."
    return report.markdown_table(headers, map(cells, rows), left=("pipeline",)) + "\n\n" + caption


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _factor(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def cpu_seconds(pipelines: dict[str, Callable[[], Iterator[Tensor]]]) -> dict[str, list[float]]:
    """Return the seconds of CPU time that each pipeline takes for all pairs, in ROUNDS rounds in which they take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in pipelines}
    for _ in range(ROUNDS + 1):
        for name, batches in pipelines.items():
            began = time.process_time()
            assert sum(len(rows) for rows in batches()) == IMAGES
            seconds[name].append(time.process_time() - began)
    # The first round warms caches.
    return {name: times[1:] for name, times in seconds.items()}


def speed_up(seconds: list[float], theirs: list[float]) -> float:
    """Return the median of the ratios within the rounds, between which the clock of a processor may change."""
    return statistics.median(their / own for own, their in zip(seconds, theirs, strict=True))


def whole_loaders(shard: Path, workers: int, decoder: DeviceDecoder, peer: bool) -> dict[str, float]:
    """Return the pairs per second of loaders with worker processes. Each worker of webdataset needs a shard of its own."""
    shards = [shard.with_name(f"copy-{number}.tar") for number in range(workers)]
    for copy in shards:
        shutil.copyfile(shard, copy)
    pattern = str(shard.with_name("copy-*.tar"))
    rates = {
        OURS: pairs_per_s(our_loader(pattern, workers=workers)),
        ALL_PIXELS: pairs_per_s(our_loader(pattern, workers=workers, reduce_jpegs=False)),
        ON_DEVICE: pairs_per_s(our_loader(pattern, workers=workers, decoder=decoder)),
    }
    return rates | ({THEIRS: pairs_per_s(their_loader([str(path) for path in shards], workers))} if peer else {})


def main(out: Path | None, device: str, workers: int) -> None:
    torch.set_num_threads(1)
    peer = importlib.util.find_spec("webdataset") is not None
    if not peer:
        print("webdataset is not installed: measuring megabatch alone", file=sys.stderr)
    decoder = open_decoder(torch.device(device), Data().max_pixels) if device == "cuda" else None
    with tempfile.TemporaryDirectory() as folder:
        shard = Path(folder) / "pairs-0.tar"
        image_bytes = write_shard(shard)
        pipelines = {OURS: ours(shard), ALL_PIXELS: ours(shard, reduce_jpegs=False)}
        if decoder is not None:
            pipelines[ON_DEVICE] = worker_part(shard)
        if peer:
            pipelines[THEIRS] = theirs(shard)
        cores = cpu_seconds(pipelines)
        differences = pixel_differences(shard, decoder)
        loaders = {} if decoder is None else whole_loaders(shard, workers, decoder, peer)
        on_device = {} if decoder is None else device_seconds(shard, decoder)
    rows = []
    for name, seconds in cores.items():
        rate = IMAGES / statistics.median(seconds)
        row: dict[str, Any] = {"pipeline": name, "image_bytes": image_bytes, "pairs_per_core_s": rate, "rounds": ROUNDS}
        row["speed_up"] = speed_up(seconds, cores[THEIRS]) if peer else None
        if loaders:
            loader_speed_up = loaders[name] / loaders[THEIRS] if peer else None
            row |= {"workers": workers, "pairs_per_s": loaders[name], "loader_speed_up": loader_speed_up}
        rows.append(row | (on_device if name == ON_DEVICE else {}) | differences | {"machine": describe(device)})
        whole = f", {_number(row['pairs_per_s'])} with {workers} workers {_factor(row['loader_speed_up'])}" if loaders else ""
        print(f"{name:34} {rate:7.0f} pairs/s per core {_factor(row['speed_up'])}{whole}")
    for name, per_image in on_device.items():
        print(f"{name:34} {1e6 * per_image:7.0f} µs per image")
    report.write_rows(out or RESULTS / f"feeding-{device}.jsonl", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    main(arguments.file, arguments.device, arguments.workers)
