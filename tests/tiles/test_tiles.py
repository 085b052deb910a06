"""Both backends through the same cases: every function of the tile contract against its formula on the whole matrix, in fp64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from megabatch.tiles import BACKENDS, backend_for, eager, products
from megabatch.tiles.contract import ComputeOptions, NeedsGrad, Pairs, Ranking, SigmoidPass, Softmax, Stats, merge

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = torch.finfo(torch.float32).eps
LARGE = 2**29
# Some have equal low halves, some equal high halves, and some need more than 32 bits.
IDS = torch.tensor([0, 2**32, 2**33, 1, 2**32 + 1, -1, 2**32 - 1, -(2**32) - 1, 2**31, -(2**31), 2**63 - 1, -(2**63)])

# Triton's interpreter warns when numpy overflows or makes NaN, in values that the kernels discard.
pytestmark = [
    pytest.mark.sampled(4),
    pytest.mark.usefixtures("unwritten_memory_is_no_number"),
    pytest.mark.filterwarnings(
        r"ignore:(overflow|divide by zero|invalid value) encountered in:RuntimeWarning:triton\.runtime\.interpreter"
    ),
    # Sums call numpy directly.
    pytest.mark.filterwarnings(r"ignore:(overflow|invalid value) encountered in reduce:RuntimeWarning"),
]


@dataclass(frozen=True)
class Case:
    """A block: M rows, N documents, D wide, and which pairs count."""

    shape: tuple[int, int, int] = (21, 29, 20)
    is_local: bool = True
    ids: str | None = None
    drop_above: float | None = None
    smoothed: bool = False
    ranked: bool = False
    weighted: bool = False
    scale: float = 4.0
    gap: float = 1.0
    workspace: int = LARGE
    rare: bool = False


EVERYTHING = {"drop_above": 0.1, "smoothed": True, "weighted": True}
OPTIONS = {
    "plain": Case((21, 37, 20)),
    "equal ids left out": Case(ids="mask"),
    "multiple positives": Case(ids="multi_positive"),
    "one pair with equal ids": Case((16, 37, 7), is_local=False, ids="multi_positive", rare=True),
    "dropping": Case(drop_above=-0.2),
    "smoothed": Case(smoothed=True),
    "ranked": Case(ids="mask", ranked=True),
    "weighted": Case(weighted=True, is_local=False),
    "scale zero": Case(scale=0.0, smoothed=True),
    "scale below zero": Case(scale=-3.0, ids="multi_positive"),
    "everything, ids left out": Case(ids="mask", **EVERYTHING),
    "everything, multiple positives": Case(ids="multi_positive", ranked=True, **EVERYTHING),
    "everything, another's block": Case(ids="multi_positive", is_local=False, **EVERYTHING),
    "everything, panels": Case((20, 70, 20), ids="mask", workspace=64, **EVERYTHING),
    "logits far apart": Case((21, 37, 20), gap=300.0, workspace=64),
    "logits far apart, everything": Case((20, 20, 7), gap=300.0, ids="multi_positive", **EVERYTHING),
}
EDGES = {
    "one row": Case((1, 37, 100), ids="mask", **EVERYTHING),
    "one row, one document": Case((1, 1, 7), ids="multi_positive", ranked=True, **EVERYTHING),
    "one document, width one": Case((21, 1, 1), is_local=False, ids="multi_positive", **EVERYTHING),
    "more rows than documents": Case((37, 5, 7), is_local=False, ids="mask", workspace=64, ranked=True),
    "no rows": Case((0, 19, 8), is_local=False, ids="multi_positive", ranked=True, **EVERYTHING),
    "no documents": Case((19, 0, 8), is_local=False, ids="multi_positive", ranked=True, **EVERYTHING),
    "whole blocks": Case((16, 64, 32)),
}
CASES = {**OPTIONS, **EDGES}
IN_HALF = ("everything, ids left out", "logits far apart", "one document, width one")


class Block:
    """The inputs of a case, its similarities in fp64, and which pairs count."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(1)
        rows, documents, width = case.shape
        self.case, self.compute = case, ComputeOptions(case.workspace)
        x, y = (torch.randn(length, width, generator=g) / width**0.5 for length in (rows, documents))
        x[::3] *= case.gap
        y[2:5] *= case.gap**0.5
        self.x, self.y = (t.to(DEVICE, dtype) for t in (x, y))
        self.scale, self.bias = (torch.tensor(s, device=DEVICE) for s in (case.scale, -1.5))
        self.weights = torch.rand(rows, generator=g).to(DEVICE) + 0.5 if case.weighted else None
        ids_M, ids_N = (IDS[torch.randint(len(IDS), (length,), generator=g)].to(DEVICE) for length in (rows, documents))
        if case.rare:
            ids_M, ids_N = torch.arange(rows, device=DEVICE), torch.arange(documents, device=DEVICE) + rows
            ids_N[20], ids_N[36] = ids_M[3], ids_M[5] + 2**32
        if case.is_local:
            ids_N[:rows] = ids_M
        # The positives that similarities are compared with may be any numbers.
        positive_M, positive_N = (torch.randn(length, generator=g).to(DEVICE) / 3 for length in (rows, documents))
        ids = (ids_M, ids_N) if case.ids else (None, None)
        self.pairs = Pairs(
            case.is_local, *ids, case.ids == "multi_positive", case.drop_above, positive_M, positive_N, case.smoothed, case.ranked
        )

        self.z = self.x.double() @ self.y.double().T
        self.own = torch.eye(rows, documents, dtype=torch.bool, device=DEVICE) & case.is_local
        same = (ids_M[:, None] == ids_N) & (case.ids is not None) & ~self.own
        self.further = same & (case.ids == "multi_positive")
        self.negative = ~self.own & ~same
        self.sign = 1.0 - 2.0 * self.further
        self.logits = self.scale.double() * self.z + self.bias.double()
        self.positive = positive_M.double()[:, None], positive_N.double()[None, :]

    def counted(self, side: int) -> Tensor:
        """Return the mask of the others that rows (side 0) or columns (side 1) count."""
        counted = self.negative
        if self.case.drop_above is not None:
            counted = counted & (self.z <= self.positive[side] + self.case.drop_above)
        return counted | self.further

    def log_sum(self, side: int) -> Tensor:
        return (self.scale.double() * self.z).masked_fill(~self.counted(side), -torch.inf).logsumexp(1 - side)

    def assert_stats(self, found: Stats, side: int) -> None:
        logits = (self.scale * self.z).abs().amax() if self.z.numel() else 0.0
        assert_close(found.peak.double() + found.total.double().log(), self.log_sum(side), 8 * EPS * (1 + logits))
        assert (found.further is None) == (self.case.ids != "multi_positive") and (found.counted is None) == (
            not self.case.smoothed
        )
        for asked, total, number in ((self.further, *found[2:4]), (self.counted(side), *found[4:6])):
            if total is not None:
                assert_close(total, (self.z * asked).sum(1 - side), 16 * EPS * (1 + (self.z.abs() * asked).sum(1 - side)))
                assert torch.equal(number, asked.sum(1 - side))

    def assert_ranking(self, found: Ranking | None, side: int) -> None:
        assert (found is None) == (not self.case.ranked)
        if found is not None:
            assert torch.equal(found.ahead, (self.negative & (self.z >= self.positive[side])).sum(1 - side))
            lowest = self.z.new_full((1, self.z.shape[1]) if side else (len(self.z), 1), -torch.inf)
            hardest = torch.cat((self.z.masked_fill(~self.negative, -torch.inf), lowest), 1 - side).amax(1 - side)
            assert_close(found.hardest, hardest, 8 * EPS * (1 + hardest.abs()))

    def softmax(self, side: int) -> Softmax:
        """Return a softmax as all blocks together could give it, with peaks above the logits of this block."""
        g = torch.Generator().manual_seed(2 + side)
        log_sum = self.log_sum(side)
        peak = log_sum.masked_fill(log_sum == -torch.inf, 0).float()
        above, gain, further, counted = torch.rand(4, len(peak), generator=g).to(DEVICE)
        multi_positive, smoothed = self.case.ids == "multi_positive", self.case.smoothed
        return Softmax(peak + above, gain + 0.1, further if multi_positive else None, counted / 10 if smoothed else None)

    def gradient(self, softmax: Softmax, side: int) -> Tensor:
        """Return the gradient in the logits of the loss of rows or columns alone."""
        vectors = (torch.zeros_like(softmax.peak) if v is None else v for v in softmax)
        peak, gain, further, counted = (v.double()[None, :] if side else v.double()[:, None] for v in vectors)
        p = (self.scale.double() * self.z - peak).exp() * gain
        return (p - counted).masked_fill(~self.counted(side), 0) - further * self.further

    def sigmoid_gradient(self) -> Tensor:
        """Return the gradient in the logits of the weighted sum of the values of all rows."""
        weights = 1 if self.weights is None else self.weights.double()[:, None]
        return weights * self.sign * torch.sigmoid(self.sign * self.logits) * self.counted(0)

    def assert_values(self, found: SigmoidPass) -> None:
        values = softplus(self.sign * self.logits) * self.counted(0)
        slopes = self.sign * torch.sigmoid(self.sign * self.logits) * self.counted(0)
        rounding = 8 * EPS * (1 + (self.logits.abs() * self.counted(0)).sum(1))
        assert_close(found.value_M, values.sum(1), rounding)
        if found.slope_M is not None:
            assert_close(found.slope_M, slopes.sum(1), rounding)
        self.assert_ranking(found.row_ranking, 0)
        self.assert_ranking(found.column_ranking, 1)

    def assert_products(self, gx: Tensor | None, gy: Tensor | None, needs_grad: NeedsGrad, g: Tensor) -> None:
        # With fp16 embeddings the gradient has 11 bits, and each term of a tile has the relative rounding error of its logit.
        logits = (self.scale * self.z).abs().amax().item() if self.z.numel() else 0.0
        allowed = 8 * EPS * (1 + logits) + (2**-11 if self.x.dtype == torch.float16 else 0)
        assert (gx is not None, gy is not None) == needs_grad
        for found, gradient, embeddings in ((gx, g, self.y.double()), (gy, g.T, self.x.double())):
            if found is not None:
                assert found.dtype == torch.float32
                assert_close(found, gradient @ embeddings, allowed * (gradient.abs() @ embeddings.abs() + 1e-6))


