"""What measurements say to a plan: read, compared with what is planned, and put where a prediction would stand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import config
from ..costs.devices import find_or_assume_device
from ..costs.hardware import Machine
from ..costs.strategy import Precision
from ..environment import device_name
from ..measurements import Fit, Measured, Noise, Profile, Sweep, read
from ..objectives import OBJECTIVES
from .calibration import Known, Step, strategy_of

Source = str | Path | Measured
# What a measurement must have in common with a plan to say anything about it.
TOWER = ("name", "options", "locked")


def gather(sources: Sequence[Source], base: config.Run, precision: Precision, machine: Machine) -> Known:
    """What the files say of a plan for these towers on this machine; a ValueError where they are of something else."""
    known = Known()
    for source in sources:
        found = source if isinstance(source, Measured) else read(source)
        name = f"the {found.kind}" if isinstance(source, Measured) else str(source)
        if found.kind in known.said and found.kind != "profile":
            raise ValueError(f"{name}: a second measurement of {found.kind}; give one of each kind, only profiles add up")
        run = _run_of(found, name)
        _check_same(run, base, precision, found.kind, name)
        known = _with(known, found, run, base, machine, precision)
    return known


def _run_of(found: Measured, name: str) -> config.Run:
    if not found.run:
        raise ValueError(f"{name}: was measured in a loop of its own, not with a run's file: what it is true of is not known")
    try:
        return config.build(found.run)
    except ValueError as error:
        raise ValueError(f"{name}: the run that it is true of cannot be read ({error}); measure anew") from None


def _check_same(run: config.Run, base: config.Run, precision: Precision, kind: str, name: str) -> None:
    """Raises ValueError at the first thing in which what was measured is not what is planned."""
    # A classifier has no second tower.
    sides = ("x", "y") if any(OBJECTIVES[each.loss.objective].contrastive for each in (run, base)) else ("x",)
    pairs: list[tuple[str, Any, Any]] = [
        (f"{side}.{field}", getattr(getattr(run, side), field), getattr(getattr(base, side), field))
        for side in sides
        for field in TOWER
    ]
    pairs += [("loss.objective", run.loss.objective, base.loss.objective), ("loss.dim", run.loss.dim, base.loss.dim)]
    if kind in ("fit", "profile"):
        pairs.append(("compute.precision", run.compute.precision, precision))
    for setting, was, planned in pairs:
        if was != planned:
            raise ValueError(f"{name}: is of {setting} = {was!r}, the plan is for {planned!r}; measure that, or leave the file out")


def _with(known: Known, found: Measured, run: config.Run, base: config.Run, machine: Machine, precision: Precision) -> Known:
    said = f"measured on {found.device}" + (f", {found.date}" if found.date else "")
    here, notes = _is_here(found.device, machine), list(known.notes)
    if found.kind in ("noise", "sweep") and run.compute.precision != precision:
        notes.append(f"the {found.kind} was {said}, in {run.compute.precision}; the plan is in {precision}")
    match found.found:
        case Fit(chunk=chunk) as fit if here:
            known = replace(known, fit=fit, ran=strategy_of(run, 1, max(chunk, run.batch.size), chunk, 0))
        case Fit():
            notes.append(f"the fit was {said}, not on {machine.device.name}: its chunk is not taken")
        case Profile(points=points, against=against):
            steps = tuple(_steps(points, run, said, machine, here=here))
            timed = {step.strategy.chunk for step in steps} if here and against == "chunk" else set()
            known = replace(known, steps=(*known.steps, *steps), timed=tuple(sorted({*known.timed, *timed})))
            if not here:
                used = "times are scaled by how far predictions were off there" if steps else "without predictions it is not used"
                notes.append(f"the profile was {said}, not on {machine.device.name}: {used}")
        case Noise() as noise:
            known = replace(known, noise=noise)
            notes += _noise_notes(noise, said)
        case Sweep() as sweep:
            known = replace(known, sweep=sweep, same_data=run.data.source == base.data.source)
            if not known.same_data:
                notes.append(f"the sweep saw {run.data.source!r}: its rate is taken, its batch is not, which belongs to its data")
    return replace(known, said={**known.said, found.kind: said}, notes=tuple(notes))


def _noise_notes(noise: Noise, said: str) -> Iterable[str]:
    interval = f"{noise.critical:,.0f} ({noise.low:,.0f} to {noise.high:,.0f})"
    if noise.coupled:
        yield (
            f"gradient noise at batch {noise.batch:,} implies a critical batch of {interval}, {said}; samples are compared with"
            " each other there, so that it belongs to that batch alone: it does not choose this one"
        )
    if noise.branch is not None:
        yield f"branched from a checkpoint, {noise.branch:,} was the largest batch that lost nothing, {said}"


def _steps(points: Iterable[Mapping[str, Any]], run: config.Run, said: str, machine: Machine, *, here: bool) -> Iterable[Step]:
    for point in points:
        seconds, predicted = point.get("seconds"), point.get("predicted_seconds")
        # On another device, how far its prediction was off is all that carries over.
        if seconds is None or not (here or predicted):
            continue
        if point.get("batch") is None or point.get("chunk") is None:
            raise ValueError(f"a point of the profile has no batch or no chunk ({dict(point)!r:.80}); measure anew")
        strategy = strategy_of(run, point.get("ranks") or 1, point["batch"], point["chunk"], _kept(point))
        memory = point.get("peak_bytes" if machine.device.type == "cpu" else "reserved_bytes")
        yield Step(strategy, seconds, memory, None if here else seconds / predicted, said)


def _kept(point: Mapping[str, Any]) -> int:
    kept = point.get("keep") or 0
    if type(kept) is not int or kept < 0:
        raise ValueError(f"keep is {kept!r:.80} in a point of the profile: must be a whole number, from 0; measure anew")
    return kept


def _is_here(name: str, machine: Machine) -> bool:
    """Whether a measurement's device is the plan's."""
    planned = machine.device.name
    if planned == "cpu":
        return name in ("cpu", device_name(torch.device("cpu")))
    return find_or_assume_device(name).name == find_or_assume_device(planned).name
