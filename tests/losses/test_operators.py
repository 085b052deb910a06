"""torch.compile sees a loss as one operator, which gives the value and the gradients of eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import embeddings
from torch import Tensor

import megabatch
from megabatch.losses import clip, siglip

CLIP = (True, "mask", 0.0, None, False)
ALONE = (True, False, None, None, "ieee", False)
TILES = (True, False, None, 1000, "ieee", False)


def step(a: Tensor, b: Tensor, tower: torch.nn.Linear, scale: Tensor, **options: Any) -> Tensor:
    x, y = (torch.nn.functional.normalize(tower(t), dim=-1) for t in (a, b))
    loss = megabatch.clip_loss(x, y, scale.exp(), **options)
    return 3 * loss + megabatch.SigLipLoss(**options)(x, y, scale.exp(), -0.1)


def gradients(f: Callable[..., Tensor], dtype: torch.dtype = torch.float64, rows: int = 20, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    tower, scale = torch.nn.Linear(8, 4, dtype=dtype), torch.tensor(1.0, dtype=dtype, requires_grad=True)
    loss = f(*(t.to(dtype) for t in embeddings(rows)), tower, scale, **options)
    loss.backward()
    return [loss.detach(), tower.weight.grad, scale.grad]


def agree(found: list[Tensor], expected: list[Tensor], rtol: float) -> bool:
    return all(torch.allclose(a, b, rtol=rtol, atol=rtol * float(b.abs().max())) for a, b in zip(found, expected, strict=True))


def test_a_compiled_step_is_one_graph():
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for options in ({}, {"workspace": 1000}):
        # The same operations in fp64, in another order at most.
        assert agree(gradients(compiled, **options), gradients(step, **options), 1e-12)


# Inductor imports modules that use what PyTorch has deprecated.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize(
    "backend, dynamic, rows", [("eager", False, (20, 28)), ("eager", True, (20, 28)), ("inductor", False, (20,))]
)
def test_every_compiler_gives_what_eager_mode_gives(backend, dynamic, rows):
    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=dynamic)
    for count in rows:
        assert agree(gradients(compiled, torch.float32, count), gradients(step, torch.float32, count), 1e-5)


@pytest.mark.slow
def test_autocast_rounds_in_a_compiled_step_as_in_eager_mode():
    torch._dynamo.reset()

    def rounded(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return megabatch.clip_loss(x, y, 20.0)

    results = []
    for f in (torch.compile(rounded, backend="aot_eager", fullgraph=True), rounded, lambda x, y: megabatch.clip_loss(x, y, 20.0)):
        x, y = (t.float().requires_grad_() for t in embeddings(12))
        value = f(x, y)
        value.backward()
        results.append([value.detach(), x.grad])
    compiled, eager, not_rounded = results
    assert agree(compiled, eager, 1e-6) and not agree(compiled, not_rounded, 1e-5)


# Dynamo reads .grad of tensors that exist after a graph break.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_diagnostics_break_the_graph_and_nothing_else():
    torch._dynamo.reset()
    x, y = (t.requires_grad_() for t in embeddings(12))

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss, diagnostics = megabatch.clip_loss(2 * x, y, 5.0, diagnostics=True)
        return 2 * loss, diagnostics.row_rank

    loss, rank = torch.compile(both, backend="eager")(x, y)
    expected, expected_rank = both(x, y)
    assert torch.equal(loss, expected) and torch.equal(rank, expected_rank) and loss.requires_grad


OPTIONS = {
    "usual": (CLIP, ALONE),
    "tiles": (CLIP, TILES),
    "rows only": ((False, *CLIP[1:]), ALONE),
    "further positives": ((True, "positive", 0.1, 0.5, False), ALONE),
}


@pytest.mark.parametrize("options, execution", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_operator_of_clip_loss_takes_every_option(options, execution, dtype):
    x, y = embeddings(12)
    ids = torch.arange(12) // 2 if options[1] == "positive" else None
    weights = torch.arange(1.0, 13.0) if options[1] == "positive" else None
    symmetric, duplicates, label_smoothing, drop_above, _ = options
    named = dict(symmetric=symmetric, duplicates=duplicates, label_smoothing=label_smoothing, drop_above=drop_above)
    named |= dict(ids=ids, weights=weights, workspace=execution[3])
    results = []
    for f in (
        lambda x, y, scale: clip._operator(x, y, scale, None, ids, weights, *options, *execution),
        lambda x, y, scale: megabatch.clip_loss(x, y, scale, **named),
    ):
        leaves = [t.to(dtype).requires_grad_() for t in (x, y)] + [torch.tensor([5.0], requires_grad=True)]
        value = 3 * f(*leaves)
        value.backward()
        results.append([value.detach(), *(t.grad for t in leaves)])
        assert [t.grad.dtype for t in leaves] == [t.dtype for t in leaves]
    assert agree(*results, 1e-12 if dtype == torch.float64 else 2**-7)


@pytest.mark.parametrize("execution", [ALONE, TILES], ids=["one piece", "tiles"])
def test_the_operator_computes_the_gradients_that_are_needed(execution):
    x, y = embeddings(12)
    scale, bias = torch.tensor(5.0), torch.tensor(-1.0, requires_grad=True)
    value = siglip._operator(x, y.requires_grad_(), scale, bias, None, None, "mask", False, *execution)
    value.backward()
    expected = [t.grad.clone() for t in (y, bias)]
    y.grad = bias.grad = None
    megabatch.siglip_loss(x, y, scale, bias).backward()
    assert agree([y.grad, bias.grad], expected, 1e-6) and x.grad is None
    with torch.no_grad():
        assert not siglip._operator(x, y, scale, bias, None, None, "mask", False, *execution).requires_grad


@pytest.mark.slow
def test_a_mistake_in_a_compiled_step_is_named():
    torch._dynamo.reset()
    x, y = embeddings(6)
    compiled = torch.compile(lambda x, y: megabatch.clip_loss(x, y, 5.0), backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match="x has 6 rows and y 5"):
        compiled(x, y[:5])


@pytest.mark.slow
def test_a_second_derivative_through_the_operator_raises_a_clear_error():
    x, y = (t.requires_grad_() for t in embeddings(6))
    value = clip._operator(x, y, torch.tensor(5.0), None, None, None, *CLIP, *ALONE)
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"first derivatives only.*megabatch.reference"):
        gradient.pow(2).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("execution", [ALONE, TILES], ids=["one piece", "tiles"])
def test_operators_keep_the_rules_of_torch_library(execution):
    x, y = (t.requires_grad_() for t in embeddings(6))
    scale = torch.tensor(5.0, requires_grad=True)
    inputs = (x, y, scale, None, None, None, [True, True, True, False], None)
    # Not test_aot_dispatch_dynamic, which differentiates the gradients again.
    rules = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.megabatch.clip_loss.default, (*inputs, *CLIP, *execution), test_utils=rules)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script:DeprecationWarning", "ignore:TensorFloat32 tensor cores", "ignore:The CUDA Graph is empty"
)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_on_cuda(mode):
    torch._dynamo.reset()

    def on_cuda(f: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        tower, scale = torch.nn.Linear(64, 64, device="cuda"), torch.tensor(1.0, device="cuda", requires_grad=True)
        a, b = (t.float().cuda() for t in embeddings(256, width=64))
        for _ in range(4):
            tower.zero_grad()
            scale.grad = None
            loss = f(a, b, tower, scale)
            loss.backward()
        return [loss.detach().clone(), tower.weight.grad.clone(), scale.grad.clone()]

    assert agree(on_cuda(torch.compile(step, fullgraph=True, mode=mode)), on_cuda(step), 1e-4)
