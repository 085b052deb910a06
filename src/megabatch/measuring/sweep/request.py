"""What a sweep is asked for, checked: a run, the batches, and how much is searched around the rule."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch

from ... import config
from ...towers.model import build_towers
from ...training.build import open_data
from ...training.schedules import samples_of
from .cases import Space, rate
from .derive import Same, middle_rate
from .runner import Place


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


def places(run: config.Run, jobs: int, devices: Sequence[str] | None) -> list[Place]:
    """A place for each run at a time; several share the threads that one would have."""
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}: must be at least 1")
    if "RANK" in os.environ:
        raise ValueError("RANK is set: a sweep starts its own processes; call it without torchrun, and name the devices it may use")
    names: list[str | None] = [*devices] if devices else [None]
    names = names * jobs
    threads = max(1, (run.compute.threads or torch.get_num_threads()) // len(names)) if len(names) > 1 else None
    return [Place(name, threads) for name in names]


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
