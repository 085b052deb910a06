"""All widths of Matryoshka together in Triton's interpreter: values and gradients of the formula, wherever they are used."""

from __future__ import annotations

import functools
import importlib
import itertools

import pytest
import torch
from cases import embeddings
from interpreted import IN_INTERPRETER

import megabatch
from megabatch import reference
from megabatch.costs.memory import loss as loss_memory
from megabatch.tiles.contract import ComputeOptions
from megabatch.tiles.fused import matryoshka as kernels
from megabatch.tiles.fused import softmax_forward

pytestmark = IN_INTERPRETER

# The package exports the function of the same name.
loss_module = importlib.import_module("megabatch.losses.matryoshka")

EPS = torch.finfo(torch.float32).eps
LARGEST_NARROW_WIDTH = kernels.LARGEST_NARROW_WIDTH
DIMS, WEIGHTS = (48, 32, 16), (1.0, 0.5, 2.0)
# Panels of several tiles, and one that holds the whole matrix.
SMALL, LARGE = 12_000, 2**24


@pytest.fixture(autouse=True)
def no_width_by_itself(monkeypatch):
    def evaluate(self, *args, **options):
        raise AssertionError("this call has to compute all widths together")

    monkeypatch.setattr(loss_module.Widths, "evaluate", evaluate)
    # The widths of these tests are narrow, and have panels unless a test says otherwise.
    monkeypatch.setattr(kernels, "LARGEST_NARROW_WIDTH", 0)


def results(loss, x, y, scale, dtype=torch.float64):
    """Return value and gradients, as fp64."""
    scale = torch.tensor(scale, dtype=torch.promote_types(dtype, torch.float32))
    leaves = [t.clone().requires_grad_() for t in (x.to(dtype), y.to(dtype), scale)]
    value = loss(*leaves)
    value.backward()
    return [t.detach().double() for t in (value, *(t.grad for t in leaves))]


def assert_the_formula(x, y, scale, *, symmetric=True, dtype=torch.float32, dims=DIMS, weights=WEIGHTS, workspace=SMALL):
    x, y = x.to(dtype).double(), y.to(dtype).double()
    formula = functools.partial(reference.matryoshka_loss, reference.clip_loss, dims=dims, dim_weights=weights, symmetric=symmetric)
    criterion = megabatch.matryoshka(
        functools.partial(megabatch.clip_loss, symmetric=symmetric, backend="fused", workspace=workspace), dims, weights
    )
    exact, found = results(formula, x, y, scale), results(criterion, x, y, scale, dtype)
    total = sum(weights)
    # Of one term of each: a gradient may cancel to zero, and the rounding of its terms remains.
    by_norm = [scale / t.norm(dim=1).min().item() / len(x) ** 0.5 for t in (x, y)]
    sizes = total * (1 + abs(scale)), total * abs(by_norm[0]), total * abs(by_norm[1]), total
    for index, (a, b, size) in enumerate(zip(found, exact, sizes, strict=True)):
        rounding = 32 * EPS * (1 + abs(scale)) * (b.norm() + size) + 1e-25
        if dtype == torch.float16 and index in (1, 2):
            # Panels are rounded to tf32, with the digits of fp16; equal terms have equal errors. The gradient is rounded too.
            rounding += torch.finfo(dtype).eps * (b.norm() + size)
        assert (a - b).norm() <= rounding, index


def test_several_panels_are_the_formula():
    assert_the_formula(*embeddings(20, width=32, norm=3.0), 20.0, dims=(32, 16), weights=(1.0, 0.5), workspace=3000)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", ["random", "clustered", "identical", "opposite"])
@pytest.mark.parametrize("scale", [1.0, 20.0, 100.0])
def test_any_embeddings_are_the_formula(kind, scale, symmetric, dtype):
    assert_the_formula(*embeddings(37, width=48, kind=kind, norm=0.3), scale, symmetric=symmetric, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 16, 33, 65])
@pytest.mark.parametrize("workspace", [1, LARGE])
def test_any_number_of_rows(rows, workspace):
    assert_the_formula(*embeddings(rows, width=48), 10.0, workspace=workspace)


@pytest.mark.slow
@pytest.mark.parametrize("extra", [1, 30])
def test_documents_beyond_the_rows_are_negatives(extra):
    assert_the_formula(*embeddings(35, extra, width=48), 10.0, symmetric=False)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(48,), (16, 48), (80, 64, 48, 32, 16), (96, 80, 64, 48, 32, 16)])
