"""Each sample's own hard negatives, without tiles: one similarity per hard negative, summed over the negatives of each sample.

A loss uses it where these logits differ from those of all other negatives, or where they are the only negatives.
Legend: K hard negatives; owner_K is the row of x that each belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..tiles.contract import Ranking, Softmax, Stats, accumulator

# Hard negatives whose embeddings are read at once.
ROWS_AT_ONCE = 8192


class OwnNegatives:
    """The similarities of hard negatives to their own row of x, and the sums and gradients of those that count.

    counts_K: which of them count; rank_K: which of them are ranked in diagnostics.
    """

    def __init__(self, x_MD: Tensor, y_KD: Tensor, owner_K: Tensor, scale: Tensor, counts_K: Tensor) -> None:
        self.x_MD, self.y_KD, self.owner_K, self.scale, self.counts_K = x_MD, y_KD, owner_K, scale, counts_K
        self.rank_K = counts_K
        self.smoothed = False
        self.acc = accumulator(x_MD.dtype)
        parts = [(x * y).sum(1) for x, y, _ in self._parts()]
        self.z_K = torch.cat(parts) if parts else x_MD.new_zeros(0, dtype=self.acc)

    def stats(self) -> Stats:
        """Return the sums over each row's own negatives."""
        s_K = (self.scale * self.z_K).masked_fill(~self.counts_K, -torch.inf)
        peak_M = self._per_row(s_K.new_full((len(self.x_MD),), -torch.inf), s_K)
        anchor_M = peak_M.masked_fill(peak_M == -torch.inf, 0)
        total_M = self._sum((s_K - anchor_M[self.owner_K]).exp())
        counted = self._sum(self.z_K * self.counts_K), self._sum(self.counts_K.to(self.acc))
        return Stats(peak_M, total_M, None, None, *(counted if self.smoothed else (None, None)))

    def ranking(self, positive_M: Tensor) -> Ranking:
        """Return the rank of each row's positive among its own negatives."""
        z_K = self.z_K.masked_fill(~self.rank_K, -torch.inf)
        ahead_M = self._sum((z_K >= positive_M[self.owner_K]).to(torch.int64))
        return Ranking(ahead_M, self._per_row(torch.full_like(positive_M, -torch.inf), z_K))

    def add_gradients(self, softmax: Softmax, gx_MD: Tensor, gy_KD: Tensor) -> Tensor:
        """Add the gradients, without the factor of the scale, and return the gradient in the scale."""
        owner_K = self.owner_K
        p_K = (self.scale * self.z_K - softmax.peak[owner_K]).exp() * softmax.gain[owner_K]
        if softmax.counted is not None:
            p_K = p_K - softmax.counted[owner_K]
        p_K = torch.where(self.counts_K, p_K, 0)
        for x, y, rows in self._parts():
            p = p_K[rows, None]
            gy_KD[rows] += p * x
            # Unlike index_add_, this adds in a fixed order on CUDA too.
            gx_MD.index_put_((owner_K[rows],), p * y, accumulate=True)
        return (p_K * self.z_K).sum()

    def _parts(self) -> Iterator[tuple[Tensor, Tensor, slice]]:
        """Yield some hard negatives at a time with their rows of x, in the dtype of sums."""
        for start in range(0, len(self.owner_K), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            yield self.x_MD[self.owner_K[rows]].to(self.acc), self.y_KD[rows].to(self.acc), rows

    def _sum(self, values_K: Tensor) -> Tensor:
        sums_M = values_K.new_zeros(len(self.x_MD))
        return sums_M.index_put_((self.owner_K,), values_K, accumulate=True)

    def _per_row(self, lowest_M: Tensor, values_K: Tensor) -> Tensor:
        return lowest_M.scatter_reduce_(0, self.owner_K, values_K, "amax")
