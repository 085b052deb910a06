"""find_chunk on a CUDA device: its memory limit, its generator, and an allocator that is clean after every failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megabatch import config, measurements
from megabatch.chunks.oom import release
from megabatch.measuring.fit import fit
from megabatch.measuring.fit.finder import ChunkResult, find_chunk
from megabatch.measuring.fit.memory import enforced, limit_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 2**20
WIDTH = 1024


class Training:
    """A small training on the device, with dropout, so that its generator counts, and half precision."""

    def __init__(self, depth: int = 8, dtype: torch.dtype | None = torch.float16) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.GELU())]
        self.model = nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
        self.dtype = dtype

    @property
    def state(self) -> list[Any]:
        return [self.model, self.optimizer, self.scaler]

    def step(self, rows: int) -> None:
        x = torch.randn(rows, WIDTH, device="cuda")
        with torch.autocast("cuda", self.dtype or torch.float32, enabled=self.dtype is not None):
            loss = self.model(x).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def look(self) -> list[Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [t.detach().clone() for t in (*self.model.parameters(), *moments)] + [
            torch.cuda.get_rng_state(),
            torch.get_rng_state(),
        ]

    def find(self, room: int, **options: Any) -> ChunkResult:
        """Return what fits into so many bytes beyond what the process has allocated now."""
        release()
        return find_chunk(self.step, state=self.state, budget=torch.cuda.memory_reserved() + room, **options)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_the_limit_of_the_device_is_found_and_nothing_stays_allocated(begun, dtype):
    training = Training(dtype=dtype)
    # Libraries allocate their workspaces in the first step.
    training.step(8)
    if not begun:
        training.optimizer.state.clear()
    release()
    before, allocated = training.look(), torch.cuda.memory_allocated()
    found = training.find(600 * MIB, start=256, within=0.02, margin=0.0)
    assert torch.cuda.memory_allocated() == allocated
    after = training.look()
    assert len(before) == len(after) and all(map(torch.equal, before, after))
    assert all(p.grad is None for p in training.model.parameters()) and bool(training.optimizer.state) == begun
    ran = [trial for trial in found.trials if trial.ran]
    failed = [trial for trial in found.trials if not trial.ran]
    assert max(t.size for t in ran) == found.size < min(t.size for t in failed) and all(t.why == "out of memory" for t in failed)
    assert max(trial.peak_bytes for trial in ran) <= found.limit_bytes
    # Fragmentation may lose some of the limit, but not most of it.
    assert max(trial.peak_bytes for trial in ran) > 0.7 * found.limit_bytes


def test_what_was_found_runs_within_the_limit_and_twice_as_much_does_not():
    training = Training()
    training.step(8)
    release()
    limit = limit_of(torch.device("cuda", 0), torch.cuda.memory_reserved() + 500 * MIB, 0.0)
    size = training.find(500 * MIB, start=64, within=0.02).size
    with enforced(limit, torch.device("cuda", 0)):
        for _ in range(5):
            training.step(size)
        with pytest.raises(torch.OutOfMemoryError):
            training.step(2 * size)
    release()


def test_the_limit_is_lifted_afterwards():
    training = Training(depth=2)
    torch.cuda.set_per_process_memory_fraction(0.9)
    try:
        training.find(300 * MIB, start=64, within=0.1)
        assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(0.9, abs=1e-6)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_margin_is_memory_that_stays_free():
    training = Training()
    training.step(8)
    exact, spare = (training.find(600 * MIB, start=256, within=0.02, margin=margin) for margin in (0.0, 0.3))
    assert spare.limit_bytes == pytest.approx(0.7 * exact.limit_bytes, rel=0.02) and spare.size < 0.9 * exact.size
    assert max(trial.peak_bytes for trial in spare.trials if trial.ran) <= spare.limit_bytes


def test_a_state_that_the_first_step_creates_is_counted():
    # Weights of 256 MiB: their gradients fit, and the moments that the optimizer creates at the end of the first step do not.
    model = nn.Linear(8192, 8192, bias=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(rows: int) -> None:
        model(torch.ones(rows, 8192, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    release()
    with pytest.raises(ValueError, match="not even one row fits: out of memory"):
        find_chunk(step, state=[model, optimizer], start=4, budget=torch.cuda.memory_reserved() + 400 * MIB, margin=0.0)
    assert not optimizer.state
    release()
    assert torch.cuda.memory_reserved() < 700 * MIB


def test_more_than_the_device_has_is_refused():
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(ValueError, match="choose a smaller budget"):
        find_chunk(lambda rows: None, state=[nn.Linear(1, 1).cuda()], budget=total + 1)


def test_a_run_end_to_end(tmp_path: Path):
    settings = ["batch.size=8192", "data.workers=0", "schedule.steps=2", "compute.device=cuda", f"compute.workspace={4 * MIB}"]
    run = config.build(config.EMBEDDED, settings)
    whole = fit(run, out=tmp_path / "whole")
    assert whole.found.chunk == 8192
    release()
    budget = torch.cuda.memory_reserved() + 160 * MIB
    result = fit(run, budget=budget, out=tmp_path / "part")
    found = result.found
    assert isinstance(found, measurements.Fit) and 1 <= found.chunk < 8192
    assert max(trial["peak_bytes"] for trial in found.trials if trial["ran"]) <= found.limit_bytes == int(0.95 * budget)
    assert result.device == torch.cuda.get_device_name() and (tmp_path / "part" / "fit.png").exists()
