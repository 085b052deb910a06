"""The Triton kernels of distillation: any panels in Triton's interpreter, and compiled without a device."""

from __future__ import annotations

import pytest
import torch
from cases import embeddings
from compiling import compiled_apart
from interpreted import IN_INTERPRETER

import megabatch
from megabatch import tiles
from megabatch.tiles import distill as eager
from megabatch.tiles import distillation_for
from megabatch.tiles.contract import ComputeOptions, NeedsGrad, Softmax
from megabatch.tiles.distill import DistillStats, Operands, Scales
from megabatch.tiles.fused import distill as fused
from megabatch.tiles.fused.launch import Panel, panels_of

pytestmark = IN_INTERPRETER


def problem(rows: int, documents: int, dtype: torch.dtype = torch.float64, norm: float = 1.0) -> tuple[Operands, Scales]:
    student, teacher = (embeddings(rows, documents - rows, width, norm=norm, seed=width) for width in (6, 9))
    operands = Operands(*(t.to(dtype) for t in (*student, *teacher)))
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    return operands, Scales(torch.tensor(7.0, dtype=acc), torch.tensor(-4.0, dtype=acc))


def results(tiles, operands: Operands, scales: Scales, columns: bool, workspace: int) -> list[torch.Tensor]:
    """Return the logarithms of both sums, the mean of the student's logits and the teacher's entropy of each side; gradients."""
    compute = ComputeOptions(workspace)
    sides = tiles.distill_stats(operands.x_MD, operands, scales, columns=columns, entropy=True, compute=compute)
    found = [t for side in sides if side is not None for t in comparable(side)]
    softmaxes = [None if side is None else (Softmax(side.peak, 2 / side.total), Softmax(side[2], 3 / side[3])) for side in sides]
    grads = tiles.distill_grads(operands.x_MD, operands, scales, *softmaxes, needs_grad=NeedsGrad(True, True), compute=compute)
    return [*found, *grads]


def comparable(stats: DistillStats) -> list[torch.Tensor]:
    """Return what does not depend on the peaks that sums are relative to."""
    peak, total, teacher_peak, teacher_total, cross, entropy = stats
    return [peak + total.log(), teacher_peak + teacher_total.log(), cross / teacher_total, entropy / teacher_total]


@pytest.mark.parametrize("columns", [True, False], ids=["both", "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows, documents, norm", [(70, 70, 1.0), (33, 97, 9.0), (1, 40, 1.0)], ids=str)
def test_panels_and_blocks_with_edges_are_the_eager_tiles_in_fp64(rows, documents, norm, dtype, columns):
    operands, scales = problem(rows, documents, dtype, norm)
    exact = [Operands(*(t.double() for t in operands)), Scales(*(t.double() for t in scales))]
    true = results(eager, *exact, columns, 2**20)
    # Logits reach 7·norm², and are rounded by that times eps in each of a few sums; fp16 gradients are rounded to tf32.
    allowed = 32 * torch.finfo(torch.float32).eps * 7 * norm**2 + (2**-10 if dtype == torch.float16 else 0)
    for workspace in (2**20, 24_000):
        for a, b in zip(results(fused, operands, scales, columns, workspace), true, strict=True):
            assert a.dtype == torch.float32 and (a.double() - b).norm() <= allowed * (1 + b.norm())


def test_a_workspace_of_24_kb_has_several_panels_in_both_directions():
    m, n, steps, *_ = fused.INTERPRETED
    panels = list(panels_of(Panel(slice(0, 70), slice(0, 70)), (m * steps, n), 24_000, 8))
    assert len({p.r.start for p in panels}) > 1 and len({p.c.start for p in panels}) > 1


def test_the_kernels_are_the_default_on_cuda():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert distillation_for(cpu, torch.float32) is distillation_for(cuda, torch.float32, "eager") is eager
    assert distillation_for(cpu, torch.float32, "fused") is distillation_for(cuda, torch.float32) is fused
    assert distillation_for(cpu, torch.float64) is distillation_for(cuda, torch.float64) is eager


def test_workspace_and_last_step_are_those_of_the_tiles_that_run(monkeypatch):
    # The default workspace and `finish` of a backend are asked for once each, and those of the other one never.
    calls = []
    for name, module in (("eager", tiles.eager), ("fused", tiles.fused)):
        for function in ("default_workspace", "finish"):
            original = getattr(module, function)
            monkeypatch.setattr(module, function, lambda *t, o=original, call=(name, function): calls.append(call) or o(*t))
    (x, y, teacher_x, teacher_y), _ = problem(5, 5, torch.float32)
    for backend in (None, "eager", "fused"):
        calls.clear()
        megabatch.distill_loss(x.requires_grad_(), y, 7.0, teacher_x, teacher_y, 4.0, backend=backend).backward()
        assert {name for name, _ in calls} == {backend or "eager"} and len({each for _, each in calls}) == 2


def test_blocks_without_rows_or_documents_have_no_sums():
    operands, scales = problem(3, 5, torch.float32)
    for empty in (operands._replace(x_MD=operands.x_MD[:0], teacher_x_MT=operands.teacher_x_MT[:0]),
                  operands._replace(y_ND=operands.y_ND[:0], teacher_y_NT=operands.teacher_y_NT[:0])):  # fmt: skip
        rows, columns = fused.distill_stats(empty.x_MD, empty, scales, columns=True, entropy=False, compute=ComputeOptions(2**20))
        for side, embedding in ((rows, empty.x_MD), (columns, empty.y_ND)):
            assert len(side.peak) == len(embedding) and (side.peak == -torch.inf).all() and (side.total == 0).all()


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megabatch.tiles.fused import distill

def compiled(capability, kernel, warps, **constants):
    integers = ("rows", "columns", "stride", *(f"{side}_{n}" for side in ("row", "column") for n in ("tiles", "length", "stride")))
    kinds = dict.fromkeys(integers, "i32") | {"gradient": "*bf16"}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "*fp32") for name in kernel.arg_names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(kernel, signature, constants, attributes)
    triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})

m, n, steps, sum_warps, gradient_warps = distill.COMPILED
sides = ("column_peak", "column_gain", "teacher_column_peak", "teacher_column_gain")
for capability in (80, 90):
    for missing in ({}, {"column_parts": None}):
        compiled(capability, distill.stats_kernel, sum_warps, ENTROPY=True, M=m, N=n, STEPS=steps, **missing)
    merged = {"T": distill.MERGED_TILES, "R": distill.MERGED_ROWS}
    for first in (True, False):
        compiled(capability, distill.merge_kernel, 4, ROW_FIRST=first, COLUMN_FIRST=False, ENTROPY=not first, **merged)
    compiled(capability, distill.merge_kernel, 4, ROW_FIRST=True, COLUMN_FIRST=True, ENTROPY=False, column_parts=None,
             column_sums=None, **merged)
    for missing in ({}, dict.fromkeys(sides)):
        compiled(capability, distill.gradient_kernel, gradient_warps, ROUND_TO_TF32=not missing, M=m, N=n, **missing)
print("compiled")
"""


@pytest.mark.slow
def test_the_kernels_compile():
    assert compiled_apart(COMPILE) == ["compiled"]
