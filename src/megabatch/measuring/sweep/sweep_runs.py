"""The sweep: trainings of one run at several batches, each at rates of its own, until one batch can be recommended."""

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
from typing import Any, get_args

import torch

from ... import config, environment, measurements, packages, trust
from ...measurements import Measured
from ...reporting.wording import seconds_text
from ...towers.model import build_towers
from ...training.build import open_data
from ...training.run_folder import claimed
from ...training.schedules import samples_of
from .cases import FAILED, Case, Same, Space, choice, derived, left, length_of, middle_rate, pilot, rate, wanted
from .outcome import RunOutcome, write_whole
from .page import page
from .picture import picture
from .runner import Processes, Train, WorkerSlot, go_through
from .summary import Summary, summary
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
    """Trains `run` at several batches and says which one to take; the same call goes on where an earlier one was stopped.

    rates: factors of the rate that the plan's rule gives at a batch, from the run's own rate at its own batch. Each batch tries
        them with the first seed; where the best lies at the edge, up to `extend` further ones follow.
    decays: factors of the weight decay, the first at every rate, the others at the best rate.
    seeds: how many, from the run's own on, or which. Those after the first are spent on the best rate and decay alone.
    same: what all runs have equal. "time": each takes `seconds` (None: what the run as it is would take), by a pilot's speed.
    jobs: runs at a time on each of the `devices` (None: on the run's own).
    train: what trains a run, by default `megabatch train` in a process of its own; say: is told of each run that ended.
    trust_code: whether code that the run names (`trust.callables`) may be imported and called, here and in these processes.

    Writes measured.json, rows.jsonl, sweep.png and report.html into `out`, and each run into a folder under out/runs. Runs that
    have come to their end there are not repeated, the others go on from their checkpoints, those that failed are tried again.
    """
    trust.require_trust(run, trust_code)
    packages.require(packages.FIGURES)
    request = requested(run, batches, rates, seeds, same, decays, extend, seconds)
    study = _Sweep(request, Path(out), places(run, jobs, devices), train or Processes(trust_code=trust_code), say or _print)
    with claimed(out, "sweep"):
        outcomes = study.outcomes()
        return write_results(request, outcomes, study.out, study.places[0].device or run.compute.device, len(study.places))


class _Sweep:
    """A sweep in progress."""

    def __init__(self, request: Request, out: Path, places: list[WorkerSlot], train: Train, say: Callable[[str], None]) -> None:
        self.base, self.space, self.request = request.run, request.space, request
        self.out, self.places, self.train, self.say = out, places, train, say
        self.began = time.monotonic()

    def outcomes(self) -> dict[Case, RunOutcome]:
        """What became of every run that the search needed."""
        lengths, failed = self._lengths()
        space = replace(self.space, middles={batch: self.space.middles[batch] for batch in lengths})

        def told(case: Case, found: Mapping[Case, RunOutcome]) -> None:
            write_rows(self.out, {**failed, **found})
            ended, ahead = len(found), left(space, scores(found))
            self.say(f"[{ended} of {ended + ahead}, {time.monotonic() - self.began:.0f} s] {_words(case, found[case])}")

        found = go_through(
            lambda found: wanted(space, scores(found)),
            lambda case: derived(self.base, case, lengths[case.batch], self.out),
            self.train,
            self.places,
            told,
        )
        write_rows(self.out, {**failed, **found})
        return {**failed, **found}

    def _lengths(self) -> tuple[dict[int, dict[str, int]], dict[Case, RunOutcome]]:
        """How long the runs of each batch are; with the same time, the batches whose pilot failed are left out, and returned."""
        same, seconds = self.request.same, self.request.seconds
        if same != "time":
            return {batch: length_of(self.base, same, batch) for batch in self.space.middles}, {}
        own = self.base.batch.size
        pilots = self._pilots({*self.space.middles} | (set() if seconds else {own}))
        if seconds is None:
            if pilots[own].error is not None:
                raise ValueError(
                    f"the run as it is, at batch {own:,}, failed in its first steps ({pilots[own].error}); give seconds"
                )
            seconds = length_of(self.base, "samples", own)["samples"] / pilots[own].pairs_per_s
        fine = {batch: pilots[batch].pairs_per_s for batch in self.space.middles if pilots[batch].error is None}
        failed = {
            Case(batch, middle, self.space.decays[0], self.space.seeds[0]): pilots[batch]
            for batch, middle in self.space.middles.items()
            if batch not in fine
        }
        return {batch: length_of(self.base, same, batch, seconds * rate) for batch, rate in fine.items()}, failed

    def _pilots(self, batches: set[int]) -> dict[int, RunOutcome]:
        """A few steps at each batch."""

        def told(batch: int, found: Mapping[int, RunOutcome]) -> None:
            error, speed = found[batch].error, found[batch].pairs_per_s
            self.say(f"pilot at batch {batch:,}: " + (f"failed: {error}" if error else f"{speed:,.0f} pairs/s"))

        return go_through(
            lambda found: [batch for batch in sorted(batches) if batch not in found],
            lambda batch: pilot(self.base, batch, self.out),
            self.train,
            self.places,
            told,
        )


def _words(case: Case, outcome: RunOutcome) -> str:
    begin = f"batch {case.batch:,}, lr {case.lr:g}, seed {case.seed}:"
    if outcome.quality is None:
        return f"{begin} failed: {outcome.error}"
    return f"{begin} {outcome.quality:.1%} in {seconds_text(outcome.seconds)}, {outcome.pairs_per_s:,.0f} pairs/s"


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Request:
    """The arguments of `sweep` that say what is compared. The run's length is in samples or steps."""

    run: config.Run
    space: Space
    same: Same
    seconds: float | None


