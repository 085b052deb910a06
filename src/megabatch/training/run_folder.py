"""The folder of a run: how it is recognised, which process may write to it, and which names in it belong to a run.

A folder is megabatch's if it holds the file MARK, which is created before anything else. The process that writes to the folder
holds an operating system lock on that file; the kernel releases it when the process ends, however it ends. `train --fresh` deletes
by name what ENTRIES lists, and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from .. import config
from ..files import partial_of, replacing, write_text
from ..version import __version__
from . import checkpoint
from .checkpoint import folder as checkpoints
from .checkpoint import manifest

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

MARK = ".megabatch-run"
FORMAT = 1
# Seconds to wait for another process to release the folder: ranks whose launcher was killed finish a step and a checkpoint.
WAIT = 30.0
# Entries that a message names; a folder of other files may hold thousands.
SHOWN = 3


@dataclass(frozen=True)
class Entry:
    """A name that a run writes. inside: the entries of a folder; None for a file.

    kept: `--fresh` does not delete it. opaque: a folder of another program with any content.
    """

    name: str
    inside: tuple[Entry, ...] | None = None
    kept: bool = False
    opaque: bool = False


# Regular expressions. The temporary files of `megabatch.files` and of checkpoints count as the names that they replace.
ENTRIES = (
    Entry(re.escape(MARK), kept=True),
    Entry(r"run\.toml(\.\d+)?", kept=True),
    Entry(r"environment\.json"),
    Entry(r"log\.jsonl"),
    Entry(r"result\.json"),
    Entry(r"report\.html"),
    Entry(r"curves\.png"),
    Entry(r"contact\.(json|png)"),
    Entry(r"contact", (Entry(r"\d+-[xy]\.png"),)),
    Entry(r"nonfinite-step-\d+\.json"),
    Entry(
        r"checkpoints",
        (Entry(checkpoints.NAMES.pattern, (Entry(re.escape(manifest.NAME)), Entry(manifest.FILE.pattern))),),
    ),
    Entry(r"tensorboard", (Entry(r"events\.out\.tfevents\..+"),)),
    Entry(r"wandb", opaque=True),
    # By `megabatch embed` and `megabatch search`.
    Entry(r"embeddings\.safetensors"),
    Entry(r"search\.png"),
    # By `megabatch sweep`, into the folders of its runs.
    Entry(r"outcome\.json"),
    Entry(r"stderr\.txt"),
)
TEMPORARY = re.compile(r"\.(.+)\.partial")


@contextmanager
def claimed(folder: str | Path, verb: str, option: str = "out") -> Iterator[Path]:
    """Mark `folder` as one of `megabatch VERB` and lock it: no other process can claim it until the block ends.

    An existing folder must be empty or marked with the same verb; otherwise ValueError is raised and nothing in it has changed.
    option: the setting that names the folder, for messages.
    """
    folder = Path(folder)
    _check_unused(folder, option)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / MARK, os.O_RDWR | os.O_CREAT, 0o666)
    _Held.add(descriptor)
    try:
        _lock(descriptor, folder, option)
        _check_verb(_read_mark(folder), folder, verb, option)
        text = json.dumps({"format": FORMAT, "megabatch": __version__, "verb": verb, "process": _process()})
        # Written in place, since the lock is on this file: a new file of the same name would not be locked.
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, text.encode())
        os.ftruncate(descriptor, len(text.encode()))
        yield folder
    finally:
        _Held.close(descriptor)


@contextmanager
def claimed_by_ranks(folder: str | Path, verb: str, first: bool) -> Iterator[Path]:
    """`claimed` for all ranks together: the first rank holds the lock, and all ranks raise its errors."""
    with contextlib.ExitStack() as held:
        checkpoint.agree(lambda: held.enter_context(claimed(folder, verb)) if first else None)
        yield Path(folder)


def clear(folder: Path) -> None:
    """Delete everything that a run has written into `folder`, except its configuration and the mark.

    Raises ValueError, and deletes nothing, where the folder holds anything else. A process that is killed while deleting leaves a
    folder that can be cleared, and no incomplete checkpoint under the name of a complete one.
    """
    others = foreign(folder)
    if others:
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        raise ValueError(
            f"out is {str(folder)!r}: --fresh clears a folder only if it holds nothing but the files of a run, and no run wrote"
            f" {', '.join(map(repr, others[:SHOWN]))}{more}; move that elsewhere, or choose another folder (out=…)"
        )
    # Leftovers of an earlier attempt come first, since their names are needed again. Then the checkpoints: without them the run
    # starts over.
    for entry in sorted(os.scandir(folder), key=lambda entry: (entry.name[0] != ".", entry.name != "checkpoints")):
        known = _known(entry, ENTRIES)
        if known is None or (known.kept and not TEMPORARY.fullmatch(entry.name)):
            continue
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False) and not TEMPORARY.fullmatch(entry.name):
            os.replace(path, partial_of(path))
            path = partial_of(path)
        _delete(path, known)


def foreign(folder: str | Path) -> list[str]:
    """Return the paths below `folder`, relative to it, that no run writes. Every symbolic link is one of them."""
    return [Path(path).relative_to(folder).as_posix() for path in _foreign(folder, ENTRIES)]


def check_not_data(run: config.Run) -> None:
    """Raise ValueError where the run's folder is inside a folder that it reads as data."""
    out = os.path.realpath(run.out)
    for name, value, path in _inputs(run):
        if os.path.isdir(path) and _within(out, path) and out != path:
            raise ValueError(
                f"out is {run.out!r}, inside the folder that {name} names ({value!r}): images that the run writes would become"
                " data; choose a folder outside of it"
            )


