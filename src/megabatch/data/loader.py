"""The rows of one rank in every step, read by worker processes; the same for any number of workers."""

from __future__ import annotations

import atexit
import os
import queue
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .collate import (
    CollatedRows,
    Leaves,
    Prepare,
    ReadTask,
    RowBuffer,
    SamplePlace,
    SampleReader,
    SkippedSample,
    without_rows,
)
from .device_decoding import DeviceDecoder, EncodedRows
from .sampler import InOrder, Order
from .source import Source

Item = TypeVar("Item")
Joined = TypeVar("Joined")
# Rows that one worker prepares at a time: enough to outweigh the transfer between processes, few enough to keep all workers busy.
PIECE_ROWS = 256


class StepRange(NamedTuple):
    """The pairs of one step over all ranks: the position of the first in the stream, and their number."""

    first: int
    pairs: int


class RankBatch(NamedTuple):
    """The rows of this rank in one step. Unreadable samples are left out, so there may be fewer than planned, down to none.

    x, y: prepared samples, stacked: a tensor or a dict of tensors; y is None without a `prepare_y`. Both are None if there are no
        rows and no other sample could be read to show their shapes.
    negatives: like y, one row for each negative of all rows, in order; None if not requested.
    ids: int64, of the rows of y and then of the negatives: equal for equal texts, and for the same image. None if not requested.
    labels: int64, the class number of each row. None without classes.
    negatives_of: int64, the row that each negative belongs to. None without negatives.
    x_ids: like ids, of the rows of x.
    keys: the names of the rows. positions: their positions in the stream. bad: the skipped samples, with reasons.
    """

    x: Any
    y: Any
    negatives: Any
    ids: Tensor | None
    labels: Tensor | None
    keys: list[str]
    positions: list[int]
    bad: list[SkippedSample]
    negatives_of: Tensor | None = None
    x_ids: Tensor | None = None


@dataclass(frozen=True)
class Loader:
    """Loads the rows of one rank: a pure function of its arguments and the requested positions, whatever the number of workers.

    prepare_x, prepare_y: prepare one sample of a side, as `BuiltTower.prepare` does; without prepare_y, y is left out.
    seed: of the augmentations, each of which depends only on the seed, the position and the side.
    workers: processes that read ahead; 0 reads in this process, when a batch is requested.
    ids: whether to number both sides, so that equal ones can be recognised: texts, and images by what is stored (a path, the bytes
        of a file) or, where no other sample can have them, by their place in the source.
    classes: the number of each label; a sample without one of these labels is a bad sample.
    negatives: whether to include the samples' negatives; then every rank has them, possibly with zero rows.
    augment: False prepares without augmentation, for evaluation.
    reduce_jpegs: decode JPEGs at a fraction of their size where the preparation shrinks them at least as much, and says so by a
        method sufficient_size(seed, width, height). False decodes all pixels.
    pinned: puts batches into page-locked memory, from which a CUDA device copies while it computes and the host goes on; otherwise
        host and device wait for each other at every chunk.
    decoder: decodes JPEGs on a device, of sides whose preparation has a method choose_crop(seed, width, height); None decodes in
        the workers.
    """

    source: Source
    order: Order | InOrder
    prepare_x: Prepare
    prepare_y: Prepare | None
    _: KW_ONLY
    seed: int
    workers: int
    rank: int
    ranks: int
    ids: bool
    classes: Mapping[str, int] | None
    negatives: bool = False
    augment: bool = True
    reduce_jpegs: bool = True
    pinned: bool = False
    decoder: DeviceDecoder | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank is {self.rank} of {self.ranks}: must lie in [0, {self.ranks})")
        if self.workers < 0:
            raise ValueError(f"workers is {self.workers}: must not be negative; 0 reads in the training process")
        if self.negatives and self.prepare_y is None:
            raise ValueError("negatives are texts of side y: they need a prepare_y")
        assert list(self.order.lengths) == list(self.source.lengths)

    def batches(self, steps: Iterable[tuple[int, int]]) -> Generator[RankBatch, None, None]:
        """Yield the rows of this rank for each step, given as (first position, pairs) like `StepRange`.

        With workers, steps are consumed ahead of time: while a batch is used, the next one is assembled and a few pieces of the one
        after it are read, no more. The workers end with the iterator: close it if it is not read to its end.
        """
        reader = SampleReader(
            self.source,
            self.prepare_x,
            self.prepare_y,
            self.seed,
            self.ids,
            self.classes,
            self.negatives,
            self.augment,
            self.reduce_jpegs,
            keep_jpegs=self.decoder is not None,
        )
        tasks = self._tasks(steps)
        if not self.workers:
            yield from self._assemble(map(reader.__getitem__, tasks))
            return
        # Started here and not in the thread that reads from them: processes and signal handlers belong to the caller's thread.
        with _interrupts_held():
            pieces = iter(_workers(reader, tasks, self.workers))
        yield from _one_item_ahead(self._assemble, pieces)

    def _tasks(self, steps: Iterable[tuple[int, int]]) -> Iterator[ReadTask]:
        """Yield what to read, in pieces; a rank without rows gets one empty piece."""
        for first, pairs in steps:
            rows = rank_rows(pairs, self.rank, self.ranks)
            for start in range(rows.start, max(rows.stop, rows.start + 1), PIECE_ROWS):
                stop = min(start + PIECE_ROWS, rows.stop)
                places = [SamplePlace(position, *self.order.at(position)) for position in range(first + start, first + stop)]
                yield ReadTask(places, rows=len(rows), last=stop == rows.stop)

    def _assemble(self, pieces: Iterable[tuple[CollatedRows, ReadTask]]) -> Iterator[RankBatch]:
        buffer = None
        for piece, task in pieces:
            buffer = buffer or RowBuffer(task.rows, self.pinned)
            if self.decoder is None:
                buffer.add(piece)
            else:
                with self.decoder.stream():
                    buffer.add(self._decoded(piece, self.decoder))
            if task.last:
                yield self._batch(buffer.rows())
                buffer = None

    def _decoded(self, piece: CollatedRows, decoder: DeviceDecoder) -> CollatedRows:
        """Return the piece with its JPEGs decoded, on the device, and without rows that cannot be decoded."""
        failures: dict[int, SkippedSample] = {}
        for side, prepare in (("x", self.prepare_x), ("y", self.prepare_y)):
            rows = getattr(piece, side)
            if not isinstance(rows, EncodedRows):
                continue
            pixels, errors = decoder.rows(rows, prepare, piece.info.keys)  # type: ignore[arg-type]
            piece = piece._replace(x={None: pixels}) if side == "x" else piece._replace(y={None: pixels})
            for jpeg in rows.jpegs:
                if jpeg.row in errors:
                    error = errors[jpeg.row]
                    failures[jpeg.row] = SkippedSample(error.key, error.reason, jpeg.image.shard, jpeg.image.number)
        return without_rows(piece, failures) if failures else piece

    def _batch(self, piece: CollatedRows) -> RankBatch:
        assert not isinstance(piece.x, EncodedRows) and not isinstance(piece.y, EncodedRows)
        info = piece.info
        return RankBatch(
            x=_tree(piece.x),
            y=_tree(piece.y),
            negatives=_tree(piece.negatives),
            ids=torch.tensor(info.ids + info.negative_ids, dtype=torch.int64) if self.ids else None,
            labels=torch.tensor(info.labels, dtype=torch.int64) if self.classes is not None else None,
            keys=info.keys,
            positions=info.positions,
            bad=info.bad,
            negatives_of=torch.arange(len(info.keys)).repeat_interleave(torch.tensor(info.negative_counts, dtype=torch.int64))
            if self.negatives
            else None,
            x_ids=torch.tensor(info.x_ids, dtype=torch.int64) if self.ids else None,
        )


