"""The batches of one rank: its share of every step's rows, read by worker processes, the same for any number of them."""

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

from .collate import Leaves, Piece, Pile, Place, Prepare, Reader, Task, Unread
from .sampler import InOrder, Order
from .source import Source

Item = TypeVar("Item")
Joined = TypeVar("Joined")
# Rows that one worker makes ready at a time: enough to pay for the way between processes, few enough to keep all workers busy.
PIECE = 256


class Rows(NamedTuple):
    """The pairs of one step, over all ranks: the position of the first in the stream, and how many."""

    first: int
    pairs: int


class Batch(NamedTuple):
    """This rank's rows of one step. Unreadable samples are left out, so there may be fewer than its share, down to none.

    x, y: what was prepared, stacked: a tensor or a dict of tensors; y is None without a `prepare_y`. Both are None where there
        are no rows, and no other sample could be read that would tell their shapes.
    negatives: as y, a row for each negative of all rows, one after another; None if they were not asked for.
    ids: int64, of the rows of y and then of the negatives: equal for equal texts. None if not asked for.
    labels: int64, the number of each row's class. None without classes.
    keys: the rows' names; positions: theirs in the stream. bad: the samples that were left out, and why.
    """

    x: Any
    y: Any
    negatives: Any
    ids: Tensor | None
    labels: Tensor | None
    keys: list[str]
    positions: list[int]
    bad: list[Unread]


@dataclass(frozen=True)
class Loader:
    """What one rank reads: a pure function of its arguments and of the positions asked for, whatever the number of workers.

    prepare_x, prepare_y: make one sample of a side ready, as `Tower.prepare` does; without prepare_y, y is left out.
    seed: of the augmentations, each of which depends on it, the position and the side alone.
    workers: processes that read ahead; 0 reads in this one, when a batch is asked for.
    ids: whether texts are given numbers by which equal ones are recognised; images are known by their keys.
    classes: the number of each label; a sample with another label, or none, is a bad one.
    negatives: whether to take the samples' negatives along; then every rank has them, if only without rows.
    augment: False prepares without augmentation, for evaluation.
    pinned: puts batches into memory that a CUDA device copies from while it computes and the host goes on; from any other, host and
        device wait for each other at every chunk.
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
    pinned: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank is {self.rank} of {self.ranks}: must lie in [0, {self.ranks})")
        if self.workers < 0:
            raise ValueError(f"workers is {self.workers}: must not be negative; 0 reads in the training process")
        if self.negatives and self.prepare_y is None:
            raise ValueError("negatives are texts of side y: they need a prepare_y")
        assert list(self.order.lengths) == list(self.source.lengths)

    def batches(self, steps: Iterable[tuple[int, int]]) -> Generator[Batch, None, None]:
        """This rank's part of each step, which is (first position, pairs) as in `Rows`.

        With workers, steps are asked for before their time: while a batch is used, the next one is put together, a few pieces of
        the one after it are read, and no more. Workers end with the iterator: close it where it is not read to its end.
        """
        reader = Reader(
            self.source, self.prepare_x, self.prepare_y, self.seed, self.ids, self.classes, self.negatives, self.augment
        )
        tasks = self._tasks(steps)
        if not self.workers:
            yield from self._joined(map(reader.__getitem__, tasks))
            return
        # Started here rather than in the thread that reads from them: processes and signal handlers want the caller's.
        with _interrupts_held():
            pieces = iter(_workers(reader, tasks, self.workers))
        yield from _one_ahead(self._joined, pieces)

    def _tasks(self, steps: Iterable[tuple[int, int]]) -> Iterator[Task]:
        """Pieces to read; an empty share is one of them too."""
        for first, pairs in steps:
            rows = share(pairs, self.rank, self.ranks)
            for start in range(rows.start, max(rows.stop, rows.start + 1), PIECE):
                stop = min(start + PIECE, rows.stop)
                places = [Place(position, *self.order.at(position)) for position in range(first + start, first + stop)]
                yield Task(places, rows=len(rows), last=stop == rows.stop)

    def _joined(self, pieces: Iterable[tuple[Piece, Task]]) -> Iterator[Batch]:
        pile = None
        for piece, task in pieces:
            pile = pile or Pile(task.rows, self.pinned)
            pile.add(piece)
            if task.last:
                yield self._batch(pile.piece())
                pile = None

    def _batch(self, piece: Piece) -> Batch:
        facts = piece.facts
        return Batch(
            x=_tree(piece.x),
            y=_tree(piece.y),
            negatives=_tree(piece.negatives),
            ids=torch.tensor(facts.ids + facts.negative_ids, dtype=torch.int64) if self.ids else None,
            labels=torch.tensor(facts.labels, dtype=torch.int64) if self.classes is not None else None,
            keys=facts.keys,
            positions=facts.positions,
            bad=facts.bad,
        )


def share(pairs: int, rank: int, ranks: int) -> range:
    """The rows of a batch that belong to this rank: contiguous, one more on the first ranks where they do not divide.

    >>> [share(5, rank, 2) for rank in range(2)]
    [range(0, 3), range(3, 5)]
    """
    size, larger = divmod(pairs, ranks)
    start = rank * size + min(rank, larger)
    return range(start, start + size + (rank < larger))


def once(total: int, pairs: int) -> Iterator[Rows]:
    """Steps of at most this many pairs over the first `total` positions: one pass, for evaluation.

    >>> list(once(5, 3))
    [Rows(first=0, pairs=3), Rows(first=3, pairs=2)]
    """
    return (Rows(first, min(pairs, total - first)) for first in range(0, total, pairs))


def _tree(leaves: Leaves) -> Any:
    return leaves.get(None, leaves or None)


def _workers(reader: Reader, tasks: Iterator[Task], count: int) -> DataLoader[Any]:
    return DataLoader(
        reader,  # type: ignore[arg-type]
        sampler=tasks,
        batch_size=None,
        num_workers=count,
        collate_fn=_as_it_is,
        worker_init_fn=_leave_the_group,
        # Seeds of workers, which nothing here uses, would be drawn from the generator of the run.
        generator=torch.Generator(),
    )


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold back SIGINT; processes that are started meanwhile never see it. One that arrives is delivered afterwards.

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


def _as_it_is(item: Item) -> Item:
    return item


def _leave_the_group(_: int) -> None:
    # Ctrl-C and launchers signal the whole group of processes: what to do then is the business of the training process, which must
    # not lose its workers before. They notice when it is gone.
    if hasattr(os, "setpgrp"):
        os.setpgrp()


def _one_ahead(join: Callable[[Iterable[Item]], Iterator[Joined]], pieces: Any) -> Iterator[Joined]:
    """What `join` makes of the pieces of a DataLoader's iterator: while one is used, a thread makes the next. Ends the workers."""
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
        # There is no public way to end them now, and the traceback of an exception would keep them alive with their iterator.
        pieces._shutdown_workers()

    thread = threading.Thread(target=make, name="megabatch-loader", daemon=True)
    thread.start()
    # An interpreter that exits freezes such threads where they are; to wait for one after that would never end.
    atexit.register(end)
    try:
        while (item := made.get().result()) is not None:
            wanted.release()
            yield item
    finally:
        if not ended.is_set():
            atexit.unregister(end)
            end()
