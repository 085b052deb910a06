"""Runs side by side: each in a process of its own, on a device of its own, and none that has come to its end before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from ... import config
from ...training import run_folder
from ...training.signals import Stopped, StopSign
from .outcome import RunOutcome, finished, record

Key = TypeVar("Key")
Train = Callable[[config.Run], RunOutcome]
# Seconds between two looks at whether somebody wants the sweep to stop.
LOOK = 0.2


class WorkerSlot(NamedTuple):
    """Where one run at a time is computed. None leaves it as the run has it."""

    device: str | None
    threads: int | None


class Processes:
    """Trains a run in a process of its own, from its checkpoint if it has one; whatever happens there comes back as an outcome.

    trust_code: whether the processes may import and call code that the run names.
    """

    def __init__(self, *, trust_code: bool = False) -> None:
        self._switches = ["--trust-code"] if trust_code else []
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def __call__(self, run: config.Run) -> RunOutcome:
        folder = Path(run.out)
        # Released at once: the worker claims the folder for the run itself.
        with run_folder.claimed(folder, "train"):
            run_folder.write_configuration(folder, run)
        with open(folder / "stderr.txt", "w", encoding="utf-8") as errors:
            process = self._start(folder, errors)
            assert process.stdin is not None and process.stdout is not None
            # Not communicate(): that would close the pipe whose end tells the worker that we are gone.
            with process.stdin, process.stdout:
                printed = process.stdout.read()
                status = process.wait()
        self._running.discard(process)
        if status:
            return RunOutcome(error=_reason(status, folder / "stderr.txt"))
        return RunOutcome(**json.loads(printed.splitlines()[-1]))

    def stop(self) -> None:
        """Asks what is running to end with a checkpoint; nothing goes on afterwards."""
        self._stopped = True
        for process in tuple(self._running):
            process.terminate()

    def _start(self, folder: Path, errors: IO[str]) -> subprocess.Popen[str]:
        # The worker imports from where this process does, and from nowhere else: towers may lie beside the script that called, but
        # `python -m` alone would put the current folder first, whoever wrote what lies there.
        paths = [path or os.getcwd() for path in sys.path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker", *self._switches, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            env=environment,
        )
        self._running.add(process)
        if self._stopped:
            process.terminate()
        return process


def go_through(
    wanted: Callable[[Mapping[Key, RunOutcome]], Sequence[Key]],
    make: Callable[[Key], config.Run],
    train: Train,
    places: Sequence[WorkerSlot],
    told: Callable[[Key, Mapping[Key, RunOutcome]], None],
) -> dict[Key, RunOutcome]:
    """The outcomes of all keys that are wanted, until no more are: which ones may depend on the outcomes so far.

    told: is called with each key that has an outcome, and all outcomes so far. `Stopped` where a signal comes: what is running is
    given the time to leave a checkpoint.
    """
    found: dict[Key, RunOutcome] = {}
    runs: dict[Key, config.Run] = {}
    running: dict[Future[RunOutcome], tuple[Key, WorkerSlot]] = {}
    free = list(places)
    with StopSign() as sign, ThreadPoolExecutor(len(places)) as pool:
        try:
            while True:
                under_way = [key for key, _ in running.values()]
                ahead = [key for key in wanted(found) if key not in under_way]
                news = _finished_before(ahead, make, runs)
                for future in [future for future in running if future.done()]:
                    key, place = running.pop(future)
                    free.append(place)
                    news[key] = future.result()
                    if news[key].error is None:
                        record(runs[key], news[key])
                for key, outcome in news.items():
                    found[key] = outcome
                    told(key, found)
                if news:
                    continue
                while ahead and free:
                    key, place = ahead.pop(0), free.pop(0)
                    running[pool.submit(_tried, train, _placed(runs[key], place))] = (key, place)
                if not running:
                    return found
                wait(running, timeout=LOOK, return_when=FIRST_COMPLETED)
                if sign.number:
                    raise Stopped(f"stopped by signal {sign.number}; the same command goes on from here", 128 + sign.number)
        except BaseException:
            # Leaving the pool waits for what it runs.
            getattr(train, "stop", lambda: None)()
            raise


def _finished_before(ahead: Sequence[Key], make: Callable[[Key], config.Run], runs: dict[Key, config.Run]) -> dict[Key, RunOutcome]:
    """The outcomes that folders hold, of keys that come up for the first time; their runs are noted in `runs`."""
    fresh = {key: make(key) for key in ahead if key not in runs}
    runs |= fresh
    return {key: outcome for key, run in fresh.items() if (outcome := finished(run)) is not None}


def _tried(train: Train, run: config.Run) -> RunOutcome:
    try:
        return train(run)
    except Exception as error:
        return RunOutcome(error=f"{type(error).__name__}: {error}")


def _placed(run: config.Run, place: WorkerSlot) -> config.Run:
    compute = run.compute
    return replace(run, compute=replace(compute, device=place.device or compute.device, threads=place.threads or compute.threads))


def _reason(status: int, errors: Path) -> str:
    """Why a process has failed: its last words, or the signal that ended it."""
    lines = [line for line in errors.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    if status > 0:
        return lines[-1] if lines else f"ended with status {status} and said nothing"
    name = signal.Signals(-status).name
    hint = "; the system kills what takes too much memory" if name == "SIGKILL" else ""
    return f"ended by {name}{hint}"
