"""Bad input gets a ValueError that names the value, the rule and the remedy."""

from __future__ import annotations

import math

import pytest
import torch

import megabatch

X, Y = torch.randn(5, 4), torch.randn(5, 4)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"x": X.long()}, "x is torch.int64: must be one of"),
        ({"x": X.to(torch.complex64)}, "x is torch.complex64"),
        ({"x": X[0]}, r"x has shape \(4,\): must be \(rows, width\)"),
        ({"x": X[:, :0], "y": Y[:, :0]}, "width of at least 1"),
        ({"x": X.tolist()}, "x is a list: must be a tensor"),
        ({"y": Y.double()}, "x is torch.float32 and y torch.float64: must be equal; convert"),
        ({"y": Y[:, :3]}, "x has width 4 and y 3: must be equal"),
        ({"y": Y[:3]}, "x has 5 rows and y 3: y must hold the positive"),
        ({"y": torch.cat((Y, Y))}, "5 rows and y 10: a symmetric loss needs equally many; pass symmetric=False"),
        ({"x": X[:0], "y": Y[:0]}, "0 rows over all ranks"),
        ({"scale": math.nan}, "scale=nan: must be a finite number"),
        ({"scale": math.inf}, "scale=inf"),
        ({"scale": "big"}, "scale='big'"),
        ({"scale": torch.ones(2)}, r"scale has shape \(2,\)"),
        ({"scale": torch.tensor(3)}, "torch.int64: must be one floating-point number"),
        ({"ids": torch.arange(4)}, r"ids has shape \(4,\): must be \(5,\)"),
        ({"ids": torch.ones(5)}, "ids is torch.float32: must be a tensor of integers"),
        ({"ids": torch.ones(5, dtype=torch.bool)}, "ids is torch.bool"),
        ({"ids": [1, 2, 3, 4, 5]}, "ids is a list: must be a tensor of integers"),
        ({"duplicates": "drop"}, "duplicates='drop': must be one of 'mask', 'positive'"),
        ({"weights": torch.ones(4)}, r"weights has shape \(4,\): must be \(5,\)"),
        ({"weights": torch.ones(5, dtype=torch.int64)}, "weights is torch.int64"),
        ({"weights": torch.ones(5, requires_grad=True)}, "pass weights.detach()"),
        ({"label_smoothing": 1.5}, r"label_smoothing=1.5: must be a finite number in \[0, 1\]"),
        ({"drop_above": math.nan}, "drop_above=nan"),
        ({"backend": "cuda"}, "backend='cuda': must be one of 'eager', 'fused'"),
        ({"x": X.double(), "y": Y.double(), "backend": "fused"}, "backend='fused': .*; pass backend='eager' or None"),
        ({"workspace": 0}, "workspace=0: must be a positive number of bytes"),
        ({"workspace": 1.5}, "workspace=1.5"),
        ({"precision": "fp8"}, "precision='fp8': must be one of 'ieee', 'tf32'"),
        ({"int8_backward": True}, r"int8_backward=True and x is float32: must be bfloat16; pass x.bfloat16\(\), or"),
        ({"int8_backward": 1}, "int8_backward=1: must be True or False"),
        ({"group": 3}, "group=3: must be None, a process group"),
    ],
    ids=lambda v: str(v)[:40] if isinstance(v, str) else None,
)
def test_wrong_input_is_named_with_rule_and_remedy(change, words):
    arguments = {"x": X, "y": Y, "scale": 1.0} | change
    with pytest.raises(ValueError, match=words):
        megabatch.clip_loss(**arguments)


def test_the_sigmoid_loss_has_no_int8_backward():
    # It computes the similarities once, in forward.
    with pytest.raises(TypeError, match="int8_backward"):
        megabatch.siglip_loss(X.bfloat16(), Y.bfloat16(), 1.0, 0.0, int8_backward=True)


def test_int8_backward_changes_nothing_where_there_are_no_kernels_for_it():
    x, y = (t.bfloat16().requires_grad_() for t in (X, Y))
    plain, int8 = (torch.autograd.grad(megabatch.clip_loss(x, y, 3.0, int8_backward=b), (x, y)) for b in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(plain, int8, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        megabatch.clip_loss(X, Y, 3.0, int8_backward=True)


@pytest.mark.skipif(not torch.backends.mps.is_available() and not torch.cuda.is_available(), reason="needs a second device")
def test_tensors_on_two_devices_are_refused():
    elsewhere = "cuda" if torch.cuda.is_available() else "mps"
    with pytest.raises(ValueError, match="must be on one device"):
        megabatch.clip_loss(X, Y.to(elsewhere), 1.0)


def test_the_bias_is_checked_like_the_scale():
    with pytest.raises(ValueError, match="bias=nan"):
        megabatch.siglip_loss(X, Y, 1.0, math.nan)


def test_a_module_stores_its_options_and_refuses_others():
    x, y, ids = torch.randn(6, 4), torch.randn(6, 4), torch.arange(6) // 2
    module = megabatch.ClipLoss(label_smoothing=0.1, duplicates="positive", workspace=2000)
    assert torch.equal(
        module(x, y, 3.0, ids=ids),
        megabatch.clip_loss(x, y, 3.0, ids=ids, label_smoothing=0.1, duplicates="positive", workspace=2000),
    )
    assert "label_smoothing=0.1" in repr(module)
    sigmoid = megabatch.SigLipLoss(duplicates="positive")
    assert torch.equal(sigmoid(x, y, 3.0, -1.0, ids=ids), megabatch.siglip_loss(x, y, 3.0, -1.0, ids=ids, duplicates="positive"))
    with pytest.raises(TypeError, match=r"unknown options \['temperature'\]"):
        megabatch.ClipLoss(temperature=0.1)
    with pytest.raises(TypeError, match="passed with each batch"):
        megabatch.SigLipLoss(ids=ids)
