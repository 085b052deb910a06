"""InfoNCE over directions on a CUDA device: right in every dtype, deterministic, without synchronisation, in bounded memory."""

from __future__ import annotations

import pytest
import torch
from cases import Case, errors, formula
from infonce_cases import ALL, build_infonce, largest_infonce_logit, random_case

import megabatch
from megabatch.losses import symmetric

pytestmark = [
    pytest.mark.usefixtures("tiles_only"),
    pytest.mark.filterwarnings("ignore:scale="),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setitem(symmetric.PIECE_ROWS, "cuda", 64)


def moved(value, dtype: torch.dtype):
    if isinstance(value, megabatch.Guide):
        return megabatch.Guide(value.x.float().cuda(), value.y.float().cuda(), value.margin, value.margin_kind)
    if not isinstance(value, torch.Tensor):
        return value
    return value.cuda().to(dtype) if value.is_floating_point() else value.cuda()


def on_gpu(case: Case, dtype: torch.dtype, **more) -> dict[str, torch.Tensor]:
    x, y = (t.to("cuda", dtype).requires_grad_() for t in (case.x, case.y))
    scale = torch.tensor(case.scalars[0], device="cuda", requires_grad=True)
    options = {name: moved(value, dtype) for name, value in case.options.items()}
    value = megabatch.infonce_loss(x, y, scale, **options, **more)
    value.backward()
    return {name: t.detach().double().cpu() for name, t in (("value", value), ("x", x.grad), ("y", y.grad), ("scale", scale.grad))}


def rounded(case: Case, dtype: torch.dtype) -> Case:
    options = {k: v.to(dtype).double() if k in ("queue", "weights") else v for k, v in case.options.items()}
    return Case(case.loss, case.x.to(dtype).double(), case.y.to(dtype).double(), case.scalars, options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_case_is_the_formula(dtype):
    for seed in range(5000, 5060):
        case = rounded(random_case(seed), dtype)
        if any(name in case.options for name in ("drop_above", "drop_ratio", "guide")):
            # A similarity at a limit may be rounded to its other side.
            continue
        sums, true = 64 * torch.finfo(torch.float32).eps * (1 + largest_infonce_logit(case)), formula(case)
        for name, e in errors(case, on_gpu(case, dtype, workspace=40_000), true).items():
            largest = true[name].abs().max()
            fits = name not in ("x", "y") or largest == 0 or torch.finfo(dtype).tiny <= largest < torch.finfo(dtype).max
            # The gradient products of bf16 and fp16 embeddings round the gradient in the logits to their dtype.
            rounding = 4 * torch.finfo(dtype).eps if name != "value" and dtype != torch.float32 else 0
            assert not fits or e <= sums + rounding or sums > 1, (seed, case.options, name, e)


OPTIONS = [
    {"directions": ALL},
    {"directions": ALL, "ids": True, "weights": True, "label_smoothing": 0.1},
    {"directions": ALL, "drop_above": {"x_to_y": 0.1, "x_to_x": 0.05}},
    {"directions": ALL, "drop_ratio": 0.9},
    {"directions": ALL, "hardness": 5.0},
    {"hardness": 5.0, "hardness_on": "hard"},
    {"directions": ("x_to_y", "y_to_x"), "partition": "separate", "ids": True, "duplicates": "positive"},
    {"queue": 70},
    {"in_batch": False, "queue": 70},
    {"directions": ALL, "guide": (0.05, "relative")},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_are_the_formula_and_two_runs_are_equal_in_every_bit(options):
    case = rounded(build_infonce(190, 60, 20.0, options, seed=3, width=40), torch.bfloat16)
    runs = [on_gpu(case, torch.bfloat16, workspace=60_000) for _ in range(3)]
    for name, e in errors(case, runs[0], formula(case)).items():
        # A pair at a limit may fall on its other side: one pair of 190 in a row.
        assert e < (4 * torch.finfo(torch.bfloat16).eps if name != "value" else 1e-4), (name, e)
        assert all(torch.equal(runs[0][name], run[name]) for run in runs[1:]), name


@pytest.mark.parametrize("diagnostics", [False, True])
def test_no_step_waits_for_the_device(diagnostics):
    case = build_infonce(300, 50, 20.0, {"directions": ALL, "hardness": 2.0, "hardness_on": "hard"}, width=64)
    x, y = (t.to("cuda", torch.bfloat16).requires_grad_() for t in (case.x, case.y))
    scale = torch.tensor(20.0, device="cuda", requires_grad=True)
    options = {name: moved(value, torch.bfloat16) for name, value in case.options.items()}

    def step():
        loss = megabatch.infonce_loss(x, y, scale, diagnostics=diagnostics, **options)
        (loss[0] if diagnostics else loss).backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_is_linear_in_the_batch(monkeypatch):
    monkeypatch.setitem(symmetric.PIECE_ROWS, "cuda", 8192)
    width, workspace = 256, 64 * 2**20

    def peak(rows: int) -> int:
        x, y = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        megabatch.infonce_loss(x, y, 0.05, directions=ALL, workspace=workspace).backward()
        return torch.cuda.max_memory_allocated() - before

    peak(1024)
    small, large = peak(16_384), peak(65_536)
    # Gradients of both sides in fp32 and bf16, one product in flight, and sums: fewer than six fp32 matrices.
    assert large < 2 * workspace + 6 * 65_536 * width * 4
    assert large - small < 6 * (65_536 - 16_384) * width * 4 + workspace


def test_fused_tiles_refuse_what_they_do_not_serve():
    case = build_infonce(20, 6, 5.0, {"directions": ALL, "ids": True})
    x, y = (t.float().cuda() for t in (case.x, case.y))
    options = {name: moved(value, torch.float32) for name, value in case.options.items()}
    with pytest.raises(ValueError, match="eager tiles"):
        megabatch.infonce_loss(x, y, 5.0, backend="fused", **options)
    assert megabatch.infonce_loss(x, y, 5.0, **options).isfinite()
