"""The sweep: trainings of one run at several batches, each at rates of its own, until one batch can be recommended."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ... import config, packages
from ...measurements import Measured
from ...reporting.format import seconds_text
from ...training.run_folder import claimed
from .cases import Case, left, wanted
from .derive import Same, derived, length_of, pilot
from .outcome import Outcome
from .request import Request, places, requested
from .results import scores, write_results, write_rows
from .runner import Place, Processes, Train, go_through


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
    trust_code: whether code that the run names (`config.callables`) may be imported and called, here and in these processes.

    Writes measured.json, rows.jsonl, sweep.png and report.html into `out`, and each run into a folder under out/runs. Runs that
    have come to their end there are not repeated, the others go on from their checkpoints, those that failed are tried again.
    """
    config.require_trust(run, trust_code)
    packages.require(packages.HTML)
    request = requested(run, batches, rates, seeds, same, decays, extend, seconds)
    study = _Study(request, Path(out), places(run, jobs, devices), train or Processes(trust_code=trust_code), say or _print)
    with claimed(out, "sweep"):
        outcomes = study.outcomes()
        return write_results(request, outcomes, study.out, study.places[0].device or run.compute.device, len(study.places))


class _Study:
    """A sweep in progress."""

    def __init__(self, request: Request, out: Path, places: list[Place], train: Train, say: Callable[[str], None]) -> None:
        self.base, self.space, self.request = request.run, request.space, request
        self.out, self.places, self.train, self.say = out, places, train, say
        self.began = time.monotonic()

    def outcomes(self) -> dict[Case, Outcome]:
        """What became of every run that the search needed."""
        lengths, failed = self._lengths()
        space = replace(self.space, middles={batch: self.space.middles[batch] for batch in lengths})

        def told(case: Case, found: Mapping[Case, Outcome]) -> None:
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

    def _lengths(self) -> tuple[dict[int, dict[str, int]], dict[Case, Outcome]]:
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

    def _pilots(self, batches: set[int]) -> dict[int, Outcome]:
        """A few steps at each batch."""

        def told(batch: int, found: Mapping[int, Outcome]) -> None:
            error, speed = found[batch].error, found[batch].pairs_per_s
            self.say(f"pilot at batch {batch:,}: " + (f"failed: {error}" if error else f"{speed:,.0f} pairs/s"))

        return go_through(
            lambda found: [batch for batch in sorted(batches) if batch not in found],
            lambda batch: pilot(self.base, batch, self.out),
            self.train,
            self.places,
            told,
        )


def _words(case: Case, outcome: Outcome) -> str:
    begin = f"batch {case.batch:,}, lr {case.lr:g}, seed {case.seed}:"
    if outcome.quality is None:
        return f"{begin} failed: {outcome.error}"
    return f"{begin} {outcome.quality:.1%} in {seconds_text(outcome.seconds)}, {outcome.pairs_per_s:,.0f} pairs/s"


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
