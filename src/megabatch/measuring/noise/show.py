"""The noise of a run in words, and on a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...measurements import Measured, Noise
from ...terminal import print_table, print_text
from ...training.noise.estimator import number, sentence

if TYPE_CHECKING:
    from rich.console import Console

POINTS = ("step", "critical batch", "from", "to")
COUPLED = (
    "Samples are compared with each other, so the number belongs to this batch: another batch is another loss, with other"
    " negatives. It says where averaging more samples stops paying, and nothing of what more negatives would gain.",
    "It rests on the gradients of whole batches at the same weights, which are independent; those of parts of a batch are not.",
)
PROXY = (
    "Noise is a proxy for the critical batch, and a disputed one (arXiv 2505.23971). Branching tries batches directly:"
    " megabatch noise --branch."
)


def noise_of(result: Measured) -> Noise:
    """The noise of a measurement of it."""
    if not isinstance(result.found, Noise):
        raise ValueError(f"a measurement of {result.kind} was given: noise has its own, measured.json of `megabatch noise`")
    return result.found


def headline(result: Measured) -> str:
    found = noise_of(result)
    words = sentence(found.critical, found.low, found.high)
    return f"{words[0].upper()}{words[1:]}."


def sentences(result: Measured) -> list[str]:
    """What follows from the noise, and what does not."""
    found = noise_of(result)
    said = [_beside(found)]
    if math.isfinite(found.critical) and found.critical > 0:
        steps, samples = 1 + found.critical / found.batch, 1 + found.batch / found.critical
        said.append(
            f"If noise were all, batch {found.batch:,} would reach a target in {number(steps)} times the fewest possible steps and"
            f" with {number(samples)} times the fewest possible samples (arXiv 1812.06162); at the critical batch both are 2."
        )
    if found.branch is not None:
        said.append(f"Branched from the last step and trained a little, {found.branch:,} is the largest batch that lost nothing.")
    return said + list(COUPLED if found.coupled else ()) + ([PROXY] if found.branch is None else [])


def point_rows(result: Measured, most: int = 12) -> list[list[str]]:
    """The course as texts, at most so many points of it, the last one among them."""
    course = noise_of(result).course
    points = course[:: -max(1, -(-len(course) // most))][::-1]
    return [[f"{point['step']:,}", *(number(point[key]) for key in ("critical", "low", "high"))] for point in points]


def show(result: Measured, console: Console | None = None) -> None:
    """Prints the noise as a table and sentences."""
    print_text(headline(result), bold=True, console=console)
    print_text(f"{result.device} · {result.date}", console=console)
    print_table(POINTS, point_rows(result), console=console)
    for line in sentences(result):
        print_text(line, item=True, console=console)


def _beside(found: Noise) -> str:
    """Where the run's batch lies."""
    batch = f"The run's batch, {found.batch:,},"
    if found.batch < found.low:
        return f"{batch} is below the whole interval: a larger one needs fewer steps, nearly in proportion while it stays below."
    if found.batch > found.high:
        return f"{batch} is above the whole interval: a smaller one would need hardly more steps, and fewer samples."
    return f"{batch} lies within the interval: by the noise it is neither too small nor too large for certain."
