"""Storage of torch.distributed.checkpoint: a safetensors file for each rank and one manifest, without pickle.

PyTorch plans which rank writes and reads which part of a tensor. Its own storage is not used, because it unpickles files.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megabatch.training.checkpoint import folder
from megabatch.training.checkpoint.manifest import (
    DTYPE_NAMES,
    DTYPES,
    NAME,
    PIECE,
    Box,
    File,
    Manifest,
    SavedTensor,
    as_json,
    nbytes,
)


@dataclass(frozen=True)
class Share:
    """What the plan assigns to a rank: the name of its file, and the bytes of the tensors of all ranks."""

    file: str
    needed: int


@dataclass(frozen=True)
class Part:
    """One tensor, or a box of one, in a rank's file."""

    item: WriteItem
    dtype: str
    box: Box

    @property
    def name(self) -> str:
        """Its name in the file: the tensor's own name if the tensor is whole."""
        assert self.item.tensor_data is not None
        whole = self.box.sizes == tuple(self.item.tensor_data.size)
        return self.item.index.fqn if whole else f"{self.item.index.fqn}@{','.join(map(str, self.box.offsets))}"


class Writer(StorageWriter):
    """Writes into a partial folder, which becomes the checkpoint `target` when every rank has finished."""

    def __init__(self, target: Path, facts: Mapping[str, Any], keep: int) -> None:
        super().__init__()
        self.target = target
        self.partial = target.with_name(target.name + folder.PARTIAL)
        self.facts = dict(facts)
        self.keep = keep
        self.needed: int | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            folder.begin(self.target)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        files = [f"rank-{rank:05d}.safetensors" for rank in range(len(plans))]
        needed = sum(nbytes(p.dtype, p.box.sizes) for plan in plans for p in _parts(plan.items, "", 0))
        return [dataclasses.replace(plan, storage_data=Share(file, needed)) for file, plan in zip(files, plans, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        share: Share = plan.storage_data
        self.needed = share.needed
        if not self.partial.is_dir():
            raise OSError(f"the first rank created {self.partial}, and this rank does not see it; all ranks must share the folder")
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._write(share.file, plan.items, planner) if plan.items else [])
        return future

    def _write(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        head, at = _header(_parts(items, name, 0))
        parts = _parts(items, name, at)
        with open(self.partial / name, "wb") as stream:
            crc = write_bytes(stream, memoryview(head), 0)
            for part in parts:
                # One tensor at a time is copied to the host.
                tensor = planner.resolve_data(part.item)
                assert isinstance(tensor, Tensor)
                tensor = tensor.detach().cpu().contiguous()
                crc = write_bytes(stream, bytes_of(tensor), crc)
            stream.flush()
            os.fsync(stream.fileno())
            file = File(stream.tell(), crc)
        return [WriteResult(p.item.index, nbytes(p.dtype, p.box.sizes), (p.box, file)) for p in parts]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        boxes: dict[str, list[Box]] = {}
        files: dict[str, File] = {}
        for result in (result for ranks in results for result in ranks):
            box, files[box.file] = result.storage_data
            boxes.setdefault(result.index.fqn, []).append(box)
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            tensors[name] = SavedTensor(DTYPE_NAMES[entry.properties.dtype], tuple(entry.size), tuple(boxes[name]))
        for name, file in files.items():
            path = self.partial / name
            if not path.exists() or path.stat().st_size != file.bytes:
                raise OSError(f"{path} was written and is missing; all ranks must share the folder")
        with open(self.partial / NAME, "w", encoding="utf-8") as stream:
            stream.write(as_json(Manifest(self.facts, files, tensors)))
            stream.flush()
            os.fsync(stream.fileno())
        folder.publish(self.partial, self.target, self.keep)


class Reader(StorageReader):
    """Reads a checkpoint whose manifest has been checked."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__()
        self.path = path
        self.manifest = manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=DTYPES[entry.dtype]),
                    torch.Size(entry.shape),
                    [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in entry.boxes],
                )
                for name, entry in self.manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.places = {
            MetadataIndex(name, box.offsets): (DTYPES[entry.dtype], box)
            for name, entry in self.manifest.tensors.items()
            for box in entry.boxes
            if math.prod(box.sizes)
        }

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            assert item.type is LoadItemType.TENSOR
            by_file.setdefault(self.places[item.storage_index][1].file, []).append(item)
        for file, items in by_file.items():
            with open(self.path / file, "rb") as stream:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(self._read(stream, item))
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, stream: IO[bytes], item: ReadItem) -> Tensor:
        """Return the part of a box that the item needs. Only its rows are read, since ranks usually hold rows."""
        dtype, box = self.places[item.storage_index]
        first, rows = (item.storage_offsets[0], item.lengths[0]) if box.sizes else (0, 1)
        tensor = torch.empty((rows, *box.sizes[1:]) if box.sizes else (), dtype=dtype, device="cpu")
        stream.seek(box.at + first * math.prod(box.sizes[1:]) * dtype.itemsize)
        if stream.readinto(bytes_of(tensor)) != tensor.nbytes:  # type: ignore[attr-defined]
            raise OSError(f"{self.path / box.file} ended early")
        for dim in range(1, len(box.sizes)):
            tensor = tensor.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        return tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, which must outlive the view."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def write_bytes(stream: IO[bytes], view: memoryview, crc: int) -> int:
    """Write bytes and return the updated checksum, in one pass over the memory."""
    for start in range(0, len(view), PIECE):
        piece = view[start : start + PIECE]
        crc = zlib.crc32(piece, crc)
        stream.write(piece)
    return crc


def _parts(items: list[WriteItem], file: str, at: int) -> list[Part]:
    """Return the place of each item, if the first one begins at `at`."""
    parts = []
    for item in items:
        assert item.tensor_data is not None, f"{item.index.fqn} is not a tensor"
        whole = item.tensor_data
        dtype = DTYPE_NAMES[whole.properties.dtype]
        box = Box(tuple(whole.chunk.offsets), tuple(whole.chunk.sizes), file, at)
        parts.append(Part(item, dtype, box))
        at += nbytes(dtype, box.sizes)
    return parts


def _header(parts: list[Part]) -> tuple[bytes, int]:
    """Return the header of a safetensors file and its length. Other programs read it; megabatch reads the manifest."""
    table = {}
    for part in parts:
        end = part.box.at + nbytes(part.dtype, part.box.sizes)
        table[part.name] = {"dtype": part.dtype, "shape": part.box.sizes, "data_offsets": [part.box.at, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, len(text) + 8
