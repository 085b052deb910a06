"""Measure the errors of gradients on hard data, by precision: `python -m benchmarks.errors --help`.

Embeddings lie in clusters and positives are noisy copies, so noisy that the clip loss is about LOSS at every scale: the negatives
of a pair's own cluster compete with its positive, and the gradient depends on the largest logits. Each implementation is compared
with
the formula in float64 on inputs rounded to the precision that it reads, over several draws of the data: the gradient in the scale
is a single number in which large sums cancel, so one draw says little about its error.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch
from benchmarks import peers, report
from benchmarks.check import LOSSES
from benchmarks.machine import describe
from benchmarks.measure import Row
from megabatch import reference

RESULTS = Path(__file__).parent / "results"
BIAS = -10.0
PAIRS_IN_A_CLUSTER = 16
# The clip loss at which the noise is chosen: far from that of random pairs and from zero.
LOSS = 2.0
# On CUDA the workspace in bytes is so small that three quarters of the similarities are computed again in backward, as most of them
# are at larger batches.
BATCH = {"cpu": 4096, "cuda": 16_384}
WORKSPACE = 2**27
# Holds all exponentials of that batch.
ALL_SAVED = 2**30
# Without it gradients in float16 underflow; a power of two changes nothing else.
FLOAT16_LOSS_SCALE = 2.0**12
HEADERS = ("loss", "scale", "value", "implementation", "gradient", "scale gradient", "bias gradient", "value off")


@dataclass(frozen=True)
class Contestant:
    """An implementation in a precision; `options` are passed to the functions of megabatch."""

    title: str
    implementation: str
    dtype: torch.dtype
    options: dict[str, Any] = field(default_factory=dict)

    def load(self, loss: str) -> peers.LossCall:
        if self.implementation != "ours":
            return peers.find(self.implementation, loss).load()
        if loss == "clip":
            return lambda x, y, scale, bias: megabatch.clip_loss(x, y, scale, **self.options)
        return lambda x, y, scale, bias: megabatch.siglip_loss(x, y, scale, bias, **self.options)


def contestants(device: str, loss: str) -> list[Contestant]:
    """Return what is compared on a device. Only CUDA has a choice of precisions, and only clip an int8 backward and saved
    exponentials, because it computes the similarities twice."""
    on_cuda = device == "cuda"
    options: dict[str, Any] = {"workspace": WORKSPACE} if on_cuda else {}

    def ours(dtype: torch.dtype, label: str = "", **more: Any) -> Contestant:
        title = f"megabatch, {str(dtype).removeprefix('torch.')} {label}".rstrip()
        return Contestant(title, "ours", dtype, options | more)

    return [
        ours(torch.bfloat16),
        *([ours(torch.bfloat16, "int8", int8_backward=True)] if on_cuda and loss == "clip" else []),
        # On Hopper the products read exponentials that are saved, and do not write the gradient in the logits.
        *([ours(torch.bfloat16, "all saved", workspace=ALL_SAVED)] if on_cuda and loss == "clip" else []),
        Contestant("OpenCLIP, bfloat16 autocast", "openclip", torch.bfloat16),
        ours(torch.float16),
        *([ours(torch.float32, p, precision=p) for p in ("tf32", "ieee")] if on_cuda else [ours(torch.float32)]),
        Contestant("OpenCLIP, float32", "openclip", torch.float32),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.errors", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch", type=int, help=f"Number of pairs (default {BATCH['cpu']}, on CUDA {BATCH['cuda']}).")
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--draws", type=int, default=8, help="Draws of the data; errors are root mean squares over them.")
    parser.add_argument("--scales", default="20,50,100", help="Scales, separated by commas.")
    parser.add_argument("--out", type=Path, help="Output file, one JSON row per line (default results/errors-DEVICE.jsonl).")
    options = parser.parse_args(arguments)
    batch = BATCH[options.device] if options.batch is None else options.batch
    if batch < 1:
        parser.error(f"--batch is {batch}: errors are of at least one pair")
    if options.draws < 1:
        parser.error(f"--draws is {options.draws}: errors are of at least one draw")
    out = options.out or RESULTS / f"errors-{options.device}.jsonl"
    rows: list[Row] = []
    for scale in (float(scale) for scale in options.scales.split(",")):
        rows.extend(measure(batch, options.dim, scale, options.device, options.draws))
    report.write_rows(out, rows)
    report.show(HEADERS, [_cells(row) for row in rows])
    print(f"rows: {out}")
    return 0


def measure(batch: int, dim: int, scale: float, device: str, draws: int) -> Iterator[Row]:
    """Yield the errors of every implementation at one scale, for both losses, over draws with seeds 0, 1, 2, ..."""
    drawn = [clustered_pairs(batch, dim, scale, device, seed) for seed in range(draws)]
    machine = describe(device)
    for loss in LOSSES:
        exact: dict[tuple[torch.dtype, int], dict[str, Tensor]] = {}
        for contestant in contestants(device, loss):
            values, errors = [], []
            for seed, (x, y, _) in enumerate(drawn):
                rounded = x.to(contestant.dtype), y.to(contestant.dtype)
                place = contestant.dtype, seed
                if place not in exact:
                    exact[place] = _result(_formula(loss), *(rows.double() for rows in rounded), scale)
                given = _result(contestant.load(loss), *rounded, scale)
                values.append(exact[place]["value"].item())
                errors.append({name: _off(given[name], right) for name, right in exact[place].items()})
            yield {
                "loss": loss,
                "implementation": contestant.implementation,
                "title": contestant.title,
                "dtype": str(contestant.dtype).removeprefix("torch."),
                **contestant.options,
                "batch": batch,
                "dim": dim,
                "device": device,
                "scale": scale,
                "bias": BIAS,
                "noise": statistics.fmean(noise for _, _, noise in drawn),
                "pairs_in_a_cluster": PAIRS_IN_A_CLUSTER,
                "draws": draws,
                "value": statistics.fmean(values),
                "errors": {name: _root_mean_square([off[name] for off in errors]) for name in errors[0]},
                "largest_errors": {name: max(off[name] for off in errors) for name in errors[0]},
                "machine": machine,
            }


def clustered_pairs(batch: int, dim: int, scale: float, device: str, seed: int) -> tuple[Tensor, Tensor, float]:
    """Return unit rows in clusters, their positives (float64), and the noise at which the clip loss is LOSS, found by bisection."""
    generator = torch.Generator().manual_seed(seed)

    def unit(rows: int) -> Tensor:
        return F.normalize(torch.randn(rows, dim, generator=generator, dtype=torch.float64), dim=1).to(device)

    centres = unit(max(1, batch // PAIRS_IN_A_CLUSTER))
    x = F.normalize(centres[torch.arange(batch, device=device) % len(centres)] + unit(batch), dim=1)
    direction = unit(batch)
    low, high = 0.0, 16.0
    for _ in range(20):
        noise = (low + high) / 2
        y = F.normalize(x + noise * direction, dim=1)
        low, high = (noise, high) if reference.clip_loss(x, y, scale) < LOSS else (low, noise)
    return x, y, noise


def markdown(rows: list[Row]) -> str:
    """Return the table for the docs: a line per loss and scale, a column per implementation and precision."""
    names = list(dict.fromkeys(row["title"] for row in rows))
    cell = {(row["loss"], row["scale"], row["title"]): row for row in rows}
    lines = [f"| loss | scale | value | {' | '.join(names)} |", f"| --- | ---: | ---: |{' ---: |' * len(names)}"]
    for loss, scale in sorted({(row["loss"], row["scale"]) for row in rows}):
        here = [cell.get((loss, scale, name)) for name in names]
        errors = [_bold(row, f"{row['errors']['gradient']:.1e}, {row['errors']['scale']:.0e}") if row else "" for row in here]
        value = report.three_digits(cell[loss, scale, names[0]]["value"])
        lines.append(f"| {loss} | {scale:g} | {value} | {' | '.join(errors)} |")
    row = rows[0]
    machine = row["machine"]
    caption = (
        f"‖g − g64‖ / ‖g64‖ of the gradients of both embeddings, then the relative error of the scale's gradient; g64 is that of "
        f"the formula in float64 on the same rounded inputs. Root mean squares over {row['draws']} draws of {row['batch']:,} pairs "
        f"in clusters of {row['pairs_in_a_cluster']}, D = {row['dim']}, so noisy that the clip loss is {LOSS:g}; siglip with a "
        f"bias of {row['bias']:g}. On {report.device_name(machine)} with torch {machine['torch']}, {machine['date'][:10]}."
    )
    return "\n".join([*lines, "", caption])


def _formula(loss: str) -> peers.LossCall:
    if loss == "clip":
        return lambda x, y, scale, bias: reference.clip_loss(x, y, scale)
    return reference.siglip_loss


def _result(call: peers.LossCall, x: Tensor, y: Tensor, scale: float) -> dict[str, Tensor]:
    """Return value and gradients in float64: of both embeddings as one tensor, of the scale and, if there is one, of the bias."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    leaves = [x.clone(), y.clone(), *(torch.tensor(value, dtype=wide, device=x.device) for value in (scale, BIAS))]
    for leaf in leaves:
        leaf.requires_grad_()
    loss = call(*leaves)
    factor = FLOAT16_LOSS_SCALE if x.dtype == torch.float16 else 1.0
    (loss * factor).backward()
    found = {"value": loss.detach().double()}
    for name, leaf in zip(("scale", "bias"), leaves[2:], strict=True):
        if leaf.grad is not None:
            found[name] = leaf.grad.double() / factor
    return found | {"gradient": torch.cat([leaf.grad.double() for leaf in leaves[:2]]) / factor}


def _off(given: Tensor, right: Tensor) -> float:
    return float((given - right).norm() / right.norm())


def _root_mean_square(errors: list[float]) -> float:
    return math.sqrt(statistics.fmean(error**2 for error in errors))


def _bold(row: Row, text: str) -> str:
    return f"**{text}**" if row["implementation"] == "ours" else text


def _cells(row: Row) -> tuple[str, ...]:
    errors = (f"{row['errors'].get(name, math.nan):.1e}".replace("nan", "") for name in ("gradient", "scale", "bias", "value"))
    return row["loss"], f"{row['scale']:g}", report.three_digits(row["value"]), row["title"], *errors


if __name__ == "__main__":
    raise SystemExit(main())