def check_not_read(run: config.Run) -> None:
    """Raise ValueError where clearing the run's folder could delete an input of the run."""
    out = os.path.realpath(run.out)
    for name, value, path in _inputs(run):
        if os.path.exists(path) and _within(path, out):
            raise ValueError(
                f"{name} is {value!r}, inside out ({run.out!r}): --fresh would delete an input of the run; move it elsewhere,"
                " or choose another folder (out=…)"
            )


def write_configuration(folder: Path, run: config.Run) -> None:
    """Write run.toml, unless the existing file describes the same run.

    An existing file that was edited (it has comments, for example) and describes another run is kept as run.toml.1, .2, ….
    """
    path, text = folder / "run.toml", config.as_toml(run)
    if path.exists():
        before = path.read_bytes()
        try:
            existing = config.as_toml(config.read(path))
        except ValueError:
            existing = None
        if existing == text:
            return
        if existing is None or existing.encode() != before:
            with replacing(_unused(path)) as temporary:
                temporary.write_bytes(before)
    write_text(path, text)


class _Held:
    """File descriptors that hold locks. A forked process (a worker of a data loader) must not keep them open."""

    descriptors: ClassVar[set[int]] = set()
    watching: ClassVar[bool] = False

    @classmethod
    def add(cls, descriptor: int) -> None:
        if not cls.watching and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=cls.close_all)
            cls.watching = True
        cls.descriptors.add(descriptor)

    @classmethod
    def close(cls, descriptor: int) -> None:
        if descriptor in cls.descriptors:
            cls.descriptors.discard(descriptor)
            os.close(descriptor)

    @classmethod
    def close_all(cls) -> None:
        for descriptor in tuple(cls.descriptors):
            cls.close(descriptor)


def _check_unused(folder: Path, option: str) -> None:
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise ValueError(f"{option} is {str(folder)!r}: it is a file, and must be a folder; choose another name")
    if os.listdir(folder) and not _is_marked(folder):
        # Versions that wrote no mark used the same checkpoint format.
        earlier = checkpoint.newest(folder / "checkpoints") is not None
        adopt = f" If it is a run of a version that wrote no such file, create the file {str(folder / MARK)!r}." if earlier else ""
        raise ValueError(
            f"{option} is {str(folder)!r}: the folder is not empty and is not one of megabatch (it has no {MARK});"
            f" choose a new or an empty folder.{adopt}"
        )


def _is_marked(folder: Path) -> bool:
    return os.path.isfile(folder / MARK) and not os.path.islink(folder / MARK)


