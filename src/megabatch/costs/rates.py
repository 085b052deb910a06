"""Rates of a device that were measured there, and their file: what a plan computes with in the place of data sheets."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..files import write_text
from ..measurements import check_types


@dataclass(frozen=True)
class Rates:
    """What was measured. kind: torch's name of the device's kind. memory: bytes of one; gpus: how many the machine has.

    products: FLOP/s of large matrix products by precision; one that the device does not have is missing. bandwidth: bytes a second
    that a copy within the device's memory reads and writes. copy: bytes a second from pinned host memory; None on a CPU.
    link: bytes a second that each of `ranks` sends in an all-reduce; None without a process group. host: seconds in which the host
    calls one operation of a forward or backward; None in files that do not know it.
    """

    device: str
    kind: str
    memory: int
    gpus: int
    products: Mapping[str, float]
    bandwidth: float
    copy: float | None
    link: float | None
    ranks: int
    torch: str
    date: str
    host: float | None = None


def as_text(rates: Rates) -> str:
    """Lines of a label and a value, as those of `megabatch env`."""
    lines = [("device", f"{rates.device}, {rates.memory / 2**30:.1f} GiB"), ("measured", f"{rates.date}, PyTorch {rates.torch}")]
    lines += [(precision, f"{rate / 1e12:,.4g} TFLOP/s, large products") for precision, rate in rates.products.items()]
    lines.append(("memory", f"{rates.bandwidth / 1e9:,.4g} GB/s, read and written"))
    if rates.copy is not None:
        lines.append(("from host", f"{rates.copy / 1e9:,.4g} GB/s, pinned"))
    if rates.host is not None:
        lines.append(("host", f"{1e6 * rates.host:,.3g} µs to call an operation"))
    if rates.link is not None:
        lines.append(("all-reduce", f"{rates.link / 1e9:,.4g} GB/s sent by each of {rates.ranks} ranks"))
    return "\n".join(f"{label:<12} {value}" for label, value in lines)


def write_rates(rates: Rates, path: str | Path) -> Path:
    """The file that `plan --rates` reads."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"measured": "rates", **asdict(rates)}, indent=1) + "\n")
    return path


def read_rates(path: str | Path) -> Rates:
    """The rates of a file; a ValueError where it holds none."""
    try:
        table: dict[str, Any] = json.loads(Path(path).read_text("utf-8"))
        if table.pop("measured") != "rates":
            raise ValueError("another measurement")
        rates = Rates(**table)
        check_types(rates)
        numbers = {"bandwidth": rates.bandwidth, "copy": rates.copy, "link": rates.link, "host": rates.host, **rates.products}
        wrong = {name: number for name, number in numbers.items() if number is not None and not 0 < number < math.inf}
        if wrong or not rates.products:
            raise ValueError(f"rates must be above 0 and finite, for one precision at least; {wrong or 'there are none'}")
        if min(rates.memory, rates.gpus, rates.ranks) < 1:
            raise ValueError("memory, gpus and ranks must be at least 1")
        return rates
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file; write one with megabatch env --measure --out {path}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: holds no rates ({error!r}); write them anew with megabatch env --measure --out …") from None
