"""A few samples, read and made ready in one go: what a worker process does for a batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .sampler import InOrder, stable_hash
from .source import BadSample, Sample, Source

Prepare = Callable[[Any, int | None], Any]
# What was prepared, with a row for each sample: a dict of tensors; a tensor alone is under None; nothing is the empty dict.
Leaves = dict[str | None, Tensor]
# A share without rows learns its shapes from a sample that can be used: one of so many, from all over the source.
TRIES = 1000
# Bytes of a tensor that may be pinned: there are up to three batches at a time, and the system cannot move any of it away.
MOST_PINNED = 4 * 2**30


class Place(NamedTuple):
    """A sample, by its position in the stream, its shard and its number there."""

    position: int
    shard: int
    number: int


class Unread(NamedTuple):
    """A sample that was left out: its name, why, and where it is in the source."""

    key: str
    reason: str
    shard: int
    number: int


class Task(NamedTuple):
    """The samples of one piece. rows: those of the whole share; last: the share ends with this piece."""

    places: list[Place]
    rows: int
    last: bool


class Facts(NamedTuple):
    """What is known of the rows beside their tensors. In lists: each tensor from a worker is an open file until it is copied."""

    ids: list[int]
    negative_ids: list[int]
    labels: list[int]
    keys: list[str]
    positions: list[int]
    bad: list[Unread]


class Piece(NamedTuple):
    """Samples made ready. `negatives` has as many rows as the samples have negatives."""

    x: Leaves
    y: Leaves
    negatives: Leaves
    facts: Facts


class Row(NamedTuple):
    """One sample made ready. ids: of y, and then of the negatives."""

    key: str
    position: int
    x: Leaves
    y: Leaves
    negatives: list[Leaves]
    ids: list[int]
    label: int | None


@dataclass(frozen=True)
class Reader:
    """Reads and prepares samples; the fields are those of `Loader`. Has the form of a data set of torch's DataLoader."""

    source: Source
    prepare_x: Prepare
    prepare_y: Prepare | None
    seed: int
    ids: bool
    classes: Mapping[str, int] | None
    negatives: bool
    augment: bool

    def __getitem__(self, task: Task) -> tuple[Piece, Task]:
        """The piece of the task, and the task without its places."""
        rows, bad = [], []
        for place in task.places:
            try:
                rows.append(self._row(place))
            except BadSample as error:
                bad.append(Unread(error.key, error.reason, place.shard, place.number))
        piece = self._piece(rows) if rows else self._no_rows
        return piece._replace(facts=piece.facts._replace(bad=bad)), task._replace(places=[])

    @functools.cached_property
    def _no_rows(self) -> Piece:
        """A piece without rows, whose tensors have the shapes and dtypes of any other; without tensors if no sample can be read."""
        for place in self._places():
            try:
                x, y, negatives, _ = self._piece([self._row(place)])
            except BadSample:
                continue
            return Piece(_empty(x), _empty(y), _empty(negatives), Facts([], [], [], [], [], []))
        return Piece({}, {}, {}, Facts([], [], [], [], [], []))

    def _piece(self, rows: list[Row]) -> Piece:
        keys = [row.key for row in rows]
        y = _stacked([row.y for row in rows], keys)
        # Where no sample has negatives, y says what theirs would look like.
        negatives = _empty(y) if self.negatives else {}
        if any(row.negatives for row in rows):
            negatives = _stacked(
                [leaves for row in rows for leaves in row.negatives], [row.key for row in rows for _ in row.negatives]
            )
        facts = Facts(
            ids=[number for row in rows for number in row.ids[:1]],
            negative_ids=[number for row in rows for number in row.ids[1:]],
            labels=[row.label for row in rows if row.label is not None],
            keys=keys,
            positions=[row.position for row in rows],
            bad=[],
        )
        return Piece(_stacked([row.x for row in rows], keys), y, negatives, facts)

    def _places(self) -> Iterator[Place]:
        """At most TRIES samples, evenly spread over the source: damage usually concerns samples that are neighbours."""
        order = InOrder(self.source.lengths)
        tries = min(TRIES, order.total)
        return (Place(0, *order.at(number * order.total // tries)) for number in range(tries))

    def _row(self, place: Place) -> Row:
        try:
            sample = self.source.read(place.shard, place.number)
        except BadSample:
            raise
        except Exception as error:
            raise RuntimeError(f"sample {place.number} of shard {place.shard} could not be read: {error!r}") from error
        try:
            return self._prepared(sample, place.position)
        except BadSample as error:
            raise BadSample(sample.key, error.reason) from error
        except Exception as error:
            raise RuntimeError(f"{sample.key}: could not be prepared: {error!r}") from error

    def _prepared(self, sample: Sample, position: int) -> Row:
        def leaves(prepare: Prepare, raw: Any, side: str) -> Leaves:
            # Each side has its own seed: two views of one image must not be cropped alike.
            return _leaves(prepare(raw, stable_hash(self.seed, position, side) if self.augment else None))

        texts = sample.negatives if self.negatives else ()
        label = None if self.classes is None else _number(sample, self.classes)
        x = leaves(self.prepare_x, sample.x, "x")
        y: Leaves = {}
        negatives: list[Leaves] = []
        if self.prepare_y is not None:
            y = leaves(self.prepare_y, sample.y, "y")
            negatives = [leaves(self.prepare_y, text, f"negative {number}") for number, text in enumerate(texts)]
        named = sample.y if isinstance(sample.y, str) else sample.key
        ids = [stable_hash(text) for text in (named, *texts)] if self.ids else []
        return Row(sample.key, position, x, y, negatives, ids, label)


class Pile:
    """Pieces put one after another into tensors allocated beforehand, so that each can be let go at once.

    rows: to be expected. pinned: whether the tensors lie in memory that a CUDA device copies from while the host goes on.
    """

    def __init__(self, rows: int, pinned: bool = False) -> None:
        self._facts = Facts([], [], [], [], [], [])
        self._x, self._y, self._negatives = (_Columns(rows, pinned) for _ in range(3))

    def add(self, piece: Piece) -> None:
        name = piece.facts.keys[0] if piece.facts.keys else "a sample"
        self._x.add(piece.x, name)
        self._y.add(piece.y, name)
        self._negatives.add(piece.negatives, name)
        self._facts.ids.extend(piece.facts.ids)
        self._facts.negative_ids.extend(piece.facts.negative_ids)
        self._facts.labels.extend(piece.facts.labels)
        self._facts.keys.extend(piece.facts.keys)
        self._facts.positions.extend(piece.facts.positions)
        self._facts.bad.extend(piece.facts.bad)

    def piece(self) -> Piece:
        return Piece(self._x.leaves(), self._y.leaves(), self._negatives.leaves(), self._facts)


class _Columns:
    """The rows of one side."""

    def __init__(self, rows: int, pinned: bool) -> None:
        self._capacity = rows
        self._pinned = pinned
        self._rows = 0
        self._leaves: Leaves = {}

    def add(self, leaves: Leaves, name: str) -> None:
        if not leaves:
            return
        if not self._leaves:
            self._leaves = _allocated(leaves, self._capacity, self._pinned)
        _check_form(leaves, self._leaves, name, dims=1)
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
        self._leaves = _allocated(before, capacity, self._pinned)
        for key, leaf in before.items():
            self._leaves[key][: self._rows] = leaf


def _stacked(rows: Sequence[Leaves], names: Sequence[str]) -> Leaves:
    """The rows as one; a row that differs from the first in shape or dtype is refused under its name."""
    first = rows[0]
    for row, name in zip(rows, names, strict=True):
        _check_form(row, first, name)
    return {key: torch.stack([row[key] for row in rows]) for key in first}


def _check_form(leaves: Leaves, others: Leaves, name: str, dims: int = 0) -> None:
    """Refuses tensors that differ from others in more than their first `dims` dimensions."""
    form, expected = ({key: (leaf.shape[dims:], leaf.dtype) for key, leaf in tree.items()} for tree in (leaves, others))
    if form != expected:
        raise ValueError(
            f"{name}: was prepared to {form}, samples before it to {expected}; all must come out with one shape and dtype: resize, "
            "crop or pad"
        )


def _empty(leaves: Leaves) -> Leaves:
    return {key: leaf[:0] for key, leaf in leaves.items()}


def _allocated(like: Leaves, rows: int, pinned: bool) -> Leaves:
    def allocated(leaf: Tensor) -> Tensor:
        shape = (rows, *leaf.shape[1:])
        small = math.prod(shape) * leaf.element_size() <= MOST_PINNED
        return torch.empty(shape, dtype=leaf.dtype, pin_memory=pinned and small)

    return {key: allocated(leaf) for key, leaf in like.items()}


def _number(sample: Sample, classes: Mapping[str, int]) -> int:
    if sample.label is None or sample.label not in classes:
        raise BadSample(sample.key, f"its label is {sample.label!r}, which is none of the {len(classes)} classes")
    return classes[sample.label]


def _leaves(prepared: Any) -> Leaves:
    leaves = prepared if isinstance(prepared, dict) else dict(prepared) if isinstance(prepared, Mapping) else {None: prepared}
    wrong = next((type(leaf).__name__ for leaf in leaves.values() if not isinstance(leaf, Tensor)), None)
    if wrong or not leaves:
        raise TypeError(f"`prepare` returned {wrong or 'nothing'}: must return a tensor, or a dict of tensors")
    return leaves
