"""One training run, from its configuration to its last checkpoint. Reads from top to bottom in the order in which things happen."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import config, environment, host_memory, packages, trust, vocabulary
from ..chunks.keep import can_read_free_bytes
from ..data.loader import RankBatch
from ..files import write_text
from ..objectives import OBJECTIVES
from ..towers.model import Pair
from . import checkpoint, run_folder
from .build import Assembly, assemble
from .distributed import Ranks, ranks
from .evaluate import evaluate_and_log
from .idle import IdleTime, watch_idle
from .memory import peak
from .objective import Classification, Outcome
from .optimizer import Average, build_optimizer, clip_gradients, optimizer_tensors, set_rate
from .ramp import NoiseRamp
from .run_logger import RunLogger
from .schedules import Step, step_schedule
from .signals import EmptyBatch, Stopped, StopSign
from .summary import finish

# Keys that may change when a run is resumed: they say how it is computed and logged, not what is computed.
FREE = {"out", "compute", "checkpoint", "watch", "evaluate", "planned", "data.workers", "data.max_bad", "batch.chunk", "batch.keep",
        "optimizer.options.fused", "optimizer.options.foreach"}  # fmt: skip
# Damaged files that are named on the terminal.
MOST_SHOWN = 10


def train(run: config.Run, *, fresh: bool = False, trust_code: bool = False) -> Path:
    """Train to the end, from the newest checkpoint in the run's folder if there is one, and return the folder.

    fresh: start over and delete what an earlier run wrote into the folder. A folder that holds anything else is refused.
    trust_code: whether code that the run names (`trust.callables`) may be imported and called.
    """
    # A run that was built by hand has not been checked yet.
    config.check(run)
    config.require_filled(run)
    trust.require_trust(run, trust_code)
    # Packages that the end of the run needs are checked for before anything is deleted, written or trained.
    packages.require(*packages.of_run(run, terminal=sys.stderr.isatty()))
    with ranks(run.compute) as here, contextlib.ExitStack() as held:
        run = config.with_ranks(run, here.size)
        folder = _prepare_folder(run, here, fresh, held)
        training = Training(assemble(run, here), folder)
        training.resume()
        with RunLogger(run, folder, training.samples, training.seen, silent=not here.first) as logger:
            if run.watch.bar:
                loss = OBJECTIVES[run.loss.objective]
                kind = {"pairs": loss.contrastive, "views": loss.views}
                logger.say(vocabulary.identity(run.batch.size, here.size, run.batch.chunk, **kind))
            _note_unknown_memory(run, here, logger)
            with StopSign() as sign:
                training.run_steps(logger, sign)
            # Signals end the process from here on: the last checkpoint is written, and the same command repeats what follows.
            finish(training.parts, folder, logger, training.average, training.metadata(), training.tensors())
        return folder


class StepTimes(NamedTuple):
    """When a step began, by time.perf_counter(), and the seconds that this rank then waited for its samples."""

    began: float
    waited: float


class Training:
    """A run in progress: its parts, its optimizer, and how many steps it has taken.

    `step_fn` computes loss and gradients of a batch. `callbacks` are called after every step.
    """

    def __init__(self, parts: Assembly, folder: Path) -> None:
        run = parts.run
        self.parts = parts
        self.run = run
        self.ranks = parts.ranks
        self.folder = folder
        length = sum(parts.training.lengths)
        self.schedule = step_schedule(run, length)
        self.samples = self.schedule.samples
        self.optimizer = build_optimizer(parts.model, run.optimizer)
        self.average = None if run.optimizer.ema is None else Average(parts.model, run.optimizer.ema)
        self.step_fn = parts.objective.step_with_oom_retry(self.optimizer)
        self.number = 0
        self.seconds = 0.0
        # Training samples that could not be read, as (shard, index): each counts once, however often the run meets it.
        self.unread: set[tuple[int, int]] = set()
        self.ramp: NoiseRamp | None = None
        if run.batch.schedule == "noise":
            # The configuration refuses other objectives.
            assert isinstance(parts.objective, Classification)
            self.ramp = NoiseRamp(run, parts.objective, length)
        self.callbacks: list[Callable[[RunLogger], object]] = []
        self.idle: IdleTime | None = None

    @property
    def seen(self) -> int:
        """Samples of all steps taken so far."""
        return self.schedule[self.number].first if self.number < len(self.schedule) else self.samples

    @property
    def bad(self) -> int:
        """Training samples that could not be read, including those known to be lost in damaged files."""
        return len(self.unread) + sum(damage.counted for damage in self.parts.training.damage)

    def run_steps(self, logger: RunLogger, sign: StopSign, last: int | None = None) -> None:
        """Take all steps that are left, or those up to step `last`, with evaluations and checkpoints in between."""
        with watch_idle(self.ranks.device) as self.idle:
            self._run_steps(logger, sign, last)

    def _run_steps(self, logger: RunLogger, sign: StopSign, last: int | None) -> None:
        self._report_damage(logger)
        every = self.run.checkpoint.every
        saved = self.number
        self.parts.model.train()
        while self.number < len(self.schedule[:last]):
            planned = self.schedule
            batches = self.parts.shuffled().batches((step.first, step.pairs) for step in planned[self.number : last])
            with contextlib.closing(batches):
                for step in planned[self.number : last]:
                    stop = self._take_step(step, batches, logger, sign)
                    if stop or (every is not None and self.number % every == 0):
                        self.save(logger)
                        saved = self.number
                    if stop:
                        raise Stopped(
                            f"stopped by signal {stop} after step {self.number}; the same command resumes the run", 128 + stop
                        )
                    if self._is_evaluation_due():
                        evaluate_and_log(self.parts, self.average, logger, step=self.number, samples=self.seen)
                    if self.schedule is not planned:
                        # Batches that were read ahead have the old size.
                        break
        if saved < self.number:
            self.save(logger)
        # A signal may have arrived after the last step looked for one.
        stop = max(self.ranks.gather(sign.number))
        if stop:
            raise Stopped(f"stopped by signal {stop} after the last step; the same command resumes the run", 128 + stop)

    def _take_step(self, step: Step, batches: Iterator[RankBatch], logger: RunLogger, sign: StopSign) -> int:
        """Take the next step and log it; return the signal that asks the run to stop, or 0."""
        began = time.perf_counter()
        if self.idle is not None:
            # Forget the evaluation or checkpoint after the last step.
            self.idle.take()
        batch = next(batches)
        waited = time.perf_counter() - began
        torch.manual_seed(seed_of(self.run.seed, self.number, self.ranks.rank))
        try:
            outcome, norm = self.step(step, batch)
        except EmptyBatch:
            stop = self._report_skipped(step, batch, began, logger, sign)
        else:
            stop = self.report(step, batch, outcome, norm, StepTimes(began, waited), logger, sign)
        self.number += 1
        if self.ramp is not None and (reason := self.ramp.decide(self.number)) is not None:
            self.schedule = self.ramp.schedule()
            logger.note(reason)
        for callback in self.callbacks:
            callback(logger)
        return stop

    def step(self, step: Step, batch: RankBatch) -> tuple[Outcome, float]:
        """Take one optimizer step and return its outcome and the gradient norm before clipping.

        Raises EmptyBatch on every rank, and changes nothing, if none of the samples can be read.
        """
        rows, shapeless = self.ranks.sum(len(batch.keys), float(batch.x is None))
        if not rows:
            raise EmptyBatch(f"step {self.number + 1}: none of its {step.pairs:,} samples can be read", 1)
        if shapeless:
            raise Stopped("almost no training sample can be read: check data.source, data.x and data.y", 1)
        set_rate(self.optimizer, self.run.optimizer.lr * step.rate)
        outcome = self.step_fn(batch)
        scaler, parameters = self.parts.objective.scaler, list(self.parts.model.parameters())
        scaler.unscale_(self.optimizer)
        norm = float(clip_gradients(parameters, self.run.optimizer.clip_norm))
        # With a GradScaler, gradients may overflow: it then skips the update and lowers its scale.
        if not math.isfinite(float(outcome.loss)) or not (math.isfinite(norm) or scaler.is_enabled()):
            self._stop_at_nonfinite(float(outcome.loss), norm, batch)
        if self.parts.objective.noise is not None:
            self.parts.objective.noise.step(norm)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()
        if isinstance(self.parts.model, Pair):
            self.parts.model.clamp_scale(self.run.loss.max_scale)
        if self.average is not None:
            self.average.update()
        return outcome, norm

    def report(
        self, step: Step, batch: RankBatch, outcome: Outcome, norm: float, times: StepTimes, logger: RunLogger, sign: StopSign
    ) -> int:
        """Log a step; return the signal that asks the run to stop, or 0. All ranks return the same."""
        own_idle = 0.0 if self.idle is None else self.idle.take()
        right, rows, bad, asked, waited, idle = self.ranks.sum(
            float(outcome.right), outcome.rows, len(batch.bad), float(sign.number > 0), times.waited, own_idle
        )
        seconds = time.perf_counter() - times.began
        self.seconds += seconds
        fields = {
            "step": self.number + 1,
            "samples": step.first + step.pairs,
            "epoch": (step.first + step.pairs) / sum(self.parts.training.lengths),
            "batch": int(rows),
            "loss": float(outcome.loss),
            OBJECTIVES[self.run.loss.objective].metric: right / rows,
            "lr": self.run.optimizer.lr * step.rate,
            "grad_norm": norm,
            "pairs_per_s": rows / seconds,
            "memory_bytes": peak(self.ranks.device),
            "seconds": seconds,
            "waiting_for_data": min(1.0, waited / self.ranks.size / seconds),
        }
        if self.idle is not None:
            fields["device_idle"] = min(1.0, idle / self.ranks.size / seconds)
        if isinstance(self.parts.model, Pair):
            fields["scale"] = float(self.parts.model.scale().detach())
        logger.event("step", **fields)
        return self._after_step(batch, bool(bad), bool(asked), logger, sign)

    def _report_skipped(self, step: Step, batch: RankBatch, began: float, logger: RunLogger, sign: StopSign) -> int:
        """Log a step without readable samples: it counts, and the weights stay as they are. Returns as `report` does."""
        seconds = time.perf_counter() - began
        self.seconds += seconds
        samples = step.first + step.pairs
        logger.event("skipped", step=self.number + 1, samples=samples, pairs=step.pairs, seconds=seconds)
        logger.say(f"step {self.number + 1}: none of its {step.pairs:,} samples can be read; the weights were not updated")
        (asked,) = self.ranks.sum(float(sign.number > 0))
        return self._after_step(batch, True, bool(asked), logger, sign)

    def _after_step(self, batch: RankBatch, bad: bool, asked: bool, logger: RunLogger, sign: StopSign) -> int:
        """Count unreadable samples and return the signal that asks the run to stop, or 0.

        bad, asked: whether any rank has met an unreadable sample, or a signal.
        """
        if bad:
            self._count_bad(batch, logger)
        numbers = self.ranks.gather(sign.number) if asked else [0]
        return max(numbers)

    def _is_evaluation_due(self) -> bool:
        """Return whether an evaluation follows the step just taken; the last step is evaluated with the summary."""
        every = self.run.evaluate.every
        due = every is not None and self.number % every == 0 and self.number < len(self.schedule)
        return due and sum(self.parts.held_out.lengths) > 0

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that a checkpoint stores, without copies: reading a checkpoint into them restores the run."""
        scaler = self.parts.objective.scaler
        state = dict(self.parts.model.state_dict()) | optimizer_tensors(self.parts.model, self.optimizer)
        state |= {} if self.average is None else self.average.tensors()
        return state | ({"scaler": _scaler_state(scaler)} if scaler.is_enabled() else {})

    def metadata(self) -> dict[str, Any]:
        """Return what a checkpoint stores beside the tensors, as values that JSON has."""
        ramp = {} if self.ramp is None else {"ramp": self.ramp.state()}
        return ramp | {
            "step": self.number,
            "samples": self.seen,
            "seconds": self.seconds,
            "bad": self.bad,
            "unread": sorted(self.unread),
            "ranks": self.ranks.size,
            **self._data_sizes(),
            "run": config.as_table(self.run),
        }

    def save(self, logger: RunLogger) -> None:
        path = checkpoint.save(
            self.folder / "checkpoints", self.number, self.tensors(), self.metadata(), keep=self.run.checkpoint.keep
        )
        logger.event("checkpoint", step=self.number, path=path.name)

    def resume(self) -> None:
        """Load the newest checkpoint of the run's folder, if there is one."""
        path = checkpoint.newest(self.folder / "checkpoints")
        if path is not None:
            checkpoint.agree(lambda: self._check_data(path))
            self.load(path)

    def load(self, path: Path) -> None:
        """Load a checkpoint and continue from its step."""
        tensors = self.tensors()
        metadata = checkpoint.load(path, tensors)
        if "scaler" in tensors:
            _set_scaler(self.parts.objective.scaler, tensors["scaler"])
        self.number, self.seconds = metadata["step"], metadata["seconds"]
        self.unread = {(shard, index) for shard, index in metadata.get("unread", [])}
        if self.ramp is not None and "ramp" in metadata:
            self.ramp.load(metadata["ramp"])
            self.schedule = self.ramp.schedule()

    def _data_sizes(self) -> dict[str, int]:
        return {"training_samples": sum(self.parts.training.lengths), "held_out_samples": sum(self.parts.held_out.lengths)}

    def _check_data(self, path: Path) -> None:
        """Raise ValueError if the data has another number of samples than when the checkpoint was written."""
        metadata = checkpoint.read_metadata(path)
        for name, now in self._data_sizes().items():
            # Checkpoints of earlier versions do not say how many.
            before = metadata.get(name, now)
            if before != now:
                raise ValueError(
                    f"{path} belongs to other data: {name.replace('_', ' ')} were {before:,}, are {now:,}. A run must be resumed"
                    " with the data that it began with, since the order depends on the number of samples. Restore the data, choose"
                    " another folder (out=…), or start over with --fresh"
                )

    def _count_bad(self, batch: RankBatch, logger: RunLogger) -> None:
        """Log the unreadable samples of a step that no rank met before; raise Stopped where there are too many."""
        last = ""
        for sample in (sample for rank in self.ranks.gather(batch.bad) for sample in rank):
            if (sample.shard, sample.number) not in self.unread:
                self.unread.add((sample.shard, sample.number))
                logger.event("bad", step=self.number + 1, key=sample.key, reason=sample.reason)
                last = f"the last one: {sample.key}: {sample.reason}. log.jsonl names them all"
        if last:
            self._check_bad(last)

    def _report_damage(self, logger: RunLogger) -> None:
        """Log the damaged files of the data; raise Stopped where more samples are lost than data.max_bad allows."""
        damage = self.parts.damage
        for each in damage:
            logger.event("damage", text=str(each), **each._asdict())
        for each in damage[:MOST_SHOWN]:
            logger.say(f"damaged: {each}")
        if len(damage) > MOST_SHOWN:
            logger.say(f"… and {len(damage) - MOST_SHOWN:,} more damaged files; log.jsonl names them all")
        if self.parts.training.damage:
            self._check_bad(f"damaged: {self.parts.training.damage[-1]}. log.jsonl names all damaged files")

    def _check_bad(self, last: str) -> None:
        allowed = self.run.data.max_bad
        if self.bad > allowed:
            raise Stopped(
                f"{self.bad:,} training samples cannot be read, and data.max_bad allows {allowed:,}; {last}. Repair or remove them,"
                " or raise data.max_bad",
                1,
            )
        if len(self.unread) >= sum(self.parts.training.lengths):
            raise Stopped(f"none of the {len(self.unread):,} training samples can be read; {last}", 1)

    def _stop_at_nonfinite(self, loss: float, norm: float, batch: RankBatch) -> None:
        keys = [key for rank in self.ranks.gather(batch.keys) for key in rank]
        path = self.folder / f"nonfinite-step-{self.number + 1}.json"
        if self.ranks.first:
            content = {"step": self.number + 1, "loss": str(loss), "grad_norm": str(norm), "keys": keys}
            write_text(path, json.dumps(content, indent=1))
        newest = checkpoint.newest(self.folder / "checkpoints")
        raise Stopped(
            f"step {self.number + 1}: the loss is {loss} and the gradient norm {norm}; the weights were not updated. {path} names"
            f" the samples of the step; the last good checkpoint is {newest or 'none yet'}. Lower optimizer.lr, lengthen"
            " schedule.warmup, or try compute.precision=bf16 or fp32",
            1,
        )


