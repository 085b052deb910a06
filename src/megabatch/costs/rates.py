"""Measured rates of a device, and the file that holds them: a plan uses them in place of data-sheet numbers."""

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
    """Rates measured on one machine.

    device: the driver's name of it. kind: its type, as in torch.device. memory: bytes of one device. gpus: devices of the machine.
    products: FLOP/s of large matrix products by precision; unsupported ones are missing. bandwidth: bytes per second that a copy
    within the device's memory reads and writes. copy: bytes per second from pinned host memory; None on a CPU. link: bytes per
    second that each of `ranks` sends in an all-reduce; None without a process group. host: seconds that the host needs to launch
    one operation of a forward or backward; None in older files.
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
    """Return the rates as lines of a label and a value, in the format of `megabatch env`."""
    lines = [("device", f"{rates.device}, {rates.memory / 2**30:.1f} GiB"), ("measured", f"{rates.date}, PyTorch {rates.torch}")]
    lines += [(precision, f"{rate / 1e12:,.4g} TFLOP/s, large matrix products") for precision, rate in rates.products.items()]
    lines.append(("memory", f"{rates.bandwidth / 1e9:,.4g} GB/s, read and written"))
    if rates.copy is not None:
        lines.append(("from host", f"{rates.copy / 1e9:,.4g} GB/s, pinned"))
    if rates.host is not None:
        lines.append(("host", f"{1e6 * rates.host:,.3g} µs per launched operation"))
    if rates.link is not None:
        lines.append(("all-reduce", f"{rates.link / 1e9:,.4g} GB/s sent by each of {rates.ranks} ranks"))
    return "\n".join(f"{label:<12} {value}" for label, value in lines)


def write_rates(rates: Rates, path: str | Path) -> Path:
    """Write the file that `plan --rates` reads."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"measured": "rates", **asdict(rates)}, indent=1) + "\n")
    return path


def read_rates(path: str | Path) -> Rates:
    """Return the rates of a file; a ValueError if it holds none."""
    try:
        table: dict[str, Any] = json.loads(Path(path).read_text("utf-8"))
        if table.pop("measured") != "rates":
            raise ValueError("it holds another measurement")
        rates = Rates(**table)
        check_types(rates)
        numbers = {"bandwidth": rates.bandwidth, "copy": rates.copy, "link": rates.link, "host": rates.host, **rates.products}
        wrong = {name: number for name, number in numbers.items() if number is not None and not 0 < number < math.inf}
        if wrong or not rates.products:
            raise ValueError(f"rates must be above 0 and finite, for at least one precision; {wrong or 'there are none'}")
        if min(rates.memory, rates.gpus, rates.ranks) < 1:
            raise ValueError("memory, gpus and ranks must be at least 1")
        return rates
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; write one with megabatch env --measure --out {path}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: holds no rates ({error!r}); write it again with megabatch env --measure --out …") from None
