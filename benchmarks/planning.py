"""`python -m benchmarks.planning` writes what docs/planning.md takes from plans: its example, published steps beside predicted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.peers import declare_torchvision_schemas
from megabatch.planning.hardware import find_machine
from megabatch.planning.how import How
from megabatch.planning.planner import Planner, Tools
from megabatch.planning.question import Question
from megabatch.planning.show import as_markdown
from megabatch.planning.time import step_time

DOCS = Path(__file__).resolve().parents[1] / "docs" / "planning.md"
QUESTION: dict[str, Any] = {
    "model": "ViT-L/14",
    "data": "10M",
    "epochs": 30,
    "gpu": "8xA100-80GB",
    "source": "shards/train-{0000..0999}.tar",
    "out": "runs/medical",
    "dim": 768,
}
# Seconds a step (labels of figure 4; which of two within 1 % is whose is not told) and peak GB (table 1, data offload) of Inf-CL,
# arXiv 2410.17243: ViT-L/14, chunks of 128, fp16, 8 × A800.
INF_CL = {32_768: (25.0, 42.40), 65_536: (49.4, 42.49), 131_072: (98.3, 42.69), 262_144: (200.3, 43.07)}


def main() -> None:
    declare_torchvision_schemas()
    planner = Planner(Question(**QUESTION), Tools())
    example = as_markdown(planner.plan())
    text = DOCS.read_text("utf-8")
    for name, part in (("example", example), ("inf-cl", published(planner))):
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda found, part=part: found[1] + part + found[2], text, flags=re.S
        )
    DOCS.write_text(text, encoding="utf-8")


def published(planner: Planner) -> str:
    """A table of the published steps beside the predicted ones."""
    machine = find_machine("8xA800")
    lines = [
        "| pairs | published, s | predicted, s | published peak, GB | predicted peak, GB |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for pairs, (seconds, gb) in INF_CL.items():
        how = How(8, pairs // 8, 128, 0, precision="bf16")
        predicted = step_time(planner.task, how, machine).seconds
        lines.append(f"| {pairs:,} | {seconds:.1f} | {predicted:.1f} | {gb:.1f} | {planner.peaks(how) / 1e9:.1f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
