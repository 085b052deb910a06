"""What fits, kept in a file: for a run that is stopped and goes on later, and for a plan."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ... import measurements
from ...environment import device_name
from ...ring import Ring
from .limits import Limit


class Stored(NamedTuple):
    """A result that is kept in a file. budget: what is asked for now; another one asks for another result."""

    path: Path
    budget: int | None

    def read(self, ring: Ring, device: torch.device, limit: Limit, cap: int) -> tuple[int | None, bool]:
        """The size in the file, None where there is none, and whether it still is the answer: found on such a device within this
        limit, and not at a lower cap. The first rank reads, since the others may not see its disk."""
        size, trusted = 0, False
        if ring.rank == 0 and self.path.exists():
            before = measurements.read(self.path)
            if not isinstance(before.found, measurements.Fit):
                raise ValueError(f"{self.path}: holds a measurement of {before.kind}, not of what fits; name another file")
            size = before.found.chunk
            same = before.device == device_name(device) and before.torch == str(torch.__version__)
            same = same and (self.budget is None or before.found.limit_bytes == limit.bytes)
            trusted = same and (size == cap or any(not trial["ran"] for trial in before.found.trials))
        first = ring.gather([size, int(trusted)], device)[0]
        return first[0] or None, bool(first[1])

    def write(self, fit: measurements.Fit, device: torch.device) -> None:
        measurements.write(as_measured(fit, {}, device), self.path)


def as_measured(fit: measurements.Fit, run: dict[str, Any], device: torch.device) -> measurements.Measured:
    """The result with where and when it was found; `run` is empty for a loop that is not ours."""
    return measurements.Measured(fit, run, device_name(device), str(torch.__version__), datetime.date.today().isoformat())
