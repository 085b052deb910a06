"""Measure how fast one core reads and prepares images: `python -m benchmarks.feeding [FILE]`.

JPEGs of 640 × 480 pixels with captions, in a tar file, go through megabatch's loader and through the pipeline that OpenCLIP builds
for training: webdataset, Pillow and torchvision's transforms. All run in one process with one thread, in turns, and CPU time is
counted, so that other work on the machine matters little. What feeds a training is this number times the cores.
"""

from __future__ import annotations

import io
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from benchmarks import report
from benchmarks.machine import describe
from megabatch.config import Data
from megabatch.data import open_source
from megabatch.data.loader import Loader, one_pass
from megabatch.data.sampler import Order
from megabatch.towers.inputs import ByteTokenizer, PrepareImage

WIDTH, HEIGHT, QUALITY, SIZE, CROP = 640, 480, 66, 224, 0.9
IMAGES, ROUNDS = 64, 5
FILE = Path(__file__).parent / "results" / "feeding-cpu.jsonl"


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


def ours(shard: Path, *, reduce_jpegs: bool, augment: bool = True) -> Callable[[], Iterator[Tensor]]:
    source = open_source(Data(source=str(shard)))
    options: dict[str, Any] = {"seed": 0, "workers": 0, "rank": 0, "ranks": 1, "ids": True, "classes": None, "augment": augment}
    loader = Loader(
        source,
        Order(source.lengths, IMAGES, 0),
        PrepareImage(SIZE, crop=CROP),
        ByteTokenizer(77),
        reduce_jpegs=reduce_jpegs,
        **options,
    )
    return lambda: (batch.x for batch in loader.batches(one_pass(IMAGES, IMAGES)))


def theirs(shard: Path) -> Callable[[], Iterator[Tensor]]:
    import webdataset

    transforms = import_transforms()
    prepare = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE, scale=(CROP, 1.0), interpolation=transforms.InterpolationMode.BICUBIC),
            lambda image: image.convert("RGB"),
            transforms.ToTensor(),
            transforms.Normalize((0.481, 0.458, 0.408), (0.269, 0.261, 0.276)),
        ]
    )

    def batches() -> Iterator[Tensor]:
        pipeline = webdataset.WebDataset(str(shard), shardshuffle=False, empty_check=False).decode("pilrgb").to_tuple("jpg", "txt")
        yield torch.stack([prepare(image) for image, _ in pipeline])

    return batches


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


def pixel_differences(shard: Path) -> dict[str, float]:
    """Return by how much the reduction of JPEGs changes pixels, in levels of 255, without augmentation."""
    reduced, whole = (torch.cat(list(ours(shard, reduce_jpegs=flag, augment=False)())).float() for flag in (True, False))
    difference = (reduced - whole).abs().flatten()
    return {"mean_difference": difference.mean().item(), "most_difference": difference.max().item()}


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table for the documentation."""
    cells = [(row["pipeline"], f"{row['pairs_per_core_s']:.0f}", f"{row['speed_up']:.2f}×") for row in rows]
    first, machine = rows[0], rows[0]["machine"]
    caption = (
        f"Pairs per second and core, JPEGs of {WIDTH} × {HEIGHT} pixels and {first['image_bytes'] / 1024:.0f} KiB to {SIZE} ×"
        f" {SIZE}, in turns in one process. Images are noise with the spectrum of photographs; reducing changes their pixels by"
        f" {first['mean_difference']:.1f} of 255 levels in the mean and {first['most_difference']:.0f} at most. {machine['cpu']},"
        f" torch {machine['torch']}, {machine['date'][:10]}."
    )
    return report.markdown_table(("pipeline", "pairs/s", "speed-up"), cells, left=("pipeline",)) + "\n\n" + caption


def main(out: Path) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        shard = Path(folder) / "pairs-0.tar"
        image_bytes = write_shard(shard)
        pipelines = {
            "megabatch": ours(shard, reduce_jpegs=True),
            "megabatch, all pixels": ours(shard, reduce_jpegs=False),
            "webdataset + torchvision": theirs(shard),
        }
        seconds: dict[str, list[float]] = {name: [] for name in pipelines}
        for _ in range(ROUNDS + 1):
            for name, batches in pipelines.items():
                began = time.process_time()
                assert sum(len(rows) for rows in batches()) == IMAGES
                seconds[name].append(time.process_time() - began)
        differences = pixel_differences(shard)
    baseline = statistics.median(seconds["webdataset + torchvision"][1:])
    rows = []
    for name, times in seconds.items():
        # The first round warms caches.
        middle = statistics.median(times[1:])
        row = {"pipeline": name, "image_bytes": image_bytes, "pairs_per_core_s": IMAGES / middle, "speed_up": baseline / middle}
        rows.append({**row, **differences, "machine": describe("cpu")})
        print(f"{name:26} {IMAGES / middle:7.0f} pairs/s per core, {baseline / middle:.2f}×")
    report.write_rows(out, rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
