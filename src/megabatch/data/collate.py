"""Read, prepare and stack a few samples: the work of one worker process for a batch."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from .device_decoding import EncodedRow, EncodedRows, can_defer, pack
from .sampler import InOrder, stable_hash
from .source import BadSample, EncodedJpeg, ImageRequest, ImageRequests, Sample, Source

Prepare = Callable[[Any, int | None], Any]
# Prepared samples, one row each: a dict of tensors. A single tensor has the key None; the empty dict is nothing.
Leaves = dict[str | None, Tensor]
# A rank without rows takes its shapes from any usable sample; this many, spread over the source, are tried.
TRIES = 1000
# Bytes of a tensor that may be pinned: there are up to three batches at a time, and pinned memory cannot be swapped out.
MOST_PINNED = 4 * 2**30


class SamplePlace(NamedTuple):
    """Where a sample is: its position in the stream, its shard and its number in the shard."""

    position: int
    shard: int
    number: int


class SkippedSample(NamedTuple):
    """A sample that was skipped: its name, the reason, and its place in the source."""

    key: str
    reason: str
    shard: int
    number: int


class ReadTask(NamedTuple):
    """The samples to read in one go. rows: all rows of this rank in the step. last: whether these are its last ones."""

    places: list[SamplePlace]
    rows: int
    last: bool


class RowInfo(NamedTuple):
    """Everything about the rows but their inputs. Lists, because each tensor from a worker is an open file until it is copied."""

    x_ids: list[int]
    ids: list[int]
    negative_ids: list[int]
    negative_counts: list[int]
    labels: list[int]
    keys: list[str]
    positions: list[int]
    bad: list[SkippedSample]


class CollatedRows(NamedTuple):
    """Prepared samples. `negatives` has one row for each negative of all samples. EncodedRows: the device decodes some."""

    x: Leaves | EncodedRows
    y: Leaves | EncodedRows
    negatives: Leaves
    info: RowInfo


class PreparedRow(NamedTuple):
    """One prepared sample. ids: of x, of y, then of the negatives; empty if not requested."""

    key: str
    position: int
    x: Leaves | EncodedRow
    y: Leaves | EncodedRow
    negatives: list[Leaves]
    ids: list[int]
    label: int | None


@dataclass(frozen=True)
class SampleReader:
    """Reads and prepares samples; the fields are those of `Loader`. Serves as the dataset of a torch DataLoader."""

    source: Source
    prepare_x: Prepare
    prepare_y: Prepare | None
    seed: int
    ids: bool
    classes: Mapping[str, int] | None
    negatives: bool
    augment: bool
    reduce_jpegs: bool
    keep_jpegs: bool = False

    def __getitem__(self, task: ReadTask) -> tuple[CollatedRows, ReadTask]:
        """Return the rows of the task, and the task without its places."""
        rows, bad = [], []
        for place in task.places:
            try:
                rows.append(self._row(place))
            except BadSample as error:
                bad.append(SkippedSample(error.key, error.reason, place.shard, place.number))
        piece = self._collate(rows) if rows else self._zero_rows
        return piece._replace(info=piece.info._replace(bad=bad)), task._replace(places=[])

    @functools.cached_property
    def _zero_rows(self) -> CollatedRows:
        """Zero rows, with the shapes and dtypes of any other rows; without tensors if no sample can be read."""
        for place in self._spread_places():
            try:
                x, y, negatives, _ = self._collate([self._row(place)])
            except BadSample:
                continue
            no_x, no_y = _no_rows(x, self.prepare_x), _no_rows(y, self.prepare_y)
            return CollatedRows(no_x, no_y, _empty(negatives), RowInfo([], [], [], [], [], [], [], []))
        return CollatedRows({}, {}, {}, RowInfo([], [], [], [], [], [], [], []))

    def _collate(self, rows: list[PreparedRow]) -> CollatedRows:
        keys = [row.key for row in rows]
        y = _collate_side([row.y for row in rows], keys)
        # If no sample has negatives, they take their shapes from y.
        negatives = _no_rows(y, self.prepare_y) if self.negatives else {}
        if any(row.negatives for row in rows):
            negatives = _stack(
                [leaves for row in rows for leaves in row.negatives], [row.key for row in rows for _ in row.negatives]
            )
        info = RowInfo(
            x_ids=[number for row in rows for number in row.ids[:1]],
            ids=[number for row in rows for number in row.ids[1:2]],
            negative_ids=[number for row in rows for number in row.ids[2:]],
            negative_counts=[len(row.negatives) for row in rows],
            labels=[row.label for row in rows if row.label is not None],
            keys=keys,
            positions=[row.position for row in rows],
            bad=[],
        )
        return CollatedRows(_collate_side([row.x for row in rows], keys), y, negatives, info)

    def _spread_places(self) -> Iterator[SamplePlace]:
        """Return at most TRIES samples, evenly spread over the source: damage usually affects neighbouring samples."""
        order = InOrder(self.source.lengths)
        tries = min(TRIES, order.total)
        return (SamplePlace(0, *order.at(number * order.total // tries)) for number in range(tries))

    def _row(self, place: SamplePlace) -> PreparedRow:
        try:
            sample = self.source.read(place.shard, place.number, self._requests(place.position))
        except BadSample:
            raise
        except Exception as error:
            raise RuntimeError(f"sample {place.number} of shard {place.shard} could not be read: {error!r}") from error
        try:
            return self._prepared(sample, place)
        except BadSample as error:
            raise BadSample(sample.key, error.reason) from error
        except Exception as error:
            raise RuntimeError(f"{sample.key}: could not be prepared: {error!r}") from error

    def _seed(self, position: int, side: str) -> int | None:
        # Each side has a seed of its own: two views of one image must not get the same crop.
        return stable_hash(self.seed, position, side) if self.augment else None

    def _requests(self, position: int) -> ImageRequests:
        """Return the forms in which the preparations take the images of a sample."""

        def request(prepare: Any, side: str) -> ImageRequest:
            sufficient = None
            if self.reduce_jpegs and hasattr(prepare, "sufficient_size"):
                sufficient = functools.partial(prepare.sufficient_size, self._seed(position, side))
            return ImageRequest(sufficient, getattr(prepare, "takes_tensors", False), self.keep_jpegs and can_defer(prepare))

        return ImageRequests(request(self.prepare_x, "x"), request(self.prepare_y, "y"))

    def _prepared(self, sample: Sample, place: SamplePlace) -> PreparedRow:
        position = place.position

        def leaves(prepare: Prepare, raw: Any, side: str) -> Leaves:
            return _leaves(prepare(raw, self._seed(position, side)))

        def prepared(prepare: Any, raw: Any, side: str) -> Leaves | EncodedRow:
            if not isinstance(raw, EncodedJpeg):
                return leaves(prepare, raw, side)
            box, mirrored = prepare.choose_crop(self._seed(position, side), raw.width, raw.height)
            return EncodedRow(raw, box, mirrored, place.shard, place.number)

        texts = sample.negatives if self.negatives else ()
        label = None if self.classes is None else _class_number(sample, self.classes)
        x = prepared(self.prepare_x, sample.x, "x")
        y: Leaves | EncodedRow = {}
        negatives: list[Leaves] = []
        if self.prepare_y is not None:
            y = prepared(self.prepare_y, sample.y, "y")
            negatives = [leaves(self.prepare_y, text, f"negative {number}") for number, text in enumerate(texts)]
        ids = [*_side_ids(sample, place), *map(stable_hash, texts)] if self.ids else []
        return PreparedRow(sample.key, position, x, y, negatives, ids, label)


class RowBuffer:
    """Copies rows into preallocated tensors as they arrive, so that what a worker sent is freed at once.

    rows: the expected number. pinned: whether the tensors are in page-locked memory, which CUDA devices copy asynchronously.
    """

    def __init__(self, rows: int, pinned: bool = False) -> None:
        self._info = RowInfo([], [], [], [], [], [], [], [])
        self._x, self._y, self._negatives = (_Columns(rows, pinned) for _ in range(3))

    def add(self, piece: CollatedRows) -> None:
        assert not isinstance(piece.x, EncodedRows) and not isinstance(piece.y, EncodedRows)
        name = piece.info.keys[0] if piece.info.keys else "a sample"
        self._x.add(piece.x, name)
        self._y.add(piece.y, name)
        self._negatives.add(piece.negatives, name)
        self._info.x_ids.extend(piece.info.x_ids)
        self._info.ids.extend(piece.info.ids)
        self._info.negative_ids.extend(piece.info.negative_ids)
        self._info.negative_counts.extend(piece.info.negative_counts)
        self._info.labels.extend(piece.info.labels)
        self._info.keys.extend(piece.info.keys)
        self._info.positions.extend(piece.info.positions)
        self._info.bad.extend(piece.info.bad)

    def rows(self) -> CollatedRows:
        return CollatedRows(self._x.leaves(), self._y.leaves(), self._negatives.leaves(), self._info)


class _Columns:
    """The rows of one side, in preallocated tensors."""

    def __init__(self, rows: int, pinned: bool) -> None:
        self._capacity = rows
        self._pinned = pinned
        self._rows = 0
        self._leaves: Leaves = {}

    def add(self, leaves: Leaves, name: str) -> None:
        if not leaves:
            return
        if not self._leaves:
            self._leaves = _allocate(leaves, self._capacity, self._pinned)
        _check_same_form(leaves, self._leaves, name, dims=1)
        end = self._rows + len(next(iter(leaves.values())))
        if end > self._capacity:
            self._grow(max(end, 2 * self._capacity))
        for key, leaf in leaves.items():
            self._leaves[key][self._rows : end] = leaf
        self._rows = end

    def leaves(self) -> Leaves:
        return {key: leaf[: self._rows] for key, leaf in self._leaves.items()}

    def _grow(self, capacity: int) -> None:
        before = self.leaves()
        self._capacity = capacity
        self._leaves = _allocate(before, capacity, self._pinned)
        for key, leaf in before.items():
            self._leaves[key][: self._rows] = leaf


def without_rows(piece: CollatedRows, failures: Mapping[int, SkippedSample]) -> CollatedRows:
    """Return the piece without some of its rows, given by their numbers, which count as skipped."""
    assert not isinstance(piece.x, EncodedRows) and not isinstance(piece.y, EncodedRows)
    info = piece.info
    kept = [row for row in range(len(info.keys)) if row not in failures]
    owners = [row for row, count in enumerate(info.negative_counts) for _ in range(count)]
    kept_negatives = [number for number, owner in enumerate(owners) if owner not in failures]

    def chosen(values: list[Any], numbers: list[int]) -> list[Any]:
        # Without ids or labels, their lists are empty.
        return [values[number] for number in numbers] if values else []

    def rows(leaves: Leaves, numbers: list[int]) -> Leaves:
        return {key: leaf[torch.tensor(numbers, dtype=torch.int64, device=leaf.device)] for key, leaf in leaves.items()}

    kept_info = RowInfo(
        x_ids=chosen(info.x_ids, kept),
        ids=chosen(info.ids, kept),
        negative_ids=chosen(info.negative_ids, kept_negatives),
        negative_counts=chosen(info.negative_counts, kept),
        labels=chosen(info.labels, kept),
        keys=chosen(info.keys, kept),
        positions=chosen(info.positions, kept),
        bad=[*info.bad, *failures.values()],
    )
    return CollatedRows(rows(piece.x, kept), rows(piece.y, kept), rows(piece.negatives, kept_negatives), kept_info)


def _collate_side(rows: Sequence[Leaves | EncodedRow], names: Sequence[str]) -> Leaves | EncodedRows:
    if not any(isinstance(row, EncodedRow) for row in rows):
        return _stack([row for row in rows if not isinstance(row, EncodedRow)], names)
    # A preparation that a device can do returns a single tensor.
    return pack([row if isinstance(row, EncodedRow) else row[None] for row in rows], lambda size: _empty_rows((size,), torch.uint8))


def _no_rows(rows: Leaves | EncodedRows, prepare: Any) -> Leaves:
    if isinstance(rows, EncodedRows):
        return {None: torch.empty((0, prepare.channels, prepare.size, prepare.size), dtype=torch.uint8)}
    return _empty(rows)


def _stack(rows: Sequence[Leaves], names: Sequence[str]) -> Leaves:
    """Stack the rows. ValueError, with its name, for a row that differs from the first in shape or dtype."""
    first = rows[0]
    for row, name in zip(rows, names, strict=True):
        _check_same_form(row, first, name)
    return {key: _stacked([row[key] for row in rows]) for key in first}


def _stacked(tensors: list[Tensor]) -> Tensor:
    if get_worker_info() is None:
        return torch.stack(tensors)
    return torch.stack(tensors, out=_empty_rows((len(tensors), *tensors[0].shape), tensors[0].dtype))


def _empty_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory for rows; in a worker, memory that it shares with the training process, to which they need not be copied."""
    numbers: int = math.prod(shape)
    if get_worker_info() is None or not numbers:
        return torch.empty(shape, dtype=dtype)
    # As PyTorch's own collate function does.
    empty = torch.empty(0, dtype=dtype)
    return empty.new(empty._typed_storage()._new_shared(numbers)).resize_(shape)


