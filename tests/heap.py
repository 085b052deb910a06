"""Memory to be measured without the C library's heap, where freed blocks of up to 32 MiB stay or go by the order of what is around.

How much of it a step leaves behind differs from processor to processor, with the sizes of what libraries allocate.
"""

from __future__ import annotations

import ctypes
import sys

M_MMAP_THRESHOLD = -3
BLOCK = 2**16


def map_blocks() -> None:
    """From now on, blocks of BLOCK bytes and more are this process's only while they are in use."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, BLOCK)
