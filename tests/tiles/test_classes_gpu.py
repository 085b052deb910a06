"""Softmax over classes on a CUDA device: right in every dtype, and deterministic where rows share a class."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from classes_cases import OPTIONS, class_errors

import megabatch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 2e-5), (torch.bfloat16, 1e-2), (torch.float16, 5e-3)], ids=str)
def test_every_dtype_is_right(options, dtype, allowed):
    errors = class_errors(options, dtype, "cuda", rows=300, classes=1500, width=128)
    assert max(errors.values()) <= allowed, errors


def test_rows_of_one_class_are_added_in_a_fixed_order():
    x, y = (F.normalize(torch.randn(n, 64, device="cuda"), dim=-1).requires_grad_() for n in (4096, 512))
    targets = torch.randint(8, (4096,), device="cuda")
    results = []
    for _ in range(3):
        results.append(torch.autograd.grad(megabatch.class_softmax_loss(x, y, targets, 20.0), (x, y)))
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))
