"""Measure memory without the C library's heap, which keeps or returns freed blocks of up to 32 MiB depending on their neighbours.

How much memory a step leaves on that heap differs from machine to machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator

import torch
from world import MEETING_TIME, fresh_processes

from benchmarks.memory import peak_of

M_MMAP_THRESHOLD = -3
BLOCK, LARGEST = 2**16, 2**25


@contextlib.contextmanager
def mapped_blocks() -> Iterator[None]:
    """Context in which blocks of BLOCK bytes and more return to the system as soon as they are freed, which is slower."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    set_threshold = mallopt or (lambda *_: None)
    set_threshold(M_MMAP_THRESHOLD, BLOCK)
    try:
        yield
    finally:
        set_threshold(M_MMAP_THRESHOLD, LARGEST)


MIB = 2**20


@mapped_blocks()
def child(pipe, work: Callable[..., None], small: tuple, args: tuple) -> None:
    torch.set_num_threads(1)
    work(*small)
    # The work makes its own inputs: they are O(rows) too, and freed pages of inputs made before could hide a part of the peak.
    pipe.send(peak_of(lambda: work(*args), "cpu").extra_bytes)


def measured(work: Callable[..., None], small: tuple, args: tuple) -> int:
    """Return the peak of work(*args) in a new process that has run work(*small) before."""
    context = fresh_processes()
    pipe, child_pipe = context.Pipe()
    process = context.Process(target=child, args=(child_pipe, work, small, args))
    process.start()
    assert pipe.poll(MEETING_TIME.total_seconds())
    result = pipe.recv()
    process.join()
    return result