def assert_close(found: Tensor, true: Tensor, allowed: Tensor | float) -> None:
    """Assert that no entry is further away than allowed; infinities must be equal."""
    assert found.shape == true.shape
    error = (found.double() - true).abs().masked_fill(found == true, 0)
    assert (error <= allowed).all(), (error - allowed).max()


@pytest.fixture(params=BACKENDS)
def tiles(request: Any) -> ModuleType:
    if request.param == "fused":
        pytest.importorskip("triton")
    return backend_for(DEVICE, torch.float16, request.param)


def every_case_but(*names: str) -> Any:
    params = [pytest.param(case, torch.float32, id=name) for name, case in CASES.items() if name not in names]
    params += [pytest.param(CASES[name], torch.float16, id=f"{name}, fp16") for name in IN_HALF]
    return pytest.mark.parametrize("case, dtype", params)


@every_case_but()
def test_sums_of_exponentials_and_of_options(tiles, case, dtype):
    block = Block(case, dtype)
    found = tiles.softmax_stats(block.x, block.y, block.scale, block.pairs, columns=True, compute=block.compute)
    for side, stats, ranking in ((0, found.rows, found.row_ranking), (1, found.columns, found.column_ranking)):
        block.assert_stats(stats, side)
        block.assert_ranking(ranking, side)


