"""The losses on a CUDA device: right in every dtype, without a host synchronisation, in bounded memory."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from cases import Case, embeddings, errors, formula, largest_logit
from test_losses import CLIP_OPTIONS, build

import megabatch
from megabatch import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CLIP = [
    {k: v for group in groups for k, v in group.items()}
    for groups in itertools.product(
        *(CLIP_OPTIONS[name] for name in ("ids", "label_smoothing", "drop_above", "weights", "direction"))
    )
]
SIGLIP = [
    {k: v for group in groups for k, v in group.items()}
    for groups in itertools.product(CLIP_OPTIONS["ids"], CLIP_OPTIONS["weights"], ({}, {"extra": 7}))
]


def on_gpu(case: Case, dtype: torch.dtype, **more) -> dict[str, torch.Tensor]:
    tensors = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in case.options.items()}

    class Losses:
        """The losses with their scalars moved to the device."""

        def __getattr__(self, name):
            return lambda x, y, *scalars, **options: getattr(megabatch, name)(x, y, *(s.cuda() for s in scalars), **options)

    moved = Case(case.loss, case.x.cuda(), case.y.cuda(), case.scalars, tensors)
    return {name: t.cpu() for name, t in moved.run(Losses(), dtype, **more).items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [0.5, 20.0, 300.0])
@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
def test_every_combination_of_options_is_the_formula(loss, scale, dtype):
    for options in CLIP if loss == "clip_loss" else SIGLIP:
        scalars = (scale,) if loss == "clip_loss" else (scale, -3.0)
        case = build(loss, 37, scalars, options, width=24).rounded(dtype)
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        # As on a CPU; gradient products of bf16 embeddings read the gradient in the logits as bf16 too.
        allowed = 32 * eps * (1 + largest_logit(case))
        rounding = 2 * torch.finfo(dtype).eps if dtype != torch.float64 else 0
        for name, e in errors(case, on_gpu(case, dtype, tile=5000), formula(case)).items():
            assert e <= allowed + (0 if name == "value" else rounding), (options, name, e)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
def test_the_error_is_not_larger_than_that_of_the_formula_in_this_dtype(loss, dtype):
    x, y = embeddings(3000, width=256, kind="clustered")
    case = Case(loss, x, y, (50.0, -10.0)[: 1 if loss == "clip_loss" else 2]).rounded(dtype)
    true = formula(case)
    plain = Case(case.loss, case.x.cuda(), case.y.cuda(), case.scalars)
    x, y = (t.to(dtype).requires_grad_() for t in (plain.x, plain.y))
    value = getattr(reference, loss)(x, y, *case.scalars)
    value.backward()
    theirs = errors(
        case,
        {"value": value.detach().double().cpu(), "x": x.grad.double().cpu(), "y": y.grad.double().cpu()},
        {k: true[k] for k in ("value", "x", "y")},
    )
    own = errors(case, on_gpu(case, dtype), true)
    for name in theirs:
        assert own[name] <= 1.5 * theirs[name] + 8 * torch.finfo(torch.float32).eps, (name, own[name], theirs[name])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
def test_a_step_never_waits_for_the_device(loss):
    x, y = (t.cuda().bfloat16().requires_grad_() for t in embeddings(500, width=64))
    scalars = [torch.tensor(s, device="cuda", requires_grad=True) for s in (20.0, -10.0)][: 1 if loss == "clip_loss" else 2]
    ids = torch.arange(500, device="cuda") // 2

    def step():
        getattr(megabatch, loss)(x, y, *scalars, ids=ids, diagnostics=True)[0].backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_ten_runs_are_bit_equal():
    x, y = (t.cuda().bfloat16() for t in embeddings(3000, width=128))
    runs = []
    for _ in range(10):
        a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
        loss = megabatch.clip_loss(a, b, 20.0, tile=2**20)
        loss.backward()
        runs.append((loss.detach(), a.grad, b.grad))
    assert all(torch.equal(s, t) for run in runs[1:] for s, t in zip(runs[0], run, strict=True))


def test_autocast_rounds_the_embeddings_and_nothing_else():
    x, y = embeddings(200, width=64)
    true = formula(Case("clip_loss", x, y, (50.0,)).rounded(torch.bfloat16))
    a, b = x.float().cuda().requires_grad_(), y.float().cuda().requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = megabatch.clip_loss(a, b, 50.0)
    loss.backward()
    assert loss.dtype == a.grad.dtype == torch.float32
    assert abs(loss.item() - true["value"].item()) < 1e-4
    assert (a.grad.double().cpu() - true["x"]).norm() < 4e-3 * true["x"].norm()


def test_a_group_of_one_over_nccl_is_one_process(tmp_path):
    x, y = (t.cuda().requires_grad_() for t in embeddings(50, width=16))
    alone = megabatch.siglip_loss(x, y, 20.0, -10.0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, device_id=torch.device("cuda:0"))
    try:
        together = megabatch.siglip_loss(x, y, 20.0, -10.0, group=dist.group.WORLD)
        gradients = [torch.autograd.grad(loss, (x, y)) for loss in (alone, together)]
    finally:
        dist.destroy_process_group()
    assert torch.equal(alone, together)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_extreme_logits_are_right():
    x, y = embeddings(30, width=4, seed=1)
    x = x * torch.where(torch.arange(30) % 3 == 0, 1000.0, 1.0)[:, None].double()
    case = Case("clip_loss", x, y, (1.0,))
    for name, e in errors(case, on_gpu(case, torch.float32), formula(case)).items():
        assert e < 32 * torch.finfo(torch.float32).eps, (name, e)


@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
def test_extra_memory_grows_linearly_at_most(loss):
    def extra(rows: int) -> int:
        x, y = (torch.randn(rows, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        getattr(megabatch, loss)(x, y, *(0.1, -5.0)[: 1 if loss == "clip_loss" else 2]).backward()
        return torch.cuda.max_memory_allocated() - before

    extra(64)
    small, large = extra(16_384), extra(65_536)
    assert large - small <= 10 * (65_536 - 16_384) * 128 * 4
