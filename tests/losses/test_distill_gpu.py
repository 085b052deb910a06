"""Distillation with the Triton kernels on a CUDA device: right in every dtype, repeatable, without a wait, in linear memory."""

from __future__ import annotations

import functools

import pytest
import torch
from cases import embeddings

import megabatch
from megabatch import reference

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Arithmetic is tested with scales that are useless for training.
    pytest.mark.filterwarnings("ignore:scale="),
]

MIB = 2**20
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def tensors(rows: int, dtype: torch.dtype, extra: int = 0, norm: float = 1.0) -> list[torch.Tensor]:
    """Return x, y and a wider teacher's: random, so that no gradient cancels to a size at which rounding counts more."""
    student = embeddings(rows, extra, width=96, norm=norm)
    teacher = embeddings(rows, extra, width=160, norm=norm, seed=1)
    return [t.to("cuda", dtype) for t in (*student, *teacher)]


def run(module, inputs: list[torch.Tensor], scales: tuple[float, float] = (20.0, 50.0), **options) -> list[torch.Tensor]:
    """Return the value and the gradients of x, y and the scale."""
    acc = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
    leaves = [t.detach().requires_grad_() for t in (*inputs[:2], torch.tensor(scales[0], dtype=acc, device="cuda"))]
    loss = module.distill_loss(*leaves, *inputs[2:], scales[1], **options)
    return [loss.detach(), *torch.autograd.grad(2 * loss, leaves)]


def assert_right(inputs: list[torch.Tensor], allowed: float, scales: tuple[float, float] = (20.0, 50.0), **options) -> None:
    true = run(reference, [t.double() for t in inputs], scales, **{k: v for k, v in options.items() if k != "workspace"})
    found = run(megabatch, inputs, scales, **options)
    for name, a, b in zip(("value", "x", "y", "scale"), found, true, strict=True):
        error = ((a.double() - b).norm() / b.norm()).item()
        assert error <= allowed, (name, error)


# Gradients are rounded once; in bf16 those in the logits too, before the products with them, and in fp16 to tf32.
ALLOWED = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 100, 1000, 4096])
@pytest.mark.parametrize("options", [{}, {"symmetric": False}, {"divergence": "kl"}], ids=["both", "rows", "kl"])
def test_every_dtype_is_right(options, rows, dtype):
    if rows == 1:
        # The only softmax is one: the value is zero or near it, and all gradients are zero.
        found = run(megabatch, tensors(1, dtype), **options)
        assert all(t.abs().max() <= 1e-4 for t in found)
        return
    assert_right(tensors(rows, dtype), ALLOWED[dtype], **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_documents_beyond_the_rows_and_weights(dtype):
    weights = torch.linspace(0.5, 2, 777, device="cuda")
    assert_right(tensors(777, dtype, extra=222), ALLOWED[dtype], symmetric=False, weights=weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("workspace", [MIB, 7 * MIB])
def test_panels_of_any_size(workspace, dtype):
    assert_right(tensors(1500, dtype), ALLOWED[dtype], divergence="kl", workspace=workspace)


@pytest.mark.parametrize("scales", [(1.0, 300.0), (300.0, 1.0), (-5.0, 5.0)], ids=str)
def test_logits_of_any_size(scales):
    # Up to 1,200.
    assert_right(tensors(600, torch.bfloat16, norm=2.0), ALLOWED[torch.bfloat16], scales)


def test_a_teacher_of_another_dtype_is_not_rounded():
    x, y, *_ = tensors(500, torch.bfloat16)
    *_, teacher_x, teacher_y = tensors(500, torch.float32)
    true = run(reference, [t.double() for t in (x, y, teacher_x, teacher_y)])
    found = run(megabatch, [x, y, teacher_x, teacher_y])
    assert abs(found[0].double() - true[0]) <= 1e-5 * abs(true[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_are_the_default_and_agree_with_the_eager_tiles(dtype):
    inputs = tensors(1000, dtype)
    default, fused, eager = (run(megabatch, inputs, backend=backend) for backend in (None, "fused", "eager"))
    assert all(torch.equal(a, b) for a, b in zip(default, fused, strict=True))
    for a, b in zip(fused, eager, strict=True):
        assert (a.double() - b).norm() <= ALLOWED[dtype] * b.double().norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_repeat_bit_for_bit(dtype):
    inputs = tensors(3000, dtype)
    first, *again = (run(megabatch, inputs, workspace=32 * MIB) for _ in range(3))
    for results in again:
        assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))


def test_no_synchronisation_after_the_first_call():
    inputs = tensors(1000, torch.bfloat16)
    scale = torch.tensor(20.0, device="cuda")
    x, y = (t.detach().requires_grad_() for t in inputs[:2])
    teacher_scale = torch.tensor(50.0, device="cuda")
    step = functools.partial(megabatch.distill_loss, x, y, scale, *inputs[2:], teacher_scale)
    step().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_is_linear_in_the_batch_beside_the_workspace():
    workspace, width = 64 * MIB, 256
    for rows in (8192, 32_768):
        inputs = [torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) / 16 for _ in range(4)]
        step = functools.partial(run, megabatch, inputs, workspace=workspace)
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        extra = torch.cuda.max_memory_allocated() - before
        # Gradients of both sides in fp32 and bf16, about forty vectors, and the sums of blocks. One matrix takes 4 GiB.
        assert extra <= 1.1 * workspace + 2 * rows * width * (4 + 2) + 40 * rows * 4 + 2 * MIB, (rows, extra / MIB)
        del inputs, step