def rank_rows(pairs: int, rank: int, ranks: int) -> range:
    """Return the rows of a batch that belong to this rank: contiguous, one more on the first ranks if they do not divide evenly.

    >>> [rank_rows(5, rank, 2) for rank in range(2)]
    [range(0, 3), range(3, 5)]
    """
    size, larger = divmod(pairs, ranks)
    start = rank * size + min(rank, larger)
    return range(start, start + size + (rank < larger))


def one_pass(total: int, pairs: int) -> Iterator[StepRange]:
    """Yield steps of at most this many pairs over the first `total` positions: one pass, for evaluation.

    >>> list(one_pass(5, 3))
    [StepRange(first=0, pairs=3), StepRange(first=3, pairs=2)]
    """
    return (StepRange(first, min(pairs, total - first)) for first in range(0, total, pairs))


def _tree(leaves: Leaves) -> Any:
    return leaves.get(None, leaves or None)


def _workers(reader: SampleReader, tasks: Iterator[ReadTask], count: int) -> DataLoader[Any]:
    return DataLoader(
        reader,  # type: ignore[arg-type]
        sampler=tasks,
        batch_size=None,
        num_workers=count,
        collate_fn=_identity,
        worker_init_fn=_leave_process_group,
        # Otherwise the seeds of the workers, which nothing here uses, would be drawn from the generator of the run.
        generator=torch.Generator(),
    )


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block SIGINT: processes that are started meanwhile never receive it. One that arrives is delivered afterwards.

    Ctrl-C reaches every process of the terminal: a worker that is still starting would print a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _identity(item: Item) -> Item:
    return item


def _leave_process_group(_: int) -> None:
    # Ctrl-C and launchers signal the whole process group. The training process decides what to do then, and must not lose its
    # workers before. They notice when it is gone.
    if hasattr(os, "setpgrp"):
        os.setpgrp()


def _one_item_ahead(join: Callable[[Iterable[Item]], Iterator[Joined]], pieces: Any) -> Iterator[Joined]:
    """Yield what `join` makes of the pieces of a DataLoader's iterator, computed one item ahead in a thread. Ends the workers."""
    made: queue.SimpleQueue[Future[Joined | None]] = queue.SimpleQueue()
    wanted = threading.Semaphore(1)
    ended = threading.Event()
    joined = join(takewhile(lambda _: not ended.is_set(), pieces))

    def make() -> None:
        while wanted.acquire() and not ended.is_set():
            result: Future[Joined | None] = Future()
            try:
                result.set_result(next(joined, None))
            except BaseException as error:
                result.set_exception(error)
            made.put(result)

    def end() -> None:
        ended.set()
        wanted.release()
        thread.join()
        # There is no public way to end them now, and the traceback of an exception would keep their iterator alive.
        pieces._shutdown_workers()

    thread = threading.Thread(target=make, name="megabatch-loader", daemon=True)
    thread.start()
    # A daemon thread is frozen when the interpreter exits; waiting for it after that would never end.
    atexit.register(end)
    try:
        while (item := made.get().result()) is not None:
            wanted.release()
            yield item
    finally:
        if not ended.is_set():
            atexit.unregister(end)
            end()