def _check_same_form(leaves: Leaves, others: Leaves, name: str, dims: int = 0) -> None:
    """Raise ValueError if tensors differ from others in dtype, or in shape beyond their first `dims` dimensions."""
    form, expected = ({key: (leaf.shape[dims:], leaf.dtype) for key, leaf in tree.items()} for tree in (leaves, others))
    if form != expected:
        raise ValueError(
            f"{name}: was prepared to {form}, samples before it to {expected}; all must have one shape and dtype: resize, crop or"
            " pad"
        )


def _empty(leaves: Leaves) -> Leaves:
    return {key: leaf[:0] for key, leaf in leaves.items()}


def _allocate(like: Leaves, rows: int, pinned: bool) -> Leaves:
    def allocate(leaf: Tensor) -> Tensor:
        shape = (rows, *leaf.shape[1:])
        small = math.prod(shape) * leaf.element_size() <= MOST_PINNED
        return torch.empty(shape, dtype=leaf.dtype, pin_memory=pinned and small)

    return {key: allocate(leaf) for key, leaf in like.items()}


def _side_ids(sample: Sample, place: SamplePlace) -> Iterator[int]:
    """Yield a number for each side: equal for equal texts, and for the same image file or bytes."""
    # Not the key: two shards in different folders may have one name.
    own = place.shard, place.number
    for side, image in ((sample.x, sample.x_image), (sample.y, sample.y_image)):
        if isinstance(image, bytes):
            yield stable_hash(hashlib.blake2b(image, digest_size=16).hexdigest())
        else:
            yield stable_hash(side) if isinstance(side, str) else stable_hash(*own) if image is None else stable_hash(str(image))


def _class_number(sample: Sample, classes: Mapping[str, int]) -> int:
    if sample.label is None or sample.label not in classes:
        raise BadSample(sample.key, f"its label is {sample.label!r}, which is not one of the {len(classes)} classes")
    return classes[sample.label]


def _leaves(prepared: Any) -> Leaves:
    leaves = prepared if isinstance(prepared, dict) else dict(prepared) if isinstance(prepared, Mapping) else {None: prepared}
    wrong = next((type(leaf).__name__ for leaf in leaves.values() if not isinstance(leaf, Tensor)), None)
    if wrong or not leaves:
        raise TypeError(f"`prepare` returned {wrong or 'nothing'}: must return a tensor, or a dict of tensors")
    return leaves
