"""What a loss can tell of its batch from the pass it makes anyway."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..tiles.contract import Ranking


class Diagnostics(NamedTuple):
    """How well each of this rank's pairs stands in the whole batch, one entry for each row of x; detached.

    positive: similarity x·y of the pair itself.
    row_rank: how many of the row's negatives, over all ranks, are at least as similar as the positive: 0 is best, and ties count
        against the positive, so that a collapsed model does not look perfect. Negatives that `drop_above` leaves out are counted.
    row_hardest: similarity of the row's hardest negative (-inf if it has none).
    column_rank, column_hardest: the same for the document of the pair against all rows; None for a loss of one direction.
    """

    positive: Tensor
    row_rank: Tensor
    row_hardest: Tensor
    column_rank: Tensor | None
    column_hardest: Tensor | None

    def recall(self, k: int = 1) -> tuple[Tensor, Tensor | None]:
        """The share of rows, and of columns, whose positive is among the k most similar."""
        shares = (None if rank is None else (rank < k).float().mean() for rank in (self.row_rank, self.column_rank))
        rows, columns = shares
        assert rows is not None
        return rows, columns


def diagnose(positive_M: Tensor, rows: Ranking, columns: Ranking | None) -> Diagnostics:
    """The diagnostics of this rank's pairs; documents without a row of their own have none."""
    column = (None, None) if columns is None else (c[: len(positive_M)] for c in columns)
    return Diagnostics(positive_M, *rows, *column)
