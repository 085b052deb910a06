"""How a similarity matrix larger than the workspace is split into panels: arithmetic that kernels and predictions share."""

from __future__ import annotations

import math


def panel_size(rows: int, columns: int, tile: tuple[int, int], cells: float, max_columns: int | None = None) -> tuple[int, int]:
    """Return rows and columns of the equal panels, each of whole tiles, into which `rows` × `columns` pairs are split.

    cells: how many fit into the workspace. Panels are as large as that allows, and no wider than `max_columns`. A single tile is
    taken even if it does not fit.

    >>> panel_size(1000, 1000, (64, 128), 500 * 500)
    (384, 384)
    """
    # Squares, or longer than a square along one side where the other is short.
    side = math.isqrt(max(1, int(cells)))
    widest = min(columns, max(max_columns or columns, tile[1]))
    height = min(rows, max(side, int(cells / widest), tile[0]))
    width = _even(columns, min(widest, int(cells / height)), tile[1])
    # A tile may be wider than what fits beside so many rows.
    height = min(height, int(cells / min(width, columns)))
    return _even(rows, height, tile[0]), width


def _even(length: int, longest: int, tile: int) -> int:
    """Return the size of about equal parts of a length, no longer than `longest`, in whole tiles."""
    count = 1 if length <= longest else -(-length // max(tile, longest // tile * tile))
    return -(-length // (count * tile)) * tile
