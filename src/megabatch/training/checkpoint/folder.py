"""The checkpoints of a run side by side: which are complete, and how a new one takes its place among them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path

from megabatch.training.checkpoint import manifest

# A new checkpoint is written under PARTIAL and renamed when it is complete. One of the same step is set aside as OLD until then,
# and counts where a crash came between the two. What is to be deleted becomes PARTIAL first, as deleting takes several calls too.
PARTIAL, OLD = ".partial", ".old"
COMPLETE = re.compile(rf"step-(\d{{8,}})({re.escape(OLD)})?")
# Every name that a save gives to a folder; others are not deleted.
NAMES = re.compile(rf"{COMPLETE.pattern}({re.escape(PARTIAL)})*")


def place(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in the name of a complete checkpoint; None for any other name."""
    match = COMPLETE.fullmatch(path.name)
    return int(match[1]) if match else None


def available(folder: str | Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest step first; a save that was cut short is not among them."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    steps = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    return [path for step, path in sorted(steps) if path == place(folder, step) or not place(folder, step).exists()]


def newest(folder: str | Path) -> Path | None:
    """The complete checkpoint of the last step, or None."""
    return next(reversed(available(folder)), None)


def before(path: Path) -> Path | None:
    """The last checkpoint of an earlier step whose files are all there."""
    step = step_of(path)
    for other in reversed(available(path.parent)):
        number = step_of(other)
        assert number is not None
        if step is None or number < step:
            try:
                manifest.check_sizes(other, manifest.read(other))
            except (ValueError, OSError):
                continue
            return other
    return None


def begin(target: Path) -> Path:
    """A fresh folder to write the checkpoint `target` in; what earlier saves left unfinished is deleted."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in target.parent.iterdir():
        superseded = path.name.endswith(OLD) and path not in available(target.parent)
        if NAMES.fullmatch(path.name) and (superseded or path.name.endswith(PARTIAL)):
            shutil.rmtree(path, ignore_errors=True)
    partial = target.with_name(target.name + PARTIAL)
    partial.mkdir()
    return partial


def publish(partial: Path, target: Path, keep: int) -> None:
    """Makes the written folder the checkpoint `target`, then deletes all but the `keep` newest; `target` always stays."""
    sync(partial)
    old = target.with_name(target.name + OLD)
    if target.exists():
        os.rename(target, old)
    os.rename(partial, target)
    sync(target.parent)
    others = [path for path in available(target.parent) if path != target]
    for path in [old, *others[: max(0, len(others) - keep + 1)]]:
        if path.exists():
            discard(path)


def discard(path: Path) -> None:
    """Deletes a checkpoint; what cannot be deleted now is tried again by the next save."""
    doomed = path.with_name(path.name + PARTIAL)
    with contextlib.suppress(OSError):
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def sync(folder: Path) -> None:
    """Waits until the names in the folder are on the disk, where the system can say so."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems know no such call for folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
