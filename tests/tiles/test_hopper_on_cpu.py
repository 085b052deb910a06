"""The Hopper kernels on a CPU, in an interpreter of Gluon: they compute the formula, whatever the order of events.

Legend: src/megabatch/tiles/contract.py. Similarities are multiples of 1/64 here, whose fp32 sums are exact.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import embeddings
from gluon_device import Broken, Deadlock
from gluon_on_cpu import Descriptor, Kernel, hopper, jit, kernels, mbarrier, tma
from gluon_on_cpu import language as gl
from torch import Tensor

from megabatch.tiles import eager
from megabatch.tiles.contract import ComputeOptions, NeedsGrad, Pairs, Softmax

pytestmark = pytest.mark.sampled(3)

HOPPER = Path(__file__).parents[2] / "src" / "megabatch" / "tiles" / "fused" / "hopper"
FILES = {"stats": "softmax_forward.py", "gradient": "softmax_backward.py", "product": "saved_products.py"}
TILE = 64
SIZES = {"M": TILE, "N": TILE, "K": 16, "GROUP": 2, "X_SLOTS": 2, "Y_SLOTS": 3, "LAG": 2}
# Sums of exponentials out of this range set a mark (fused/tile.py).
SMALLEST_SUM, LARGEST_SUM = 2.0**-90, 2.0**100
# Gradients of the int8 kernel above this are to be marked.
LIMIT = 1 / 64
EPS = torch.finfo(torch.float32).eps
# Rows, columns, width and programs: a single pair, whole tiles, and all kinds of edges.
SHAPES = [(1, 1, 8, 1), (128, 64, 16, 1), (150, 200, 40, 2), (130, 70, 33, 3), (257, 129, 24, 2), (64, 140, 50, 3)]
PAIRS = [{"shift": 70}, {"shift": -70}, {"shift": -30, "ids": True}, {"ids": True}]

shapes = pytest.mark.parametrize("rows, columns, width, programs", SHAPES)


@functools.cache
def kernel(name: str, *change: str) -> Kernel:
    """Load a kernel from its file; change: a piece of its source, and its replacement."""
    return getattr(kernels(HOPPER / FILES[name], dict([change]) if change else {}), f"{name}_kernel")


@dataclass
class Panel:
    """A panel, its pairs and their similarities. shift: the positive of row i is in column i + shift; None without positives."""

    rows: int
    columns: int
    width: int
    shift: int | None = None
    ids: bool = False
    scale: float = 0.3
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.rows + self.columns + self.width)
        self.x, self.y = (torch.randint(-8, 9, (n, self.width), generator=g) / 8.0 for n in (self.rows, self.columns))
        # Ids are unique, except that some have equal low halves, and every second of these is equal as a whole.
        self.ids_M, self.ids_N = torch.arange(self.rows), torch.arange(self.columns) + 1000
        self.ids_N[::37] = self.ids_M[torch.randint(self.rows, self.ids_N[::37].shape, generator=g)]
        self.ids_N[::74] += 2**32
        self.biases = torch.zeros(self.rows), torch.zeros(self.columns)

    @property
    def z(self) -> Tensor:
        return self.x.double() @ self.y.double().T + self.biases[0].double()[:, None] + self.biases[1]

    @property
    def exponentials(self) -> Tensor:
        # The offset is that of tile.exp_offset.
        return (self.scale * self.z - min(max(abs(self.scale) - 56, 0), 44)).exp()

    @property
    def counts(self) -> Tensor:
        """The mask of pairs that are neither positives nor equal in id."""
        i, j = torch.arange(self.rows)[:, None], torch.arange(self.columns)[None, :]
        counts = torch.ones(self.rows, self.columns, dtype=torch.bool)
        if self.shift is not None:
            counts &= i + self.shift != j
        if self.ids:
            counts &= self.ids_M[:, None] != self.ids_N[None, :]
        return counts

    @property
    def error(self) -> float:
        """The allowed relative error of an exponential in fp32, as in test_losses.py."""
        return 32 * EPS * (1 + (self.scale * self.z).abs().max().item())

    def run(self, kernel: Kernel, programs: int = 2, seed: int = 0, match_width: int = TILE, **given: Any) -> None:
        """Run a kernel. Options that are not given are off: None, or False for constants."""
        given = {**SIZES, "WIDTH": self.width, "IS_LOCAL": self.shift is not None, "shift": self.shift or 0, **given}
        if "row_step" in given:
            x, y = self.x / given["row_step"][: self.rows, None], self.y / given["column_step"][: self.columns, None]
            x, y = x.round().to(torch.int8), y.round().to(torch.int8)
        else:
            x, y = self.x.to(self.dtype), self.y.to(self.dtype)
        given |= {name: described(surrounded(t), TILE, given["K"]) for name, t in (("x", x), ("y", y))}
        given["scale"] = torch.tensor(self.scale)
        given |= {"rows": self.rows, "columns": self.columns}
        if self.ids:
            given |= {"ids_M": self.ids_M.view(torch.int32), "ids_N": self.ids_N.view(torch.int32)}
            given["matches"] = self._matches(match_width)
        off = {name: False if name in kernel.constants else None for name in kernel.arg_names if name not in given}
        kernel[(programs,)](**given, **off, seed=seed)

    def _matches(self, width: int) -> Tensor:
        """Return the tiles of this width in which the low halves of two ids are equal."""
        equal = self.ids_M[:, None] % 2**32 == self.ids_N[None, :] % 2**32
        return torch.stack([torch.stack([t.any() for t in r.split(width, 1)]) for r in equal.split(TILE)]).to(torch.int8)


def surrounded(t: Tensor) -> Tensor:
    """Return the same matrix within one of NaN, with rows aligned for TMA."""
    around = t.new_full((t.shape[0] + 2, (t.shape[1] + 31) // 16 * 16), torch.nan if t.is_floating_point() else -128)
    inner = around[1:-1, 16 : 16 + t.shape[1]]
    return inner.copy_(t)


def is_written_alone(inner: Tensor) -> bool:
    """Return whether a surrounded matrix is finite and everything around it still NaN."""
    around = torch.as_strided(inner, (inner.shape[0] + 2, inner.stride(0)), (inner.stride(0), 1), 0)
    return bool(inner.isfinite().all()) and int(around.isfinite().sum()) == inner.numel()


def described(t: Tensor, *block: int) -> Descriptor:
    return Descriptor(t, t.shape, t.stride(), block)


def sums_of_tiles(exponentials: Tensor) -> Tensor:
    """Return the sums of tiles (tile, row)."""
    return torch.stack([part.sum(1) for part in exponentials.split(TILE, 1)])


def assert_the_sums(
    panel: Panel, symmetric: bool = True, change: tuple[str, ...] = (), saves: bool = False, **given: Any
) -> Tensor:
    """Assert the sums of all tiles, the marks of those out of range and, if `saves`, the exponentials. Return the marks."""
    exact = panel.exponentials * panel.counts
    expected = [sums_of_tiles(side) for side in (exact, exact.T)[: 1 + symmetric]]
    parts = [torch.full((1, 2, *sums.shape), torch.nan) for sums in expected]
    needs_fallback, marks = torch.zeros(2, TILE, dtype=torch.int32)
    outputs = {"row_parts": parts[0], "column_parts": parts[1] if symmetric else None, "needs_fallback": needs_fallback}
    saved = surrounded(torch.full((panel.rows, panel.columns), torch.nan, dtype=torch.bfloat16))
    if saves:
        outputs |= {"saved": described(saved, TILE, TILE // 4), "OUT_SLOTS": 2}
    panel.run(kernel("stats", *change), **{**outputs, **given})
    if saves:
        torch.testing.assert_close(saved.double(), exact, rtol=panel.error + torch.finfo(torch.bfloat16).eps / 2, atol=1e-36)
        assert is_written_alone(saved)
    for found, sums in zip(parts, expected, strict=True):
        peaks, totals = found[0]
        # The peak of a plain sum of exponentials is not written.
        assert peaks.isnan().all()
        # Underflow is not an error: such sums set a mark.
        torch.testing.assert_close(totals, sums.float(), rtol=panel.error, atol=1e-36)
        lost = ((sums < SMALLEST_SUM) | (sums > LARGEST_SUM)).any(0)
        marks[lost.nonzero() % TILE] = 1
    assert torch.equal(needs_fallback, marks)
    return marks


def assert_the_gradient(
    panel: Panel,
    symmetric: bool = True,
    smoothed: bool = False,
    int8: bool = False,
    change: tuple[str, ...] = (),
    match_width: int = TILE,
    **given: Any,
) -> None:
    """Assert the gradient. int8: of int8 embeddings, and the marks of large gradients."""
    g = torch.Generator().manual_seed(1)
    # Gains are padded by a pair of tiles, shares of the target are not.
    gain_M, gain_N = (torch.cat((torch.rand(n, generator=g), torch.zeros(2 * TILE))) for n in (panel.rows, panel.columns))
    counted_M, counted_N = (torch.rand(n, generator=g) for n in (panel.rows, panel.columns))
    softmax = {"row_gain": gain_M, "column_gain": gain_N if symmetric else None}
    if smoothed:
        softmax |= {"row_counted": counted_M, "column_counted": counted_N if symmetric else None}
    large = torch.full((-(-panel.columns // TILE), panel.rows), 7, dtype=torch.int8)
    if int8:
        steps = [torch.cat((torch.rand(n, generator=g) / 8, torch.zeros(2 * TILE))) for n in (panel.rows, panel.columns)]
        # Multiples of their steps, so that quantising them is exact.
        panel.x, panel.y = (8 * t * step[: len(t), None] for t, step in zip((panel.x, panel.y), steps, strict=True))
        softmax |= {"row_step": steps[0], "column_step": steps[1], "large": large, "limit": torch.tensor(LIMIT)}
        panel.biases = tuple((torch.rand(n, generator=g) - 0.5) / max(1, abs(panel.scale)) for n in (panel.rows, panel.columns))
        padded = [torch.cat((bias, torch.zeros(2 * TILE))) for bias in panel.biases]
        softmax |= {"row_bias": padded[0], "column_bias": padded[1]}
        for gain in (gain_M, gain_N):
            gain *= 0.02 * gain
    target = surrounded(torch.full((panel.rows, panel.columns), torch.nan, dtype=torch.bfloat16))
    sizes = {"OUT_SLOTS": 2, "MATCH_WIDTH": match_width, "match_width": match_width, "gradient": described(target, TILE, TILE // 4)}
    panel.run(kernel("gradient", *change), **softmax, **{**sizes, **given})
    gains = gain_M[: panel.rows, None].double() + symmetric * gain_N[None, : panel.columns]
    shares = smoothed * (counted_M[:, None].double() + symmetric * counted_N[None, :])
    weights = panel.exponentials * gains
    expected = (weights - shares) * panel.counts
    # Exponentials may underflow.
    bound = panel.error * (weights + shares) + torch.finfo(torch.bfloat16).eps / 2 * expected.abs() + 1e-36
    # A NaN is within no bound.
    assert ((target.double() - expected).abs() <= bound * panel.counts).all()
    assert is_written_alone(target)
    if int8:
        most = torch.stack([part.max(1).values for part in expected.split(TILE, 1)])
        assert set(large.unique().tolist()) <= {0, 1}
        assert large[most > LIMIT * (1 + panel.error)].all() and not large[most < LIMIT * (1 - panel.error)].any()


def assert_the_product(
    rows: int, depth: int, width: int, transposed: bool, change: tuple[str, ...] = (), block: int = 32, **given: Any
) -> None:
    """Assert the product of exponentials, or of transposed ones, times their gains. block: columns of a program's product."""
    g = torch.Generator().manual_seed(rows + depth)
    exp, embeddings = torch.rand(rows, depth, generator=g).bfloat16(), torch.randn(depth, width, generator=g).bfloat16()
    # Values that nobody may write follow.
    around, K = torch.full((rows + 1, width), torch.nan), 16
    product = around[:rows]
    # Gains as bf16_gains makes them: whole pairs of steps, the inner ones in the order of the threads that need them.
    outer = torch.cat((torch.rand(rows, generator=g), torch.zeros(128)))
    inner = torch.cat((torch.rand(depth, generator=g), torch.zeros(-depth % (2 * K)))).bfloat16()
    high = outer.bfloat16()
    placed = inner.view(-1, K // 16, 2, 4, 2).permute(0, 3, 1, 2, 4)
    stored = {"high": high, "low": (outer - high.float()).bfloat16(), "inner": placed}
    blocks = {"exp": described(surrounded(exp.T if transposed else exp), *((K, 64) if transposed else (64, K)))}
    blocks["embeddings"] = described(surrounded(embeddings), K, block)
    sizes = {"WIDTH": width, "M": 64, "K": K, "N": block, "SLOTS": 3, "TRANSPOSED": transposed}
    gains = {name: t.contiguous().view(-1) for name, t in stored.items()}
    numbers = {"product": product, "rows": rows, "steps": 2 * -(-depth // (2 * K))}
    programs = -(-rows // 128) * -(-width // block)
    kernel("product", *change)[(programs,)](**blocks, **gains, **numbers, **{**sizes, **given})
    gradient = exp.double() * (outer[:rows, None].double() + inner[:depth].double())
    exact, size = gradient @ embeddings.double(), gradient @ embeddings.double().abs()
    assert around[rows].isnan().all()
    # Two sums are rounded to bf16, and what is small beside them.
    assert ((product - exact).abs() <= 2.1 * torch.finfo(torch.bfloat16).eps / 2 * size + 1e-6).all()
    # An error of a whole row, which a rounded gain of it would be, does not average out.
    rounded = exp.double() * (high[:rows, None].double() + inner[:depth].double()) @ embeddings.double()
    if depth > 100:
        assert (product - exact).norm() < (product - rounded).norm()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows, depth, width", [(1, 1, 32), (64, 16, 30), (129, 48, 64), (130, 70, 33), (257, 200, 96)])
def test_products_of_any_shape(rows, depth, width, transposed):
    assert_the_product(rows, depth, width, transposed, seed=rows)


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_products_through_any_number_of_slots(slots):
    for seed in range(3):
        assert_the_product(130, 150, 32, seed % 2 == 1, SLOTS=slots, seed=seed)


@shapes
@pytest.mark.parametrize("symmetric", [True, False])
def test_sums_of_any_shape(rows, columns, width, programs, symmetric):
    assert_the_sums(Panel(rows, columns, width), symmetric, programs=programs, saves=rows % 2 == 0)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("pairs", [*PAIRS, {"shift": 3, "dtype": torch.float16}], ids=str)
def test_sums_with_any_options(pairs, symmetric):
    panel = Panel(150, 140, 40, **pairs)
    assert_the_sums(panel, symmetric, seed=symmetric, saves=panel.dtype == torch.bfloat16)


@pytest.mark.parametrize("scale, number", [(-0.3, 0), (0.0, 0), (30.0, TILE), (-30.0, TILE)])
def test_sums_out_of_range_set_a_mark(scale, number):
    assert assert_the_sums(Panel(150, 140, 40, shift=5, scale=scale)).sum() == number


def test_a_single_row_and_a_single_column_set_a_mark():
    panel = Panel(150, 140, 40, scale=-1.5)
    panel.x[:, 0], panel.y[:, 0] = 1, 1
    for t, place in ((panel.x, 137), (panel.y, 70)):
        t[place] = 0
        t[place, 0] = 64
    assert assert_the_sums(panel).nonzero().flatten().tolist() == [70 - TILE, 137 - 2 * TILE]


@pytest.mark.parametrize("scale", [60.0, 99.0, -99.0, 130.0])
def test_large_scales_have_an_offset_and_set_no_mark(scale):
    panel = Panel(150, 140, 40, shift=5, scale=scale)
    # Similarities of unit vectors, and the largest there can be.
    panel.x, panel.y = panel.x / 16, panel.y / 2
    panel.x[3], panel.y[70] = 0, 0
    panel.x[3, 0], panel.y[70, 0] = 1, math.copysign(min(1, 99 / abs(scale)), scale)
    panel.y = panel.y.bfloat16().float()
    assert not assert_the_sums(panel, saves=True).any()
    assert_the_gradient(panel)
    panel = Panel(150, 140, 40, shift=5, scale=scale)
    # Quantised entries of a row are at most one.
    panel.x[:, 1:] = 0
    assert_the_gradient(panel, int8=True)


@shapes
@pytest.mark.parametrize("symmetric, int8", [(True, False), (False, False), (True, True)])
def test_gradient_of_any_shape(rows, columns, width, programs, symmetric, int8):
    assert_the_gradient(Panel(rows, columns, width), symmetric, int8=int8, programs=programs)


@pytest.mark.parametrize("smoothed", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("pairs", PAIRS, ids=str)
def test_gradient_with_any_options(pairs, symmetric, smoothed):
    assert_the_gradient(Panel(150, 140, 40, **pairs), symmetric, smoothed, seed=smoothed)
    if not smoothed:
        assert_the_gradient(Panel(150, 140, 40, **pairs), symmetric, int8=True)


def test_gradient_with_matches_of_wider_tiles():
    assert_the_gradient(Panel(130, 300, 16, ids=True), match_width=2 * TILE)


@pytest.mark.parametrize("out_slots", [1, 2, 4])
def test_gradient_through_any_number_of_slots(out_slots):
    assert_the_gradient(Panel(150, 200, 16), OUT_SLOTS=out_slots)


@pytest.mark.parametrize("x_slots, y_slots", list(itertools.product((2, 3), (2, 3, 4))))
def test_any_number_of_slots_works_for_any_number_of_steps(x_slots, y_slots):
    for width, lag in itertools.product((10, 40, 70), range(y_slots)):
        slots = {"X_SLOTS": x_slots, "Y_SLOTS": y_slots, "LAG": lag}
        assert_the_sums(Panel(100, 130, width), symmetric=False, programs=1, seed=lag, **slots)


TOO_FEW = [(1, 3, 1), (2, 1, 0), (2, 3, 3)]
CHECK = "gl.static_assert((X_SLOTS > 1) & (Y_SLOTS > 1) & (LAG < Y_SLOTS))", ""


@pytest.mark.parametrize("x_slots, y_slots, lag", TOO_FEW)
@pytest.mark.parametrize("change, error", [((), AssertionError), (CHECK, Deadlock)], ids=["checked", "not checked"])
def test_too_few_slots_are_refused_because_they_would_deadlock(x_slots, y_slots, lag, change, error):
    outputs = {"row_parts": torch.empty(1, 2, 3, 100), "needs_fallback": torch.empty(TILE, dtype=torch.int32)}
    with pytest.raises(error):
        Panel(100, 130, 70).run(kernel("stats", *change), 1, **outputs, X_SLOTS=x_slots, Y_SLOTS=y_slots, LAG=lag)


def test_a_number_of_out_slots_that_does_not_divide_four_is_refused():
    with pytest.raises(AssertionError):
        assert_the_gradient(Panel(150, 200, 16), OUT_SLOTS=3)


def test_the_order_of_events_changes_nothing():
    for seed in range(4):
        assert_the_sums(Panel(260, 140, 40, shift=0), seed=seed)
        assert_the_gradient(Panel(260, 140, 40, shift=0), seed=seed)


@pytest.fixture
def started(monkeypatch) -> collections.Counter[str]:
    """Let the library use these kernels wherever it can, interpreted. Return how often it has launched each."""
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    from megabatch.tiles.fused import architectures, gradient_panels, hopper, launch, tuned_configs
    from megabatch.tiles.fused.hopper import pipeline, saved_products, softmax_backward, softmax_forward

    if not architectures.INTERPRETED:
        pytest.skip("the other kernels are compiled here")
    launches = collections.Counter[str]()

    class Counted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launches[self.name] += 1
            return kernel(self.name)[grid]

    def add(_: Any, product: gradient_panels._Product) -> None:
        """Multiply bf16 with fp32 accumulation, which PyTorch has only on a GPU."""
        into, g, embeddings, is_first = product
        result = g.float() @ embeddings.float()
        into.copy_(result if is_first else into + result)

    monkeypatch.setattr(gradient_panels.GradientProducts, "_add", add)
    monkeypatch.setattr(architectures, "INTERPRETER", architectures.INTERPRETER._replace(load_kernels=lambda: hopper))
    monkeypatch.setattr(softmax_forward, "stats_kernel", Counted("stats"))
    monkeypatch.setattr(softmax_backward, "gradient_kernel", Counted("gradient"))
    monkeypatch.setattr(saved_products, "product_kernel", Counted("product"))
    config = tuned_configs.Pipeline(2, x_slots=2, y_slots=3, lag=2, out_slots=2, min_tile_pairs=0)
    monkeypatch.setattr(pipeline, "pipeline_for", lambda *_: config)
    blocks = tuned_configs.Blocks(pipeline.TILE, pipeline.TILE, pipeline.STEP_BYTES, 4, 1)
    monkeypatch.setattr(launch, "blocks_for", lambda *_: blocks)
    return launches


# Triton's interpreter warns when numpy divides by zero, in values that the kernels discard.
DISCARDED = pytest.mark.filterwarnings(r"ignore:divide by zero encountered in log2:RuntimeWarning:triton\.runtime\.interpreter")


@DISCARDED
def test_the_library_launches_them_with_all_arguments(started):
    from megabatch.tiles import fused

    x, y = (t.bfloat16() for t in embeddings(190, width=72, kind="clustered"))
    exact, scale, ids = (x.double(), y.double()), torch.tensor(10.0), torch.arange(190) // 2
    pairs, plain = (Pairs(is_local=True, ids_M=ids, ids_N=ids, smoothed=smoothed) for smoothed in (True, False))
    # A workspace so small that there are four panels.
    found = fused.softmax_stats(x, y, scale, plain, columns=True, compute=ComputeOptions(2500))
    true = eager.softmax_stats(*exact, scale.double(), pairs, columns=True, compute=ComputeOptions(2**24))
    for ours, theirs in ((found.rows, true.rows), (found.columns, true.columns)):
        sums, true_sums = (stats.peak.double() + stats.total.double().log() for stats in (ours, theirs))
        # Logits are below 11 here.
        torch.testing.assert_close(sums, true_sums, rtol=0, atol=32 * EPS * 11)
    weights_M, positive_M = torch.arange(190.0).double(), (exact[0] * exact[1]).sum(1)
    normalised = eager.normalise(true.rows, true.columns, positive_M, scale.double(), weights_M, 0.1)
    softmax = [Softmax(*(None if t is None else t.float() for t in side)) for side in (normalised.rows, normalised.columns)]
    gradients = fused.softmax_grads(x, y, scale, pairs, *softmax, needs_grad=NeedsGrad(True, True), compute=ComputeOptions(50_000))
    options = {"needs_grad": NeedsGrad(True, True), "compute": ComputeOptions(2**24)}
    expected = eager.softmax_grads(*exact, scale.double(), pairs, normalised.rows, normalised.columns, **options)
    for ours, theirs in zip(gradients, expected, strict=True):
        # The gradient in the logits is rounded to bf16.
        assert (ours.double() - theirs).norm() < torch.finfo(torch.bfloat16).eps * theirs.norm()
    assert started == {"stats": 4, "gradient": 4}


@DISCARDED
@pytest.mark.parametrize("symmetric, workspace, width", [(True, 2**20, 256), (False, 2**20, 254), (True, 50_000, 256)])
def test_the_library_multiplies_saved_exponentials(symmetric, workspace, width, started, monkeypatch):
    from megabatch.tiles import fused
    from megabatch.tiles.fused.hopper import saved_products

    monkeypatch.setattr(saved_products, "MIN_BUSY", 0)
    # A width of 254 is padded.
    x, y = (t.bfloat16() for t in embeddings(190, width=width, kind="clustered"))
    exact, scale, pairs = (x.double(), y.double()), torch.tensor(10.0), Pairs(is_local=True)
    compute, needs_grad = ComputeOptions(workspace), NeedsGrad(True, True)
    found = fused.softmax_stats(x, y, scale, pairs, columns=symmetric, compute=compute, save_exp=True)
    true = eager.softmax_stats(*exact, scale.double(), pairs, columns=symmetric, compute=ComputeOptions(2**24))
    weights_M = 1 + torch.arange(190.0).double()
    normalised = eager.normalise(true.rows, true.columns, (exact[0] * exact[1]).sum(1), scale.double(), weights_M, 0.0)
    sides = normalised.rows, normalised.columns
    softmax = [side and Softmax(*(None if t is None else t.float() for t in side)) for side in sides]
    launched = dict(started)
    gradients = fused.softmax_grads(x, y, scale, pairs, *softmax, needs_grad=needs_grad, compute=compute, saved_exp=found.saved_exp)
    expected = eager.softmax_grads(*exact, scale.double(), pairs, *sides, needs_grad=needs_grad, compute=ComputeOptions(2**24))
    for ours, theirs in zip(gradients, expected, strict=True):
        # Exponentials and gradients in the logits are rounded to bf16.
        assert (ours.double() - theirs).norm() < torch.finfo(torch.bfloat16).eps * theirs.norm()
    # With one softmax, PyTorch multiplies them.
    assert launched["stats"] and started["product"] == 2 * symmetric and bool(started["gradient"]) == (workspace < 2**20)
    # One side alone.
    for wanted in (NeedsGrad(True, False), NeedsGrad(False, True)):
        found = fused.softmax_stats(x, y, scale, pairs, columns=symmetric, compute=compute, save_exp=True)
        alone = fused.softmax_grads(x, y, scale, pairs, *softmax, needs_grad=wanted, compute=compute, saved_exp=found.saved_exp)
        assert [t is not None for t in alone] == list(wanted)
        assert all(torch.equal(a, b) for a, b in zip(alone, gradients, strict=True) if a is not None)


@pytest.mark.parametrize("is_marked", [False, True])
def test_gains_in_bf16_are_those_of_a_gradient_that_is_written_already(is_marked):
    saved_products = pytest.importorskip("megabatch.tiles.fused.hopper.saved_products")
    if torch.cuda.is_available():
        pytest.skip("the kernel is interpreted here")
    gains, marks = torch.rand(1200) * 1e-3, torch.zeros(256, dtype=torch.int32)
    marks[200] = is_marked
    columns = torch.rand(200) * 1e-3
    both = saved_products.bf16_gains(gains, columns, 1152, 128, marks)
    for found, exact in zip(both, (gains, columns), strict=True):
        length = len(found.high)
        if is_marked:
            assert found.high.eq(1).all() and not found.low.any() and not found.inner.any()
            continue
        # Triton's interpreter rounds to bf16 towards zero, a device to nearest.
        torch.testing.assert_close(found.high.double() + found.low.double(), exact[:length].double(), rtol=2.0**-14, atol=0)
        # In each step of 64, thread q of four has entries 2q and 2q + 1 of every eight.
        steps = found.inner.view(-1, 4, 8, 2).permute(0, 2, 1, 3).reshape(length)
        assert torch.equal(steps, found.high)


@pytest.mark.slow
@pytest.mark.parametrize("symmetric, weight", [(True, 1.0), (False, 1.0), (True, 1e-3)])
def test_the_library_computes_large_int8_gradients_again(symmetric, weight, started, monkeypatch):
    from megabatch.tiles import fused
    from megabatch.tiles.fused import int8
    from megabatch.tiles.fused.hopper import softmax_backward

    # Triton's interpreter cannot multiply bf16.
    quantise = int8.quantise
    monkeypatch.setattr(int8, "quantise", lambda t, *more: quantise(t.float(), *more))
    # Clusters of four, two of which have equal ids, so that two or three negatives are large.
    g = torch.Generator().manual_seed(0)
    centres, *noise = torch.randn(3, 190, 72, generator=g)
    x, y = (torch.nn.functional.normalize(centres[torch.arange(190) // 4] + 0.5 * t, dim=1).bfloat16() for t in noise)
    exact, ids, scale = (x.double(), y.double()), torch.arange(190) // 2, torch.tensor(60.0)
    pairs, needs_grad = Pairs(is_local=True, ids_M=ids, ids_N=ids), NeedsGrad(True, True)
    weights_M = torch.full((190,), weight, dtype=torch.float64)
    true = eager.softmax_stats(*exact, scale.double(), pairs, columns=symmetric, compute=ComputeOptions(2**24))
    normalised = eager.normalise(true.rows, true.columns, (exact[0] * exact[1]).sum(1), scale.double(), weights_M, 0.0)
    sides, dpos_M = (normalised.rows, normalised.columns), normalised.dpos_M
    softmax = [side and Softmax(*(None if t is None else t.float() for t in side)) for side in sides]
    others = eager.softmax_grads(*exact, scale.double(), pairs, *sides, needs_grad=needs_grad, compute=ComputeOptions(2**24))
    whole = [product + dpos_M[:, None] * partners for product, partners in zip(others, exact[::-1], strict=True)]

    def errors() -> list[float]:
        compute = ComputeOptions(50_000, int8_similarities=True)
        found = fused.softmax_grads(x, y, scale, pairs, *softmax, needs_grad=needs_grad, compute=compute, dpos_M=dpos_M.float())
        return [float((a.double() - b).norm() / c.norm()) for a, b, c in zip(found, others, whole, strict=True)]

    right = errors()
    # The gradient in the logits is rounded to bf16.
    assert max(right) < torch.finfo(torch.bfloat16).eps
    monkeypatch.setattr(softmax_backward, "correct_large", lambda *_: None)
    assert min(errors()) > 5 * max(right)
    assert started == {"gradient": 8}


CHANGES = {
    "a slot is released too early": ("stats", "z = warpgroup_mma_wait(1, deps=(z,))", "pass", "changes while a product reads"),
    "a product is not waited for": ("stats", "z = warpgroup_mma_wait(0, deps=(z,))", "pass", "before it is waited for"),
    "the wrong turn": ("stats", "(turn & 1) ^ 1", "turn & 1", "no warp group can continue"),
    "half of the bytes": ("stats", "primitive_bitwidth // 8", "primitive_bitwidth // 16", "that nobody expects"),
    "twice the bytes": ("stats", "primitive_bitwidth // 8", "primitive_bitwidth // 4", "no warp group can continue"),
    "the rows of the first group": ("stats", "row + CONSUMER * M, k * K", "row, k * K", "not close"),
    "a slot is overwritten too early": (
        "gradient",
        "store_wait(OUT_SLOTS - 1)",
        "store_wait(OUT_SLOTS)",
        "changes while a store reads",
    ),
    "stores are not waited for": ("gradient", "tma.store_wait(0)", "pass", "before its stores are waited for"),
    "saved tiles are not waited for": ("saved", "tma.store_wait(0)", "pass", "before its stores are waited for"),
    "exponentials are released too early": (
        "product",
        "z, g = warpgroup_mma_wait(0, deps=(z, g))\n    mbarrier.arrive(empty",
        "mbarrier.arrive(empty",
        "changes while a product reads|before it is waited for",
    ),
    "one gain for all rows": ("product", "gl.load(gains.high + i)", "gl.load(gains.high + 0 * i)", "assert"),
    "gains in another order": ("product", "(1, 2, 0, 3)", "(0, 1, 2, 3)", "assert"),
    "the step of one row for all": ("int8", "gl.load(int8.row_step + i)", "gl.load(int8.row_step + 0 * i)", "assert"),
    "the biases of the first quarter": ("int8", "column_bias + first", "column_bias + column", "assert"),
    "only one quarter is looked at": ("int8", "gl.maximum(largest, _fold_max(g, M, QUARTER))", "largest", "assert"),
}


@pytest.mark.parametrize("name, before, after, message", CHANGES.values(), ids=CHANGES)
def test_the_interpreter_finds_errors(name, before, after, message):
    check = {
        "stats": assert_the_sums,
        "gradient": assert_the_gradient,
        "int8": functools.partial(assert_the_gradient, int8=True),
        "saved": functools.partial(assert_the_sums, saves=True),
        "product": lambda _, change: assert_the_product(150, 200, 32, transposed=False, change=change),
    }[name]
    with pytest.raises((Broken, AssertionError), match=message):
        check(Panel(150, 200, 40), change=(before, after))


def _load_blocks(x, slot, full, empty):
    for n in gl.range(8):
        mbarrier.wait(empty, (n & 1) ^ 1)
        mbarrier.expect(full, 64 * 16 * 2)
        tma.async_copy_global_to_shared(x, [n * 64, 0], full, slot)


def _multiply_blocks(products, slot, full, empty, early):
    z = gl.zeros((64, 64), gl.float32)
    for n in gl.range(8):
        mbarrier.wait(full, n & 1)
        z = hopper.warpgroup_mma(slot, slot.permute((1, 0)), z, is_async=True)
        mbarrier.arrive(empty, count=1, pred=early)
        z = hopper.warpgroup_mma_wait(0, deps=(z,))
        mbarrier.arrive(empty, count=1, pred=not early)
    i = gl.arange(0, 64)
    gl.store(products + i[:, None] * 64 + i[None, :], z)


@jit
def _one_slot_kernel(x, products, EARLY: gl.constexpr):
    """Sum products of blocks through one slot. EARLY: release it before the product is waited for."""
    slot = gl.allocate_shared_memory(x.dtype, [64, 16], x.layout)
    full, empty = (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()) for _ in range(2))
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    work = (_multiply_blocks, (products, slot, full, empty, EARLY)), (_load_blocks, (x, slot, full, empty))
    gl.warp_specialize(work, [1], [40])


@pytest.mark.parametrize("seed", range(3))
def test_a_slot_is_released_after_its_product_and_not_before(seed):
    x, products = torch.randint(-8, 9, (8 * 64, 13)) / 8.0, torch.full((64, 64), torch.nan)
    matrix = described(surrounded(x.bfloat16()), 64, 16)
    _one_slot_kernel[(1,)](matrix, products, EARLY=False, seed=seed)
    assert torch.equal(products, sum(block @ block.T for block in x.split(64)))
    with pytest.raises(Broken, match="changes while a product reads it"):
        _one_slot_kernel[(1,)](matrix, products, EARLY=True, seed=seed)


@jit
def _barrier_kernel(ARRIVALS: gl.constexpr, PARITY: gl.constexpr):
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=2)
    for _ in gl.static_range(ARRIVALS):
        mbarrier.arrive(barrier)
    mbarrier.wait(barrier, PARITY)


@pytest.mark.parametrize("arrivals", range(6))
def test_a_barrier_lets_pass_whom_its_last_phase_ended_for(arrivals):
    ended = 1 - arrivals // 2 % 2
    _barrier_kernel[(1,)](ARRIVALS=arrivals, PARITY=ended)
    with pytest.raises(Deadlock, match=r"the program, test_hopper_on_cpu\.py:\d+, waits for the end of a phase"):
        _barrier_kernel[(1,)](ARRIVALS=arrivals, PARITY=1 - ended)


@jit
def _copy_kernel(source, target, length, FROM: gl.constexpr, MASKED: gl.constexpr):
    i = FROM + gl.arange(0, 16)
    if MASKED:
        gl.store(target + i, gl.load(source + i, mask=(i >= 0) & (i < length), other=7.0), mask=(i >= 0) & (i < length))
    else:
        gl.store(target + i, gl.load(source + i))


@pytest.mark.parametrize("first", [-1, 5, 20])
def test_pointers_stay_inside_their_tensor(first):
    # Other values follow in memory.
    source, target = torch.arange(40.0)[:20], torch.zeros(40)[:20]
    _copy_kernel[(1,)](source, target, 20, FROM=first, MASKED=True)
    inside = slice(max(first, 0), first + 16)
    assert torch.equal(target[inside], source[inside]) and target.sum() == source[inside].sum()
    for given in ((source, torch.zeros(40)), (torch.zeros(40), target)):
        with pytest.raises(Broken, match="reaches"):
            _copy_kernel[(1,)](*given, 20, FROM=first, MASKED=False)


def _fail():
    mbarrier.wait(gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()), 0)


def _wait(barrier):
    mbarrier.wait(barrier, 0)


@jit
def _failing_kernel():
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    gl.warp_specialize([(_wait, (barrier,)), (_fail, ()), (_wait, (barrier,))], [1, 1], None)


def test_an_error_in_one_warp_group_ends_all():
    before = threading.active_count()
    with pytest.raises(Broken, match="there is no barrier at shared memory 1"):
        _failing_kernel[(3,)]()
    assert threading.active_count() == before


@jit
def _numbers_kernel(whole, others, n):
    """Operations whose rules differ from Python's or PyTorch's."""
    gl.store(whole, (0 - n) // 2)
    gl.store(whole + 1, (0 - n) % 4)
    gl.store(whole + 2, n * 2**30)
    gl.store(whole + 3, (gl.full((1, 1), -2.5, gl.float32).to(gl.uint32, bitcast=True) >> 31).to(gl.int32).sum())
    gl.store(whole + 4, gl.sum((gl.arange(0, 8) < n).to(gl.int1), 0))
    gl.store(others, (n + 0.00390625).to(gl.bfloat16))
    gl.store(others + 1, gl.maximum(gl.full((1,), float("nan"), gl.float32), n).sum())
    gl.store(others + 2, n / 2)


def test_numbers_are_those_of_a_device():
    whole, others = torch.zeros(5, dtype=torch.int32), torch.zeros(3)
    _numbers_kernel[(1,)](whole, others, 7)
    assert whole.tolist() == [-3, -3, -(2**30), 1, 7] and others.tolist() == [7.0, 7.0, 3.5]


def test_other_code_sees_the_real_modules():
    before = dict(sys.modules)
    kernels(HOPPER / FILES["gradient"])
    assert sys.modules == before


def test_a_missing_feature_of_the_language_is_named():
    with pytest.raises(AttributeError, match="has no 'dot_fma'"):
        gl.dot_fma(0, 0, 0)
    with pytest.raises(AttributeError, match=r"has no 'add\.rn\.bf16x2'"):
        gl.inline_asm_elementwise("add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [1.0, 1.0], gl.float32, is_pure=True, pack=2)
