"""`megabatch sweep`: train one run at several batches, each at its best learning rate, and recommend a batch.

A sweep is a checked request, runs until no more are needed (cases.py says which), and a summary of each batch (summary.py) from
which the verdict is drawn (verdict.py).
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from ... import config, environment, measurements, packages, trust
from ...measurements import Measured
from ...reporting.format import seconds_text
from ...reporting.html import write_report
from ...towers.model import build_towers
from ...training.build import open_data
from ...training.run_folder import claimed
from ...training.schedules import samples_of
from .cases import Case, Same, Space, length_of, middle_rate, needed_cases, pilot_of, rate, remaining, run_of
from .outcome import RunOutcome, write_whole
from .report import sweep_report
from .runner import Processes, Train, WorkerSlot, run_all
from .summary import scores, summaries
from .verdict import verdict


def sweep(
    run: config.Run,
    *,
    batches: Sequence[int],
    rates: Sequence[float] = (0.5, 1, 2),
    seeds: int | Sequence[int] = 3,
    same: Same = "samples",
    decays: Sequence[float] = (1.0,),
    extend: int = 2,
    seconds: float | None = None,
    jobs: int = 1,
    devices: Sequence[str] | None = None,
    out: str | Path,
    train: Train | None = None,
    say: Callable[[str], None] | None = None,
    trust_code: bool = False,
) -> Measured:
    """Train `run` at several batches and recommend one. The same call continues a sweep that was stopped.

    rates: factors of the rate that the plan's rule gives at a batch, from the run's own rate at its own batch. Each batch tries
        them with the first seed; if the best is at an edge, up to `extend` further ones follow.
    decays: factors of the weight decay: the first is used at every rate, the others are tried at the best rate.
    seeds: how many, from the run's own on, or which. Those after the first are used at the best rate and decay only.
    same: what all runs have in common. "time": each takes `seconds`, by the speed of a pilot run; None is the time that the run as
        it is would take.
    jobs: parallel runs on each of the `devices` (None: on the run's own).
    train: trains a run, by default `megabatch train` in a worker process. say: called with a line for each run that ended.
    trust_code: whether code that the run names (`trust.callables`) may be imported and called, here and in the workers.

    Writes measured.json, rows.jsonl, sweep.png and report.html into `out`, and each run into a folder under out/runs. Finished runs
    there are not repeated, unfinished ones resume from their checkpoints, and failed ones are tried again.
    """
    config.require_filled(run)
    # Each run of a sweep is one process.
    run = config.with_ranks(run, 1)
    trust.require_trust(run, trust_code)
    packages.require(packages.HTML)
    request = checked_request(
        run, batches=batches, rates=rates, seeds=seeds, same=same, decays=decays, extend=extend, seconds=seconds
    )
    slots = worker_slots(run, jobs, devices)
    progress = _Sweep(request, Path(out), slots, train or Processes(trust_code=trust_code), say or _print)
    with claimed(out, "sweep"):
        outcomes = progress.outcomes()
        return write_results(request, outcomes, progress.out, slots[0].device or run.compute.device, len(slots))


@dataclass(frozen=True)
class SweepRequest:
    """What a sweep compares. The run's length is in samples or steps. seconds: of each run, for same="time"."""

    run: config.Run
    space: Space
    same: Same
    seconds: float | None


def checked_request(
    run: config.Run,
    *,
    batches: Sequence[int],
    rates: Sequence[float],
    seeds: int | Sequence[int],
    same: Same,
    decays: Sequence[float],
    extend: int,
    seconds: float | None,
) -> SweepRequest:
    """Check arguments of `sweep` and return them as a request."""
    seeds = tuple(range(run.seed, run.seed + seeds)) if isinstance(seeds, int) else tuple(dict.fromkeys(seeds))
    rules: list[tuple[str, Any, bool, str]] = [
        (
            "batches",
            batches,
            len(set(batches)) == len(batches) > 0 and min(batches) >= 1,
            "must list batches, each once",
        ),
        ("rates", rates, _are_factors(rates) and min(rates) > 0, "must be factors above 0, as 0.5, 1, 2"),
        ("seeds", seeds, len(seeds) > 0, "must be at least 1, or a list of seeds"),
        ("same", same, same in get_args(Same), f"must be one of {', '.join(get_args(Same))}"),
        ("decays", decays, _are_factors(decays), "must be factors of the weight decay, none of them negative"),
        ("extend", extend, extend >= 0, "must not be negative; 0 tries no further rates"),
        ("seconds", seconds, seconds is None or (seconds > 0 and same == "time"), 'must be above 0, and needs same="time"'),
        ("data.held_out", run.data.held_out, run.data.held_out != 0, "a sweep compares held-out quality; hold some pairs out"),
    ]
    for name, value, valid, rule in rules:
        if not valid:
            raise ValueError(f"{name} is {value!r}: {rule}")
    run = _in_samples(run)
    middles = {batch: middle_rate(run, batch) for batch in batches}
    weight_decays = tuple(dict.fromkeys(rate(run.optimizer.weight_decay, factor) for factor in decays))
    return SweepRequest(run, Space(middles, tuple(rates), weight_decays, seeds, extend), same, seconds)


def worker_slots(run: config.Run, jobs: int, devices: Sequence[str] | None) -> list[WorkerSlot]:
    """Return a slot for each parallel run; several share the threads that one would have."""
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}: must be at least 1")
    if "RANK" in os.environ:
        raise ValueError("RANK is set, but a sweep starts its own processes; call it without torchrun, and list the devices to use")
    names: list[str | None] = [*devices] if devices else [None]
    names = names * jobs
    threads = max(1, (run.compute.threads or torch.get_num_threads()) // len(names)) if len(names) > 1 else None
    return [WorkerSlot(name, threads) for name in names]


class _Lengths(NamedTuple):
    """The length of the runs at each batch, and the outcomes of pilots that failed, whose batches have no length."""

    by_batch: dict[int, dict[str, int]]
    failed: dict[Case, RunOutcome]


class _Sweep:
    """A sweep in progress."""

    def __init__(self, request: SweepRequest, out: Path, slots: list[WorkerSlot], train: Train, say: Callable[[str], None]) -> None:
        self.base, self.space, self.request = request.run, request.space, request
        self.out, self.slots, self.train, self.say = out, slots, train, say
        self.began = time.monotonic()

    def outcomes(self) -> dict[Case, RunOutcome]:
        """Train every run that the sweep needs and return their outcomes."""
        lengths, failed = self._lengths()
        space = replace(self.space, middles={batch: self.space.middles[batch] for batch in lengths})

        def on_outcome(case: Case, outcomes: Mapping[Case, RunOutcome]) -> None:
            write_rows(self.out, {**failed, **outcomes})
            ended, left = len(outcomes), remaining(space, scores(outcomes))
            self.say(f"[{ended} of {ended + left}, {time.monotonic() - self.began:.0f} s] {_progress_text(case, outcomes[case])}")

        outcomes = run_all(
            lambda outcomes: needed_cases(space, scores(outcomes)),
            lambda case: run_of(self.base, case, lengths[case.batch], self.out),
            self.train,
            self.slots,
            on_outcome,
        )
        write_rows(self.out, {**failed, **outcomes})
        return {**failed, **outcomes}

    def _lengths(self) -> _Lengths:
        same, seconds = self.request.same, self.request.seconds
        if same != "time":
            return _Lengths({batch: length_of(self.base, same, batch) for batch in self.space.middles}, {})
        base_batch = self.base.batch.size
        pilots = self._pilots({*self.space.middles} | (set() if seconds else {base_batch}))
        if seconds is None:
            if pilots[base_batch].error is not None:
                raise ValueError(
                    f"the run as it is, at batch {base_batch:,}, failed in its first steps ({pilots[base_batch].error}), so its"
                    " time is unknown; pass seconds"
                )
            seconds = length_of(self.base, "samples", base_batch)["samples"] / pilots[base_batch].pairs_per_s
        speeds = {batch: pilots[batch].pairs_per_s for batch in self.space.middles if pilots[batch].error is None}
        failed = {
            Case(batch, middle, self.space.decays[0], self.space.seeds[0]): pilots[batch]
            for batch, middle in self.space.middles.items()
            if batch not in speeds
        }
        return _Lengths({batch: length_of(self.base, same, batch, seconds * speed) for batch, speed in speeds.items()}, failed)

    def _pilots(self, batches: set[int]) -> dict[int, RunOutcome]:
        """Take a few steps at each batch and return the outcomes."""

        def on_outcome(batch: int, outcomes: Mapping[int, RunOutcome]) -> None:
            error, speed = outcomes[batch].error, outcomes[batch].pairs_per_s
            self.say(f"pilot at batch {batch:,}: " + (f"failed: {error}" if error else f"{speed:,.0f} pairs/s"))

        return run_all(
            lambda outcomes: [batch for batch in sorted(batches) if batch not in outcomes],
            lambda batch: pilot_of(self.base, batch, self.out),
            self.train,
            self.slots,
            on_outcome,
        )


def rows_of(outcomes: Mapping[Case, RunOutcome]) -> list[dict[str, Any]]:
    """Return a row for each run, failed ones with their error."""
    return [{**case._asdict(), **asdict(outcome)} for case, outcome in sorted(outcomes.items())]


def write_rows(out: Path, outcomes: Mapping[Case, RunOutcome]) -> None:
    write_whole(out / "rows.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows_of(outcomes)))


def write_results(
    request: SweepRequest, outcomes: Mapping[Case, RunOutcome], out: Path, device: str | None, processes: int
) -> Measured:
    """Write the files of a sweep and return its measurement; ValueError if every run has failed."""
    batches = summaries(request.space, outcomes, processes)
    if not batches:
        first = next(outcome.error for outcome in outcomes.values())
        raise ValueError(f"every run of the sweep failed; {out / 'rows.jsonl'} has the errors, the first one is: {first}")
    result = verdict(batches, request.same)
    measured = Measured(
        measurements.Sweep(result.batch, result.lr, request.same, tuple(each.as_row() for each in batches)),
        run=config.as_table(request.run),
        device=_device_name(device),
        torch=str(torch.__version__),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    )
    rows = rows_of(outcomes)
    measurements.write(measured, out / "measured.json")
    write_report(sweep_report(measured, rows), out)
    return measured


def _are_factors(values: Sequence[float]) -> bool:
    return len(values) > 0 and all(0 <= value < math.inf for value in values)


def _in_samples(run: config.Run) -> config.Run:
    """Return the run with its length in samples if it is in epochs, for which the data is opened."""
    if run.schedule.epochs is None:
        return run
    x, y = build_towers(run)
    training, _ = open_data(run, x.kind, y.kind)
    samples = samples_of(run.schedule, sum(training.lengths))
    return replace(run, schedule=replace(run.schedule, epochs=None, samples=samples))


def _device_name(device: str | None) -> str:
    """Return the name of a device; None is the accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return environment.device_name(torch.device(device) if device is not None else accelerator or torch.device("cpu"))


def _progress_text(case: Case, outcome: RunOutcome) -> str:
    begin = f"batch {case.batch:,}, lr {case.lr:g}, seed {case.seed}:"
    if outcome.quality is None:
        return f"{begin} failed: {outcome.error}"
    return f"{begin} {outcome.quality:.1%} in {seconds_text(outcome.seconds)}, {outcome.pairs_per_s:,.0f} pairs/s"


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
