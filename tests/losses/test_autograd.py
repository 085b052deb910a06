"""How the losses behave inside PyTorch: graphs, modes, the compiler, determinism."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from cases import embeddings

import megabatch
from megabatch.tiles import products

LOSSES = {
    "clip": lambda x, y, **options: megabatch.clip_loss(x, y, 5.0, **options),
    "siglip": lambda x, y, **options: megabatch.siglip_loss(x, y, 5.0, -2.0, **options),
}
losses = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


@losses
def test_a_second_derivative_raises_a_clear_error(loss):
    x, y = embeddings(6)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x, y), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"first derivatives only.*megabatch.reference"):
        torch.autograd.grad(gradient.pow(2).sum(), x, allow_unused=True)


@losses
def test_create_graph_alone_does_no_harm(loss):
    x, y = embeddings(6)
    x.requires_grad_()
    (once,) = torch.autograd.grad(loss(x, y), x)
    (graph,) = torch.autograd.grad(loss(x, y), x, create_graph=True)
    assert torch.equal(once, graph)


@losses
def test_backward_twice_through_a_retained_graph_adds_up(loss):
    x, y = embeddings(6)
    x.requires_grad_()
    value = loss(x, y)
    value.backward(retain_graph=True)
    once = x.grad.clone()
    value.backward()
    assert torch.equal(x.grad, 2 * once)


@losses
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_their_work_is_skipped(loss, mode, monkeypatch):
    x, y = embeddings(6)
    x.requires_grad_()
    expected = loss(x, y, workspace=64).detach()
    monkeypatch.setattr(products, "_add_product", lambda *_: pytest.fail("a gradient was computed"))
    with mode():
        value = loss(x, y, workspace=64)
    assert torch.equal(value, expected) and not value.requires_grad
    x.requires_grad_(False)
    assert not loss(x, y).requires_grad


def test_a_frozen_side_costs_no_product(monkeypatch):
    x, y = embeddings(6)
    x.requires_grad_()
    calls, add_product = [], products._add_product
    monkeypatch.setattr(products, "_add_product", lambda *args: calls.append(1) or add_product(*args))
    # Four tiles.
    megabatch.clip_loss(x, y, 5.0, workspace=2 * 12 * 8).backward()
    assert len(calls) == 4


def test_similarities_are_computed_once_forward_and_once_backward(monkeypatch):
    x, y = embeddings(64, width=8)
    x.requires_grad_()
    counted, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **kw: counted.append(len(a) * b.shape[1]) or mm(a, b, **kw))
    loss = megabatch.clip_loss(x, y, 5.0, workspace=4000)
    assert sum(counted) == 64 * 64
    loss.backward()
    assert sum(counted) == 2 * 64 * 64
    counted.clear()
    megabatch.siglip_loss(x, y, 5.0, -1.0, workspace=4000).backward()
    assert sum(counted) == 64 * 64


@losses
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_are_bit_equal(loss, dtype):
    x, y = (t.to(dtype) for t in embeddings(300, width=32))
    runs = []
    for _ in range(3):
        a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
        value = loss(a, b, workspace=2**16)
        value.backward()
        runs.append((value, a.grad, b.grad))
    assert all(torch.equal(s, t) for run in runs[1:] for s, t in zip(runs[0], run, strict=True))


@losses
def test_gradients_come_back_in_the_dtype_of_the_input(loss):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x, y = (t.to(dtype).requires_grad_() for t in embeddings(6))
        value = loss(x, y)
        value.backward()
        assert x.grad.dtype == y.grad.dtype == dtype
        assert value.dtype == torch.promote_types(dtype, torch.float32)


@losses
def test_embeddings_need_not_be_contiguous_and_are_not_changed(loss):
    x, y = embeddings(12, width=10)
    strided = x.T.contiguous().T[::2]
    before = strided.clone()
    a = strided.detach().requires_grad_()
    b = strided.detach().clone().requires_grad_()
    loss(a, y[::2]).backward()
    loss(b, y[::2].clone()).backward()
    assert torch.allclose(a.grad, b.grad) and torch.equal(strided, before)


def test_a_change_in_place_between_forward_and_backward_raises():
    x, y = embeddings(6)
    x.requires_grad_()
    scaled = x * 1
    loss = megabatch.clip_loss(scaled, y, 5.0)
    scaled.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_nan_embeddings_give_a_nan_loss():
    x, y = embeddings(6)
    x[2, 1] = torch.nan
    assert megabatch.clip_loss(x, y, 5.0).isnan() and megabatch.siglip_loss(x, y, 5.0, 0.0).isnan()


def test_a_grad_scaler_reaches_through_fp16_gradients():
    """Gradients too small for fp16 survive if the loss is scaled, as by a GradScaler."""
    x, y = embeddings(200, width=16, norm=1e-2)
    x, y = x.half().requires_grad_(), y.half()
    (megabatch.clip_loss(x, y, 1e-3) * 2.0**20).backward()
    wide = x.detach().double().requires_grad_()
    megabatch.clip_loss(wide, y.double(), 1e-3).backward()
    assert torch.allclose(x.grad.double() / 2**20, wide.grad, rtol=2e-3, atol=1e-12)


def test_importing_megabatch_imports_no_compiler_and_no_kernels():
    code = "import sys, megabatch; print([m for m in ('torch._dynamo', 'triton', 'open_clip', 'matplotlib') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
