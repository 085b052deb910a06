"""A rank or the launcher killed with SIGKILL at any moment: the same command resumes to exactly the same parameters."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time
import uuid
from pathlib import Path

import pytest
from small_runs import PAIRS, assert_equal, final, run_of, write_pairs
from world import fresh_processes

from megabatch import config
from megabatch.reporting.history import read_history
from megabatch.training import checkpoint, run_folder

pytestmark = [
    pytest.mark.sampled(3),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="a launcher forks its ranks here, so that they import nothing"),
]

OPTIONS = ["x.name=text", 'x.options={"width": 8, "buckets": 64}', "y.name=x", "compute.threads=1", "checkpoint.every=3"]
WHO = ("rank 0", "rank 1", "the launcher")


class Launch:
    """`torchrun --nproc-per-node=2 -m megabatch train FILE`, under way; its ranks are forked from it."""

    def __init__(self, file: Path) -> None:
        self.notes = file.with_name(f"launch-{uuid.uuid4().hex}")
        self.notes.mkdir()
        self.process = fresh_processes().Process(target=_launch, args=(file, self.notes))
        self.process.start()

    def pid(self, who: str) -> int | None:
        """Return the process of a rank or the launcher, or None before it exists."""
        if who == "the launcher":
            return self.process.pid
        path = self.notes / who
        return int(path.read_text() or 0) or None if path.exists() else None

    def wait(self) -> int:
        self.process.join(180)
        assert self.process.exitcode is not None, self.printed
        return self.process.exitcode

    @property
    def printed(self) -> str:
        return (self.notes / "printed").read_text()[-5000:]


def _launch(file: Path, notes: Path) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for number in (1, 2):
        os.dup2(os.open(notes / "printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=notes.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        monitor_interval=0.05,
        max_restarts=0,
    )
    elastic_launch(settings, _as_rank)(file, notes)


def _as_rank(file: Path, notes: Path) -> None:
    from torch.multiprocessing import _prctl_pr_set_pdeathsig

    from megabatch import cli

    # A forked rank would get a signal when the launcher dies. Ranks that torchrun starts as commands, as users do, do not.
    _prctl_pr_set_pdeathsig(0)
    (notes / f"rank {os.environ['RANK']}").write_text(str(os.getpid()))
    status = cli.main(["train", str(file)])
    if status:
        sys.exit(status)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("killed")
    write_pairs(path / "pairs.jsonl", PAIRS)
    return path


def expected(folder, steps):
    """Return the parameters of a run of so many steps that was not killed."""
    out = folder / f"whole-{steps}"
    if not out.exists():
        launch = Launch(write_run(folder, out.name, steps))
        assert launch.wait() == 0, launch.printed
    return final(out)


def write_run(folder, name, steps):
    run = run_of(folder / "pairs.jsonl", folder / name, *OPTIONS, steps=steps)
    (folder / f"{name}.toml").write_text(config.as_toml(run))
    return folder / f"{name}.toml"


def kill(launch, who, out, steps, delay):
    """Kill a moment after the log has so many steps; return whether the run was still running."""
    log = out / "log.jsonl"
    while not log.exists() or log.read_bytes().count(b'"event": "step"') < steps:
        assert launch.process.is_alive(), launch.printed
        time.sleep(0.002)
    time.sleep(delay)
    pid = launch.pid(who)
    under_way = launch.process.is_alive() and not (out / "result.json").exists()
    if under_way:
        os.kill(pid, signal.SIGKILL)
    return under_way


def killed_and_resumed(folder, who, seed, steps):
    """Return the folder of a run of so many steps that was killed once, in its first three quarters, and then resumed."""
    chance = random.Random(f"{who} {seed}")
    for attempt in range(5):
        file = write_run(folder, f"{who}-{seed}-{attempt}", steps)
        out = file.with_suffix("")
        first = Launch(file)
        if not kill(first, who, out, chance.randint(1, steps * 3 // 4), chance.uniform(0, 0.05)):
            # On a busy machine the run may end before the check.
            assert first.wait() == 0, first.printed
            continue
        if who != "the launcher":
            # The launcher ends the other rank and itself; ranks without a launcher are not waited for.
            assert first.wait() != 0
        second = Launch(file)
        assert second.wait() == 0, second.printed
        for rank in ("rank 0", "rank 1"):
            wait_for_end(first.pid(rank))
        return out
    raise AssertionError("the run was never killed in time")


def wait_for_end(pid, seconds=60):
    end = time.monotonic() + seconds
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        assert time.monotonic() < end, f"process {pid} lives on without its launcher"
        time.sleep(0.05)


def check(out, steps):
    assert_equal(final(out), expected(out.parent, steps))
    assert run_folder.foreign(out) == [] and json.loads((out / "result.json").read_text())["steps"] == steps
    history = read_history(out / "log.jsonl")
    assert [row["step"] for row in history.steps] == list(range(1, steps + 1)) and history.unread == 0
    # Two processes writing at the same time would repeat steps.
    order = [row["step"] for row in map(json.loads, (out / "log.jsonl").read_text().splitlines()) if row["event"] == "step"]
    assert sum(after <= before for before, after in itertools.pairwise(order)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("who", WHO)
def test_killed_once_it_ends_with_the_same_parameters(folder, who):
    check(killed_and_resumed(folder, who, seed=0, steps=20), steps=20)


@pytest.mark.slow
def test_ranks_whose_launcher_was_killed_end_with_a_checkpoint(folder):
    """They would continue unnoticed and write to the folder of the resumed run."""
    file = write_run(folder, "endless", steps=10**5)
    launch, out = Launch(file), folder / "endless"
    try:
        assert kill(launch, "the launcher", out, steps=4, delay=0)
        for rank in ("rank 0", "rank 1"):
            wait_for_end(launch.pid(rank), seconds=30)
    finally:
        for rank in ("rank 0", "rank 1"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(launch.pid(rank), signal.SIGKILL)
    last = read_history(out / "log.jsonl").steps[-1]["step"]
    assert checkpoint.read_metadata(checkpoint.newest(out / "checkpoints"))["step"] == last


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 11))])
@pytest.mark.parametrize("who", WHO)
def test_killed_at_any_moment_it_ends_with_the_same_parameters(folder, who, seed):
    check(killed_and_resumed(folder, who, seed, steps=60), steps=60)
