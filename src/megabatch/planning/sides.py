"""The work of the two sides of a pair, also where one tower embeds both, or where a query has several documents."""

from __future__ import annotations

from ..costs.counting import Pass, Work


def both_sides(towers: tuple[Work, ...], *, pairs: bool, negatives: int = 0) -> tuple[Work, ...]:
    """Return the work of a step's towers: of side x, and of side y with its hard negatives, as many rows for each row of x.

    A tower that is shared computes both sides, and has its parameters once.
    """
    if not pairs:
        return towers
    x, y = towers[0], towers[-1]
    if len(towers) == 1:
        y = y._replace(parameters=0, trainable=0)
    return (x, _repeated(y, 1 + negatives))


def _repeated(work: Work, times: int) -> Work:
    """Return the work for so many rows in place of each one, in as many more chunks."""

    def repeat(one: Pass) -> Pass:
        return Pass(tuple(call._replace(times=times * call.times) for call in one.calls))

    return work._replace(forward=repeat(work.forward), backward=repeat(work.backward), inputs=times * work.inputs)