@pytest.mark.parametrize("name", ["plain", "everything, another's block", "no documents"])
def test_rows_alone(tiles, name):
    block = Block(CASES[name], torch.float32)
    pairs = replace(block.pairs, positive_N=None)
    found = tiles.softmax_stats(block.x, block.y, block.scale, pairs, columns=False, compute=block.compute)
    block.assert_stats(found.rows, 0)
    block.assert_ranking(found.row_ranking, 0)
    assert found.columns is None and found.column_ranking is None
    needs_grad, rows = NeedsGrad(True, True), block.softmax(0)
    products = tiles.softmax_grads(block.x, block.y, block.scale, pairs, rows, None, needs_grad=needs_grad, compute=block.compute)
    block.assert_products(*products, needs_grad, block.gradient(rows, 0))


@every_case_but()
def test_gradients_of_the_softmax(tiles, case, dtype):
    block = Block(case, dtype)
    rows, columns, needs_grad = block.softmax(0), block.softmax(1), NeedsGrad(True, True)
    found = tiles.softmax_grads(
        block.x, block.y, block.scale, block.pairs, rows, columns, needs_grad=needs_grad, compute=block.compute
    )
    block.assert_products(*found, needs_grad, block.gradient(rows, 0) + block.gradient(columns, 1))


@every_case_but()
def test_saved_exponentials_give_the_gradients_of_the_softmax(tiles, case, dtype):
    block = Block(case, dtype)
    blocks = block.x, block.y, block.scale, block.pairs
    saved_exp = tiles.softmax_stats(*blocks, columns=True, compute=block.compute, save_exp=True).saved_exp
    rows, columns, needs_grad = block.softmax(0), block.softmax(1), NeedsGrad(True, True)
    found = tiles.softmax_grads(*blocks, rows, columns, needs_grad=needs_grad, compute=block.compute, saved_exp=saved_exp)
    block.assert_products(*found, needs_grad, block.gradient(rows, 0) + block.gradient(columns, 1))
    saved_exp = tiles.softmax_stats(*blocks, columns=False, compute=block.compute, save_exp=True).saved_exp
    found = tiles.softmax_grads(*blocks, rows, None, needs_grad=needs_grad, compute=block.compute, saved_exp=saved_exp)
    block.assert_products(*found, needs_grad, block.gradient(rows, 0))


