"""One training, from its configuration to its last checkpoint: read top to bottom, this is what happens."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import config, environment
from . import checkpoint
from .assembly import Assembly, assemble
from .data.loader import Batch
from .finish import finish
from .held_out import measure
from .launch import Ranks, ranks
from .memory import peak
from .model import Pair
from .objective import Outcome
from .optimizers import Average, build_optimizer, clip_gradients, optimizer_tensors, set_rate
from .ramp import Ramp
from .schedules import Step, course
from .signals import Stopped, StopSign
from .watch import Watch

# What may change between two parts of one run: how it is computed and watched, not what is computed.
FREE = {"out", "compute", "checkpoint", "watch", "evaluate", "planned", "data.workers", "data.max_bad", "batch.chunk", "batch.keep"}


def train(run: config.Run, *, fresh: bool = False) -> Path:
    """Trains to the end, from the newest checkpoint of the run's folder if there is one, and returns the folder.

    fresh: start over, and delete what an earlier run has left in the folder.
    """
    with ranks(run.compute) as here:
        folder = _folder(run, here, fresh)
        training = Training(assemble(run, here), folder)
        training.resume()
        with Watch(run, folder, training.samples, training.seen, silent=not here.first) as watch, StopSign() as sign:
            training.run_to_the_end(watch, sign)
            finish(training.parts, folder, watch, training.average, training.facts(), training.tensors())
        return folder


class Training:
    """A run in progress: its parts, its optimizer, how far it is.

    `callbacks` are called after every step. One that puts another list into `course`, equal up to the present step, changes what
    follows.
    """

    def __init__(self, parts: Assembly, folder: Path) -> None:
        run = parts.run
        self.parts = parts
        self.run = run
        self.ranks = parts.ranks
        self.folder = folder
        self.course = course(run, sum(parts.training.lengths))
        self.samples = self.course[-1].first + self.course[-1].pairs
        self.optimizer = build_optimizer(parts.model, run.optimizer)
        self.average = None if run.optimizer.ema is None else Average(parts.model, run.optimizer.ema)
        self.take = parts.objective.repeated_on_oom(self.optimizer)
        self.number = 0
        self.seconds = 0.0
        self.bad = 0
        self.ramp = Ramp(self) if run.batch.schedule == "noise" else None
        self.callbacks: list[Callable[[Watch], object]] = [] if self.ramp is None else [self.ramp]

    @property
    def seen(self) -> int:
        return self.course[self.number].first if self.number < len(self.course) else self.samples

    def run_to_the_end(self, watch: Watch, sign: StopSign, last: int | None = None) -> None:
        """Every step that is left, or those up to step `last`, with evaluations and checkpoints between them."""
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
                        watch.event("evaluation", step=self.number, samples=self.seen, **measure(self.parts, self.average)[0])
                    if self.course is not planned:
                        # What was read ahead is of the size before.
                        break
        if saved < self.number:
            self.save(watch)

    def _take_step(self, step: Step, batches: Iterator[Batch], watch: Watch, sign: StopSign) -> int:
        """The next step and what is said of it; returns the signal that wants the run to stop, 0 if none does."""
        began = time.perf_counter()
        batch = next(batches)
        torch.manual_seed(seed_of(self.run.seed, self.number, self.ranks.rank))
        outcome, norm = self.step(step, batch)
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

    def step(self, step: Step, batch: Batch) -> tuple[Outcome, float]:
        """One optimizer step: forward and backward at the step's batch, clipping, the update, the averages."""
        rows = self.ranks.sum(len(batch.keys))[0]
        if not rows:
            raise Stopped(f"step {self.number}: none of its {step.pairs} samples could be read; see log.jsonl", 1)
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

    def report(self, step: Step, batch: Batch, outcome: Outcome, norm: float, began: float, watch: Watch, sign: StopSign) -> int:
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
        self.number, self.seconds, self.bad = facts["step"], facts["seconds"], facts["bad"]
        if self.ramp is not None and "ramp" in facts:
            self.ramp.load(facts["ramp"])

    def _count_bad(self, batch: Batch, watch: Watch) -> None:
        found = [each for rank in self.ranks.gather(batch.bad) for each in rank]
        for key, reason in found:
            watch.event("bad", step=self.number + 1, key=key, reason=reason)
        self.bad += len(found)
        if self.bad > self.run.data.max_bad:
            raise Stopped(
                f"{self.bad} samples could not be read, data.max_bad allows {self.run.data.max_bad}; the last one: {found[-1][0]}: "
                f"{found[-1][1]}. log.jsonl names them all: mend or remove them, or raise data.max_bad",
                1,
            )

    def _stop_at_nonfinite(self, loss: float, norm: float, batch: Batch) -> None:
        keys = [key for rank in self.ranks.gather(batch.keys) for key in rank]
        path = self.folder / f"nonfinite-step-{self.number + 1}.json"
        if self.ranks.first:
            path.write_text(
                json.dumps({"step": self.number + 1, "loss": str(loss), "grad_norm": str(norm), "keys": keys}, indent=1)
            )
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


def _folder(run: config.Run, here: Ranks, fresh: bool) -> Path:
    """The run's folder, with its configuration and machine written down; one rank does it, all hear of what goes wrong."""
    folder = Path(run.out)

    def prepare() -> None:
        if fresh and (folder / "run.toml").exists():
            shutil.rmtree(folder)
        if folder.exists() and not (folder / "run.toml").exists() and any(folder.iterdir()):
            raise ValueError(f"out is {run.out!r}: the folder holds something that is no run; name another one")
        folder.mkdir(parents=True, exist_ok=True)
        newest = checkpoint.newest(folder / "checkpoints")
        if newest is not None:
            _check_same(checkpoint.read_facts(newest)["run"], config.as_table(run), newest)
        (folder / "run.toml").write_text(config.as_toml(run), encoding="utf-8")
        (folder / "environment.json").write_text(json.dumps(environment.describe(), indent=2))

    checkpoint.agree(lambda: prepare() if here.first else None)
    return folder


def _check_same(saved: dict[str, Any], asked: dict[str, Any], path: Path) -> None:
    before, now = _flat(saved), _flat(asked)
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
