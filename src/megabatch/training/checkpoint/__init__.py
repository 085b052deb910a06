"""Checkpoints: saved by all ranks together, whole or not at all, and read without executing anything.

A checkpoint is a folder: one safetensors file for each rank that had something to write, and `checkpoint.json` with the facts, the
place of every tensor, and sizes and checksums. `torch.distributed.checkpoint` plans the writing and the reading, so tensors may be
split over ranks (DTensor), and come back on another number of them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from megabatch.ring import Ring
from megabatch.training.checkpoint import folder as folders
from megabatch.training.checkpoint import manifest as manifests
from megabatch.training.checkpoint.folder import available, newest
from megabatch.training.checkpoint.manifest import DTYPE_NAMES, DTYPES, Manifest
from megabatch.training.checkpoint.storage import Reader, Writer

__all__ = ["available", "load", "newest", "read_facts", "save"]

T = TypeVar("T")
# Differences that a message names; a changed model has hundreds.
SHOWN = 4


def save(folder: str | Path, step: int, tensors: Mapping[str, Any], facts: Mapping[str, Any], *, keep: int) -> Path:
    """The new checkpoint `folder`/step-00000200 (for step 200). All ranks call it, and see a shared folder.

    It appears when it is complete; then all but the `keep` newest are deleted. If it cannot be written (a full disk), every rank
    raises OSError and those before it are as they were.

    tensors: a dict, or nested dicts, of tensors; DTensors are split over ranks, others of the same name are taken to be equal.
    facts: of the first rank, anything that JSON can say; read back with `step`, `ranks` and `torch` (its version) added.
    """
    target = folders.place(Path(folder), step)

    def prepare() -> tuple[dict[str, Tensor], Writer]:
        if keep < 1:
            raise ValueError(f"keep is {keep}: at least 1 checkpoint, the new one, stays")
        added = {**facts, "step": step, "ranks": _ranks(), "torch": torch.__version__}
        return flat(tensors), Writer(target, _plain(added), keep)

    state, writer = agree(prepare)
    try:
        with _quiet():
            state_dict_saver.save(state, storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=False))
    except CheckpointException as failure:
        _raise(failure, writer)
    return target


def load(path: str | Path, tensors: Mapping[str, Any], *, whole: bool = True) -> dict[str, Any]:
    """The facts of the checkpoint at `path`, whose content is copied into `tensors`, on any number of ranks. All ranks call it.

    A checkpoint that is damaged, foreign or of another model is a ValueError on every rank, and no tensor has been touched.

    whole: False leaves those tensors of the checkpoint alone that are not asked for.
    """
    path = Path(path)
    state, found = agree(lambda: (flat(tensors), _read(path)))
    # Ranks may have tensors of their own.
    asked = set[str]().union(*Ring.world().gather_objects(list(state), torch.device("cpu")))
    agree(lambda: _compare(path, state, found, found.tensors.keys() - asked if whole else ()))
    agree(lambda: _verify(path, found))
    try:
        with _quiet():
            state_dict_loader.load(state, storage_reader=Reader(path, found), planner=DefaultLoadPlanner(flatten_state_dict=False))
    except CheckpointException as failure:
        error = _first(failure)
        raise error if isinstance(error, OSError) else RuntimeError(f"checkpoint {path} could not be read: {error!r}") from failure
    return found.facts


def read_facts(path: str | Path) -> dict[str, Any]:
    """The facts that the checkpoint at `path` was saved with. One rank may call it alone; the tensors' files are not looked at."""
    with _refusing(Path(path)):
        return manifests.read(Path(path)).facts


def agree(work: Callable[[], T]) -> T:
    """Return work(); raise the exception of any rank on all of them, so that no rank waits for one that failed."""
    return Ring.world().raise_together(work, torch.device("cpu"))


def flat(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Nested dicts of tensors as one, names joined by dots.

    >>> list(flat({"model": {"bias": torch.zeros(3)}, "step": torch.tensor(1)}))
    ['model.bias', 'step']
    """
    found: dict[str, Tensor] = {}
    for key, value in tensors.items():
        name = f"{prefix}{key}"
        inner = flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
        if not isinstance(value, (Mapping, Tensor)):
            raise ValueError(f"{name} is {value!r}: a checkpoint holds tensors; other values go into the facts")
        if isinstance(value, Tensor) and (value.dtype not in DTYPE_NAMES or value.layout is not torch.strided):
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())
            raise ValueError(f"{name} is a {value.layout} tensor of {value.dtype}: only dense ones of {known} are saved")
        if twice := found.keys() & inner.keys():
            raise ValueError(f"{twice.pop()} names two tensors: rename a dict or a key, names are joined by dots")
        found |= inner
    return found


def _read(path: Path) -> Manifest:
    with _refusing(path):
        found = manifests.read(path)
        manifests.check_sizes(path, found)
        return found


def _verify(path: Path, found: Manifest) -> None:
    """Checksums, each rank its part of the files: together they read every file once."""
    rank, ranks = (dist.get_rank(), _ranks()) if dist.is_initialized() else (0, 1)
    with _refusing(path):
        for name in sorted(found.files)[rank::ranks]:
            manifests.check_sum(path, name, found.files[name])


def _compare(path: Path, state: dict[str, Tensor], found: Manifest, surplus: Iterable[str]) -> None:
    saved = {name: (entry.shape, DTYPES[entry.dtype]) for name, entry in found.tensors.items()}
    given = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    differences = [f"{name} is missing in it" for name in given if name not in saved]
    differences += [f"{name} is only in it" for name in sorted(surplus)]
    differences += [
        f"{name} is {_words(*saved[name])} in it and {_words(*given[name])} here"
        for name in given
        if name in saved and saved[name] != given[name]
    ]
    if differences:
        more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise ValueError(
            f"checkpoint {path} is of another model or optimizer: {'; '.join(differences[:SHOWN])}{more}."
            " Take the configuration that it was trained with"
        )


def _words(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(facts, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"facts {facts!r}: must be what JSON can say ({error})") from None


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """What is wrong with the checkpoint becomes a sentence that offers the one before."""
    try:
        yield
    except ValueError as error:
        other = folders.before(path)
        offer = (
            f"the one before is {other}: to go on from it, move this one away" if other else "there is no complete one before it"
        )
        raise ValueError(f"checkpoint {path} {error}; {offer}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """A run in one process needs no process group, and no warning about it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        yield


def _first(failure: CheckpointException) -> BaseException:
    """The exception of the first rank that failed; an interrupt as it is."""
    error = failure.failures[min(failure.failures)][0]
    if not isinstance(error, Exception):
        raise error
    return error


def _raise(failure: CheckpointException, writer: Writer) -> NoReturn:
    """One clear error, the same on every rank, after the partial folder is gone."""
    if (dist.get_rank() if dist.is_initialized() else 0) == 0 and writer.partial.exists():
        folders.discard(writer.partial)
    error = _first(failure)
    needed = "" if writer.needed is None else f" Its tensors take {writer.needed:,} bytes."
    other = folders.newest(writer.target.parent)
    before = f"The one before, {other}, is intact." if other else "There is none before it."
    message = f"checkpoint {writer.target} could not be written: {error}.{needed} {before}"
    if isinstance(error, OSError):
        raise OSError(*([error.errno] if error.errno else []), message) from failure
    raise RuntimeError(message) from failure