@every_case_but("dropping", "smoothed")
def test_values_slopes_and_gradients_of_the_sigmoid(tiles, case, dtype):
    block = Block(replace(case, drop_above=None), dtype)
    needs_grad = NeedsGrad(True, True)
    found = tiles.sigmoid_sums(
        block.x, block.y, block.scale, block.bias, block.pairs, block.weights, needs_grad=needs_grad, compute=block.compute
    )
    block.assert_values(found)
    block.assert_products(found.gx_MD, found.gy_ND, needs_grad, block.sigmoid_gradient())


@every_case_but("dropping", "smoothed")
def test_the_sigmoid_in_blocks_of_rows(case, dtype, monkeypatch):
    monkeypatch.setattr(products, "SMALL_CELLS", 0)
    monkeypatch.setattr(products, "FEWEST_BLOCKS", 3)
    test_values_slopes_and_gradients_of_the_sigmoid(eager, case, dtype)


@pytest.mark.parametrize("name", ["plain", "everything, another's block", "no rows"])
def test_values_of_the_sigmoid_alone(tiles, name):
    block = Block(replace(CASES[name], drop_above=None), torch.float32)
    found = tiles.sigmoid_sums(
        block.x, block.y, block.scale, block.bias, block.pairs, block.weights, needs_grad=None, compute=block.compute
    )
    block.assert_values(found)
    assert found.slope_M is found.gx_MD is found.gy_ND is None


@pytest.mark.parametrize("needs_grad", [NeedsGrad(True, False), NeedsGrad(False, True)], ids=["x", "y"])
def test_only_the_requested_product_is_computed(tiles, needs_grad):
    block = Block(Case((21, 37, 20), weighted=True, workspace=64), torch.float32)
    rows, columns = block.softmax(0), block.softmax(1)
    found = tiles.softmax_grads(
        block.x, block.y, block.scale, block.pairs, rows, columns, needs_grad=needs_grad, compute=block.compute
    )
    block.assert_products(*found, needs_grad, block.gradient(rows, 0) + block.gradient(columns, 1))
    found = tiles.sigmoid_sums(
        block.x, block.y, block.scale, block.bias, block.pairs, block.weights, needs_grad=needs_grad, compute=block.compute
    )
    block.assert_products(found.gx_MD, found.gy_ND, needs_grad, block.sigmoid_gradient())


def test_two_blocks_merge_into_the_whole(tiles):
    block = Block(Case((13, 29, 20), ids="multi_positive", ranked=True, **EVERYTHING), torch.float32)
    parts = []
    for is_local, where in ((True, slice(0, 18)), (False, slice(18, None))):
        pairs = replace(block.pairs, is_local=is_local, ids_N=block.pairs.ids_N[where], positive_N=block.pairs.positive_N[where])
        parts.append((block.y[where], pairs))
    softmax = [tiles.softmax_stats(block.x, y, block.scale, pairs, columns=True, compute=block.compute) for y, pairs in parts]
    rows, ranking = merge(*((found.rows, found.row_ranking) for found in softmax))
    block.assert_stats(rows, 0)
    block.assert_ranking(ranking, 0)
    block.assert_stats(Stats(*map(torch.cat, zip(*(found.columns for found in softmax), strict=True))), 1)

    block = Block(replace(block.case, drop_above=None), torch.float32)
    needs_grad = NeedsGrad(True, False)
    sigmoid = [
        tiles.sigmoid_sums(
            block.x,
            y,
            block.scale,
            block.bias,
            replace(pairs, drop_above=None),
            block.weights,
            needs_grad=needs_grad,
            compute=block.compute,
        )
        for y, pairs in parts
    ]
    assert sigmoid[0].gy_ND is None
    columns = Ranking(*map(torch.cat, zip(*(found.column_ranking for found in sigmoid), strict=True)))
    merged = [merge(a, b) for a, b in zip(*(found[:5] for found in sigmoid), strict=True)]
    block.assert_values(SigmoidPass(*merged, columns))
    block.assert_products(merged[2], None, needs_grad, block.sigmoid_gradient())


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 5, 100), (21, 37, 20), (33, 33, 7), (0, 4, 8)], ids=str)
def test_similarities_of_the_positives(tiles, shape):
    for dtype in (torch.float32, torch.float16):
        block = Block(Case(shape), dtype)
        found = tiles.positives(block.x, block.y, block.compute)
        assert_close(found, block.z.diagonal(), 4 * EPS * (1 + block.z.diagonal().abs()))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("multi_positive", [False, True])
