"""Measure the overhead of recomputing chunks on the host: `python -m benchmarks.overhead [FILE]`.

A deep tower of tiny layers, in which only the host's work per operation and saved tensor matters, runs with megabatch's
recomputation, with torch.utils.checkpoint over the same chunks, and with the two passes of the classic gradient cache.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megabatch
from benchmarks import report
from benchmarks.machine import describe

ROWS, CHUNK, WIDTH, DEPTH, STEPS = 64, 8, 16, 48, 20
FILE = Path(__file__).parent / "results" / "overhead-cpu.jsonl"


class Block(nn.Module):
    """A residual block, as in a transformer without its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def methods(tower: nn.Module) -> dict[str, Callable[[Tensor], None]]:
    """Return three methods to compute the gradients of the sum of squared embeddings."""
    encode = megabatch.cached(tower, chunk=CHUNK)

    def two_pass(x: Tensor) -> None:
        with torch.no_grad():
            gradient = 2 * torch.cat([tower(rows) for rows in x.split(CHUNK)])
        for rows, part in zip(x.split(CHUNK), gradient.split(CHUNK), strict=True):
            (tower(rows) * part).sum().backward()

    def torch_checkpoint(x: Tensor) -> None:
        torch.cat([checkpoint(tower, rows, use_reentrant=False) for rows in x.split(CHUNK)]).square().sum().backward()

    return {
        "megabatch": lambda x: encode(x).square().sum().backward(),
        "torch.utils.checkpoint": torch_checkpoint,
        "two-pass": two_pass,
    }


def main(out: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tower, x = nn.Sequential(*(Block() for _ in range(DEPTH))), torch.randn(ROWS, WIDTH)
    seconds: dict[str, list[float]] = {}
    gradients: list[Tensor] = []
    for step in range(STEPS + 2):
        # In turn, so that other load of the machine affects all of them.
        for name, run in methods(tower).items():
            tower.zero_grad()
            start = time.perf_counter()
            run(x)
            if step >= 2:
                seconds.setdefault(name, []).append(time.perf_counter() - start)
            gradients.append(tower[0].up.weight.grad)
    assert all(torch.allclose(gradients[0], gradient, rtol=1e-4, atol=1e-6) for gradient in gradients)
    settings = {"rows": ROWS, "chunk": CHUNK, "width": WIDTH, "depth": DEPTH, "steps": STEPS, "machine": describe("cpu")}
    rows = [{"way": name, "seconds": statistics.median(times), **settings} for name, times in seconds.items()]
    report.write_rows(out, rows)
    for row in rows:
        print(f"{row['way']:24} {1000 * row['seconds']:6.0f} ms, {row['seconds'] / rows[-1]['seconds']:.2f} of two-pass")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