@pytest.mark.parametrize("kept", [0, 1, 3])
def test_any_widths_in_any_groups(dims, kept, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_KEPT_TILES", kept)
    # Embeddings wider than every width have a gradient of zero beyond it.
    weights = tuple(1.0 + i for i in range(len(dims)))
    assert_the_formula(*embeddings(34, width=112), 10.0, dims=dims, weights=weights)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale", [10.0, 300.0])
@pytest.mark.parametrize("largest", [16, 32, 48])
def test_narrow_widths_without_panels(largest, scale, symmetric, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "LARGEST_NARROW_WIDTH", largest)
    assert_the_formula(*embeddings(37, 0 if symmetric else 5, width=48), scale, symmetric=symmetric, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [-20.0, 1e-3, 0.0, 300.0, 2000.0])
def test_any_scale(scale):
    assert_the_formula(*embeddings(34, width=48), scale)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [70.0, 150.0])
def test_rows_whose_logits_are_all_low_are_computed_again(scale):
    """Half of the rows point away from all others, so that exponentials with the common offset underflow."""
    x, y = embeddings(40, width=48, kind="clustered")
    centre = y[:1]
    y = torch.nn.functional.normalize(centre + 0.05 * y, dim=1)
    x = torch.nn.functional.normalize(torch.where(torch.arange(40)[:, None] % 2 == 0, centre, -centre) + 0.05 * x, dim=1)
    assert_the_formula(x, y, scale)


@pytest.mark.slow
def test_norms_count_as_in_normalize():
    x, y = embeddings(20, width=48)
    x[1] *= 1e-14
    x[2, :16] = 0
    formula = functools.partial(reference.matryoshka_loss, reference.clip_loss, dims=DIMS)
    criterion = megabatch.matryoshka(functools.partial(megabatch.clip_loss, backend="fused"), DIMS)
    exact, found = results(formula, x, y, 2.0), results(criterion, x, y, 2.0, torch.float32)
    assert exact[1][1].abs().max() > 1e9
    for a, b in zip(found, exact, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.slow
def test_runs_are_equal_bit_for_bit_and_a_second_backward_adds_the_same_gradients():
    x, y = (t.float().requires_grad_() for t in embeddings(20, width=48))
    criterion = megabatch.matryoshka(megabatch.ClipLoss(backend="fused", workspace=SMALL), DIMS)
    losses = [criterion(x, y, 20.0) for _ in range(2)]
    first, second = (torch.autograd.grad(loss, (x, y), retain_graph=True) for loss in losses)
    assert torch.equal(*losses) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    again = torch.autograd.grad(3 * losses[0], (x, y))
    assert all(torch.allclose(3 * a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True), (False, False, False)])
def test_only_what_needs_a_gradient_gets_one(needed):
    x, y = (t.float() for t in embeddings(20, width=16))
    inputs = [t.requires_grad_(need) for t, need in zip((x, y, torch.tensor(20.0)), needed, strict=True)]
    whole = [t.detach().clone().requires_grad_() for t in inputs]
    criterion = megabatch.matryoshka(functools.partial(megabatch.clip_loss, backend="fused"), (16,))
    criterion(*whole).backward()
    loss = criterion(*inputs)
    assert loss.requires_grad == any(needed)
    if any(needed):
        loss.backward()
    for one, all_of_them, need in zip(inputs, whole, needed, strict=True):
        assert torch.equal(one.grad, all_of_them.grad) if need else one.grad is None


@pytest.mark.slow
def test_diagnostics_are_those_of_the_widest_prefix():
    x, y = (t.float() for t in embeddings(9, width=32))
    criterion = megabatch.matryoshka(megabatch.ClipLoss(diagnostics=True, backend="fused"), (16, 32))
    loss, found = criterion(x.requires_grad_(), y, 5.0)
    assert torch.equal(found.row_rank, reference.ranks(x, y)[0])
    loss.backward()
    (plain,) = torch.autograd.grad(megabatch.matryoshka(megabatch.ClipLoss(backend="fused"), (16, 32))(x, y, 5.0), x)
    assert torch.equal(x.grad, plain)


def arguments(loss, *inputs, **options):
    return loss_module._softmax_arguments(loss, inputs, options)


