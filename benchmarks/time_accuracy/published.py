"""Compare predictions with published throughput on devices that nothing was fitted on: RTX 3090, V100, A100 and A800.

    python -m benchmarks.time_accuracy.published         # without a device, a few CPU-minutes; to results/time-published.jsonl

A row counts as inside if the published seconds of a step lie within the interval that a plan states for the device.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.memory_accuracy.subjects import subject
from megabatch.costs.counting import Work, count_work
from megabatch.costs.hardware import find_machine
from megabatch.costs.memory.step import default_loss
from megabatch.costs.models import SkipCompute
from megabatch.costs.strategy import Strategy
from megabatch.costs.time import StepWork, interval, step_time

RESULTS = Path(__file__).resolve().parents[1] / "results" / "time-published.jsonl"
TIMM = "huggingface/pytorch-image-models, results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv"
NVIDIA = "NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/{}/README.md, training performance, one GPU"
INF_CL = "arXiv 2410.17243, figure 4: ViT-L/14, gradient cache in chunks of 128"
Row = dict[str, Any]


@dataclass(frozen=True)
class Throughput:
    """Seconds of a published training step on `gpus` devices. precision: "tf32" is fp32 with TF32 in matrix products too."""

    gpu: str
    model: str
    rows: int
    precision: str
    seconds: float
    source: str
    channels_last: bool = False
    gpus: int = 1


def published() -> Iterator[Throughput]:
    """Yield published steps, models of many kinds of operations."""
    milliseconds = {
        ("resnet18", 512): 184.877, ("resnet34", 512): 314.992, ("resnet50", 512): 618.983, ("resnext50_32x4d", 384): 577.966,
        ("seresnet50", 384): 536.208, ("regnetx_032", 384): 486.368, ("regnety_032", 384): 549.77, ("densenet121", 256): 348.758,
        ("dla60", 384): 540.13, ("repvgg_b0", 512): 419.512, ("efficientnet_b0", 384): 262.1, ("mobilenetv2_100", 512): 278.633,
        ("mobilenetv3_large_100", 512): 235.344, ("convnext_tiny", 256): 313.859, ("poolformer_s24", 256): 374.176,
        ("mixer_s16_224", 512): 331.197, ("vit_base_patch32_224", 512): 299.695, ("deit_tiny_patch16_224", 512): 222.68,
        ("vit_small_patch16_224", 384): 363.872, ("swin_tiny_patch4_window7_224", 256): 394.841,
        ("xcit_tiny_12_p16_224", 512): 384.926, ("twins_svt_small", 384): 449.18,
    }  # fmt: skip
    for (model, rows), ms in milliseconds.items():
        yield Throughput("RTX3090", model, rows, "fp16", ms / 1e3, TIMM)
    for gpu, model, rows, precision, rate in (
        ("A100-80GB", "resnet50", 256, "fp16", 2470),
        ("A100-80GB", "resnet50", 256, "tf32", 938),
        ("V100-32GB", "resnet50", 256, "fp16", 1156),
        ("V100-32GB", "resnet50", 128, "fp32", 356),
        ("V100-16GB", "resnet50", 256, "fp16", 1200),
        ("A100-80GB", "resnext101_32x4d", 128, "fp16", 1169),
        ("A100-80GB", "resnext101_32x4d", 128, "tf32", 420),
        ("V100-32GB", "resnext101_32x4d", 128, "fp16", 556),
        ("V100-32GB", "resnext101_32x4d", 64, "fp32", 151),
    ):
        folder = "resnet50v1.5" if model == "resnet50" else "resnext101-32x4d"
        yield Throughput(gpu, model, rows, precision, rows / rate, NVIDIA.format(folder), channels_last=precision == "fp16")
    for pairs, seconds in ((32, 25.0), (64, 49.4), (128, 98.3), (256, 200.3)):
        yield Throughput("A800-80GB", "clip-vit-l-14", 1024 * pairs // 8, "bf16", seconds, INF_CL, gpus=8)


def work_of(row: Throughput) -> tuple[Work, ...]:
    """Return the counted work of each tower, as autocast to 16 bits computes it, or in fp32."""
    described = subject(row.model)
    with SkipCompute():
        model = described.build()
    towers = model if isinstance(model, tuple) else (model,)
    makers = described.inputs if isinstance(described.inputs, tuple) else (described.inputs,)
    precision = "bf16" if row.precision in ("fp16", "bf16") else "fp32"
    loss = None if len(towers) == 2 else default_loss
    if not row.channels_last:
        return tuple(count_work(tower, make, precision, loss=loss) for tower, make in zip(towers, makers, strict=True))

    def inputs(rows: int) -> torch.Tensor:
        images: torch.Tensor = makers[0](rows).to(memory_format=torch.channels_last)
        return images

    module: nn.Module = towers[0].to(memory_format=torch.channels_last)
    return (count_work(module, inputs, precision, loss=loss),)


def compared(row: Throughput, work: tuple[Work, ...]) -> Row:
    """Return the row with the prediction, the interval, and whether the published seconds lie inside."""
    machine = find_machine(row.gpu, row.gpus)
    precision = "fp32" if row.precision == "tf32" else row.precision
    if row.precision == "tf32":
        device = machine.device
        machine = replace(machine, device=replace(device, rates={**device.rates, "fp32": device.rates["tf32"]}))
    if len(work) == 2:
        step = step_time(StepWork(work, "clip", 768), Strategy(row.gpus, row.rows, 128, 0, precision="bf16"), machine)
    else:
        strategy = Strategy(row.gpus, row.rows, row.rows, precision=precision, accumulate=True)  # type: ignore[arg-type]
        step = step_time(StepWork(work, "supervised"), strategy, machine)
    low, high = interval(step.seconds, machine.device)
    inside = low <= row.seconds <= high
    return asdict(row) | {
        "predicted_s": step.seconds,
        "low_s": low,
        "high_s": high,
        "inside": inside,
        "ratio": row.seconds / step.seconds,
    }


def line(row: Row) -> str:
    mark = "inside" if row["inside"] else "OUTSIDE"
    return (
        f"{row['gpu']:<10} {row['model']:<30} {row['precision']:<5} {row['rows']:>6} {1e3 * row['seconds']:10.1f} ms published,"
        f" {1e3 * row['predicted_s']:10.1f} predicted, ratio {row['ratio']:.2f}, {mark}"
    )


def summary(rows: list[Row]) -> str:
    inside = sum(row["inside"] for row in rows)
    return f"{inside} of {len(rows)} published steps are inside the stated interval ({inside / len(rows):.0%})"


def main(arguments: list[str] | None = None) -> int:
    """Write and print the comparison; return 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.time_accuracy.published",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    counted: dict[Any, tuple[Work, ...]] = {}
    rows = []
    with options.output.open("w") as file:
        for row in published():
            key = row.model, row.precision in ("fp16", "bf16"), row.channels_last
            if key not in counted:
                counted[key] = work_of(row)
            rows.append(compared(row, counted[key]))
            print(json.dumps(rows[-1]), file=file, flush=True)
            print(line(rows[-1]), flush=True)
    print(summary(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
