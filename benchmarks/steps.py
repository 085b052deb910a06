"""Memory of a whole training step against batch and chunk, on the embedded pairs: `python -m benchmarks.steps --help`.

Each case runs in a separate process. Its peak is compared with what must grow with the batch: the inputs, and the embeddings with
their gradients. Everything else depends on the chunk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe
from benchmarks.memory import peak_of
from megabatch import config
from megabatch.chunks.rows import tensors_of
from megabatch.training.build import assemble
from megabatch.training.distributed import ranks
from megabatch.training.objective import Contrastive

RESULTS = Path(__file__).parent / "results"
PAIRS, CHUNKS = (4096, 16384, 65536), (128, 1024)
# Each embedding has a gradient of the same size.
COPIES = 2


def measure(pairs: int, chunk: int, device: str) -> dict[str, Any]:
    """Return one row. A small step comes first, so that libraries are loaded and gradients exist before the measured one."""
    run = config.build(config.EMBEDDED, [f"batch.chunk={chunk}", "batch.keep=0", "data.workers=0", f"compute.device={device}"])
    with ranks(run.compute) as here:
        parts = assemble(run, here)
        objective, loader = parts.objective, parts.shuffled()
        assert isinstance(objective, Contrastive)
        (warm,) = loader.batches([(0, 2 * chunk)])
        objective.step(warm)
        (batch,) = loader.batches([(0, pairs)])
        began = time.perf_counter()
        found = peak_of(lambda: float(objective.step(batch).loss), device)
        inputs = sum(tensor.nbytes for side in (batch.x, batch.y) for tensor in tensors_of(side))
        return {
            "pairs": pairs,
            "chunk": chunk,
            "step_s": time.perf_counter() - began,
            "extra_bytes": found.extra_bytes,
            "method": found.method,
            "input_bytes": inputs,
            "embedding_bytes": 2 * COPIES * pairs * run.loss.dim * 4,
            "loss": found.result,
            "device": device,
        }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return the exit code: 0, or 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", default=",".join(map(str, PAIRS)))
    parser.add_argument("--chunks", default=",".join(map(str, CHUNKS)))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        pairs, chunk = map(int, options.case.split(","))
        print(json.dumps(measure(pairs, chunk, options.device)))
        return 0
    out = options.out or RESULTS / f"steps-{options.device}.jsonl"
    machine, failed = describe(options.device), False
    with out.open("w") as file:
        for chunk in options.chunks.split(","):
            for pairs in options.pairs.split(","):
                command = [sys.executable, "-m", "benchmarks.steps", "--device", options.device, "--case", f"{pairs},{chunk}"]
                done = subprocess.run(command, capture_output=True, text=True)
                failed = failed or done.returncode != 0
                row = json.loads(done.stdout or "{}") or {"pairs": pairs, "chunk": chunk, "error": done.stderr[-500:]}
                print(json.dumps(row | machine), file=file, flush=True)
                print(_line(row), flush=True)
    return int(failed)


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['pairs']:>7} pairs, chunk {row['chunk']}: {row['error']}"
    extra = f"+{row['extra_bytes'] / 2**20:,.0f} MiB"
    return f"{row['pairs']:>7,} pairs, chunk {row['chunk']:>5,}: {row['step_s']:7.1f} s, {extra}"


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table, and a line that describes it."""
    first = rows[0]
    lines = [
        "| pairs | chunk | peak above the inputs | embeddings and gradients |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        peak, grows = (f"{row[key] / 2**20:,.0f} MiB" for key in ("extra_bytes", "embedding_bytes"))
        lines.append(f"| {row['pairs']:,} | {row['chunk']:,} | {peak} | {grows} |")
    where = first.get("gpu") or f"{first['cpu']} ({first['threads']} threads)"
    return "\n".join(lines) + (
        f"\n\nForward and backward of the embedded default's towers and loss, no graph kept, on {where} with torch "
        f"{first['torch']}, {str(first['date'])[:10]}. The last column is arithmetic: embeddings and gradients of both sides."
    )


if __name__ == "__main__":
    raise SystemExit(main())
