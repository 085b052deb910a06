"""All widths of Matryoshka together on a CUDA device: as exact as each by itself, repeatable, without a wait, in linear memory."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch
from cases import embeddings

import megabatch
from megabatch import reference
from megabatch.costs.memory import Setup
from megabatch.costs.memory.loss import LossMemory
from megabatch.objectives import LossOptions

pytest.importorskip("triton")

from megabatch.tiles.fused import matryoshka as kernels

loss_module = importlib.import_module("megabatch.losses.matryoshka")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DIMS, WEIGHTS = (768, 512, 256, 128, 64), (1.0, 0.8, 0.6, 0.4, 0.2)


def leaves(rows: int, dtype: torch.dtype, scale: float = 20.0, extra: int = 0, **kind) -> list[torch.Tensor]:
    tensors = [t.to("cuda", dtype) for t in embeddings(rows, extra, width=768, norm=3.0, **kind)]
    return [t.requires_grad_() for t in (*tensors, torch.tensor(scale, device="cuda"))]


def run(inputs: list[torch.Tensor], dims=DIMS, weights=WEIGHTS, **options) -> list[torch.Tensor]:
    for t in inputs:
        t.grad = None
    loss = megabatch.matryoshka(megabatch.clip_loss, dims, weights)(*inputs, **options)
    (2 * loss).backward()
    return [loss.detach(), *(t.grad for t in inputs)]


def formula(inputs: list[torch.Tensor], dims=DIMS, weights=WEIGHTS, **options) -> list[torch.Tensor]:
    inputs = [t.detach().double().requires_grad_() for t in inputs]
    loss = reference.matryoshka_loss(reference.clip_loss, *inputs, dims=dims, dim_weights=weights, **options)
    (2 * loss).backward()
    return [loss.detach(), *(t.grad for t in inputs)]


@pytest.fixture
def each_by_itself(monkeypatch):
    """Return a function that computes each width by itself."""

    def call(*args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(loss_module, "_together", lambda *_: None)
            return run(*args, **options)

    return call


def assert_as_exact(inputs, each_by_itself, **options) -> None:
    exact, together, alone = formula(inputs, **options), run(inputs, **options), each_by_itself(inputs, **options)
    dtype = inputs[0].dtype
    for index, (value, found, other) in enumerate(zip(exact, together, alone, strict=True)):
        error, allowed = ((t.double() - value).norm() / value.norm() for t in (found, other))
        slack = torch.finfo(dtype).eps if index in (1, 2) else 1e-4
        assert error <= 1.5 * allowed + slack, (index, error.item(), allowed.item())


@pytest.mark.parametrize("narrow", [0, kernels.LARGEST_NARROW_WIDTH], ids=["all in panels", "narrow ones apart"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("rows", [129, 1000, 5000])
def test_errors_are_those_of_each_width_by_itself(rows, symmetric, dtype, narrow, each_by_itself, monkeypatch):
    monkeypatch.setattr(kernels, "LARGEST_NARROW_WIDTH", narrow)
    assert_as_exact(leaves(rows, dtype), each_by_itself, symmetric=symmetric)


@pytest.mark.parametrize("scale", [50.0, 100.0])
@pytest.mark.parametrize("workspace", [2**24, 2**28, None])
def test_clustered_embeddings_in_panels_of_any_size(scale, workspace, each_by_itself):
    inputs = leaves(1000, torch.bfloat16, scale, kind="clustered")
    exact, found, other = formula(inputs), run(inputs, workspace=workspace), each_by_itself(inputs, workspace=workspace)
    for index in (0, 1, 2):
        error, allowed = ((t[index].double() - exact[index]).norm() / exact[index].norm() for t in (found, other))
        assert error <= 1.5 * allowed + torch.finfo(torch.bfloat16).eps, (index, error.item(), allowed.item())


@pytest.mark.parametrize("dims", [(768,), (768, 64), (512, 384, 256, 192, 128, 96, 64, 32), (112, 48, 16)])
def test_any_widths(dims, each_by_itself):
    weights = tuple(1.0 + i for i in range(len(dims)))
    assert_as_exact(leaves(1000, torch.bfloat16), each_by_itself, dims=dims, weights=weights)


def test_documents_beyond_the_rows_are_negatives(each_by_itself):
    assert_as_exact(leaves(900, torch.bfloat16, extra=333), each_by_itself, symmetric=False)


def test_rows_whose_logits_are_all_low(each_by_itself):
    x, y, scale = leaves(600, torch.bfloat16, 150.0, kind="clustered")
    with torch.no_grad():
        y.copy_(y[:1] + 0.02 * y)
        x.copy_(torch.where(torch.arange(600, device="cuda")[:, None] % 2 == 0, 1, -1) * y + 0.02 * x)
    exact, found, other = formula([x, y, scale]), run([x, y, scale]), each_by_itself([x, y, scale])
    for index in (0, 1, 2):
        error, allowed = ((t[index].double() - exact[index]).norm() / exact[index].norm() for t in (found, other))
        assert error <= 1.5 * allowed + 2 * torch.finfo(torch.bfloat16).eps, (index, error.item(), allowed.item())


def test_autocast_rounds_the_embeddings_only():
    inputs = leaves(500, torch.float32)
    rounded = [t.detach().bfloat16().requires_grad_() for t in inputs[:2]] + inputs[2:]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = [t.clone() for t in run(inputs)]
    expected = run(rounded)
    assert torch.equal(found[0], expected[0]) and found[1].dtype == torch.float32
    assert torch.allclose(found[1], expected[1].float(), rtol=1e-2, atol=1e-6)


def test_runs_are_equal_bit_for_bit():
    inputs = leaves(3000, torch.bfloat16)
    first = [t.clone() for t in run(inputs, workspace=2**26)]
    assert all(torch.equal(a, b) for a, b in zip(first, run(inputs, workspace=2**26), strict=True))


def test_no_synchronisation_after_the_first_call():
    inputs = leaves(1000, torch.bfloat16)
    run(inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_can_be_captured_and_replayed():
    inputs = leaves(1000, torch.bfloat16)
    expected = [t.clone() for t in run(inputs)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(inputs)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_memory_is_linear_in_the_batch_beside_the_workspace():
    rows, workspace = 16_384, 2**28
    x, y = (torch.randn(rows, 768, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    step = functools.partial(run, [x, y, torch.tensor(20.0, device="cuda")], workspace=workspace)
    step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    used = torch.cuda.max_memory_allocated() - before
    # Gradients in fp32 and in bf16 of both sides, less those of the step before; vectors of every width; cuBLAS's own workspace.
    assert used <= workspace + 2 * rows * 768 * (4 + 2) + 40 * len(DIMS) * rows * 4 + 2**26


class Ledger:
    """Adds up allocations."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.peak = 0

    def allocate(self, size: int, part: str) -> int:
        self.sizes.append(size)
        self.peak = max(self.peak, sum(self.sizes))
        return len(self.sizes) - 1

    def free(self, index: int) -> None:
        self.sizes[index] = 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [4096, 16_384, 65_536])
def test_predicted_memory_is_that_of_the_kernels(rows, dtype):
    x, y = (torch.randn(rows, 768, device="cuda", dtype=dtype).requires_grad_() for _ in range(2))
    inputs = [x, y, torch.tensor(20.0, device="cuda")]
    run(inputs)
    for t in inputs:
        t.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(inputs)
    measured = torch.cuda.max_memory_allocated() - before
    memory = torch.cuda.get_device_properties(0).total_memory
    options = LossOptions(dims=DIMS, masked=False)
    ledger = Ledger()
    precision = "fp16" if dtype == torch.float16 else "bf16"
    loss = LossMemory(
        ledger, Setup(objective="clip", precision=precision, loss_options=options, device_memory=memory), rows, 768, dtype.itemsize
    )
    assert loss.prefixes_together
    loss.forward()
    loss.backward()
    assert ledger.peak == pytest.approx(measured, rel=0.05), (ledger.peak / 2**20, measured / 2**20)
