"""One training, from its configuration to its last checkpoint: read top to bottom, this is what happens."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import config, environment, host_memory, packages, trust
from ..chunks.keep import can_read_free_bytes
from ..data.loader import RankBatch
from ..files import write_text
from ..towers.model import Pair
from . import checkpoint, run_folder
from .build import Assembly, assemble
from .distributed import Ranks, ranks
from .held_out import evaluated
from .memory import peak
from .objective import Outcome
from .optimizer import Average, build_optimizer, clip_gradients, optimizer_tensors, set_rate
from .ramp import Ramp
from .run_logger import Watch
from .schedules import Step, course
from .signals import EmptyBatch, Stopped, StopSign
from .summary import finish

# What may change between two parts of one run: how it is computed and watched, not what is computed.
FREE = {"out", "compute", "checkpoint", "watch", "evaluate", "planned", "data.workers", "data.max_bad", "batch.chunk", "batch.keep"}
# Damaged files that are named on the terminal.
MOST_SHOWN = 10


def train(run: config.Run, *, fresh: bool = False, trust_code: bool = False) -> Path:
    """Trains to the end, from the newest checkpoint of the run's folder if there is one, and returns the folder.

    fresh: start over, and delete what an earlier run has written into the folder; one that holds anything else is refused.
    trust_code: whether code that the run names (`trust.callables`) may be imported and called.
    """
    # One that was put together by hand has not been checked yet.
    config.check(run)
    trust.require_trust(run, trust_code)
    # What the end of the run needs is asked for now, before anything is deleted, written or trained.
    packages.require(*packages.of_run(run, terminal=sys.stderr.isatty()))
    with ranks(run.compute) as here, contextlib.ExitStack() as held:
        folder = _folder(run, here, fresh, held)
        training = Training(assemble(run, here), folder)
        training.resume()
        with Watch(run, folder, training.samples, training.seen, silent=not here.first) as watch:
            if run.batch.keep == "auto" and not can_read_free_bytes(here.device):
                why = f", since {host_memory.REMEDY}" if here.device.type == "cpu" else ""
                watch.note(
                    f'batch.keep is "auto", and the free memory of this {here.device.type} cannot be read{why}: no chunk is kept. '
                    "A number keeps some all the same"
                )
            with StopSign() as sign:
                training.run_to_the_end(watch, sign)
            # Without the sign: the last checkpoint is written, and the same command repeats what follows.
            finish(training.parts, folder, watch, training.average, training.facts(), training.tensors())
        return folder


class Training:
    """A run in progress: its parts, its optimizer, how far it is.

    `callbacks` are called after every step. One that puts another schedule into `course`, equal up to the present step, changes
    what follows.
    """

    def __init__(self, parts: Assembly, folder: Path) -> None:
        run = parts.run
        self.parts = parts
        self.run = run
        self.ranks = parts.ranks
        self.folder = folder
        self.course = course(run, sum(parts.training.lengths))
        self.samples = self.course.samples
        self.optimizer = build_optimizer(parts.model, run.optimizer)
        self.average = None if run.optimizer.ema is None else Average(parts.model, run.optimizer.ema)
        self.take = parts.objective.repeated_on_oom(self.optimizer)
        self.number = 0
        self.seconds = 0.0
        # Training samples that could not be read, by shard and number; each counts once, however often it is met.
        self.unread: set[tuple[int, int]] = set()
        self.ramp = Ramp(self) if run.batch.schedule == "noise" else None
        self.callbacks: list[Callable[[Watch], object]] = [] if self.ramp is None else [self.ramp]

    @property
    def seen(self) -> int:
        return self.course[self.number].first if self.number < len(self.course) else self.samples

    @property
    def bad(self) -> int:
        """How many training samples could not be read, with those known to be lost in damaged files."""
        return len(self.unread) + sum(damage.counted for damage in self.parts.training.damage)

    def run_to_the_end(self, watch: Watch, sign: StopSign, last: int | None = None) -> None:
        """Every step that is left, or those up to step `last`, with evaluations and checkpoints between them."""
        self._report_damage(watch)
        every = self.run.checkpoint.every
        saved = self.number
        self.parts.model.train()
        while self.number < len(self.course[:last]):
            planned = self.course
            batches = self.parts.shuffled().batches((step.first, step.pairs) for step in planned[self.number : last])
            with contextlib.closing(batches):
                for step in planned[self.number : last]:
                    stop = self._take_step(step, batches, watch, sign)
                    if stop or (every is not None and self.number % every == 0):
                        self.save(watch)
                        saved = self.number
                    if stop:
                        raise Stopped(
                            f"stopped by signal {stop} after step {self.number}; the same command goes on from there", 128 + stop
                        )
                    if self._is_test_due():
                        evaluated(self.parts, self.average, watch, step=self.number, samples=self.seen)
                    if self.course is not planned:
                        # What was read ahead is of the size before.
                        break
        if saved < self.number:
            self.save(watch)
        # The last step asked for signals before its checkpoint was written.
        stop = max(self.ranks.gather(sign.number))
        if stop:
            raise Stopped(f"stopped by signal {stop} after the last step; the same command goes on from there", 128 + stop)

    def _take_step(self, step: Step, batches: Iterator[RankBatch], watch: Watch, sign: StopSign) -> int:
        """The next step and what is said of it; returns the signal that wants the run to stop, 0 if none does."""
        began = time.perf_counter()
        batch = next(batches)
        torch.manual_seed(seed_of(self.run.seed, self.number, self.ranks.rank))
        try:
            outcome, norm = self.step(step, batch)
        except EmptyBatch:
            stop = self._report_skipped(step, batch, began, watch, sign)
        else:
            stop = self.report(step, batch, outcome, norm, began, watch, sign)
        self.number += 1
        for callback in self.callbacks:
            callback(watch)
        return stop

    def _is_test_due(self) -> bool:
        """Whether an evaluation follows the step just taken; the last one has its own."""
        every = self.run.evaluate.every
        due = every is not None and self.number % every == 0 and self.number < len(self.course)
        return due and sum(self.parts.held_out.lengths) > 0

    def step(self, step: Step, batch: RankBatch) -> tuple[Outcome, float]:
        """One optimizer step: forward and backward at the step's batch, clipping, the update, the averages.

        EmptyBatch on every rank, and nothing is changed, where none of its samples can be read.
        """
        rows, shapeless = self.ranks.sum(len(batch.keys), float(batch.x is None))
        if not rows:
            raise EmptyBatch(f"step {self.number + 1}: none of its {step.pairs:,} samples can be read", 1)
        if shapeless:
            raise Stopped("hardly any training sample can be read: check data.source, data.x and data.y", 1)
        set_rate(self.optimizer, self.run.optimizer.lr * step.rate)
        outcome = self.take(batch)
        scaler, parameters = self.parts.objective.scaler, list(self.parts.model.parameters())
        scaler.unscale_(self.optimizer)
        norm = float(clip_gradients(parameters, self.run.optimizer.clip_norm))
        # With a scaler, gradients may overflow: it then leaves out the update and lowers itself.
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
        self, step: Step, batch: RankBatch, outcome: Outcome, norm: float, began: float, watch: Watch, sign: StopSign
    ) -> int:
        """Says what the step did; returns the signal that wants the run to stop, 0 if none does. Ranks agree on it."""
        right, rows, bad, asked = self.ranks.sum(float(outcome.right), outcome.rows, len(batch.bad), float(sign.number > 0))
        seconds = time.perf_counter() - began
        self.seconds += seconds
        quality = "accuracy" if self.parts.classes else "recall"
        fields = {
            "step": self.number + 1,
            "samples": step.first + step.pairs,
            "epoch": (step.first + step.pairs) / sum(self.parts.training.lengths),
            "batch": int(rows),
            "loss": float(outcome.loss),
            quality: right / rows,
            "lr": self.run.optimizer.lr * step.rate,
            "grad_norm": norm,
            "pairs_per_s": rows / seconds,
            "memory_bytes": peak(self.ranks.device),
            "seconds": seconds,
        }
        if isinstance(self.parts.model, Pair):
            fields["scale"] = float(self.parts.model.scale().detach())
        watch.event("step", **fields)
        return self._after_step(batch, bool(bad), bool(asked), watch, sign)

    def _report_skipped(self, step: Step, batch: RankBatch, began: float, watch: Watch, sign: StopSign) -> int:
        """Say that a step had nothing to learn from: it counts, and the weights stay as they are. Returns as `report` does."""
        seconds = time.perf_counter() - began
        self.seconds += seconds
        samples = step.first + step.pairs
        watch.event("skipped", step=self.number + 1, samples=samples, pairs=step.pairs, seconds=seconds)
        watch.say(f"step {self.number + 1}: none of its {step.pairs:,} samples can be read; the weights were not updated")
        (asked,) = self.ranks.sum(float(sign.number > 0))
        return self._after_step(batch, True, bool(asked), watch, sign)

    def _after_step(self, batch: RankBatch, bad: bool, asked: bool, watch: Watch, sign: StopSign) -> int:
        """Count unreadable samples and return the signal that wants the run to stop, 0 if none does. `bad`, `asked`: whether any
        rank has met such a sample, or a signal."""
        if bad:
            self._count_bad(batch, watch)
        numbers = self.ranks.gather(sign.number) if asked else [0]
        return max(numbers)

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds, the tensors themselves: what is read into them is the run's."""
        scaler = self.parts.objective.scaler
        state = dict(self.parts.model.state_dict()) | optimizer_tensors(self.parts.model, self.optimizer)
        state |= {} if self.average is None else self.average.tensors()
        return state | ({"scaler": _scaler_state(scaler)} if scaler.is_enabled() else {})

    def facts(self) -> dict[str, Any]:
        ramp = {} if self.ramp is None else {"ramp": self.ramp.state()}
        return ramp | {
            "step": self.number,
            "samples": self.seen,
            "seconds": self.seconds,
            "bad": self.bad,
            "unread": sorted(self.unread),
            "ranks": self.ranks.size,
            "run": config.as_table(self.run),
        }

    def save(self, watch: Watch) -> None:
        path = checkpoint.save(
            self.folder / "checkpoints", self.number, self.tensors(), self.facts(), keep=self.run.checkpoint.keep
        )
        watch.event("checkpoint", step=self.number, path=path.name)

    def resume(self) -> None:
        """Takes up the newest checkpoint, if there is one."""
        path = checkpoint.newest(self.folder / "checkpoints")
        if path is not None:
            self.load(path)

    def load(self, path: Path) -> None:
        """Takes up a checkpoint."""
        tensors = self.tensors()
        facts = checkpoint.load(path, tensors)
        if "scaler" in tensors:
            _set_scaler(self.parts.objective.scaler, tensors["scaler"])
        self.number, self.seconds = facts["step"], facts["seconds"]
        self.unread = {(shard, number) for shard, number in facts.get("unread", [])}
        if self.ramp is not None and "ramp" in facts:
            self.ramp.load(facts["ramp"])

    def _count_bad(self, batch: RankBatch, watch: Watch) -> None:
        """Log the unreadable samples of a step that were not met before, on any rank; Stopped where there are too many."""
        last = ""
        for each in (each for rank in self.ranks.gather(batch.bad) for each in rank):
            if (each.shard, each.number) not in self.unread:
                self.unread.add((each.shard, each.number))
                watch.event("bad", step=self.number + 1, key=each.key, reason=each.reason)
                last = f"the last one: {each.key}: {each.reason}. log.jsonl names them all"
        if last:
            self._check_bad(last)

    def _report_damage(self, watch: Watch) -> None:
        """Say which files of the data are damaged; Stopped where more samples are lost than may be."""
        damage = self.parts.damage
        for each in damage:
            watch.event("damage", text=str(each), **each._asdict())
        for each in damage[:MOST_SHOWN]:
            watch.say(f"damaged: {each}")
        if len(damage) > MOST_SHOWN:
            watch.say(f"… and {len(damage) - MOST_SHOWN:,} more damaged files; log.jsonl names them all")
        if self.parts.training.damage:
            self._check_bad(f"damaged: {self.parts.training.damage[-1]}. log.jsonl names all damaged files")

    def _check_bad(self, last: str) -> None:
        allowed = self.run.data.max_bad
        if self.bad > allowed:
            raise Stopped(
                f"{self.bad:,} training samples cannot be read, data.max_bad allows {allowed:,}; {last}: mend or remove them, or"
                " raise data.max_bad",
                1,
            )
        if len(self.unread) >= sum(self.parts.training.lengths):
            raise Stopped(f"none of the {len(self.unread):,} training samples can be read; {last}", 1)

    def _stop_at_nonfinite(self, loss: float, norm: float, batch: RankBatch) -> None:
        keys = [key for rank in self.ranks.gather(batch.keys) for key in rank]
        path = self.folder / f"nonfinite-step-{self.number + 1}.json"
        if self.ranks.first:
            facts = {"step": self.number + 1, "loss": str(loss), "grad_norm": str(norm), "keys": keys}
            write_text(path, json.dumps(facts, indent=1))
        newest = checkpoint.newest(self.folder / "checkpoints")
        raise Stopped(
            f"step {self.number + 1}: loss {loss}, norm of the gradient {norm}; the weights were not updated. {path} names the "
            f"step's samples; the last good checkpoint is {newest or 'none yet'}. Lower optimizer.lr, lengthen schedule.warmup, or "
            "try compute.precision=bf16 or fp32",
            1,
        )


