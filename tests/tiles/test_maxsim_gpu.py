"""Late interaction with the Triton kernels on a CUDA device: right in every dtype, deterministic, in linear memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from maxsim_cases import CASES, maxsim_errors

import megabatch

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 2**20
LARGER = {
    "whole blocks": ({}, (40, 60, 32, 256, 128)),
    "whole blocks with masks": ({"masks": True}, (40, 60, 32, 200, 128)),
    "padded queries": ({"masks": True, "symmetric": True}, (33, 33, 24, 300, 96)),
    "wide": ({"masks": True, "average_tokens": True}, (9, 17, 5, 140, 320)),
    "long queries": ({"masks": True}, (5, 9, 300, 70, 64)),
}


def batch(rows: int, dtype: torch.dtype, tokens: tuple[int, int] = (32, 256), width: int = 128):
    torch.manual_seed(0)
    x, y = (F.normalize(torch.randn(rows, t, width, device="cuda"), dim=-1).to(dtype).requires_grad_() for t in tokens)
    lengths = torch.randint(tokens[1] // 4, tokens[1] + 1, (rows, 1), device="cuda")
    return x, y, torch.arange(tokens[1], device="cuda") < lengths


def step(x, y, mask, **options):
    loss = megabatch.maxsim_loss(x, y, 1.0, y_mask=mask, **options)
    return [loss.detach(), *torch.autograd.grad(loss, (x, y))]


# The gradients are rounded to the dtype, and in bf16 the gradient of a score before its product with q too.
@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 1e-5), (torch.bfloat16, 6e-3), (torch.float16, 1e-3)], ids=str)
@pytest.mark.parametrize("case", [*CASES.values(), *LARGER.values()], ids=[*CASES, *LARGER])
def test_every_dtype_is_right(case, dtype, allowed):
    errors = maxsim_errors(*case, dtype, "cuda")
    assert max(errors.values()) <= allowed, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_size_of_tiles_changes_nothing_but_rounding(dtype):
    inputs = batch(200, dtype)
    whole, tiled, eager = (step(*inputs, **o) for o in ({}, {"workspace": MIB}, {"backend": "eager"}))
    for a, *others in zip(whole, tiled, eager, strict=True):
        for b in others:
            # Each tile rounds its part of a gradient once; fp32 maxima that nearly tie may go to another token.
            assert (a.double() - b).norm() <= max(2 * torch.finfo(dtype).eps, 1e-3) * a.double().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_results_repeat_bit_for_bit(dtype):
    inputs = batch(256, dtype)
    first, *again = (step(*inputs) for _ in range(3))
    for results in again:
        assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))


def test_memory_is_the_workspace_and_linear_in_the_batch():
    workspace = 64 * MIB
    step(*batch(64, torch.bfloat16), workspace=workspace)
    for rows in (512, 2048):
        inputs = batch(rows, torch.bfloat16)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(*inputs, workspace=workspace)
        extra = torch.cuda.max_memory_allocated() - before
        embeddings = rows * (32 + 256) * 128 * 2
        # Sums of the gradients in fp32, the gradients, and those of a tile. The token similarities of 2,048 rows take 128 GiB.
        assert extra <= workspace + 5 * embeddings, (rows, extra / MIB, embeddings / MIB)
        del inputs


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 24 * 2**30, reason="needs 24 GiB"
)
def test_a_tile_may_have_more_places_than_an_int32_counts():
    inputs = batch(8448, torch.bfloat16, (32, 16), 16)
    assert 8448**2 * 32 > 2**31
    whole, tiled = (step(*inputs, workspace=w) for w in (8 * 2**30, 256 * MIB))
    for a, b in zip(whole, tiled, strict=True):
        assert (a.double() - b).norm() <= 2 * torch.finfo(torch.bfloat16).eps * a.double().norm()
