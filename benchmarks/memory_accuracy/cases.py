"""The steps that are predicted and measured, and the memory limits that a prediction has to keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from megabatch.costs.memory import Setup

GIB = 2**30
# Models that were first measured after the rules for workspaces had been derived from the others.
HELD_OUT = {
    "densenet121": (32, "bf16"),
    "mixer_b16_224": (64, "bf16"),
    "mobilenetv3_large_100": (64, "bf16"),
    "regnety_032": (64, "fp32"),
    "resnext50_32x4d": (64, "bf16"),
}


@dataclass(frozen=True)
class Case:
    """One step of a model.

    chunk: rows that are encoded at once; None: the whole batch. as_run: with the fused optimizer and the linear patches of
    `megabatch train` on CUDA, instead of PyTorch's defaults; rows without this key were measured with the defaults.
    """

    model: str
    rows: int
    precision: str = "fp32"
    checkpointing: bool = False
    objective: str = "supervised"
    chunk: int | None = None
    keep: int = 0
    device: str = "cuda"
    as_run: bool = False

    def setup(self) -> Setup:
        given = asdict(self)
        del given["model"], given["rows"], given["as_run"]
        return Setup(**given, fused=self.as_run)

    @property
    def supervised(self) -> bool:
        return self.objective == "supervised"


@dataclass(frozen=True)
class Limit:
    """A step within `bytes` of memory, with the most rows, or the largest chunk, that are predicted to fit."""

    case: Case
    bytes: int

    def at(self, size: int) -> Case:
        return replace(self.case, rows=size) if self.case.supervised else replace(self.case, chunk=size)


def of_row(row: dict[str, Any]) -> Case:
    """Return the case of a row."""
    return Case(**{field.name: row[field.name] for field in fields(Case) if field.name in row})


def cases() -> Iterator[Case]:
    """Yield every family of models, in both precisions, with and without checkpointing, some at three batch sizes."""
    for rows in (32, 64, 128):
        yield Case("resnet50", rows)
        yield Case("vit_base_patch16_224", rows, "bf16")
    for name in ("resnet50", "convnext_tiny", "efficientnet_b0", "swin_tiny_patch4_window7_224"):
        yield Case(name, 64, "bf16")
    for name in ("convnext_tiny", "efficientnet_b0", "vit_base_patch16_224", "swin_tiny_patch4_window7_224"):
        yield Case(name, 64)
    yield Case("vit_large_patch14_224", 32, "bf16")
    yield Case("vit_base_patch16_224", 64, "bf16", as_run=True)
    yield Case("vit_large_patch14_224", 64, "bf16", checkpointing=True)
    for precision in ("fp32", "bf16"):
        yield Case("bert-base", 32, precision)
        yield Case("gpt2", 8, precision)
        yield Case("gpt2-medium", 4, precision)
    yield Case("gpt2", 16, "bf16", checkpointing=True)
    yield Case("bert-base", 64, "bf16", checkpointing=True)
    for name, rows, chunk in (("clip-vit-b-32", 512, 128), ("clip-vit-l-14", 128, 32)):
        yield Case(name, rows, "bf16", objective="clip")
        yield Case(name, 8 * rows, "bf16", objective="clip", chunk=chunk)
        yield Case(name, 8 * rows, "bf16", objective="clip", chunk=chunk, as_run=True)
        yield Case(name, 8 * rows, "bf16", objective="siglip", chunk=chunk, keep=2)
    for name, (rows, precision) in HELD_OUT.items():
        yield Case(name, rows, precision)
    yield Case("vgg16", 32)


def limits() -> Iterator[Limit]:
    """Yield steps of each family that fill a small device, among them the family with the worst predicted reserve."""
    yield Limit(Case("resnet50", 1, "bf16"), 4 * GIB)
    yield Limit(Case("vit_base_patch16_224", 1, "bf16"), 6 * GIB)
    yield Limit(Case("convnext_tiny", 1), 8 * GIB)
    yield Limit(Case("gpt2", 1, "bf16"), 12 * GIB)
    yield Limit(Case("clip-vit-b-32", 2048, "bf16", objective="clip", chunk=1), 6 * GIB)


def quick_cases() -> list[Case]:
    """Return two tiny cases for a CPU, which has no memory counters, to test the program."""
    return [Case("tiny", 8, device="cpu"), Case("tiny-clip", 8, objective="clip", chunk=4, device="cpu")]
