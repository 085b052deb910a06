"""Write the generated parts of docs/planning.md, the example and the published steps: `python -m benchmarks.planning`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers import declare_torchvision_schemas
from megabatch.costs.hardware import find_machine
from megabatch.costs.strategy import Strategy
from megabatch.costs.time import step_time
from megabatch.planning.estimator import Estimator, estimator_for
from megabatch.planning.planner import plan_for
from megabatch.planning.problem import problem_of
from megabatch.planning.report import plan_report
from megabatch.planning.request import Request
from megabatch.reporting.markdown import as_markdown

DOCS = Path(__file__).resolve().parents[1] / "docs" / "planning.md"
REQUEST: dict[str, Any] = {
    "model": "ViT-L/14",
    "data": "10M",
    "epochs": 30,
    "gpu": "8xA100-80GB",
    "source": "shards/train-{0000..0999}.tar",
    "out": "runs/medical",
    "dim": 768,
}
CHUNK = 128
# An image of Inf-CL on the GPU: 3 × 224² numbers of 4 bytes.
IMAGE_BYTES = 3 * 224 * 224 * 4


class Published(NamedTuple):
    """A row of Inf-CL's tables.

    seconds: labels of figure 4 (two labels within 1 % of each other cannot be told apart). peak, loss: GB, from table 1, and from
    table 2 at the largest batch. offload: whether images wait on the host, as they always do in megabatch.
    """

    gpus: int
    pairs: int
    seconds: float | None
    peak: float | None
    loss: float
    offload: bool


K = 1024
# arXiv 2410.17243: ViT-L/14, gradient cache in chunks of 128, automatic mixed precision, AdamW, A800-80GB.
INF_CL = (
    Published(8, 32 * K, 25.0, 42.40, 0.18, True),
    Published(8, 64 * K, 49.4, 42.49, 0.36, True),
    Published(8, 128 * K, 98.3, 42.69, 0.72, True),
    Published(8, 256 * K, 200.3, 43.07, 1.45, True),
    Published(8, 1024 * K, None, 45.40, 6.53, True),
    Published(8, 4096 * K, None, None, 26.12, True),
    Published(32, 32 * K, None, 42.48, 0.05, False),
    Published(32, 64 * K, None, 43.08, 0.09, False),
    Published(32, 128 * K, None, 44.30, 0.18, False),
    Published(32, 256 * K, None, 46.71, 0.35, False),
    Published(32, 1024 * K, None, 61.20, 1.44, False),
    Published(32, 12288 * K, None, None, 19.59, True),
)  # fmt: skip


def main() -> None:
    declare_torchvision_schemas()
    problem = problem_of(Request(**REQUEST))
    estimator = estimator_for(problem)
    example = as_markdown(plan_report(plan_for(problem, estimator)), detail=False)
    text = DOCS.read_text("utf-8")
    for name, part in (("example", example), ("inf-cl", published(estimator))):
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda found, part=part: found[1] + part + found[2], text, flags=re.S
        )
    DOCS.write_text(text, encoding="utf-8")


def published(estimator: Estimator) -> str:
    """Return a table of published and predicted steps: seconds of a step, peak and memory of the loss in GB."""
    head = (
        "A800",
        "pairs",
        "s, published",
        "predicted",
        "in the loss",
        "peak, published",
        "predicted",
        "loss, published",
        "predicted",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + " ---: |" * len(head)]
    for row in INF_CL:
        strategy = Strategy(row.gpus, row.pairs // row.gpus, CHUNK, 0, precision="bf16")
        step = step_time(estimator.task, strategy, find_machine(f"{row.gpus}xA800"))
        memory, least = estimator.peaks.predict(strategy), estimator.peaks.predict(replace(strategy, shard=2 * CHUNK))
        peak, loss = memory.reserved_bytes, memory.phases["loss"] - least.phases["loss"]
        images = "" if row.offload else f" + {strategy.shard * IMAGE_BYTES / 1e9:.1f}"
        cells = [f"{row.gpus}", f"{row.pairs:,}", _number(row.seconds, 1), f"{step.seconds:,.1f}", f"{step.parts['loss']:,.1f}"]
        cells += [_number(row.peak, 1), f"{peak / 1e9:.1f}{images}", _number(row.loss, 2), f"{loss / 1e9:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
