"""The kernels for small batches in Triton's interpreter: the whole matrix at once gives the formula's values and gradients."""

from __future__ import annotations

import inspect
import itertools
import random

import pytest
import torch
from cases import INPUTS_OF_ONE_PIECE as INPUTS
from cases import LOSSES_IN_ONE_PIECE as LOSSES
from cases import Case, embeddings
from interpreted import IN_INTERPRETER

import megabatch
from megabatch import reference
from megabatch.losses import one_piece as losses_in_one_piece
from megabatch.tiles.contract import ComputeOptions
from megabatch.tiles.fused import launch, one_piece

pytestmark = IN_INTERPRETER

EPS = torch.finfo(torch.float32).eps
# The last rows and columns of a tile, one row more, and several tiles of each kind.
ROWS = (2, 33, 128, 300)


@pytest.fixture(autouse=True)
def kernels_on_a_cpu(monkeypatch):
    monkeypatch.setattr(losses_in_one_piece, "one_piece_for", lambda tiles, device: one_piece)
    losses_in_one_piece.plan_for.cache_clear()
    yield
    losses_in_one_piece.plan_for.cache_clear()


def assert_the_formula(case: Case, rounding: float) -> None:
    exact, found = case.run(reference), case.run(megabatch, torch.float32)
    for name, value in exact.items():
        slack = rounding * value.abs().max() + (rounding * float((case.x @ case.y.T).abs().max()) if name == "scale" else 0)
        assert (found[name] - value).abs().max() <= slack, name


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("rows", ROWS)
def test_any_number_of_rows(loss, rows):
    name, options = loss
    x, y = embeddings(rows, width=12)
    assert_the_formula(Case(name, x, y, (20.0, -5.0)[: 1 + (name == "siglip_loss")], options), 100 * EPS)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_any_logits(loss, inputs):
    (name, options), (kind, scale) = loss, inputs
    x, y = (t.float().double() for t in embeddings(40, **kind))
    largest = abs(scale) * float((x @ y.T).abs().max())
    # A logit is rounded in proportion to its size, and so is its exponential.
    assert_the_formula(Case(name, x, y, (scale, -5.0)[: 1 + (name == "siglip_loss")], options), (100 + 4 * min(largest, 1e4)) * EPS)


def test_documents_beyond_the_rows_are_negatives():
    x, y = embeddings(40)[0][:30], embeddings(40)[1]
    assert_the_formula(Case("clip_loss", x, y, (20.0,), {"symmetric": False}), 100 * EPS)


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, True), (False, False, True), (False, False, False)])
def test_only_what_needs_a_gradient_gets_one(needed):
    x, y = (t.float() for t in embeddings(40))
    inputs = [t.requires_grad_(need) for t, need in zip((x, y, torch.tensor(20.0)), needed, strict=True)]
    whole = [t.detach().clone().requires_grad_() for t in inputs]
    megabatch.clip_loss(*whole).backward()
    loss = megabatch.clip_loss(*inputs)
    assert loss.requires_grad == any(needed)
    if any(needed):
        loss.backward()
    for one, all_of_them, need in zip(inputs, whole, needed, strict=True):
        assert torch.equal(one.grad, all_of_them.grad) if need else one.grad is None


def test_a_second_backward_adds_the_same_gradients():
    inputs = [t.float().requires_grad_() for t in embeddings(40)]
    loss = megabatch.clip_loss(*inputs, 20.0)
    loss.backward(retain_graph=True)
    once = [t.grad.clone() for t in inputs]
    (3 * loss).backward()
    assert all(torch.allclose(t.grad, 4 * g) for t, g in zip(inputs, once, strict=True))


def test_what_fits():
    def fits(rows: int, documents: int, dtype: torch.dtype, compute: ComputeOptions, width: int = 64) -> bool:
        return one_piece.fits((rows, documents, width), dtype, compute)

    compute = ComputeOptions(6 * 100**2)
    assert fits(100, 100, torch.bfloat16, compute) and not fits(100, 101, torch.bfloat16, compute)
    assert not fits(100, 100, torch.float32, compute) and not fits(10, 10, torch.float16, compute)
    assert not fits(1, 1, torch.bfloat16, compute) and not fits(0, 5, torch.bfloat16, compute)
    large = ComputeOptions(2**40)
    assert not fits(8192, 8193, torch.bfloat16, large) and not fits(8192, 8192, torch.bfloat16, large, 2**18)
    assert not fits(10, 10, torch.float32, large._replace(precision="tf32"))
    in_graph = large._replace(in_graph=True)
    assert fits(4096, 4096, torch.bfloat16, in_graph) and not fits(4096, 4097, torch.bfloat16, in_graph)
    assert fits(8192, 8192, torch.float32, in_graph)


class FakeKernel:
    """Stands for a Triton kernel. What it compiles raises if it is launched with arguments that it was not compiled for."""

    def __init__(self, kernel) -> None:
        annotations = inspect.signature(kernel.fn).parameters.values()
        self.is_constant = ["constexpr" in str(parameter.annotation) for parameter in annotations]

    def what_it_depends_on(self, arguments) -> list:
        assert len(arguments) == len(self.is_constant)
        return [
            a if constant or a is None else a.dtype if isinstance(a, torch.Tensor) else type(a)
            for a, constant in zip(arguments, self.is_constant, strict=True)
        ]

    def __getitem__(self, grid):
        def compile_and_launch(*arguments):
            return Compiled(self, self.what_it_depends_on(arguments))

        return compile_and_launch


class Compiled:
    function = packed_metadata = None

    def __init__(self, kernel: FakeKernel, compiled_for: list) -> None:
        self.kernel, self.compiled_for = kernel, compiled_for

    def run(self, *arguments):
        # Three dimensions of the grid, stream, function, metadata of kernel and launch, and two hooks come first.
        assert self.kernel.what_it_depends_on(arguments[9:]) == self.compiled_for


def test_a_compiled_kernel_is_used_only_for_what_it_was_compiled_for(monkeypatch):
    monkeypatch.setattr(one_piece, "_compiled", {})
    monkeypatch.setattr(launch, "_stream", lambda device: 0)
    # An address would not tell the dtype.
    monkeypatch.setattr(launch, "addresses", tuple)
    for name in [name for name in vars(one_piece) if name.endswith("_kernel")]:
        monkeypatch.setattr(one_piece, name, FakeKernel(getattr(one_piece, name)))
    calls = list(itertools.product(LOSSES.values(), itertools.product((True, False), repeat=3), (8, 12)))
    random.Random(0).shuffle(calls)
    for (name, options), needs, width in calls * 2:
        tensors = *(t.float() for t in embeddings(40, width=width)), torch.tensor(20.0)
        inputs = [t.requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        loss = getattr(megabatch, name)(*inputs, *(-5.0,) * (name == "siglip_loss"), **options)
        if loss.requires_grad:
            loss.backward()
    assert one_piece._compiled
