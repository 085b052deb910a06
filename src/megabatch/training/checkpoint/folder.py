"""The folder of a run's checkpoints: which are complete, and how a new one is added."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path

from megabatch.training.checkpoint import manifest

# A new checkpoint is written with the suffix PARTIAL and renamed when it is complete. An existing one of the same step becomes OLD
# meanwhile, and counts if a crash comes between the two renames. A checkpoint is also renamed to PARTIAL before it is deleted,
# since deleting takes several calls.
PARTIAL, OLD = ".partial", ".old"
COMPLETE = re.compile(rf"step-(\d{{8,}})({re.escape(OLD)})?")
# All names that saving gives to folders; others are never deleted.
NAMES = re.compile(rf"{COMPLETE.pattern}({re.escape(PARTIAL)})*")


def place(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step in the name of a complete checkpoint, or None for any other name."""
    match = COMPLETE.fullmatch(path.name)
    return int(match[1]) if match else None


def available(folder: str | Path) -> list[Path]:
    """Return the complete checkpoints in `folder` in the order of their steps."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    steps = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    return [path for step, path in sorted(steps) if path == place(folder, step) or not place(folder, step).exists()]


def newest(folder: str | Path) -> Path | None:
    """Return the complete checkpoint of the last step, or None."""
    return next(reversed(available(folder)), None)


def before(path: Path) -> Path | None:
    """Return the last checkpoint of an earlier step that has all its files, or None."""
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
    """Create and return an empty folder for the checkpoint `target`; delete incomplete checkpoints of earlier saves."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in target.parent.iterdir():
        superseded = path.name.endswith(OLD) and path not in available(target.parent)
        if NAMES.fullmatch(path.name) and (superseded or path.name.endswith(PARTIAL)):
            shutil.rmtree(path, ignore_errors=True)
    partial = target.with_name(target.name + PARTIAL)
    partial.mkdir()
    return partial


def publish(partial: Path, target: Path, keep: int) -> None:
    """Rename the written folder to `target`, then delete all but the `keep` newest checkpoints; `target` always stays."""
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
    """Delete a checkpoint; the next save tries again if that fails."""
    partial = path.with_name(path.name + PARTIAL)
    with contextlib.suppress(OSError):
        os.rename(path, partial)
        shutil.rmtree(partial)


def sync(folder: Path) -> None:
    """Flush the names in the folder to disk, where the system supports it."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not support fsync on folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
