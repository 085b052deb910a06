"""Memory to be measured without the C library's heap, where freed blocks of up to 32 MiB stay or go by the order of what is around.

How much of it a step leaves behind has differed from machine to machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator

import torch
from world import fresh_processes

from benchmarks.memory import peak_of

M_MMAP_THRESHOLD = -3
BLOCK, LARGEST = 2**16, 2**25


@contextlib.contextmanager
def mapped_blocks() -> Iterator[None]:
    """Meanwhile, blocks of BLOCK bytes and more are this process's only while they are in use. That is slower."""
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
    # Inputs are made inside: they are O(rows) as well, and allocating them beforehand could hide pages that the work reuses.
    pipe.send(peak_of(lambda: work(*args), "cpu").extra_bytes)


def measured(work: Callable[..., None], small: tuple, args: tuple) -> int:
    """The peak of work(*args) in a fresh process that has run work(*small)."""
    context = fresh_processes()
    here, there = context.Pipe()
    process = context.Process(target=child, args=(there, work, small, args))
    process.start()
    assert here.poll(120)
    result = here.recv()
    process.join()
    return result
