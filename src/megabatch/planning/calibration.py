"""Measurements that correct a plan's predictions: they are read, checked against the plan, and applied to seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import config
from ..costs.devices import find_or_assume_device
from ..costs.hardware import Machine
from ..costs.strategy import Precision, Strategy
from ..environment import device_name
from ..evidence import Confidence
from ..measurements import Fit, Measured, Noise, Profile, Sweep, read
from ..objectives import OBJECTIVES

Source = str | Path | Measured
# The fields of a tower that a measurement must share with the plan.
TOWER = ("name", "options", "locked")
# The keys of `compute` that choose other kernels: measurements with other ones are used, and a note says so.
KERNELS = ("compile", "channels_last", "linear_patches", "short_attention", "bf16_residuals")


class MeasuredStep(NamedTuple):
    """A measured step.

    factor: None if it was measured on the plan's device; otherwise measured over predicted seconds on that other device.
    origin: where and when it was measured.
    """

    strategy: Strategy
    seconds: float
    memory: int | None
    factor: float | None
    origin: str


@dataclass(frozen=True)
class Calibration:
    """All measurements of a plan.

    ran: the strategy of the largest chunk that `fit` ran on the plan's device. steps: from profiles. timed: chunks that were
    compared with each other on the plan's device. same_data: whether the sweep used the plan's data.
    origin: where and when each kind was measured.
    """

    fit: Fit | None = None
    ran: Strategy | None = None
    steps: tuple[MeasuredStep, ...] = ()
    noise: Noise | None = None
    sweep: Sweep | None = None
    same_data: bool = False
    timed: tuple[int, ...] = ()
    origin: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def allows(self, strategy: Strategy) -> bool:
        """Return whether a strategy may be tried. After a fit: only strategies of the same kind, with no larger chunk."""
        return self.ran is None or (strategy.chunk <= self.ran.chunk and _kind(strategy) == _kind(self.ran))

    def has_run(self, strategy: Strategy) -> bool:
        """Return whether `fit` ran a step that takes at least as much memory."""
        # The graph of the last chunk exists anyway when backward begins: keeping one chunk takes no memory.
        return self.ran is not None and self.allows(strategy) and strategy.shard <= self.ran.shard and strategy.keep <= 1

    def nearest(self, strategy: Strategy) -> MeasuredStep | None:
        """Return the most similar measured step, by the ratios of rows per rank and per chunk."""
        same_kind = [step for step in self.steps if _kind(step.strategy) == _kind(strategy)]
        return min(same_kind or self.steps, key=lambda step: _distance(step.strategy, strategy), default=None)

    def confidence(self, strategy: Strategy) -> Confidence | None:
        """Return how well the measured steps represent a strategy; None without measured steps."""
        step = self.nearest(strategy)
        if step is None:
            return None
        return "low" if step.factor is not None else "measured" if step.strategy == strategy else "medium"

    def seconds(self, strategy: Strategy, predict: Callable[[Strategy], float]) -> float:
        """Return the measured seconds of a step, or the prediction corrected by its error at the nearest measured step."""
        step = self.nearest(strategy)
        if step is None:
            return predict(strategy)
        if step.strategy == strategy and step.factor is None:
            return step.seconds
        return predict(strategy) * (step.seconds / predict(step.strategy) if step.factor is None else step.factor)

    def memory(self, strategy: Strategy, predict: Callable[[Strategy], int]) -> int:
        """Return the bytes of a step, measured or corrected likewise."""
        step = self.nearest(strategy)
        if step is None or step.memory is None:
            return predict(strategy)
        return round(step.memory if step.strategy == strategy else predict(strategy) * step.memory / predict(step.strategy))


def strategy_of(run: config.Run, ranks: int, batch: int, chunk: int, keep: int, node: int = 8) -> Strategy:
    """Return the strategy with which a run takes a step at such a batch and chunk."""
    shard = -(-batch // ranks)
    strategy = Strategy(
        ranks,
        shard,
        min(chunk, shard),
        checkpointing=run.x.checkpointing,
        precision=run.compute.precision,
        sharding=run.compute.sharding,
        accumulate=(accumulate := not OBJECTIVES[run.loss.objective].contrastive),
        node=node,
        gradient_exchange=run.compute.gradient_exchange,
    )
    return replace(strategy, keep=0 if accumulate else min(keep, strategy.chunks))


def _kind(strategy: Strategy) -> Strategy:
    return replace(strategy, ranks=1, shard=1, chunk=1, keep=0, gradient_exchange=None)


def _distance(a: Strategy, b: Strategy) -> tuple[float, float]:
    rows = abs(math.log(a.shard / b.shard)) + abs(math.log(a.chunk / b.chunk))
    return rows + abs(math.log(a.ranks / b.ranks)), abs(a.keep - b.keep)


def calibrate(sources: Sequence[Source], base: config.Run, precision: Precision, machine: Machine) -> Calibration:
    """Read measurements for a plan of these towers on this machine. Raises ValueError if they are of a different model or setup."""
    calibration = Calibration()
    for source in sources:
        measured = source if isinstance(source, Measured) else read(source)
        name = f"the {measured.kind}" if isinstance(source, Measured) else str(source)
        if measured.kind in calibration.origin and measured.kind != "profile":
            raise ValueError(
                f"{name}: is a second measurement of {measured.kind}; give one of each kind; only profiles may be several"
            )
        run = _run_of(measured, name)
        _check_same(run, base, precision, measured.kind, name)
        calibration = _with(calibration, measured, run, base, machine, precision)
    return calibration


def _run_of(measured: Measured, name: str) -> config.Run:
    if not measured.run:
        raise ValueError(f"{name}: was measured in a custom loop without a configuration, so it cannot be matched with a plan")
    try:
        return config.build(measured.run)
    except ValueError as error:
        raise ValueError(f"{name}: the configuration of its run cannot be read ({error}); measure again") from None


def _check_same(run: config.Run, base: config.Run, precision: Precision, kind: str, name: str) -> None:
    """Raise ValueError at the first field in which the measured run differs from the plan."""
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
    for key, measured, planned in pairs:
        if measured != planned:
            raise ValueError(
                f"{name}: was measured with {key} = {measured!r}, but the plan has {planned!r}; measure that, or leave the file out"
            )


def _with(
    calibration: Calibration, measured: Measured, run: config.Run, base: config.Run, machine: Machine, precision: Precision
) -> Calibration:
    """Return the calibration with one more measurement."""
    origin = f"measured on {measured.device}" + (f", {measured.date}" if measured.date else "")
    same_device, notes = _is_same_device(measured.device, machine), list(calibration.notes)
    if measured.kind in ("noise", "sweep") and run.compute.precision != precision:
        notes.append(f"The {measured.kind} was {origin}, in {run.compute.precision}, but the plan is in {precision}.")
    if measured.kind in ("fit", "profile"):
        notes += [
            f"The {measured.kind} was {origin}, with compute.{key} = {getattr(run.compute, key)}, but the plan has"
            f" {getattr(base.compute, key)}: its kernels may be others, and faster or slower."
            for key in KERNELS
            if getattr(run.compute, key) != getattr(base.compute, key)
        ]
    match measured.found:
        case Fit(chunk=chunk) as fit if same_device:
            calibration = replace(calibration, fit=fit, ran=strategy_of(run, 1, max(chunk, run.batch.size), chunk, 0, machine.node))
        case Fit():
            notes.append(f"The fit was {origin}, not on {machine.device.name}, so its chunk is not used.")
        case Profile(points=points, against=against):
            steps = tuple(_measured_steps(points, run, origin, machine, same_device=same_device))
            timed = {step.strategy.chunk for step in steps} if same_device and against == "chunk" else set()
            timed_chunks = tuple(sorted({*calibration.timed, *timed}))
            calibration = replace(calibration, steps=(*calibration.steps, *steps), timed=timed_chunks)
            if not same_device:
                use = "times are scaled by the error of the predictions there" if steps else "it is not used without predictions"
                notes.append(f"The profile was {origin}, not on {machine.device.name}: {use}.")
        case Noise() as noise:
            calibration = replace(calibration, noise=noise)
            notes += _noise_notes(noise, origin)
        case Sweep() as sweep:
            calibration = replace(calibration, sweep=sweep, same_data=run.data.source == base.data.source)
            if not calibration.same_data:
                notes.append(
                    f"The sweep used the data {run.data.source!r}. The plan uses its learning rate, but not its batch, which"
                    " depends on the data."
                )
    return replace(calibration, origin={**calibration.origin, measured.kind: origin}, notes=tuple(notes))


def _noise_notes(noise: Noise, origin: str) -> Iterable[str]:
    interval = f"{noise.critical:,.0f} ({noise.low:,.0f} to {noise.high:,.0f})"
    if noise.coupled:
        yield (
            f"Gradient noise at batch {noise.batch:,} implies a critical batch of {interval}, {origin}. Samples of a batch are"
            " compared with each other, so the number holds for that batch only and does not choose this one."
        )
    if noise.branch is not None:
        yield f"Branched from a checkpoint, {noise.branch:,} was the largest batch that lost nothing, {origin}."


def _measured_steps(
    points: Iterable[Mapping[str, Any]], run: config.Run, origin: str, machine: Machine, *, same_device: bool
) -> Iterable[MeasuredStep]:
    for point in points:
        seconds, predicted = point.get("seconds"), point.get("predicted_seconds")
        # From another device, only the error of its prediction carries over.
        if seconds is None or not (same_device or predicted):
            continue
        if point.get("batch") is None or point.get("chunk") is None:
            raise ValueError(f"a point of the profile has no batch or no chunk ({dict(point)!r:.80}); measure again")
        strategy = strategy_of(run, point.get("ranks") or 1, point["batch"], point["chunk"], _kept_chunks(point), machine.node)
        memory = point.get("peak_bytes" if machine.device.type == "cpu" else "reserved_bytes")
        yield MeasuredStep(strategy, seconds, memory, None if same_device else seconds / predicted, origin)


def _kept_chunks(point: Mapping[str, Any]) -> int:
    kept = point.get("keep") or 0
    if type(kept) is not int or kept < 0:
        raise ValueError(f"keep is {kept!r:.80} in a point of the profile: must be an integer of at least 0; measure again")
    return kept


def _is_same_device(name: str, machine: Machine) -> bool:
    """Return whether the device of a measurement is the plan's."""
    planned = machine.device.name
    if planned == "cpu":
        return name in ("cpu", device_name(torch.device("cpu")))
    return find_or_assume_device(name).name == find_or_assume_device(planned).name
