"""Checkpoints: written by all ranks together, completely or not at all, and read without executing code.

A checkpoint is a folder: one safetensors file for each rank that has tensors to write, and `checkpoint.json` with metadata, the
place of every tensor, sizes and checksums. `torch.distributed.checkpoint` plans writing and reading, so tensors may be split over
ranks (DTensor), and be loaded on another number of ranks.
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

__all__ = ["available", "load", "newest", "read_metadata", "save"]

T = TypeVar("T")
# Differences that an error names; a changed model has hundreds.
SHOWN = 4


def save(folder: str | Path, step: int, tensors: Mapping[str, Any], metadata: Mapping[str, Any], *, keep: int) -> Path:
    """Write the checkpoint `folder`/step-00000200 (for step 200) and return its path. All ranks call it, with a shared folder.

    The checkpoint appears when it is complete; then all but the `keep` newest are deleted. If it cannot be written (a full disk),
    every rank raises OSError and earlier checkpoints are unchanged.

    tensors: a dict, or nested dicts, of tensors. DTensors are split over ranks; other tensors of the same name must be equal.
    metadata: of the first rank, values that JSON has; `step`, `ranks` and `torch` (its version) are added.
    """
    target = folders.place(Path(folder), step)

    def prepare() -> tuple[dict[str, Tensor], Writer]:
        if keep < 1:
            raise ValueError(f"keep is {keep}: must be at least 1, for the new checkpoint")
        added = {**metadata, "step": step, "ranks": _ranks(), "torch": torch.__version__}
        return flat(tensors), Writer(target, _plain(added), keep)

    state, writer = agree(prepare)
    try:
        with _quiet():
            state_dict_saver.save(state, storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=False))
    except CheckpointException as failure:
        _raise(failure, writer)
    return target


def load(path: str | Path, tensors: Mapping[str, Any], *, whole: bool = True) -> dict[str, Any]:
    """Copy the checkpoint at `path` into `tensors` and return its metadata, on any number of ranks. All ranks call it.

    Every rank raises ValueError, and changes no tensor, if the checkpoint is damaged, is not ours, or is of another model.

    whole: whether all tensors of the checkpoint must be asked for; False ignores the others.
    """
    path = Path(path)
    state, manifest = agree(lambda: (flat(tensors), _read(path)))
    # Ranks may hold different tensors.
    asked = set[str]().union(*Ring.world().gather_objects(list(state), torch.device("cpu")))
    agree(lambda: _compare(path, state, manifest, manifest.tensors.keys() - asked if whole else ()))
    agree(lambda: _verify(path, manifest))
    try:
        with _quiet():
            planner = DefaultLoadPlanner(flatten_state_dict=False)
            state_dict_loader.load(state, storage_reader=Reader(path, manifest), planner=planner)
    except CheckpointException as failure:
        error = _first(failure)
        raise error if isinstance(error, OSError) else RuntimeError(f"checkpoint {path} could not be read: {error!r}") from failure
    return manifest.facts


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Return the metadata of the checkpoint at `path` without reading tensors. A single rank may call it."""
    with _refusing(Path(path)):
        return manifests.read(Path(path)).facts


def agree(work: Callable[[], T]) -> T:
    """Return work(); raise the exception of any rank on all of them, so that no rank waits for one that failed."""
    return Ring.world().raise_together(work, torch.device("cpu"))


def flat(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Return nested dicts of tensors as one dict, with names joined by dots.

    >>> list(flat({"model": {"bias": torch.zeros(3)}, "step": torch.tensor(1)}))
    ['model.bias', 'step']
    """
    joined: dict[str, Tensor] = {}
    for key, value in tensors.items():
        name = f"{prefix}{key}"
        inner = flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
        if not isinstance(value, (Mapping, Tensor)):
            raise ValueError(f"{name} is {value!r}: a checkpoint stores tensors; put other values into the metadata")
        if isinstance(value, Tensor) and (value.dtype not in DTYPE_NAMES or value.layout is not torch.strided):
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())
            raise ValueError(f"{name} is a {value.layout} tensor of {value.dtype}: only dense tensors of {known} can be saved")
        if twice := joined.keys() & inner.keys():
            raise ValueError(f"{twice.pop()} names two tensors, since names are joined by dots; rename a dict or a key")
        joined |= inner
    return joined


def _read(path: Path) -> Manifest:
    with _refusing(path):
        manifest = manifests.read(path)
        manifests.check_sizes(path, manifest)
        return manifest


def _verify(path: Path, manifest: Manifest) -> None:
    """Check the checksums. Each rank checks a part of the files, so that every file is read once."""
    rank, ranks = (dist.get_rank(), _ranks()) if dist.is_initialized() else (0, 1)
    with _refusing(path):
        for name in sorted(manifest.files)[rank::ranks]:
            manifests.check_sum(path, name, manifest.files[name])


def _compare(path: Path, state: dict[str, Tensor], manifest: Manifest, surplus: Iterable[str]) -> None:
    saved = {name: (entry.shape, DTYPES[entry.dtype]) for name, entry in manifest.tensors.items()}
    given = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    differences = [f"{name} is missing in the checkpoint" for name in given if name not in saved]
    differences += [f"{name} is only in the checkpoint" for name in sorted(surplus)]
    differences += [
        f"{name} is {_shape_text(*saved[name])} in the checkpoint and {_shape_text(*given[name])} in the run"
        for name in given
        if name in saved and saved[name] != given[name]
    ]
    if differences:
        more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise ValueError(
            f"checkpoint {path} is of another model or optimizer: {'; '.join(differences[:SHOWN])}{more}."
            " Use the configuration that it was trained with"
        )


def _shape_text(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(metadata, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata is {metadata!r}: must consist of values that JSON has ({error})") from None


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Complete the error about a checkpoint to a sentence that offers the previous checkpoint."""
    try:
        yield
    except ValueError as error:
        other = folders.before(path)
        offer = "there is no complete earlier one"
        if other is not None:
            offer = f"to resume from the previous one, {other}, move this one elsewhere"
        raise ValueError(f"checkpoint {path} {error}; {offer}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warning that there is no process group, which a single process does not need."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        yield


def _first(failure: CheckpointException) -> BaseException:
    """Return the exception of the first rank that failed; raise it if it is an interrupt."""
    error = failure.failures[min(failure.failures)][0]
    if not isinstance(error, Exception):
        raise error
    return error


def _raise(failure: CheckpointException, writer: Writer) -> NoReturn:
    """Delete the partial folder and raise one error, the same on every rank."""
    if (dist.get_rank() if dist.is_initialized() else 0) == 0 and writer.partial.exists():
        folders.discard(writer.partial)
    error = _first(failure)
    needed = "" if writer.needed is None else f" Its tensors take {writer.needed:,} bytes."
    other = folders.newest(writer.target.parent)
    before = f"The previous one, {other}, is intact." if other else "There is no previous one."
    message = f"checkpoint {writer.target} could not be written: {error}.{needed} {before}"
    if isinstance(error, OSError):
        raise OSError(*([error.errno] if error.errno else []), message) from failure
    raise RuntimeError(message) from failure
