"""The Triton kernels on a CPU, in Triton's interpreter: right for any input, chosen where supported, within their workspace."""

from __future__ import annotations

import ast
import datetime
import importlib.util
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from cases import CLIP_OPTIONS, Case, build, embeddings, errors, formula, largest_logit, ours
from hypothesis import given, settings

import megabatch
from megabatch import tiles
from megabatch.costs.memory.loss import BESIDE_KEPT, KEPT_WIDTH, default_workspace
from megabatch.tiles import backend_for, backend_name, eager
from megabatch.tiles.contract import ComputeOptions, NeedsGrad, Pairs, Softmax

pytest.importorskip("triton")

import triton.language as tl
from interpreted import IN_INTERPRETER
from reduction_kernel import expected, integers, rows_and_columns

from megabatch.tiles import fused
from megabatch.tiles.fused import architectures, int8, launch, reductions, sigmoid, tile, tuned_configs
from megabatch.tiles.fused.gradient_panels import MIN_WIDTH_TO_SAVE_EXP, GradientProducts, allocate_saved_exp
from megabatch.tiles.fused.reductions import COUNTED, EXPONENTIALS, RANKING, SUMS

pytestmark = [pytest.mark.sampled(4), *IN_INTERPRETER]

EPS = torch.finfo(torch.float32).eps
CUDA = torch.device("cuda")
SCALARS = {"clip_loss": (7.0,), "siglip_loss": (7.0, -3.0)}
EVERYTHING = {"ids": True, "duplicates": "positive", "label_smoothing": 0.1, "drop_above": 0.2, "weights": True}
EVERY_OPTION = {"clip_loss": EVERYTHING, "siglip_loss": {"ids": True, "duplicates": "positive", "weights": True, "extra": 5}}

both_losses = pytest.mark.parametrize("loss", SCALARS)


def combinations(*names: str) -> list[dict]:
    """Return every combination of the options of these groups."""
    return [dict(itertools.chain(*(o.items() for o in groups))) for groups in itertools.product(*(CLIP_OPTIONS[n] for n in names))]


ALONE = [option for group in CLIP_OPTIONS.values() for option in group if option]
MIXED = combinations(*CLIP_OPTIONS)[4::9]
CLIP = [{}, *ALONE, EVERYTHING, {**EVERYTHING, "duplicates": "mask", "symmetric": False, "extra": 5}, *MIXED]
SIGLIP = [{**options, **extra} for options in combinations("ids", "weights") for extra in ({}, {"extra": 5})]


def new_launch(kernel: str, x: torch.Tensor, y: torch.Tensor, compute: ComputeOptions) -> launch.Launch:
    return launch.Launch(architectures.INTERPRETER, kernel, x, y, compute)


def assert_exact(case: Case, dtype: torch.dtype = torch.float32, allowed: float | None = None, **more) -> None:
    """Assert that results are as exact as fp32 sums allow, with the bounds of test_losses.py."""
    case = case.rounded(dtype)
    sums = 32 * EPS * (1 + largest_logit(case)) if allowed is None else allowed
    for name, e in errors(case, ours(case, dtype, backend="fused", **more), formula(case)).items():
        assert e <= sums + (torch.finfo(dtype).eps if name in ("x", "y", "scale") and dtype != torch.float32 else 0), (name, e)


