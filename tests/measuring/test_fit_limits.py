"""The memory limit of a device and how it is enforced, on a simulated GPU and on the real CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megabatch.measuring.fit.memory import Limit, PeakTracker, enforced, limit_of

GPU = torch.device("cuda", 0)


class Memory:
    """The memory functions of a device with 1,000 bytes, of which others use 300 and this process 200."""

    def __init__(self) -> None:
        self.fraction = 1.0
        self.peak = 999

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 500, 1000

    def memory_reserved(self, device: torch.device) -> int:
        return 200

    def set_per_process_memory_fraction(self, fraction: float, device: torch.device) -> None:
        self.fraction = fraction

    def get_per_process_memory_fraction(self, device: torch.device) -> float:
        return self.fraction

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = 0

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak


@pytest.fixture
def memory(monkeypatch) -> Memory:
    module = Memory()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


@pytest.mark.parametrize(
    "budget, margin, fraction, expected",
    [(None, 0.0, 1.0, 700), (None, 0.1, 1.0, 630), (400, 0.0, 1.0, 400), (400, 0.25, 1.0, 300), (None, 0.0, 0.5, 500)],
)
def test_what_a_device_allows(memory, budget, margin, fraction, expected):
    memory.fraction = fraction
    assert limit_of(GPU, budget, margin) == Limit(expected, "enforced")


def test_no_more_than_there_is(memory):
    with pytest.raises(ValueError, match="budget is 701 B: cuda:0 has only 700 B"):
        limit_of(GPU, 701, 0.0)
    memory.fraction = 0.6
    with pytest.raises(ValueError, match="has only 600 B"):
        limit_of(GPU, 601, 0.0)


def test_the_allocator_refuses_within_and_is_as_before_afterwards(memory):
    memory.fraction = 0.9
    with pytest.raises(RuntimeError, match="stop"), enforced(Limit(300, "enforced"), GPU):
        assert memory.fraction == 0.3
        raise RuntimeError("stop")
    assert memory.fraction == 0.9
    with enforced(Limit(300, "measured"), GPU), enforced(Limit(None, "raised"), GPU):
        assert memory.fraction == 0.9


def test_the_peak_begins_anew(memory):
    with PeakTracker(GPU) as peak:
        memory.peak = max(memory.peak, 40)
    assert peak.bytes == 40


def test_a_device_that_tells_nothing(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    apple: Any = torch.device("mps")
    assert limit_of(apple, None, 0.1) == Limit(None, "raised")
    with PeakTracker(apple) as peak:
        pass
    assert peak.bytes is None
    with pytest.raises(ValueError, match="cannot limit the memory of mps"):
        limit_of(apple, 100, 0.0)


def test_a_system_that_tells_nothing(monkeypatch):
    monkeypatch.setattr("megabatch.host_memory.resident", lambda: None)
    with pytest.raises(ValueError, match="pip install psutil, or use an accelerator"):
        limit_of(torch.device("cpu"), None, 0.0)
