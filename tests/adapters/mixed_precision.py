"""How far a training in bf16 ends from the same training in fp32, as a fraction of the way that each parameter went."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

Weights = dict[str, Tensor]
# Parameters that bf16 does not bring to this fraction with the library's own loss say nothing: their gradients nearly cancel.
READABLE = 0.1
# Of two trainings in the same precision, the worst parameter of one is off by up to twice that of the other, in either direction:
# seen over 23 batches of the models here, with errors of 0.01 to 0.06, a few times the 0.004 of bf16's last digit. A gradient that
# is twice or half the true one is off by 1 or 0.5.
SCATTER = 3.0


class Errors(NamedTuple):
    """The largest error of a parameter with our loss and with the library's own, and the fraction of parameters that were read."""

    ours: float
    theirs: float
    read: float

    def agree(self) -> bool:
        return self.read > 0.5 and 0 < self.ours < SCATTER * self.theirs


def errors(ours: Weights, theirs: Weights, exact: Weights, start: Weights) -> Errors:
    """Return the errors of weights that were trained in bf16; exact: the library's own in fp32. start: where all of them began."""

    def distances(a: Weights, b: Weights) -> dict[str, float]:
        return {name: float((a[name].double() - b[name].double()).norm()) for name in exact}

    way = {name: distance for name, distance in distances(exact, start).items() if distance > 0}
    found, own = ({name: off[name] / way[name] for name in way} for off in (distances(ours, exact), distances(theirs, exact)))
    read = [name for name in way if own[name] < READABLE]
    return Errors(max(found[name] for name in read), max(own[name] for name in read), len(read) / len(way))