def seed_of(*parts: int) -> int:
    """Return a seed for torch that depends on all parts and nothing else, so that resuming needs no saved generator state."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


def _prepare_folder(run: config.Run, here: Ranks, fresh: bool, held: contextlib.ExitStack) -> Path:
    """Return the run's folder, with its configuration and the environment written. The first rank does it; all raise its errors.

    held: what that rank holds until the run ends, so that no other process writes to the folder.
    """
    folder = Path(run.out)

    def prepare() -> None:
        run_folder.check_not_data(run)
        held.enter_context(run_folder.claimed(folder, "train"))
        if fresh:
            run_folder.check_not_read(run)
            run_folder.clear(folder)
        newest = checkpoint.newest(folder / "checkpoints")
        if newest is not None:
            _check_same(checkpoint.read_metadata(newest)["run"], config.as_table(run), newest)
        run_folder.write_configuration(folder, run)
        write_text(folder / "environment.json", json.dumps(environment.describe(), indent=2))

    checkpoint.agree(lambda: prepare() if here.first else None)
    return folder


def _note_unknown_memory(run: config.Run, here: Ranks, logger: RunLogger) -> None:
    """Log that "auto" keeps no chunk where free memory cannot be read."""
    if run.batch.keep == "auto" and not can_read_free_bytes(here.device):
        why = f", since {host_memory.REMEDY}" if here.device.type == "cpu" else ""
        logger.note(
            f'batch.keep is "auto", and the free memory of this {here.device.type} cannot be read{why}: no chunk is kept. '
            "Set batch.keep to a number to keep some"
        )


def _check_same(saved: dict[str, Any], asked: dict[str, Any], path: Path) -> None:
    """Raise ValueError where a checkpoint's configuration differs in more than FREE from the one that is asked for."""
    before, now = config.flat(saved), config.flat(asked)
    for settings in (before, now):
        # False leaves hard negatives out, and so does None where the data has none.
        settings["data.negatives"] = settings.get("data.negatives") or None
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    changed = [key for key in changed if not {key, key.partition(".")[0]} & FREE]
    if changed:
        differences = ", ".join(f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in changed[:4])
        raise ValueError(f"{path} belongs to another run: {differences}. Choose another folder (out=…), or start over with --fresh")


def _scaler_state(scaler: torch.amp.GradScaler) -> Tensor:
    state = scaler.state_dict()
    return torch.tensor([state["scale"], state["_growth_tracker"]], dtype=torch.float64)


def _set_scaler(scaler: torch.amp.GradScaler, state: Tensor) -> None:
    scale, tracker = state.tolist()
    scaler.load_state_dict({**scaler.state_dict(), "scale": scale, "_growth_tracker": int(tracker)})