def test_which_calls_compute_all_widths_together():
    x, y = embeddings(5, width=16)
    clip, infonce = megabatch.clip_loss, megabatch.infonce_loss
    assert arguments(clip, x, y, 5.0)["symmetric"] and not arguments(infonce, x, y, 5.0)["symmetric"]
    assert not arguments(clip, x, y, 5.0, symmetric=False)["symmetric"]
    assert arguments(megabatch.ClipLoss(workspace=7), x, y, 5.0)["workspace"] == 7
    assert arguments(functools.partial(clip, workspace=7), x, y, 5.0, workspace=8)["workspace"] == 8
    assert arguments(clip, x, y, 5.0, ids=None, weights=None, label_smoothing=0) is not None
    ids, weights = torch.arange(5), torch.ones(5)
    hooked = megabatch.ClipLoss()
    hooked.register_forward_hook(lambda *_: None)

    class Doubled(megabatch.ClipLoss):
        def forward(self, *inputs, **options):
            return 2 * super().forward(*inputs, **options)

    for loss, inputs, options in (
        (Doubled(), (5.0,), {}),
        (clip, (5.0,), {"ids": ids}),
        (clip, (5.0,), {"weights": weights}),
        (clip, (5.0,), {"label_smoothing": 0.1}),
        (clip, (5.0,), {"drop_above": 0.1}),
        (clip, (5.0,), {"int8_backward": True}),
        (clip, (5.0,), {"unknown": 1}),
        (clip, (5.0, 6.0), {}),
        (clip, (), {}),
        (infonce, (5.0,), {"queue": y}),
        (infonce, (5.0,), {"directions": ("x_to_y", "y_to_x")}),
        (megabatch.ClipLoss(label_smoothing=0.1), (5.0,), {}),
        (megabatch.ClipLoss(), (5.0,), {"symmetric": False}),
        (hooked, (5.0,), {}),
        (functools.partial(clip, x), (5.0,), {}),
        (megabatch.siglip_loss, (5.0, -5.0), {}),
        (reference.clip_loss, (5.0,), {}),
    ):
        assert arguments(loss, x, y, *inputs, **options) is None, (loss, options)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: megabatch.matryoshka(megabatch.clip_loss, (8,))(x, y, 5.0, backend="fused"),
        lambda x, y: megabatch.matryoshka(megabatch.clip_loss, (16,), normalize=False)(x, y, 5.0, backend="fused"),
        lambda x, y: megabatch.matryoshka(megabatch.clip_loss, (16,))(x, y, 5.0),
        lambda x, y: megabatch.matryoshka(megabatch.clip_loss, (16,))(x, y, 5.0, backend="eager"),
    ],
    ids=["no whole steps", "not normalised", "a CPU", "eager"],
)
def test_all_other_calls_compute_each_width_by_itself(call):
    x, y = (t.float() for t in embeddings(5, width=16))
    with pytest.raises(AssertionError, match="all widths together"):
        call(x, y)


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 7])
def test_every_column_gets_the_gradient_of_every_width_that_contains_it_once(kept):
    for count in range(1, 7):
        for dims in itertools.combinations((16, 64, 128, 256, 512, 768), count):
            ends = kernels.group_ends(dims, kept)
            products = kernels.panel_products(dims, ends)
            assert sorted(product.width for product in products) == list(range(count))
            for column, width in itertools.product((0, *dims[:-1]), range(count)):
                # The panel of a width contains the gradients of this width and of the wider ones of its group.
                containing = [
                    product
                    for product in products
                    if product.columns.start <= column < product.columns.stop and product.width <= width <= ends[product.width]
                ]
                assert len(containing) == (column < dims[width])
            firsts = [product.columns for product in products if product.is_first]
            assert sum(columns.stop - columns.start for columns in firsts) == dims[-1]
            assert [product.is_first for product in products] == sorted((p.is_first for p in products), reverse=True)


@pytest.mark.slow
def test_the_workspace_bounds_the_panels_of_all_widths(monkeypatch):
    x, y = (t.float() for t in embeddings(64, width=48))
    allocated = []
    products = kernels.GradientProducts
    monkeypatch.setattr(products, "add", lambda self, panel, p, *args, **options: allocated.append(p.rows * p.columns))
    compute = ComputeOptions(30_000)
    loss, state = kernels.prefix_loss(x, y, torch.tensor(5.0), tuple(sorted(DIMS)), WEIGHTS, symmetric=True, compute=compute)
    needs_grad = kernels.NeedsGrad(True, True)
    kernels.prefix_grads(
        x, y, torch.tensor(5.0), state, torch.ones_like(loss), (x.dtype, y.dtype), needs_grad=needs_grad, compute=compute
    )
    assert len(allocated) // len(DIMS) > 1 and max(allocated) * len(DIMS) * 4 <= compute.workspace


def test_predicted_memory_splits_panels_as_the_kernels_do():
    assert (
        kernels.GRADIENT_BLOCKS[:2] == loss_memory.PREFIX_GRADIENT_TILE
        and kernels.STATS_BLOCKS[:2] == loss_memory.PREFIX_STATS_TILE
    )
    assert kernels.PANELS_WORKSPACE == loss_memory.PANELS_WORKSPACE and softmax_forward.CACHED_BYTES == loss_memory.CACHED_BYTES
    assert kernels.SMALLEST_STEP == loss_memory.PREFIX_STEP and LARGEST_NARROW_WIDTH == loss_memory.NARROW_WIDTH
