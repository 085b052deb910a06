"""Memory of this machine and of this process, in bytes.

On Linux it is read from /proc and from the limits of the process's control groups, on other systems from psutil. Every function
returns None if the system does not provide the number; the caller decides what to do then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
# The files of a control group's limit and usage, and the field of memory.stat that counts page cache the kernel can drop.
CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")
# The kernel counts a process's pages in batches per thread, so its numbers lag by a few MiB.
COUNTING_ERROR = 2**22
# What to tell the user if memory cannot be read.
REMEDY = "this system has no /proc and psutil cannot be imported: pip install psutil"


def total() -> int | None:
    """Return the size of this machine's memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        # Windows has no sysconf.
        psutil = _psutil()
        return None if psutil is None else int(psutil.virtual_memory().total)


def available() -> int | None:
    """Return how much this process can still allocate without swapping: the available memory, within a container's limit."""
    free = _fields(PROC / "meminfo").get("MemAvailable")
    if free is None:
        psutil = _psutil()
        return None if psutil is None else int(psutil.virtual_memory().available)
    # /proc/meminfo does not show the limit of a container.
    return max(0, min([free, *_left_in_cgroups()]))


def resident() -> int | None:
    """Return the resident set size of this process."""
    size = _fields(PROC / "self" / "status").get("VmRSS")
    if size is not None:
        return size
    psutil = _psutil()
    return None if psutil is None else int(psutil.Process().memory_info().rss)


def peak_resident() -> int | None:
    """Return the highest resident set size of this process, since it started or since `reset_peak` succeeded."""
    peak = _fields(PROC / "self" / "status").get("VmHWM")
    if peak is not None:
        return peak
    try:
        import resource
    except ImportError:
        # Windows does not have this module; psutil provides the peak of the working set there.
        psutil = _psutil()
        return None if psutil is None else getattr(psutil.Process().memory_info(), "peak_wset", None)
    # macOS counts bytes, other systems KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak() -> bool:
    """Restart `peak_resident` from the current resident set size. Return whether it worked: only Linux supports it, not always."""
    try:
        # "5" resets VmHWM (see proc_pid_clear_refs(5)).
        (PROC / "self" / "clear_refs").write_text("5")
    except OSError:
        return False
    peak, size = peak_resident(), resident()
    # Some sandboxes accept the write and ignore it.
    return peak is not None and size is not None and peak - size <= COUNTING_ERROR


def _psutil() -> Any:
    try:
        import psutil
    except ImportError:
        return None
    return psutil


def _fields(path: Path) -> dict[str, int]:
    """Return the sizes in a file of lines like "VmRSS:   5412 kB"; none if there is no such file."""
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[2:] == ["kB"]}


def _left_in_cgroups() -> Iterator[int]:
    """Yield what is left below the memory limit of each control group of this process, from its own up to the root."""
    for line in (_text(PROC / "self" / "cgroup") or "0::/").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = CGROUPS, CGROUP_V2
        elif "memory" in controllers.split(","):
            root, names = CGROUPS / "memory", CGROUP_V1
        else:
            continue
        # A container may see the path that the host has for it, of which only the uppermost parents exist inside.
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            limit, used = (_text(group / name).strip() for name in names[:2])
            if limit.isdigit() and used.isdigit():
                yield int(limit) - int(used) + _stat(group / "memory.stat", names[2])
            if group == root:
                break


def _stat(path: Path, field: str) -> int:
    values = dict(line.split(maxsplit=1) for line in _text(path).splitlines())
    return int(values.get(field, 0))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
