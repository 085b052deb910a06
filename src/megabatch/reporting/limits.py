"""What limits the speed of a run: reading its samples, the host, or the device."""

from __future__ import annotations

from typing import Literal

from .format import percent_text

Limit = Literal["reading", "host", "device"]
# A smaller share of a step's time is not worth mentioning.
NOTABLE = 0.1


def limit_of(waiting: float | None, idle: float | None) -> Limit | None:
    """Return what limits a run, from the shares of its time that passed before samples were read, and with an idle device.

    None if that is unknown: without an idle share, as on a CPU, only reading can be told from the rest.

    >>> limit_of(0.3, 0.4), limit_of(0.02, 0.4), limit_of(0.02, 0.05), limit_of(0.02, None)
    ('reading', 'host', 'device', None)
    """
    if waiting is not None and waiting > NOTABLE:
        return "reading"
    if waiting is None or idle is None:
        return None
    # While a step waits for samples, the device is idle too.
    return "host" if idle - waiting > NOTABLE else "device"


def limit_sentence(waiting: float | None, idle: float | None) -> str | None:
    """Return a sentence that names the limit, and a remedy; None if it is unknown."""
    limit = limit_of(waiting, idle)
    if limit == "reading":
        assert waiting is not None
        return (
            f"Steps waited {percent_text(waiting)} of their time for samples, so reading is the bottleneck: raise data.workers,"
            ' up to the number of cores per GPU, or set data.decode="device" for JPEGs on a CUDA device.'
        )
    if limit is None or idle is None:
        return None
    if limit == "host":
        return (
            f"The device was idle {percent_text(idle)} of the time although samples were ready, so the host is the bottleneck:"
            " raise batch.chunk, or set compute.compile=true."
        )
    return f"The device was busy {percent_text(1 - idle)} of the time: it is what limits the speed."
