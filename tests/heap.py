"""Memory to be measured without the C library's heap, where freed blocks of up to 32 MiB stay or go by the order of what is around.

How much of it a step leaves behind has differed from machine to machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

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