def seed_of(*parts: int) -> int:
    """A seed for torch that depends on all parts and nothing else: a step's randomness needs no state to be saved."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


def _folder(run: config.Run, here: Ranks, fresh: bool, held: contextlib.ExitStack) -> Path:
    """The run's folder, with its configuration and machine written down; one rank does it, all hear of what goes wrong.

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
            _check_same(checkpoint.read_facts(newest)["run"], config.as_table(run), newest)
        run_folder.write_configuration(folder, run)
        write_text(folder / "environment.json", json.dumps(environment.describe(), indent=2))

    checkpoint.agree(lambda: prepare() if here.first else None)
    return folder


def _check_same(saved: dict[str, Any], asked: dict[str, Any], path: Path) -> None:
    before, now = _flat(saved), _flat(asked)
    for settings in (before, now):
        # False leaves hard negatives out, and so does None where there are none.
        settings["data.negatives"] = settings.get("data.negatives") or None
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    changed = [key for key in changed if not {key, key.partition(".")[0]} & FREE]
    if changed:
        differences = ", ".join(f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in changed[:4])
        raise ValueError(f"{path} belongs to another run: {differences}. Name another folder (out=…), or start over with --fresh")


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _scaler_state(scaler: torch.amp.GradScaler) -> Tensor:
    state = scaler.state_dict()
    return torch.tensor([state["scale"], state["_growth_tracker"]], dtype=torch.float64)


def _set_scaler(scaler: torch.amp.GradScaler, state: Tensor) -> None:
    scale, tracker = state.tolist()
    scaler.load_state_dict({**scaler.state_dict(), "scale": scale, "_growth_tracker": int(tracker)})