def requested(
    run: config.Run,
    batches: Sequence[int],
    rates: Sequence[float],
    seeds: int | Sequence[int],
    same: Same,
    decays: Sequence[float],
    extend: int,
    seconds: float | None,
) -> Request:
    """The request of these arguments, whose meaning `sweep` tells."""
    seeds = tuple(range(run.seed, run.seed + seeds)) if isinstance(seeds, int) else tuple(dict.fromkeys(seeds))
    rules: list[tuple[str, Any, bool, str]] = [
        ("batches", batches, len(set(batches)) == len(batches) > 0 and min(batches) >= 1, "name each batch once, at least one"),
        ("rates", rates, _factors(rates) and min(rates) > 0, "are factors above 0, as in 0.5, 1, 2"),
        ("seeds", seeds, len(seeds) > 0, "must be at least 1, or a list of seeds"),
        ("same", same, same in get_args(Same), f"must be one of {', '.join(get_args(Same))}"),
        ("decays", decays, _factors(decays), "are factors of the weight decay, none of them negative"),
        ("extend", extend, extend >= 0, "must not be negative; 0 keeps to the rates given"),
        ("seconds", seconds, seconds is None or (seconds > 0 and same == "time"), 'must be above 0, and go with same="time"'),
        ("data.held_out", run.data.held_out, run.data.held_out != 0, "a sweep compares held-out quality; hold some pairs out"),
    ]
    for name, value, fine, rule in rules:
        if not fine:
            raise ValueError(f"{name} is {value!r}: {rule}")
    run = _in_samples(run)
    middles = {batch: middle_rate(run, batch) for batch in batches}
    weight_decays = tuple(dict.fromkeys(rate(run.optimizer.weight_decay, factor) for factor in decays))
    return Request(run, Space(middles, tuple(rates), weight_decays, seeds, extend), same, seconds)


def places(run: config.Run, jobs: int, devices: Sequence[str] | None) -> list[WorkerSlot]:
    """A place for each run at a time; several share the threads that one would have."""
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}: must be at least 1")
    if "RANK" in os.environ:
        raise ValueError("RANK is set: a sweep starts its own processes; call it without torchrun, and name the devices it may use")
    names: list[str | None] = [*devices] if devices else [None]
    names = names * jobs
    threads = max(1, (run.compute.threads or torch.get_num_threads()) // len(names)) if len(names) > 1 else None
    return [WorkerSlot(name, threads) for name in names]


def _factors(values: Sequence[float]) -> bool:
    return len(values) > 0 and all(0 <= value < math.inf for value in values)


def _in_samples(run: config.Run) -> config.Run:
    """The run with its length in samples where it is in epochs, which takes a look at the data."""
    if run.schedule.epochs is None:
        return run
    x, y = build_towers(run)
    training, _ = open_data(run, x.kind, y.kind)
    samples = samples_of(run.schedule, sum(training.lengths))
    return replace(run, schedule=replace(run.schedule, epochs=None, samples=samples))


def scores(outcomes: Mapping[Case, RunOutcome]) -> dict[Case, float]:
    """What rates are chosen by."""
    return {case: FAILED if outcome.choosing is None else outcome.choosing for case, outcome in outcomes.items()}


def rows_of(outcomes: Mapping[Case, RunOutcome]) -> list[dict[str, Any]]:
    """A row for each run, failed ones with their error."""
    return [{**case._asdict(), **asdict(outcome)} for case, outcome in sorted(outcomes.items())]


def write_rows(out: Path, outcomes: Mapping[Case, RunOutcome]) -> None:
    write_whole(out / "rows.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows_of(outcomes)))


def write_results(
    request: Request, outcomes: Mapping[Case, RunOutcome], out: Path, device: str | None, processes: int
) -> measurements.Measured:
    """The measurement, with its files; ValueError where every run has failed."""
    summaries = summaries_of(request.space, outcomes, processes)
    if not summaries:
        first = next(outcome.error for outcome in outcomes.values())
        raise ValueError(f"every run of the sweep failed; {out / 'rows.jsonl'} says why, the first one: {first}")
    told = verdict(summaries, request.same)
    found = measurements.Measured(
        measurements.Sweep(told.batch, told.lr, request.same, tuple(each.as_row() for each in summaries)),
        run=config.as_table(request.run),
        device=_device_name(device),
        torch=str(torch.__version__),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    )
    rows = rows_of(outcomes)
    measurements.write(found, out / "measured.json")
    picture((found, rows), out / "sweep.png")
    write_whole(out / "report.html", page(found, rows))
    return found


def summaries_of(space: Space, outcomes: Mapping[Case, RunOutcome], processes: int) -> list[Summary]:
    """Each batch at its best rate, smallest first; those without a result are named in each of the others."""
    known = scores(outcomes)
    chosen = {batch: choice(space, known, batch) for batch in sorted(space.middles)}
    lost = [batch for batch, found in chosen.items() if found is None]
    return [summary(batch, pick, outcomes, processes, lost) for batch, pick in chosen.items() if pick is not None]


def _device_name(device: str | None) -> str:
    """What the runs were computed on; where nothing was said, the accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    chosen = torch.device(device) if device is not None else accelerator or torch.device("cpu")
    return environment.device_name(chosen)
