"""Runs in parallel, each in its own worker process on its own device; runs that finished earlier are not repeated."""

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
from .outcome import RunOutcome, read_outcome, write_outcome

Key = TypeVar("Key")
Train = Callable[[config.Run], RunOutcome]
# Seconds between two checks for a signal.
POLL_S = 0.2


class WorkerSlot(NamedTuple):
    """The device and the threads of one worker process. None leaves the run's own."""

    device: str | None
    threads: int | None


class Processes:
    """A callable that trains a run in a worker process, from its checkpoint if there is one. A failure is an outcome too.

    trust_code: whether the workers may import and call code that the run names.
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
            # Not communicate(), which closes standard input: its end tells the worker that this process is gone.
            with process.stdin, process.stdout:
                printed = process.stdout.read()
                status = process.wait()
        self._running.discard(process)
        if status:
            return RunOutcome(error=_reason(status, folder / "stderr.txt"))
        return RunOutcome(**json.loads(printed.splitlines()[-1]))

    def stop(self) -> None:
        """Ask the running workers to save a checkpoint and exit; workers that start later exit at once."""
        self._stopped = True
        for process in tuple(self._running):
            process.terminate()

    def _start(self, folder: Path, errors: IO[str]) -> subprocess.Popen[str]:
        # The worker has the import path of this process, because towers may be next to the calling script. `python -m` alone would
        # put the current folder first, where anybody may have written a module.
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


def run_all(
    needed: Callable[[Mapping[Key, RunOutcome]], Sequence[Key]],
    run_of: Callable[[Key], config.Run],
    train: Train,
    slots: Sequence[WorkerSlot],
    on_outcome: Callable[[Key, Mapping[Key, RunOutcome]], None],
) -> dict[Key, RunOutcome]:
    """Run what `needed` returns for the outcomes so far, until it returns nothing; return all outcomes.

    on_outcome: called with each key that has an outcome, and all outcomes so far. A signal raises `Stopped`, after the running
    workers had the time to save a checkpoint.
    """
    outcomes: dict[Key, RunOutcome] = {}
    runs: dict[Key, config.Run] = {}
    running: dict[Future[RunOutcome], tuple[Key, WorkerSlot]] = {}
    free = list(slots)
    with StopSign() as sign, ThreadPoolExecutor(len(slots)) as pool:
        try:
            while True:
                in_progress = [key for key, _ in running.values()]
                waiting = [key for key in needed(outcomes) if key not in in_progress]
                new = _finished_earlier(waiting, run_of, runs)
                for future in [future for future in running if future.done()]:
                    key, slot = running.pop(future)
                    free.append(slot)
                    new[key] = future.result()
                    if new[key].error is None:
                        write_outcome(runs[key], new[key])
                for key, outcome in new.items():
                    outcomes[key] = outcome
                    on_outcome(key, outcomes)
                if new:
                    continue
                while waiting and free:
                    key, slot = waiting.pop(0), free.pop(0)
                    running[pool.submit(_outcome_of, train, _in_slot(runs[key], slot))] = (key, slot)
                if not running:
                    return outcomes
                wait(running, timeout=POLL_S, return_when=FIRST_COMPLETED)
                if sign.number:
                    raise Stopped(f"stopped by signal {sign.number}; the same command resumes the sweep", 128 + sign.number)
        except BaseException:
            # Leaving the pool waits for its threads, so their workers must stop.
            getattr(train, "stop", lambda: None)()
            raise


def _finished_earlier(
    waiting: Sequence[Key], run_of: Callable[[Key], config.Run], runs: dict[Key, config.Run]
) -> dict[Key, RunOutcome]:
    """Add the runs of new keys to `runs`; return the outcomes of those that finished in an earlier sweep."""
    fresh = {key: run_of(key) for key in waiting if key not in runs}
    runs |= fresh
    return {key: outcome for key, run in fresh.items() if (outcome := read_outcome(run)) is not None}


def _outcome_of(train: Train, run: config.Run) -> RunOutcome:
    try:
        return train(run)
    except Exception as error:
        return RunOutcome(error=f"{type(error).__name__}: {error}")


def _in_slot(run: config.Run, slot: WorkerSlot) -> config.Run:
    compute = run.compute
    return replace(run, compute=replace(compute, device=slot.device or compute.device, threads=slot.threads or compute.threads))


def _reason(status: int, errors: Path) -> str:
    """Return why a worker has failed: the last line of its standard error, or the signal that ended it."""
    lines = [line for line in errors.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    if status > 0:
        return lines[-1] if lines else f"the worker exited with status {status} and no message"
    name = signal.Signals(-status).name
    hint = "; the system kills processes that use too much memory" if name == "SIGKILL" else ""
    return f"the worker was ended by {name}{hint}"