@pytest.mark.parametrize("width", [1, 7, 100, 128, 300])
@pytest.mark.parametrize("kind", ["random", "one large entry", "equal entries", "tiny and huge"])
def test_quantised_rows_have_the_similarities_of_rows(width, kind):
    g = torch.Generator().manual_seed(width)
    x, y = torch.randn(70, width, generator=g), torch.randn(90, width, generator=g)
    if kind == "one large entry":
        x[:, width // 2] = 50
    elif kind == "equal entries":
        x[:] = 3
        y[::2] = -1
    elif kind == "tiny and huge":
        x, y = x * 1e-30, y * 1e30
    x[5], y[7] = 0, 0
    none = torch.zeros(width)
    (a, x_steps, *biases), (b, y_steps, _) = (int8.quantise(t, none, none, 30) for t in (x, y))
    assert a.shape[1] % 128 == b.shape[1] % 128 == 0 and int(a.min()) >= -127 and not x_steps[70:].any() and not biases[0].any()
    assert x_steps[5] == y_steps[7] == 0 and not a[5].any() and not b[7].any()
    found = (a.double() @ b.double().T) * x_steps[:70, None].double() * y_steps[None, :90]
    x_error, y_error = x_steps[:70, None].double() * y.double().norm(dim=1), y_steps[:90].double() * x.double().norm(dim=1)[:, None]
    off = (found - x.double() @ y.double().T).abs()
    # At most half a step in every entry, all in one direction, and the product of two such errors.
    assert (off <= (x_error + y_error) * a.shape[1] ** 0.5 / 2 + x_steps[:70, None] * y_steps[:90] * a.shape[1] / 4 + 1e-6).all()
    if width >= 100:
        # A step is a small fraction of a row, because after the rotation no entry is much larger than others.
        assert (127 * x_steps[:70] <= 0.6 * x.double().norm(dim=1)).all()
        if kind != "equal entries":
            # Independent errors, uniform within a step, add up in squares.
            assert off.square().mean() < 1.5 * ((x_error**2 + y_error**2) / 12).mean()


def test_int8_similarities_of_unit_rows_have_the_documented_error():
    x, y = (
        torch.nn.functional.normalize(torch.randn(64, 768, generator=torch.Generator().manual_seed(n)), dim=1) for n in range(2)
    )
    # Unit vectors that are similar have less error than others, and none that all similarities of a row share.
    for similarity in (0.0, 0.9):
        x, y = (torch.cat((t * (1 - similarity) ** 0.5, torch.full((64, 1), similarity**0.5)), 1) for t in (x, y))
        means = x.mean(0), y.mean(0)
        (a, x_steps, x_biases), (b, y_steps, y_biases) = int8.quantise(x, *means, 0), int8.quantise(y, *means[::-1], 0)
        found = (a.double() @ b.double().T) * x_steps[:, None].double() * y_steps + x_biases[:, None] + y_biases
        off = found - x.double() @ y.double().T
        assert 3.5e-4 < off.square().mean().sqrt() / (1 - similarity) < 4.5e-4
        assert off.mean(1).square().mean().sqrt() < 6e-5 and off.mean(0).square().mean().sqrt() < 6e-5


@pytest.mark.parametrize("symmetric", [True, False])
def test_only_gradients_above_the_limit_are_computed_again(symmetric):
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(70, 20, generator=g) / 4, torch.randn(300, 20, generator=g) / 4
    gains = torch.rand(70 + 99, generator=g), torch.rand(300 + 99, generator=g) if symmetric else None
    work, whole = new_launch("gradient", x, y, ComputeOptions(2**24)), launch.Panel(slice(0, 70), slice(0, 300))
    panel = torch.rand(70, 304, generator=g)[:, :300]
    before, limit = panel.clone(), torch.tensor(0.97)
    marks = torch.stack([(part > limit).any(1) for part in panel.split(64, 1)])
    # A tile without a mark is not looked at.
    marks[2, 10:40] = False
    correction = int8.Correction(torch.tensor(2.0), marks.to(torch.int8), 64, limit, *gains)
    int8.correct_large(work, whole, panel, correction)
    again = (before > limit) & marks.repeat_interleave(64, 0)[:300].T
    exact = (2 * x.double() @ y.double().T).exp() * (gains[0][:70, None] + (gains[1][:300] if symmetric else 0.0))
    assert 500 < int(again.sum()) < 700 and torch.equal(panel[~again], before[~again])
    torch.testing.assert_close(panel[again].double(), exact[again], rtol=64 * EPS, atol=0)


@pytest.mark.parametrize(
    "loss, place, options",
    [("clip_loss", *option) for option in enumerate(CLIP)] + [("siglip_loss", *option) for option in enumerate(SIGLIP)],
    ids=str,
)
def test_options(loss, place, options):
    scalars = (7.0, 20.0, 300.0, -3.0)[place % 4], -3.0
    dtype = torch.float16 if place % 5 == 2 else torch.float32
    assert_exact(build(loss, 21, scalars[: len(SCALARS[loss])], options), dtype, workspace=1000)


@both_losses
def test_a_scale_of_zero(loss):
    assert_exact(build(loss, 21, (0.0, -3.0)[: len(SCALARS[loss])], EVERY_OPTION[loss]))


@pytest.mark.parametrize("width", [1, 7, 100])
@both_losses
def test_any_width(loss, width):
    assert_exact(build(loss, 18, SCALARS[loss], EVERY_OPTION[loss], width=width))


@both_losses
def test_one_row(loss):
    case = Case(loss, *embeddings(1, width=5), SCALARS[loss])
    assert_exact(case)
    if loss == "clip_loss":
        assert all(t.abs().max() == 0 for t in ours(case, torch.float32, backend="fused").values())


def strided(t: torch.Tensor) -> torch.Tensor:
    """Return the same values with others between them."""
    return torch.stack((t, t + 1), 1)[:, 0]


LAYOUTS = {
    "transposed, cut": lambda given: {"x": given["x"].T.contiguous().T, "y": torch.cat((given["y"], given["x"]), 1)[:, :8]},
    "shifted": lambda given: {"x": torch.cat((given["x"][0, :1], given["x"].flatten()))[1:].view(12, 8)},
    "ids strided": lambda given: {"ids": strided(given["ids"])},
    "weights strided": lambda given: {"weights": strided(given["weights"])},
    "weights expanded": lambda given: {"weights": given["weights"][:1].expand(12)},
    # A single row is contiguous whatever its stride.
    "one row, cut": lambda given: {name: torch.cat((given[name], given["x"][:, :1]), 1)[:1, :8] for name in ("x", "y")},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@both_losses
def test_inputs_may_have_any_memory_layout(loss, layout):
    case = build(loss, 12, SCALARS[loss], {"ids": True, "weights": True}, width=8)
    given = {"x": case.x.float(), "y": case.y.float(), "ids": case.options["ids"], "weights": case.options["weights"].float()}
    given |= layout(given)
    rows, found = len(given["x"]), []
    for tensors in (given, {name: t.clone(memory_format=torch.contiguous_format) for name, t in given.items()}):
        x, y = (tensors[name].detach().requires_grad_() for name in ("x", "y"))
        more = {name: tensors[name][:rows] for name in ("ids", "weights")}
        value = getattr(megabatch, loss)(x, y, *SCALARS[loss], **more, backend="fused")
        found.append((value, *torch.autograd.grad(value, (x, y))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
@both_losses
def test_kernels_without_tensor_descriptors_compute_the_same(loss, monkeypatch):
    case = build(loss, 21, SCALARS[loss], EVERY_OPTION[loss], width=23)
    expected = ours(case, torch.float32, backend="fused", workspace=1000)
    monkeypatch.setattr(architectures, "INTERPRETER", architectures.INTERPRETER._replace(descriptors=False))
    found = ours(case, torch.float32, backend="fused", workspace=1000)
    assert all(torch.allclose(found[name], t, rtol=1e-6, atol=1e-7) for name, t in expected.items())


@pytest.fixture
def use_blocks(monkeypatch) -> Iterator[Callable[..., None]]:
    def use(**changes: int) -> None:
        monkeypatch.setattr(tuned_configs, "INTERPRETED", tuned_configs.INTERPRETED._replace(**changes))
        tuned_configs.blocks_for.cache_clear()

    yield use
    tuned_configs.blocks_for.cache_clear()


@pytest.mark.slow
@both_losses
def test_tiles_that_are_not_halved(loss, use_blocks):
    use_blocks(pieces=1)
    assert_exact(build(loss, 37, SCALARS[loss], {}), workspace=1000)
    assert_exact(build(loss, 21, SCALARS[loss], EVERY_OPTION[loss]))


def test_sigmoids_of_wide_tiles_take_several_logarithms_a_row(use_blocks):
    use_blocks(n=256, pieces=2)
    assert_exact(build("siglip_loss", 10, (7.0, -3.0), {"extra": 140}))


def test_more_rows_of_tiles_than_a_group_has(use_blocks):
    use_blocks(group=2)
    assert_exact(build("siglip_loss", 48, (7.0, -3.0), {"extra": 16}, width=4))


@pytest.mark.parametrize("op", [0, 1, 2], ids=["sums", "maxima", "products"])
@pytest.mark.parametrize("m, n, warps", [(16, 16, 4), (32, 64, 2), (64, 32, 4), (128, 32, 4), (128, 16, 8), (256, 8, 4)])
def test_reductions_of_rows_and_columns_are_exact(m, n, warps, op):
    values = integers(m, n, op)
    for found, true in zip(rows_and_columns(values, op, warps, product=False), expected(values, op), strict=True):
        assert torch.equal(found, true)


@both_losses
@pytest.mark.parametrize("scale", [-7.0, 0.0])
def test_any_scale_is_right_beside_diagnostics(loss, scale):
    case = build(loss, 21, (scale, *SCALARS[loss][1:]), {})
    ranked = SimpleNamespace(**{loss: lambda *args: getattr(megabatch, loss)(*args, backend="fused", diagnostics=True)[0]})
    assert all(e < 1e-6 for e in errors(case, case.run(ranked, torch.float32), formula(case)).values())


def set_fallback(monkeypatch, *, where: float, parts: tuple[str, ...] = ("stats", "gradient", "sigmoid")) -> None:
    """Make the safe launch compute every tile again (where=math.inf), or none (where=-math.inf)."""
    if "stats" in parts:
        monkeypatch.setattr(tile, "SMALLEST_SUM", tl.constexpr(where))
        monkeypatch.setattr(tile, "LARGEST_SUM", tl.constexpr(math.inf))
    if "gradient" in parts:
        monkeypatch.setattr(tile, "LOWEST_PEAK", tl.constexpr(where))
        monkeypatch.setattr(tile, "HIGHEST_PEAK", tl.constexpr(math.inf))
    if "sigmoid" in parts:
        monkeypatch.setattr(sigmoid, "overflowed", lambda value: (value < value) if where < 0 else (value == value))


@pytest.mark.slow
@both_losses
def test_ordinary_logits_need_no_fallback_which_is_right_for_them_too(loss, monkeypatch):
    # Where a row drops all of a tile the sum is zero, which looks like an underflow.
    options = {name: value for name, value in EVERY_OPTION[loss].items() if name != "drop_above"}
    case = build(loss, 21, SCALARS[loss], options)
    expected = ours(case, torch.float32, backend="fused")
    set_fallback(monkeypatch, where=-math.inf)
    found = ours(case, torch.float32, backend="fused")
    assert all(torch.equal(found[name], t) for name, t in expected.items())
    set_fallback(monkeypatch, where=math.inf)
    found = ours(case, torch.float32, backend="fused")
    assert not all(torch.equal(found[name], t) for name, t in expected.items())
    assert all(e < 1e-6 for e in errors(case, found, formula(case)).values())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"symmetric": False},
        {"label_smoothing": 0.1},
        {"ids": torch.arange(21) // 2},
        {"ids": torch.arange(21) // 2, "duplicates": "positive"},
    ],
    ids=lambda options: "and ".join(options) or "no options",
)
@pytest.mark.parametrize("similarity", [0.9, 0.1])
def test_unit_vectors_need_no_fallback_at_a_temperature_of_a_hundredth(similarity, options, monkeypatch):
    x, y = (torch.nn.functional.normalize(t, dim=1) * math.sqrt(1 - similarity) for t in embeddings(21, width=7))
    x, y = (torch.cat((t, torch.full((21, 1), similarity).sqrt()), 1) for t in (x, y))
    case = Case("clip_loss", x.double(), y.double(), (100.0,), options)
    set_fallback(monkeypatch, where=-math.inf)
    found = errors(case, ours(case, torch.float32, backend="fused"), formula(case))
    assert all(e < 2e-5 for e in found.values()), found


def far_apart(gap: float) -> Case:
    """Return rows whose largest logits are far below and above those of their neighbours in the tile."""
    x, y = embeddings(21, width=4, seed=1)
    x = x * torch.where(torch.arange(21) % 3 == 0, gap, 1.0)[:, None].double()
    y[5:7] *= gap
    return Case("clip_loss", x, y, (1.0,))


@pytest.mark.parametrize("gap", [50.0, 1000.0, 1e5])
def test_rows_far_below_the_largest_logit_of_their_tile_are_right(gap):
    assert_exact(far_apart(gap), allowed=32 * EPS, workspace=1000)


@pytest.mark.parametrize("offset", [-500.0, 500.0])
def test_logits_may_all_be_far_from_zero(offset):
    x, y = embeddings(21, width=7)
    x, y = (torch.cat((t, torch.full((21, 1), abs(offset) ** 0.5)), 1) for t in (x, y))
    x[:, -1] *= math.copysign(1, offset)
    assert_exact(Case("clip_loss", x, y, (1.0,)))


@pytest.mark.parametrize("side", [0, 1], ids=["column", "row"])
def test_one_row_or_column_may_be_far_below_all_others(side):
    x, y = embeddings(21, width=6)
    x, y = torch.cat((x, torch.ones(21, 1)), 1), torch.cat((y, torch.zeros(21, 1)), 1)
    y[3, -1] = -200
    assert_exact(Case("clip_loss", *((x, y), (y, x))[side], (1.0,)))


@pytest.mark.parametrize("bias", [-1e4, 0.0, 1e4])
def test_sigmoids_of_large_logits(bias):
    # Away from zero the loss is linear in the logit and the slope is zero or one, so the rounding of the logit loses nothing.
    x, y = embeddings(21, width=7)
    assert_exact(Case("siglip_loss", x, y, (1e4, bias)), allowed=64 * EPS)


@pytest.mark.parametrize(
    "case, part, wrong",
    [
        (far_apart(1000.0), "stats", {"value", "x", "y", "scale"}),
        (far_apart(1000.0), "gradient", {"x", "y", "scale"}),
        (Case("siglip_loss", *embeddings(21, width=7), (1e4, 0.0)), "sigmoid", {"value", "x", "y", "scale", "bias"}),
    ],
    ids=["stats", "gradient", "sigmoid"],
)
def test_large_logits_need_the_fallback(case, part, wrong, monkeypatch):
    set_fallback(monkeypatch, where=-math.inf, parts=(part,))
    found = errors(case, ours(case, torch.float32, backend="fused"), formula(case))
    assert {name for name, e in found.items() if not e < 1e-3} == wrong


def test_identical_rows_give_log_n_at_any_size_of_logit():
    for norm, scale in ((1.0, 1.0), (1.0, 100.0), (1e3, 100.0), (1e4, 1e3)):
        x = torch.full((20, 16), norm / 4)
        assert megabatch.clip_loss(x, x, scale, backend="fused").item() == pytest.approx(math.log(20), rel=1e-6)


def test_a_small_loss_keeps_its_digits():
    x = torch.eye(16, dtype=torch.float64)
    for scale in (12.0, 20.0):
        for loss, scalars in (("clip_loss", (scale,)), ("siglip_loss", (2 * scale, -scale))):
            case = Case(loss, x, x, scalars)
            found, true = ours(case, torch.float32, backend="fused"), formula(case)
            assert found["value"].item() == pytest.approx(true["value"].item(), rel=1e-5)
            assert torch.allclose(found["x"], true["x"], rtol=1e-5, atol=0)


@both_losses
def test_nan_stays_nan(loss):
    x, y = (t.float().requires_grad_() for t in embeddings(18))
    with torch.no_grad():
        x[3, 1] = math.nan
    value = getattr(megabatch, loss)(x, y, *SCALARS[loss], backend="fused")
    value.backward()
    assert value.isnan() and x.grad[3].isnan().all() and y.grad.isnan().all()


@pytest.mark.parametrize("loss, options", [("clip_loss", {}), ("clip_loss", {"symmetric": False}), ("siglip_loss", {})])
def test_diagnostics_are_those_of_the_other_backend(loss, options):
    x, y = (t.float() for t in embeddings(21, 0 if not options and loss == "clip_loss" else 5, width=5, seed=2))
    ids = torch.arange(len(y)) % 20
    f = getattr(megabatch, loss)
    found, expected = (
        f(x, y, *SCALARS[loss], ids=ids, diagnostics=True, workspace=1000, backend=backend, **options)[1]
        for backend in ("fused", "eager")
    )
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-6))


@pytest.mark.parametrize(
    "loss, rows_of_a_tile",
    [
        pytest.param("siglip_loss", 16, marks=pytest.mark.slow),
        ("clip_loss", 16),
        ("clip_loss", 128),
        pytest.param("clip_loss", 256, marks=pytest.mark.slow),
    ],
)
def test_ranks_and_hardest_negatives_are_exact_ties_included(loss, rows_of_a_tile, use_blocks):
    # In the first case all negatives in a column of a tile tie with the positive; integers, whose products are exact.
    use_blocks(m=rows_of_a_tile, n=64)
    g = torch.Generator().manual_seed(1)
    rows = rows_of_a_tile + 3
    for x, y in (torch.ones(2, rows, 16), torch.randint(-1, 2, (2, rows, 16), generator=g).float()):
        found = getattr(megabatch, loss)(x, y, *SCALARS[loss], diagnostics=True, backend="fused")[1]
        z, own = (x @ y.T).fill_diagonal_(-torch.inf), (x * y).sum(1)
        assert torch.equal(found.row_rank, (z >= own[:, None]).sum(1)) and torch.equal(found.column_rank, (z >= own).sum(0))
        assert torch.equal(found.row_hardest, z.amax(1)) and torch.equal(found.column_hardest, z.amax(0))


def test_a_collapsed_model_does_not_look_perfect():
    same = embeddings(1, width=20)[0].float().expand(21, 20)
    for scale in (5.0, 500.0):
        assert megabatch.clip_loss(same, same, scale, backend="fused", diagnostics=True)[1].recall(20)[0] == 0


@both_losses
def test_two_runs_are_equal_to_the_last_bit(loss):
    case = build(loss, 21, SCALARS[loss], {"ids": True})
    first, second = (ours(case, torch.float32, backend="fused", workspace=1000) for _ in range(2))
    assert all(torch.equal(second[name], t) for name, t in first.items())


@both_losses
def test_backward_may_be_called_again_and_gradients_have_the_dtype_of_their_input(loss):
    x, y = (t.half().requires_grad_() for t in embeddings(18))
    scalars = [torch.tensor(s, requires_grad=True) for s in SCALARS[loss]]
    value = getattr(megabatch, loss)(x, y, *scalars, backend="fused")
    assert value.dtype == torch.float32
    first, second = (torch.autograd.grad(value, (x, y, *scalars), retain_graph=True) for _ in range(2))
    assert [t.dtype for t in first] == [t.dtype for t in (x, y, *scalars)]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@both_losses
def test_tf32_rounds_products_and_no_more(loss):
    case = build(loss, 18, SCALARS[loss], {})
    found = errors(case, ours(case, torch.float32, backend="fused", precision="tf32"), formula(case))
    assert all(e < 2**-10 for e in found.values())


SHARDS = {"clip_loss": [7, 14], "siglip_loss": [12, 0]}


def shard_results(rank: int, size: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return one rank's part of both batches, backward included."""
    results = {}
    for loss, lengths in SHARDS.items():
        case = build(loss, sum(lengths), SCALARS[loss], {"ids": True, "weights": True})
        where = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
        options = {name: t[where] for name, t in case.options.items()}
        part = Case(loss, case.x[where], case.y[where], case.scalars, options)
        results[loss] = ours(part, torch.float32, backend="fused", group=dist.group.WORLD)
    return results


@pytest.mark.slow
def test_two_ranks_are_one_batch(world):
    parts = world.run(2, shard_results)
    for loss, lengths in SHARDS.items():
        case = build(loss, sum(lengths), SCALARS[loss], {"ids": True, "weights": True})
        # The gradient of a rank is that of the sum of both ranks' values.
        found = {name: torch.cat([part[loss][name] for part in parts]) / 2 for name in ("x", "y")}
        found |= {name: t for name, t in parts[1][loss].items() if name not in found}
        for name, e in errors(case, found, formula(case)).items():
            assert e < 32 * EPS * (1 + largest_logit(case)), (loss, name, e)


@pytest.mark.parametrize(
    "dtype, words", [(torch.bfloat16, r"interpreter \(TRITON_INTERPRET=1\) computes bfloat16"), (torch.float64, "float64")], ids=str
)
def test_a_dtype_that_has_no_kernels_is_named(dtype, words):
    x, y = (t.to(dtype) for t in embeddings(5))
    with pytest.raises(ValueError, match=f"backend='fused': .*{words}.*pass backend='eager' or None"):
        megabatch.clip_loss(x, y, 1.0, backend="fused")


def test_under_autocast_the_dtype_is_that_of_the_products():
    x, y = (t.float() for t in embeddings(5))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="computes bfloat16"):
        megabatch.clip_loss(x, y, 1.0, backend="fused")


def test_a_cpu_uses_the_eager_backend_by_default():
    cpu = torch.device("cpu")
    assert backend_for(cpu, torch.float32) is eager
    assert backend_for(cpu, torch.float32, "fused") is fused


def test_without_triton_there_is_a_remedy_and_a_fallback(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"Triton is not installed \(pip install megabatch\[fused\]\)"):
        megabatch.clip_loss(*(t.float() for t in embeddings(5)), 1.0, backend="fused")
    assert backend_name(CUDA) == "eager"


def test_a_broken_triton_is_reported_and_falls_back_to_eager(monkeypatch):
    monkeypatch.delattr(tiles, "fused")
    monkeypatch.setitem(sys.modules, "megabatch.tiles.fused", None)
    with pytest.raises(ValueError, match="Triton cannot be imported"):
        backend_name(CUDA, backend="fused")
    assert backend_name(CUDA) == "eager"


def test_the_architecture_decides_what_is_supported(monkeypatch):
    monkeypatch.setattr(architectures, "INTERPRETED", False)
    monkeypatch.setattr(architectures, "_capability", lambda device: (7, 5))
    assert "compute capability 7.5, and fused tiles need 8.0" in architectures.unsupported(CUDA, torch.float16)
    assert backend_name(CUDA, torch.bfloat16) == "eager"
    with pytest.raises(ValueError, match=r"backend='fused': .*7\.5"):
        backend_name(CUDA, torch.bfloat16, "fused")
    assert "no fused tiles for cpu" in architectures.unsupported(torch.device("cpu"), torch.float32)
    for capability, name in (
        ((8, 0), "ampere"),
        ((8, 9), "ampere"),
        ((9, 0), "hopper"),
        ((10, 0), "blackwell"),
        ((12, 0), "blackwell"),
    ):
        monkeypatch.setattr(architectures, "_capability", lambda device, capability=capability: capability)
        assert backend_name(CUDA, torch.bfloat16) == "fused" and backend_name(CUDA, torch.float64) == "eager"
        architecture = architectures.architecture_of(CUDA)
        assert architecture.name == name and architecture.descriptors == (capability >= (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert architectures.unsupported(CUDA, torch.float16) is None and not architectures.architecture_of(CUDA).descriptors


def test_architectures_are_sorted_and_hopper_has_kernels_with_the_versions_of_triton_that_they_were_run_with(monkeypatch):
    capabilities = [architecture.capability for architecture in architectures.ARCHITECTURES]
    assert capabilities == sorted(capabilities)
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    loaded = {}
    for version in ("3.6.1", "3.7.1"):
        monkeypatch.setattr(architectures.triton, "__version__", version)
        loaded[version] = architectures._hopper_kernels.__wrapped__()
    assert loaded["3.7.1"] is None and callable(loaded["3.6.1"].softmax_stats) and callable(loaded["3.6.1"].softmax_grads)


def test_only_the_table_of_architectures_names_one():
    """A kernel for another architecture is a record in architectures.py and its own files: nothing else has to know it."""
    folder = Path(architectures.__file__).parent
    names = {architecture.name for architecture in architectures.ARCHITECTURES}
    for file in set(folder.glob("*.py")) - {Path(architectures.__file__)}:
        nodes = list(ast.walk(ast.parse(file.read_text())))
        imported = {alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
        modules = {part for node in nodes if isinstance(node, ast.ImportFrom) for part in (node.module or "").split(".")}
        strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        assert not names & (imported | modules | strings), file


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(1, 2**18),
    st.sampled_from((0.25, 1.5, 2.0, 4.0)),
    st.none() | st.integers(32, 400),
)
def test_panels_cover_every_pair_once_within_the_workspace(rows, columns, workspace, bytes_per_cell, widest):
    x, y = torch.empty(rows, 4), torch.empty(columns, 4)
    work = new_launch("stats", x, y, ComputeOptions(workspace))
    panels, held = list(work.panels(bytes_per_cell, widest)), torch.zeros(rows, columns, dtype=torch.int64)
    for p in panels:
        held[p.r, p.c] += 1
        assert p.rows * p.columns <= max(workspace / bytes_per_cell, work.blocks.m * work.blocks.n)
        assert p.r.start % work.blocks.m == 0 and p.c.start % work.blocks.n == 0
        assert widest is None or p.columns <= widest
    assert (held == 1).all()
    assert len(panels) <= 1 or rows * columns > workspace / bytes_per_cell or columns > (widest or columns)
    assert panels == sorted(panels, key=lambda p: (p.r.start, p.c.start))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 2**16), st.none() | st.integers(32, 400))
def test_panels_around_saved_exponentials_cover_every_pair_once_in_the_order_that_sums_need(rows, columns, workspace, widest):
    x, y, compute = torch.empty(rows, 4), torch.empty(columns, 4), ComputeOptions(workspace)
    work = new_launch("stats", x, y, compute)
    saved = allocate_saved_exp(work, compute)
    first = next(new_launch("gradient", x, y, compute).panels(4))
    assert (saved.panel.r, saved.panel.c) == (first.r, first.c) and saved.buffer.dtype == torch.float32
    held = torch.zeros(rows, columns, dtype=torch.int64)
    for p in work.panels(0.5, widest, saved.panel):
        assert held[p.r, :].any(1).all() == (p.c.start > 0) and held[:, p.c].any(0).all() == (p.r.start > 0)
        inside = p.r.stop <= saved.panel.rows and p.c.stop <= saved.panel.columns
        outside = p.r.start >= saved.panel.rows or p.c.start >= saved.panel.columns
        assert saved.contains(p) == inside != outside
        held[p.r, p.c] += 1
        if inside:
            saved.view(p).fill_(1)
    assert (held == 1).all()
    assert saved.view(saved.panel).eq(1).all()


def saved_of(width=8, dtype=torch.float32, **options):
    x, y = embeddings(70, width=width)
    pairs = Pairs(is_local=True, positive_M=torch.zeros(70), positive_N=torch.zeros(70), **options)
    compute = ComputeOptions(40 * 64 * 4)
    tensors = x.to(dtype), y.to(dtype), torch.tensor(3.0)
    return tensors, pairs, compute, fused.softmax_stats(*tensors, pairs, columns=True, compute=compute, save_exp=True).saved_exp


def test_saved_exponentials_are_those_of_the_first_panel_and_gradients_are_computed_from_them():
    (x, y, scale), pairs, compute, saved = saved_of()
    rows, columns = saved.panel.rows, saved.panel.columns
    assert rows < 70 and columns < 70
    true = (3 * x.double() @ y.double().T).exp().fill_diagonal_(0)[:rows, :columns]
    assert torch.allclose(saved.view(saved.panel).double(), true, rtol=1e-5)
    softmax = Softmax(torch.zeros(70), torch.ones(70))
    arguments = x, y, scale, pairs, softmax, softmax
    again, _ = fused.softmax_grads(*arguments, needs_grad=NeedsGrad(True, True), compute=compute)
    saved.buffer.mul_(2)
    doubled, _ = fused.softmax_grads(*arguments, needs_grad=NeedsGrad(True, True), compute=compute, saved_exp=saved)
    extra = 2 * true @ y[:columns].double()
    assert torch.allclose((doubled - again)[:rows].double(), extra, rtol=1e-4, atol=1e-3)
    assert torch.allclose(doubled[rows:], again[rows:], rtol=1e-5)


@pytest.mark.parametrize("workspace", [2**20, 40 * 64 * 4])
@pytest.mark.parametrize("kind", ["usual", "tiny weight", "marked"])
def test_gains_of_rows_alone_are_factors_of_saved_products(kind, workspace, monkeypatch):
    x, y = embeddings(70, 9, width=8)
    options = {"symmetric": False, "ids": torch.arange(79) // 2}
    if kind == "tiny weight":
        options["weights"] = torch.where(torch.arange(70) == 3, 1e-36, 1.0)
    if kind == "marked":
        x[3:5] *= 40
    case = Case("clip_loss", x, y, (3.0,), options)
    written, write = [], GradientProducts.write_with_gains

    def spy(products, panel, p, gains_M):
        written.append((gains_M == 1).all().item())
        write(products, panel, p, gains_M)

    monkeypatch.setattr(GradientProducts, "write_with_gains", spy)
    true = formula(case)
    # Both gradients share memory for a while; each is wanted alone, too.
    for wanted in ((True, True), (True, False), (False, True)):
        tensors = [t.float().requires_grad_(need) for t, need in zip((x, y), wanted, strict=True)]
        megabatch.clip_loss(*tensors, 3.0, backend="fused", workspace=workspace, **options).backward()
        for name, t, need in zip(("x", "y"), tensors, wanted, strict=True):
            assert not need or (t.grad - true[name]).norm() < 1e-5 * true[name].norm(), (wanted, name)
    # With a mark, the panel holds the gradient itself.
    assert written == [kind != "usual"] * 3


@pytest.mark.parametrize("workspace, symmetric", [(2**20, False), (40 * 64 * 4, True)])
def test_saved_exponentials_show_which_pairs_count_however_small_they_are(workspace, symmetric):
    x, y = embeddings(70, width=8)
    # Logits of some rows are about zero for ten columns, and so low for the others that their exponentials underflow.
    y[:, 0] = torch.where(torch.arange(70) < 10, 0.0, 1.0)
    x[20:23, 0] = -200
    case = Case("clip_loss", x, y, (1.0,), {"ids": torch.arange(70) // 2, "label_smoothing": 0.3, "symmetric": symmetric})
    a, b = (t.float().requires_grad_() for t in (x, y))
    loss = megabatch.clip_loss(a, b, 1.0, backend="fused", workspace=workspace, **case.options)
    assert loss.grad_fn.partial is not None
    true = formula(case)
    for found in (torch.autograd.grad(loss, (a, b), retain_graph=True), torch.autograd.grad(loss, (a, b))):
        for gradient_of, name in zip(found, ("x", "y"), strict=True):
            assert (gradient_of - true[name]).norm() < 1e-5 * true[name].norm()


@pytest.mark.slow
def test_nothing_is_saved_with_options_that_need_more_than_exponentials():
    ids = torch.arange(70) // 2
    assert all(saved_of(**options)[-1] for options in ({"ids_M": ids, "ids_N": ids}, {"ranked": True}, {"smoothed": True}))
    for options in ({"ids_M": ids, "ids_N": ids, "multi_positive": True}, {"drop_above": 0.1}):
        assert saved_of(**options)[-1] is None
    (x, y, scale), pairs, compute, _ = saved_of()
    assert fused.softmax_stats(x, y, scale, pairs, columns=True, compute=compute).saved_exp is None
    # Nor on a device where products are faster: those of fp16, whose panels take four bytes per cell, and narrow ones.
    for dtype, width in ((torch.float16, 768), (torch.bfloat16, 256), (torch.float32, 32)):
        x_MD = torch.empty(8, width, dtype=dtype, device="meta")
        assert allocate_saved_exp(SimpleNamespace(x_MD=x_MD, y_ND=x_MD), compute) is None


def test_predicted_memory_saves_exponentials_where_the_kernels_do():
    assert {2: MIN_WIDTH_TO_SAVE_EXP["bfloat16"], 4: MIN_WIDTH_TO_SAVE_EXP["ieee"]} == KEPT_WIDTH
    for memory in (0, 2**30, 16 * 10**9, 24 * 2**30, 80 * 2**30, 141 * 10**9, 192 * 2**30):
        assert default_workspace("cuda", memory) == fused.workspace_for(memory)
    assert BESIDE_KEPT == launch.PARTS_BESIDE_SAVED_EXP


@pytest.mark.slow
def test_a_second_backward_computes_again_what_the_first_has_overwritten():
    x, y = (t.float().requires_grad_() for t in embeddings(70, width=8))
    loss = megabatch.clip_loss(x, y, 3.0, backend="fused", workspace=40 * 64 * 4)
    first, second = (torch.autograd.grad(loss, (x, y), retain_graph=True) for _ in range(2))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(first, second, strict=True))


def test_partial_sums_of_many_tiles_are_merged_over_panels():
    g = torch.Generator().manual_seed(0)
    rows, tiles = 40, 150
    sums = reductions.Sums(torch.empty(rows, 1), [kind.value for kind in (EXPONENTIALS, RANKING, COUNTED, SUMS)])
    panels = torch.randint(-9, 9, (2, 4, 2, tiles, rows), generator=g).float()
    panels[:, 1:3, 1] = panels[:, 1:3, 1].abs()
    # Plain sums, sums relative to a peak (encoded by a minus), and sums of nothing, as all of the first five rows.
    panels[:, 0, 0] *= 30
    panels[:, 0, 1, :, :5] = 0
    panels[0, 0, 0, panels[0, 0, 1] >= 0] = math.nan
    for place, parts in enumerate(panels):
        reductions.merge_parts(launch.Panel(slice(0, rows), slice(place, place + 1)), sums, parts, None, None)
    first, second = panels.double().permute(1, 2, 4, 0, 3).flatten(3).unbind(1)
    peaks = torch.where(second[0] < 0, first[0], 0.0)
    found = sums.values.double()
    assert torch.allclose(found[0, 0] + found[0, 1].log(), (peaks + second[0].abs().log()).logsumexp(1), rtol=1e-6)
    assert torch.equal(found[1, 0], first[1].amax(1)) and torch.equal(found[2:, 0], first[2:].sum(2))
    assert torch.equal(sums.counts[1:3], second[1:3].sum(2).long()) and torch.equal(found[3, 1], second[3].sum(1))


def test_tiles_in_which_ids_may_be_equal_are_marked():
    ids_M, ids_N = torch.arange(40), torch.arange(40, 640)
    for i, j, high in ((0, 599, 0), (17, 5, 1), (18, 300, -1), (39, 270, 0)):
        ids_N[j] = ids_M[i] + high * 2**32
    work = new_launch("stats", torch.empty(40, 4), torch.empty(600, 4), ComputeOptions(2**20))
    marks = work.pair_args(Pairs(ids_M=ids_M, ids_N=ids_N), launch.Panel(slice(0, 40), slice(0, 600))).matches
    assert marks.nonzero().tolist() == [[0, 599 // 32], [1, 5 // 32], [1, 300 // 32], [2, 270 // 32]]


def pretend(monkeypatch, name: str = "a new device", capability: tuple[int, int] = (13, 7), shared: int = 99 * 1024) -> None:
    """Pretend a CUDA device of this name and capability, with `shared` bytes of shared memory."""
    properties = SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], shared_memory_per_block=48 * 1024, shared_memory_per_block_optin=shared
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def blocks_on(kernel: str, dtype: torch.dtype, precision: str, width: int) -> tuned_configs.Blocks:
    return tuned_configs.blocks_for.__wrapped__(kernel, CUDA, dtype, precision, width)


@pytest.mark.parametrize("shared_kib", [64, 99, 160, 227])
@pytest.mark.parametrize(
    "dtype, precision",
    [(torch.float32, "ieee"), (torch.float32, "tf32"), (torch.bfloat16, "ieee"), (torch.float16, "ieee")],
    ids=str,
)
def test_an_unknown_device_gets_blocks_that_fit_it(monkeypatch, dtype, precision, shared_kib):
    pretend(monkeypatch, shared=shared_kib * 1024)
    for kernel, width in itertools.product(("stats", "gradient", "sigmoid"), (1, 20, 768, 4096)):
        found = blocks_on(kernel, dtype, precision, width)
        operands = found.stages * (found.m + found.n) * found.k * dtype.itemsize
        written = found.m * found.n // found.pieces * (2 if dtype == torch.bfloat16 else 4)
        assert operands + written <= shared_kib * 1024
        assert found.k >= 16 and (found.k == 16 or found.k < 2 * width)


def test_a_device_that_does_not_tell_its_largest_shared_memory_gets_blocks(monkeypatch):
    properties = SimpleNamespace(name="", major=13, minor=7, shared_memory_per_block=48 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert blocks_on("stats", torch.bfloat16, "ieee", 768).m == 64


def test_tuned_blocks_are_well_formed():
    entries = json.loads(tuned_configs.TUNED.read_text())["blocks"]
    assert entries
    for entry in entries:
        assert entry["kernel"] in ("stats", "gradient", "sigmoid") and entry["kind"] in ("bfloat16", "float16", "ieee", "tf32")
        sizes = [entry[name] for name in ("m", "n", "k", "warps", "pieces")]
        assert all(size & (size - 1) == 0 and size > 0 for size in sizes)
        assert min(entry["m"], entry["k"], entry["n"] // entry["pieces"]) >= 16 and entry["pieces"] <= 2
        assert min(entry["stages"], entry["programs"], entry["group"], entry["width"]) >= 1
        assert datetime.date.fromisoformat(entry["date"])
        assert all(entry[name] for name in ("device", "capability", "torch", "triton"))
    measured = [(entry["kernel"], entry["kind"], entry["width"], entry["device"]) for entry in entries]
    assert len(set(measured)) == len(measured)


def test_tuned_pipelines_are_well_formed():
    entries = json.loads(tuned_configs.TUNED.read_text())["pipelines"]
    assert {(entry["kernel"], entry["kind"]) for entry in entries} == {
        ("stats", "bfloat16"),
        ("stats", "float16"),
        ("gradient", "bfloat16"),
        ("gradient", "int8"),
    }
    for entry in entries:
        assert min(entry["group"], entry["lag"], entry["width"]) >= 1
        assert entry["x_slots"] > 1 and entry["lag"] < entry["y_slots"]
        assert entry["out_slots"] in ((0,) if entry["kernel"] == "stats" else (1, 2, 4))
        assert entry["min_tile_pairs"] is None or entry["min_tile_pairs"] > 0
        # A slot for a block takes 16 KiB, one for a quarter of the gradient 8; a multiprocessor of capability 9.0 has 227.
        assert 16 * (2 * entry["x_slots"] + entry["y_slots"]) + 16 * entry["out_slots"] < 227
        assert datetime.date.fromisoformat(entry["date"])
        assert entry["device"] and entry["capability"] == "9.0" and entry["torch"] and entry["triton"]


def test_hopper_kernels_are_used_where_they_were_measured_to_be_faster(monkeypatch, tmp_path):
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    from megabatch.tiles.fused.hopper import pipeline

    common = {
        "kernel": "stats",
        "kind": "bfloat16",
        "device": "A",
        "capability": "9.0",
        "x_slots": 3,
        "y_slots": 7,
        "lag": 5,
        "out_slots": 0,
    }
    found = [
        {**common, "width": 64, "group": 8, "min_tile_pairs": None},
        {**common, "width": 768, "group": 16, "min_tile_pairs": 2.5},
    ]
    file = tmp_path / "tuned_configs.json"
    file.write_text(json.dumps({"blocks": [], "pipelines": found}))
    monkeypatch.setattr(tuned_configs, "TUNED", file)
    monkeypatch.setattr(pipeline, "pipeline_for", tuned_configs.pipeline_for.__wrapped__)
    monkeypatch.setattr(pipeline, "multiprocessors", lambda device: 4)
    pretend(monkeypatch, "B", (9, 0))

    def selected(rows, width=700, kernel="stats", dtype=torch.bfloat16, m=128, n=128):
        x_MD = torch.empty(rows, width, dtype=dtype, device="meta")
        work = SimpleNamespace(kernel=kernel, x_MD=x_MD, blocks=tuned_configs.Blocks(m, n, 64, 4, 3))
        return pipeline.select_pipeline(work, launch.Panel(slice(0, rows), slice(0, 1280)))

    # Ten pairs of tiles are 2.5 for each of four multiprocessors.
    assert selected(256).group == 16 and selected(1).group == 16
    assert selected(256)._fields == tuned_configs.Pipeline._fields
    assert selected(256, width=100) is selected(256, dtype=torch.float32) is selected(256, kernel="gradient") is None
    assert selected(256, n=256) is None
    found[1]["min_tile_pairs"] = 2.6
    file.write_text(json.dumps({"blocks": [], "pipelines": found}))
    assert selected(256) is None and selected(257).group == 16
    pretend(monkeypatch, "C", (10, 0))
    assert selected(4096) is None


def test_blocks_are_those_of_this_device_or_of_its_capability_at_the_nearest_width(monkeypatch, tmp_path):
    common = {"kernel": "stats", "kind": "tf32", "k": 64, "warps": 8, "stages": 3, "programs": 1, "group": 8, "pieces": 1}
    places = [("A", "9.0", 256, 32), ("A", "9.0", 1024, 64), ("B", "9.0", 256, 128)]
    names = ("device", "capability", "width", "m")
    entries = [{**common, **dict(zip(names, place, strict=True)), "n": place[-1]} for place in places]
    file = tmp_path / "tuned_configs.json"
    file.write_text(json.dumps({"blocks": entries, "pipelines": []}))
    monkeypatch.setattr(tuned_configs, "TUNED", file)
    for name, version, width, m in [
        ("A", (9, 0), 300, 32),
        ("A", (9, 0), 4096, 64),
        ("B", (9, 0), 4096, 128),
        ("C", (9, 0), 1000, 64),
        ("C", (12, 0), 1000, 128),
    ]:
        pretend(monkeypatch, name, version)
        found = blocks_on("stats", torch.float32, "tf32", width)
        assert (found.m, found.k) == (m, 64 if name != "C" or version == (9, 0) else 16)
    pretend(monkeypatch, "A", (9, 0))
    assert [blocks_on("stats", torch.float32, "tf32", width).k for width in (7, 16, 17, 40, 100)] == [16, 16, 32, 64, 64]
    assert blocks_on("gradient", torch.float32, "tf32", 256) != blocks_on("stats", torch.float32, "tf32", 256)


def test_gains_are_unshifted_and_peaks_out_of_range_are_marked():
    from megabatch.tiles.fused.unshifted_gains import TILE, unshifted_gains

    peaks, gains = (torch.randn(2, 300, generator=torch.Generator().manual_seed(seed)).unbind() for seed in (0, 1))
    rows, columns = Softmax(peaks[0], gains[0]), Softmax(peaks[1][:129], gains[1][:129])
    needs_fallback = torch.zeros(128, dtype=torch.int32)
    for other, (scale, offset) in itertools.product((columns, None), [(20.0, 0), (-70.0, 14), (1e3, 44)]):
        found = unshifted_gains(torch.tensor(scale), rows, other, needs_fallback)
        torch.testing.assert_close(found.rows[:300], gains[0] * torch.exp(offset - peaks[0]), rtol=1e-5, atol=0)
        assert not found.rows[300:].any() and len(found.rows) >= 300 + 2 * TILE
        if other:
            assert not found.columns[129:].any() and len(found.columns) >= 129 + 2 * TILE
            torch.testing.assert_close(found.columns[:129], gains[1][:129] * torch.exp(offset - peaks[1][:129]), rtol=1e-5, atol=0)
        assert not needs_fallback.any()
    peaks[1][3] = 65.0
    scale = torch.tensor(20.0)
    unshifted_gains(torch.tensor(58.0), rows, columns, needs_fallback)
    assert not needs_fallback.any()
    unshifted_gains(scale, rows, columns, needs_fallback)
    assert needs_fallback.nonzero().tolist() == [[3]]
    # Gains that are zero are exact in bf16, and those of tiny weights are not.
    peaks[1][3], gains[0][5], gains[0][140] = 0.0, 0.0, 1e-36
    unshifted_gains(scale, rows, columns, needs_fallback.zero_())
    assert needs_fallback.nonzero().tolist() == [[140 - 128]]
