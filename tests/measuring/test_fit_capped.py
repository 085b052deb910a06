"""find_chunk in a process whose memory the kernel really limits."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from heap import mapped_blocks
from torch import Tensor, nn
from world import fresh_processes

from megabatch.measuring.fit.finder import find_chunk

MIB = 2**20
# Numbers per row, and how many sines save them for backward: 2 MiB per row.
WIDTH, DEPTH = MIB // 16, 4
ROOM = 64 * MIB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of a process's data are Linux's")


class Tower(nn.Module):
    """A model that saves much for backward and computes little."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(DEPTH):
            x = (self.scale * x).sin()
        return x


def data_bytes() -> int:
    """Return the private writable memory of this process, touched or not, which the kernel compares with RLIMIT_DATA."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmData"].split()[0]) * 1024


@mapped_blocks()
def capped(pipe: Any) -> None:
    """Find what fits within ROOM, then train with that chunk, and with twice as much."""
    torch.set_num_threads(1)
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(rows: int) -> None:
        model(torch.rand(rows, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(1)
    # Allocators reserve more of the kernel than they hand out, up to a GiB on ARM: use up what is reserved, without touching it.
    ballast = torch.empty(960 * MIB, dtype=torch.uint8)
    before = [p.detach().clone() for p in model.parameters()]
    moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
    generator = torch.get_rng_state()
    limit = data_bytes() + ROOM
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    found = find_chunk(step, state=[model, optimizer], start=24, within=0.2)
    same = all(map(torch.equal, before, model.parameters())) and torch.equal(generator, torch.get_rng_state())
    same = same and all(map(torch.equal, moments, (v for state in optimizer.state.values() for v in state.values())))
    for _ in range(5):
        step(found.size)
    try:
        step(2 * found.size)
        beyond = "it ran"
    except RuntimeError as error:
        beyond = str(error)
    pipe.send((found, same, beyond, len(ballast)))


@pytest.mark.slow
def test_a_real_limit_is_found_and_training_goes_on_below_it():
    context = fresh_processes()
    here, there = context.Pipe()
    process = context.Process(target=capped, args=(there,))
    process.start()
    there.close()
    assert here.poll(120)
    found, same, beyond, _ = here.recv()
    process.join()
    assert process.exitcode == 0 and same
    # Each round saves a product and a sine; allocators had some memory left, or need some more.
    row = 2 * DEPTH * WIDTH * 4
    assert 0.3 * ROOM / row < found.size < 4 * ROOM / row
    assert any(trial.why == "out of memory" for trial in found.trials) and "memory" in beyond
    assert next(trial for trial in found.trials if trial.size == found.size).ran
