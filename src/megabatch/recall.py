"""Recall at k: the values of k that are reported, and the recall of a random ranking."""

from __future__ import annotations

RECALL_AT = (1, 5, 10)


def chance(pairs: int) -> dict[int, float]:
    """Recall at 1, 5 and 10 of a model that answers at random.

    >>> chance(1000)
    {1: 0.001, 5: 0.005, 10: 0.01}
    """
    return {k: min(1.0, k / pairs) for k in RECALL_AT}
