"""find_chunk on a simulated device with a known limit: wherever memory runs out, the result is the largest size that ran."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from world import MEETING_TIME, fresh_processes

import megabatch
from megabatch import host_memory, measurements
from megabatch.measuring.fit import finder
from megabatch.measuring.fit.finder import find_chunk
from megabatch.measuring.fit.memory import ResidentTracker, limit_of, resident_bytes

MIB = 2**20
WORDS = "CUDA out of memory. Tried to allocate 20.00 GiB"


class Refusing(torch.autograd.Function):
    """The identity; its backward checks the limit of the device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: Any) -> Tensor:
        ctx.device, ctx.rows = device, len(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.device.ask(ctx.rows, "backward")
        return grad, None


class Simulated:
    """A training on a device with memory for `limit` rows, which raises beyond it in forward, backward or the optimizer's step.

    leak: rows by which every failure lowers the limit for good.
    """

    def __init__(self, limit: int, where: str = "forward", leak: int = 0) -> None:
        self.limit, self.where, self.leak = limit, where, leak
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.ran: list[int] = []
        self.tried: list[int] = []

    def ask(self, rows: int, where: str) -> None:
        if where == self.where and rows > self.limit:
            self.limit -= self.leak
            raise torch.OutOfMemoryError(WORDS)

    def step(self, rows: int) -> None:
        self.tried.append(rows)
        x = torch.rand(rows, 4)
        self.ask(rows, "forward")
        Refusing.apply(self.model(x), self).square().mean().backward()
        self.ask(rows, "optimizer step")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ran.append(rows)

    @property
    def state(self) -> list[Any]:
        return [self.model, self.optimizer]

    def find(self, **options: Any) -> finder.ChunkResult:
        return find_chunk(self.step, state=self.state, **{"margin": 0.0, **options})


class Unmeasured(contextlib.nullcontext):
    """PeakTracker of a device that does not report its memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(self)
        self.bytes = None


@contextlib.contextmanager
def uncollecting() -> Iterator[None]:
    """Skip the garbage collection after every trial, because these trials leave no garbage."""
    with contextlib.ExitStack() as patches:
        for module in ("trial", "memory", "finder"):
            patches.enter_context(mock.patch(f"megabatch.measuring.fit.{module}.release"))
        yield


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Do as `uncollecting`, and do not measure this process's memory."""
    with uncollecting(), mock.patch("megabatch.measuring.fit.trial.PeakTracker", Unmeasured):
        yield


@pytest.fixture
def quick() -> Iterator[None]:
    with quickly():
        yield


def test_every_limit_is_found(quick):
    for limit in range(1, 301):
        device = Simulated(limit)

        def step(rows: int, device: Simulated = device) -> None:
            device.tried.append(rows)
            device.ask(rows, "forward")

        start, cap = (None, 1, 64, 500)[limit % 4], (None, 50, 1000)[limit % 3]
        found = find_chunk(step, start=start, cap=cap, margin=0.0)
        assert found.size == min(limit, cap or limit) and device.tried.count(found.size) >= 2
        assert cap is None or max(device.tried) <= cap
        assert [trial.size for trial in found.trials if trial.ran][-1] == found.size
        assert all(trial.ran == (trial.size <= limit) for trial in found.trials)
        assert all((trial.why == "out of memory") == (not trial.ran) for trial in found.trials)


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer step"])
@pytest.mark.parametrize("start", [4, 700])
def test_limits_are_found_wherever_memory_runs_out(quick, where, start):
    for limit in (1, 2, 5, 17, 64, 100, 299):
        device = Simulated(limit, where)
        assert device.find(start=start).size == limit
        assert device.ran.count(limit) >= 2 and max(device.ran) == limit


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer step"])
def test_the_state_is_bit_equal_after_a_search(quick, where):
    device = Simulated(37, where)
    device.model(torch.ones(3, 4)).sum().backward()
    device.model.eval()
    generator = torch.get_rng_state()
    before = [p.detach().clone() for p in device.model.parameters()] + [p.grad.clone() for p in device.model.parameters()]
    assert device.find().size == 37
    after = [p.detach() for p in device.model.parameters()] + [p.grad for p in device.model.parameters()]
    assert all(map(torch.equal, before, after))
    assert not device.optimizer.state and torch.equal(generator, torch.get_rng_state()) and not device.model.training


@pytest.mark.parametrize("leak", [1, 3])
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer step"])
def test_after_a_leak_what_is_found_still_runs(quick, where, leak):
    for limit in (64, 100, 137, 300):
        device = Simulated(limit, where, leak)
        found = device.find(start=16).size
        assert device.limit >= found >= device.limit // 2
        device.step(found)


def test_a_trial_takes_a_second_step_beside_the_state_of_the_first(quick):
    # The optimizer's state is created at the end of the first step, so only the second step has its memory.
    device = Simulated(100)
    plain = device.step

    def step(rows: int) -> None:
        device.limit = 60 if device.optimizer.state else 100
        plain(rows)

    assert find_chunk(step, state=device.state, margin=0.0).size == 60


def test_the_margin_is_left_free_and_what_is_returned_ran(quick):
    device = Simulated(100)
    found = device.find(margin=0.1)
    assert found.size == 90 and device.ran[-2:] == [90, 90]
    assert Simulated(1).find(margin=0.5).size == 1
    # Nothing failed, so the result is the cap, and nothing beyond it was tried.
    assert Simulated(100).find(margin=0.1, cap=95).size == 95


def test_where_not_even_one_row_runs_the_error_says_what_to_do(quick):
    device = Simulated(0, "optimizer step")
    before = [p.detach().clone() for p in device.model.parameters()]
    with pytest.raises(ValueError, match=r"not even one row fits: out of memory \(CUDA out of memory. Tried .*checkpointing"):
        device.find(start=4)
    assert all(map(torch.equal, before, device.model.parameters())) and not device.optimizer.state


def test_other_errors_come_through_and_leave_no_trace():
    device = Simulated(100)

    def step(rows: int) -> None:
        device.step(rows)
        raise KeyError("labels")

    before = [p.detach().clone() for p in device.model.parameters()]
    with pytest.raises(KeyError, match="labels"):
        find_chunk(step, state=device.state)
    assert all(map(torch.equal, before, device.model.parameters())) and not device.optimizer.state
    assert len(device.tried) == 1


def test_a_step_that_does_not_grow_needs_a_cap(quick):
    with pytest.raises(ValueError, match="cap is not given, and the step runs even at 16,777,216 rows"):
        find_chunk(lambda rows: None, start=2**23)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"start": 0}, "start is 0"),
        ({"cap": 0}, "cap is 0"),
        ({"cap": 2.5}, "cap is 2.5"),
        ({"margin": 1.0}, "margin is 1.0"),
        ({"within": -0.1}, "within is -0.1"),
        ({"budget": 0}, "budget is 0"),
        ({"budget": 2**60}, "choose a smaller budget"),
        ({"group": "all"}, "group='all'"),
        ({"state": [3]}, r"state\[0\] is a int"),
    ],
)
def test_bad_arguments_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        find_chunk(lambda rows: None, **options)