def _read_mark(folder: Path) -> dict[str, Any]:
    """Return the content of the mark; empty where the file is empty, or was cut off when the process was killed."""
    try:
        found, _ = json.JSONDecoder().raw_decode((folder / MARK).read_text("utf-8", errors="replace"))
    except (ValueError, OSError):
        return {}
    return found if isinstance(found, dict) else {}


def _check_verb(mark: dict[str, Any], folder: Path, verb: str, option: str) -> None:
    if mark.get("format", FORMAT) != FORMAT:
        raise ValueError(
            f"{option} is {str(folder)!r}: megabatch {mark.get('megabatch')} wrote it in format {mark['format']!r}, and this"
            f" version reads format {FORMAT}; continue with the version that wrote it, or choose another folder"
        )
    if mark.get("verb", verb) != verb:
        raise ValueError(
            f"{option} is {str(folder)!r}: the folder is one of `megabatch {mark['verb']}`, whose files would be replaced;"
            " choose another folder"
        )


def _lock(descriptor: int, folder: Path, option: str) -> None:
    """Lock the mark, and wait up to WAIT seconds for another process to release it."""
    end = time.monotonic() + WAIT
    waiting = False
    while True:
        try:
            _try_lock(descriptor)
            return
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                warnings.warn(
                    f"the file system of {folder} has no locks: make sure that no other process writes to it", stacklevel=2
                )
                return
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
                raise
        holder = _read_mark(folder).get("process", "another process")
        if time.monotonic() > end:
            raise ValueError(
                f"{option} is {str(folder)!r}: {holder} is writing to it; wait until it ends, end it, or choose another folder"
            )
        if not waiting:
            print(f"waiting up to {WAIT:.0f} s for {holder}, which is writing to {folder}", file=sys.stderr, flush=True)
            waiting = True
        time.sleep(0.1)


def _try_lock(descriptor: int) -> None:
    """Lock the file, or raise OSError without waiting."""
    if sys.platform == "win32":
        # A byte far behind the text, so that others can still read the text.
        os.lseek(descriptor, 1 << 30, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _known(entry: os.DirEntry[str], entries: Sequence[Entry]) -> Entry | None:
    """Return the matching one of `entries`; None for an unknown name, a link, or a folder in place of a file."""
    temporary = TEMPORARY.fullmatch(entry.name)
    name = temporary[1] if temporary else entry.name
    for known in entries:
        if re.fullmatch(known.name, name):
            folder = known.opaque or known.inside is not None
            alike = entry.is_dir(follow_symlinks=False) if folder else entry.is_file(follow_symlinks=False)
            return known if alike else None
    return None


def _foreign(folder: str | Path, entries: Sequence[Entry]) -> Iterator[str]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        known = _known(entry, entries)
        if known is None:
            yield entry.path
        elif known.inside is not None:
            yield from _foreign(entry.path, known.inside)


def _delete(path: Path, known: Entry) -> None:
    """Delete a file, or a folder and its known entries. Files that were added meanwhile stay, and rmdir raises OSError."""
    if known.opaque:
        shutil.rmtree(path)
    elif known.inside is None:
        path.unlink()
    else:
        for entry in tuple(os.scandir(path)):
            inner = _known(entry, known.inside)
            if inner is not None:
                _delete(Path(entry.path), inner)
        path.rmdir()


def _inputs(run: config.Run) -> Iterator[tuple[str, str, str]]:
    """Yield the settings of a run that may name files or folders, as (name, value, real path)."""
    named = (
        ("data.source", run.data.source),
        ("data.held_out", run.data.held_out),
        ("x.weights", run.x.weights),
        ("y.weights", run.y.weights),
    )
    for name, value in named:
        if isinstance(value, str):
            yield name, value, os.path.realpath(os.path.expanduser(value))


def _within(path: str, folder: str) -> bool:
    """Return whether a real path is the folder or inside of it."""
    with contextlib.suppress(ValueError):
        return os.path.commonpath([path, folder]) == folder
    # commonpath raises for different drives.
    return False


def _unused(path: Path) -> Path:
    number = 1
    while os.path.lexists(numbered := path.with_name(f"{path.name}.{number}")):
        number += 1
    return numbered