@pytest.mark.parametrize("sides", [1, 2])
def test_losses_and_softmax_from_the_sums(tiles, sides, multi_positive, smoothing, weighted):
    rows = 300
    g = torch.Generator().manual_seed(3)

    def uniform(low: float = 0.0, high: float = 1.0) -> Tensor:
        return (low + (high - low) * torch.rand(rows, generator=g)).to(DEVICE)

    scale, positive, weights = torch.tensor(7.0, device=DEVICE), uniform(-1, 1), uniform(0.1, 2) if weighted else None
    # No others, a few far below the positive, many far above it.
    peak = torch.cat((torch.full((20,), -torch.inf), torch.linspace(-300, 300, rows - 20))).to(DEVICE)
    total = uniform(1, 30) * (peak > -torch.inf)
    numbers = torch.randint(1, 9, (2, rows), generator=g).to(DEVICE) * (peak > -torch.inf)
    stats = [
        Stats(
            peak.roll(side),
            total.roll(side),
            *((uniform(-3, 3), numbers[0].roll(side)) if multi_positive else (None, None)),
            *((uniform(-3, 3), numbers[1].roll(side)) if smoothing else (None, None)),
        )
        for side in range(sides)
    ]
    found = tiles.normalise(stats[0], stats[1] if sides == 2 else None, positive, scale, weights, smoothing)

    z, s, weight = positive.double(), scale.double() * positive.double(), torch.ones(rows, device=DEVICE).double()
    weight = weight if weights is None else weights.double()
    loss, own, terms = torch.zeros_like(z), torch.zeros_like(z), torch.zeros_like(z)
    assert (found.columns is None) == (sides == 1)
    for side, softmax in zip(stats, (found.rows, found.columns), strict=False):
        peak, total, *sums = (torch.zeros_like(z) if t is None else t.double() for t in side)
        log_sum = torch.logaddexp(peak + total.log(), s)
        target, uniformly = (1 - smoothing) / (1 + sums[1]), smoothing / (1 + sums[3])
        loss += log_sum - target * (s + scale * sums[0]) - uniformly * (s + scale * sums[2])
        # The probability of the positive minus its target, without the difference of two numbers near one.
        own -= (target + uniformly - 1) + (peak + total.log() - log_sum).exp()
        terms += 1 + log_sum.abs() + s.abs() + 7 * (sums[0].abs() + sums[2].abs())
        assert_close(softmax.gain.double().log() - softmax.peak.double(), weight.log() - log_sum, 8 * EPS * (1 + log_sum.abs()))
        for given, needs_grad in ((softmax.further, multi_positive and target), (softmax.counted, bool(smoothing) and uniformly)):
            assert (given is None) == (needs_grad is False)
            if given is not None:
                assert_close(given, weight * needs_grad, 4 * EPS * weight)
    assert_close(found.loss_M, weight * loss, 8 * EPS * weight * terms)
    # If only the positive itself is in the target, no digit of a small probability is lost.
    allowed = 4 * EPS if multi_positive or smoothing else 2**-16 * own.abs() + 1e-37
    assert_close(found.dpos_M, weight * own, weight * allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows, paired, width", [(21, 21, 300), (37, 21, 7), (1, 1, 1), (5, 0, 8), (0, 0, 8)])
def test_the_positives_part_is_added_last(tiles, rows, paired, width, dtype):
    g = torch.Generator().manual_seed(4)
    gradient = torch.randn(rows, width, generator=g).to(DEVICE)
    embeddings, partners = (torch.randn(length, width, generator=g).to(DEVICE, dtype) for length in (rows, paired))
    own, factor = torch.randn(paired, generator=g).to(DEVICE), torch.tensor(-0.3, device=DEVICE)
    whole = gradient.double()
    whole[:paired] += own.double()[:, None] * partners.double()
    terms = (whole.abs() * embeddings.double().abs()).sum()
    for finished in (torch.empty_like(gradient, dtype=torch.float16), gradient):
        slopes = tiles.finish(gradient, embeddings, partners, own, factor, finished)
        assert_close(slopes.sum(), (whole * embeddings.double()).sum(), 8 * EPS * (1 + terms))
        rounding = torch.finfo(finished.dtype).eps
        assert_close(finished, factor.double() * whole, 4 * EPS + rounding * whole.abs())