def test_encoders_that_help_themselves_have_run_out_of_memory_all_the_same(quick):
    """`cached` continues in halves if a forward does not fit; such a size has not run."""
    device = Simulated(12)

    class Tower(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            device.ask(len(x), "forward")
            return super().forward(x)

    tower = Tower(4, 2)
    encode = megabatch.cached(tower, chunk=64)
    data = torch.rand(40, 4)

    def step(chunk: int) -> None:
        encode.chunk = chunk
        encode(data).square().mean().backward()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "out of memory")
        found = find_chunk(step, state=[tower], cap=40, margin=0.0)
    assert found.size == 12 and all(trial.ran == (trial.size <= 12) for trial in found.trials)


@pytest.mark.slow
def test_a_budget_is_measured_and_held():
    # In a process of its own: the system may page out parts of a large one, and then its memory is not what it was.
    process = fresh_processes().Process(target=_hold_budget)
    process.start()
    process.join(MEETING_TIME.total_seconds())
    assert process.exitcode == 0


@uncollecting()
def _hold_budget():
    held: list[Tensor] = []

    def step(rows: int) -> None:
        # Eight MiB per row, written to, so that they are resident.
        held.append(torch.ones(rows, 2 * MIB))
        held.clear()

    with ResidentTracker() as idle:
        pass
    budget, state = idle.bytes + 200 * MIB, [nn.Linear(1, 1)]
    exact, spare = (find_chunk(step, state=state, start=20, budget=budget, margin=margin, cap=200) for margin in (0.0, 0.1))
    # The process's other memory varies by some MiB, and a row is eight: a difference of two rows is allowed.
    assert abs(exact.size - 25) <= 2 and exact.limit_bytes == budget
    assert exact.size - spare.size == pytest.approx(0.1 * budget / (8 * MIB), abs=2) and spare.limit_bytes == int(0.9 * budget)
    for found in (exact, spare):
        ran = {trial.size: trial.peak_bytes for trial in found.trials if trial.ran}
        failed = {trial.size: trial.peak_bytes for trial in found.trials if not trial.ran}
        assert max(ran.values()) <= found.limit_bytes < min(failed.values())
        assert all(trial.why == "above the limit" for trial in found.trials if not trial.ran)
    with pytest.raises(ValueError, match=r"not even one row fits: above the limit, peak .*, limit 1\.\d+ MiB"):
        find_chunk(step, state=state, budget=2 * MIB)


