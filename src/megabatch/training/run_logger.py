"""What a run reports while it runs: a progress bar or lines, one JSON line for each event, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from .. import config, packages
from ..reporting.limits import NOTABLE, limit_of

# Seconds between two progress lines of a training, where there is no terminal for a progress bar.
LINE_EVERY = 15.0
# Seconds between two lines about one long step.
HEARTBEAT = 3.0
SCALARS = (
    "loss",
    "recall",
    "accuracy",
    "scale",
    "lr",
    "grad_norm",
    "batch",
    "pairs_per_s",
    "waiting_for_data",
    "device_idle",
    "memory_bytes",
)


class RunLogger:
    """Writes log.jsonl and the terminal's output on the first rank; on the others it does nothing."""

    def __init__(self, run: config.Run, folder: Path, samples: int, seen: int, *, silent: bool) -> None:
        self._silent = silent
        self._samples = samples
        self._bad: set[tuple[str, str]] = set()
        self._bar: Any = None
        self._task: Any = None
        self._writers: list[Any] = []
        self._printed = time.monotonic()
        self._lines = False
        if silent:
            return
        if run.watch.bar and sys.stderr.isatty():
            self._bar, self._task = _bar(samples, seen)
        if run.watch.tensorboard:
            self._writers.append(_TensorBoard(folder / "tensorboard"))
        if run.watch.wandb is not None:
            self._writers.append(_Wandb(run, folder))
        self._lines = run.watch.bar and self._bar is None
        _cut_torn_line(folder / "log.jsonl")
        # Opened last, since nothing after it may fail: it stays open as long as the run.
        self._log = open(folder / "log.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    def __enter__(self) -> RunLogger:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        for writer in self._writers:
            writer.close()
        if not self._silent:
            self._log.close()

    def event(self, event: str, **fields: Any) -> None:
        """Write one line of the log, and flush it."""
        if self._silent:
            return
        print(json.dumps({"event": event, **fields}), file=self._log, flush=True)
        for writer in self._writers:
            writer.put(event, fields)
        if event == "step":
            self._show(fields)

    def bad(self, key: str, reason: str, **fields: Any) -> bool:
        """Log a sample that cannot be read, unless it was logged for that reason before; return whether it was logged."""
        new = (key, reason) not in self._bad
        if new:
            self._bad.add((key, reason))
            self.event("bad", **fields, key=key, reason=reason)
        return new

    def note(self, text: str) -> None:
        """Write a sentence to the log and to the terminal."""
        self.event("note", text=text)
        self.say(text)

    def say(self, text: str) -> None:
        """Write a line to the terminal."""
        if self._silent:
            return
        if self._bar is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False)

    @contextmanager
    def heartbeat(self, status: Callable[[], str]) -> Iterator[None]:
        """Say `status()` every few seconds while the block runs, from a thread: PyTorch's operations release the interpreter."""
        if self._silent or not (self._lines or self._bar is not None):
            yield
            return
        ended = threading.Event()
        began = time.monotonic()

        def beat() -> None:
            while not ended.wait(HEARTBEAT):
                self.say(f"  {status()}, {time.monotonic() - began:,.0f} s so far")

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _show(self, fields: Mapping[str, Any]) -> None:
        seen = fields["samples"]
        if self._bar is not None:
            self._bar.update(self._task, completed=seen, summary=_summary(fields))
        elif self._lines and (time.monotonic() - self._printed > LINE_EVERY or seen >= self._samples):
            self._printed = time.monotonic()
            left = (self._samples - seen) / fields["pairs_per_s"] if fields["pairs_per_s"] else 0
            print(f"{seen:>11,} of {self._samples:,} pairs · {_summary(fields)} · {left:,.0f} s left", file=sys.stderr, flush=True)


def _cut_torn_line(log: Path) -> None:
    """Remove a last line without a newline, which a killed process or a full disk leaves, so that the next event starts a line."""
    if not log.exists():
        return
    with open(log, "rb+") as stream:
        size = begin = stream.seek(0, os.SEEK_END)
        kept = 0
        while begin and not kept:
            end, begin = begin, max(0, begin - (1 << 16))
            stream.seek(begin)
            newline = stream.read(end - begin).rfind(b"\n")
            kept = 0 if newline < 0 else begin + newline + 1
        if kept < size:
            stream.truncate(kept)


def _summary(fields: Mapping[str, Any]) -> str:
    """Return the numbers of a step for a progress bar or line."""
    metric = "recall" if "recall" in fields else "accuracy"
    share = fields["waiting_for_data"]
    waiting = f" · {share:.0%} waiting for data" if share > NOTABLE else ""
    if limit_of(share, fields.get("device_idle")) == "host":
        waiting = f" · device idle {fields['device_idle']:.0%}"
    return (
        f"loss {fields['loss']:.3f} · {metric} {fields[metric]:.1%} · {fields['pairs_per_s']:,.0f} pairs/s"
        f" · {memory_text(fields['memory_bytes'])}{waiting}"
    )


def memory_text(size: int | None) -> str:
    """Return a size in MiB, or "memory unknown" for None, on systems that do not report it."""
    return "memory unknown" if size is None else f"{size / 2**20:,.0f} MiB"


def _bar(samples: int, seen: int) -> tuple[Any, Any]:
    packages.require(packages.BAR)
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[summary]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    )
    bar = Progress(*columns, console=Console(stderr=True))
    return bar, bar.add_task("training", total=samples, completed=seen, summary="starting")


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        packages.require(packages.TENSORBOARD_LOG)
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def put(self, event: str, fields: Mapping[str, Any]) -> None:
        for name, value in _scalars(event, fields).items():
            self._writer.add_scalar(name, value, fields["step"])

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, run: config.Run, folder: Path) -> None:
        packages.require(packages.WANDB_LOG)
        import wandb

        self._run = wandb.init(project=run.watch.wandb, dir=str(folder), config=config.as_table(run), resume="allow")

    def put(self, event: str, fields: Mapping[str, Any]) -> None:
        scalars = _scalars(event, fields)
        if scalars:
            self._run.log(scalars, step=fields["step"])

    def close(self) -> None:
        self._run.finish()


def _scalars(event: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the points that an event adds to curves, by the name of the curve."""
    if event == "step":
        return {f"train/{name}": fields[name] for name in SCALARS if fields.get(name) is not None}
    if event != "evaluation":
        return {}
    recall = {f"held-out/{side}@{k}": v for side in ("x_to_y", "y_to_x") for k, v in fields.get(side, {}).items()}
    return recall | {f"held-out/{name}": fields[name] for name in ("accuracy",) if name in fields}