def test_copies_of_the_state_do_not_count_to_the_step():
    model = nn.Linear(8192, 8192, bias=False)
    with ResidentTracker() as idle:
        pass
    found = find_chunk(lambda rows: None, state=[model], cap=1)
    # The copy is of 256 MiB.
    assert abs(found.trials[0].peak_bytes - idle.bytes) < 96 * MIB


def test_without_a_budget_half_of_what_the_host_has_is_one():
    limit = limit_of(torch.device("cpu"), None, 0.0)
    assert limit.bytes == pytest.approx(resident_bytes() + host_memory.available() / 2, rel=0.05) and limit.mode == "measured"
    shared = limit_of(torch.device("cpu"), None, 0.0, ranks=4)
    assert shared.bytes == pytest.approx(resident_bytes() + host_memory.available() / 8, rel=0.05)


def test_peaks_are_seen_also_where_the_kernels_mark_cannot_be_reset(monkeypatch):
    monkeypatch.setattr(host_memory, "reset_peak", lambda: False)
    torch.ones(192 * MIB)
    with ResidentTracker() as seen:
        before = resident_bytes()
        # So large that what the system pages out of this process meanwhile does not matter, and long enough to be sampled.
        x = torch.ones(64 * MIB)
        for _ in range(5):
            x.sin_()
        del x
    assert 160 * MIB < seen.bytes - before < 400 * MIB


def kept(path: Path, device: Simulated, **options: Any) -> tuple[int, int]:
    """Return the size found, and how many sizes were tried."""
    found = device.find(file=path, **options)
    return found.size, len(found.trials)


def test_a_result_that_is_kept_is_taken_up_after_one_trial(quick, tmp_path):
    path = tmp_path / "folder" / "chunk.json"
    size, trials = kept(path, Simulated(100))
    assert size == 100 and trials > 5
    assert isinstance(measurements.read(path).found, measurements.Fit) and measurements.read(path).found.chunk == 100
    assert kept(path, Simulated(100)) == (100, 1)
    # The stored size no longer runs, as on a device that others use too: search again and store the new result.
    assert kept(path, Simulated(70))[0] == 70
    assert kept(path, Simulated(100)) == (70, 1)


def test_a_result_of_another_question_is_where_the_search_begins(quick, tmp_path):
    path = tmp_path / "chunk.json"
    assert kept(path, Simulated(100), cap=64)[0] == 64
    assert kept(path, Simulated(100), cap=64) == (64, 1), "no larger one is asked for"
    assert kept(path, Simulated(100))[0] == 100, "the cap was in the way"
    other = json.loads(path.read_text()) | {"device": "another"}
    path.write_text(json.dumps(other))
    assert kept(path, Simulated(300))[0] == 300
    here = resident_bytes()
    assert kept(path, Simulated(320), budget=here + 900 * MIB)[0] == 320, "another budget"
    assert kept(path, Simulated(320), cap=50)[0] == 50


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "chunk.json"
    sweep = measurements.Measured(measurements.Sweep(64, 0.1, "samples"), {}, "cpu", "2")
    measurements.write(sweep, path)
    with pytest.raises(ValueError, match="holds a measurement of sweep, not of fit"):
        Simulated(10).find(file=path)


def test_few_trials_from_a_good_start(quick):
    good, none = Simulated(1000), Simulated(1000)
    assert good.find(start=1000, within=0.05).size >= 950
    assert none.find(within=0.05).size >= 950
    assert len(set(good.tried)) <= 4 and len(set(none.tried)) >= 10
