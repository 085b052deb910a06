"""Machines: so many devices, by name, by what is here, or by rates that were measured."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from .devices import Device, Efficiency, cpu_device, find_device, find_or_assume_device
from .rates import Rates, read_rates

# More than any machine has; arithmetic on larger numbers would overflow.
MOST_BYTES, MOST_DEVICES = 1e18, 10**7
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {f"{letter}IB": 2 ** (10 * power) for power, letter in enumerate("KMGT", start=1)}
# Large products and copies, which are measured, already stay below the peaks: on an H200 by a quarter and an eighth.
MEASURED_PRODUCTS, MEASURED_BANDWIDTH = 0.75, 0.88


@dataclass(frozen=True)
class Machine:
    """So many devices, `node` of them in each computer; `network`: bytes a second between computers, for each device, one way."""

    device: Device
    gpus: int = 1
    node: int = 8
    network: float = 25e9

    def __post_init__(self) -> None:
        if not 1 <= self.gpus <= MOST_DEVICES:
            raise ValueError(
                f"gpus is {str(self.gpus)[:40]}: must be at least 1, and at most {MOST_DEVICES:,}; a CPU counts as one"
            )

    @property
    def link(self) -> float:
        """Bytes a second of the slowest link of a ring over all devices, as reached."""
        return (self.device.link if self.gpus <= self.node else min(self.network, self.device.link)) * self.device.efficiency.link

    def with_gpus(self, gpus: int) -> Machine:
        return dataclasses.replace(self, gpus=gpus)


def parse_bytes(text: str | int) -> int:
    """Bytes of "80GiB", "24GB", "512 MiB"; GB is 10⁹, GiB is 2³⁰.

    >>> parse_bytes("80GiB"), parse_bytes("24GB")
    (85899345920, 24000000000)
    """
    found = re.fullmatch(r"\s*(-?[0-9.]+)\s*([A-Za-z]*)\s*", str(text))
    unit = UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or found[1].count(".") > 1:
        raise ValueError(f"memory is {text!r}: must read like 80GiB or 24GB")
    size = float(found[1]) * unit
    if not 1 <= size <= MOST_BYTES:
        raise ValueError(f"memory is {str(text)[:40]!r}: must be above 0, and at most {MOST_BYTES:g} bytes")
    return int(size)


def find_machine(
    gpu: str | None = None,
    gpus: int | None = None,
    memory: str | int | None = None,
    rates: str | Path | Rates | None = None,
) -> Machine:
    """The machine that is asked about; with nothing named, this one.

    gpu: a name, "8xA100-80GB" with their number, or "cpu". memory: of each; alone, it stands for a device with A100's rates.
    rates: measured ones in the place of the table's, or their file; alone, they stand for the machine that they were measured on.
    """
    if gpus is not None and gpus < 1:
        raise ValueError(f"gpus is {gpus}: must be at least 1; a CPU counts as one")
    size = None if memory is None else parse_bytes(memory)
    counted = re.fullmatch(r"\s*(\d+)\s*[x×*]\s*(.+)", gpu) if gpu else None
    if counted:
        if gpus is not None and gpus != int(counted[1]):
            raise ValueError(f"gpu is {gpu!r} and gpus is {gpus}: say the number once")
        gpus, gpu = int(counted[1]), counted[2]
    known = read_rates(rates) if isinstance(rates, (str, Path)) else rates
    machine = _named(gpu, gpus, size) if known is None else _measured(known, gpu, gpus)
    return machine if size is None else dataclasses.replace(machine, device=dataclasses.replace(machine.device, memory=size))


def _named(gpu: str | None, gpus: int | None, size: int | None) -> Machine:
    """The machine by the names of its devices, as far as they are given."""
    if gpu is None and size is None:
        return this_machine(gpus)
    if gpu is None:
        device = find_device("A100-80GB")
        device = dataclasses.replace(device, name="unnamed", source="rates of an A100, assumed: name the device (gpu=…)")
    else:
        device = cpu_device() if gpu.strip().lower() == "cpu" else find_device(gpu)
    return Machine(device, 1 if gpus is None else gpus)


def _measured(rates: Rates, gpu: str | None, gpus: int | None) -> Machine:
    """The machine that rates were measured on; a ValueError where another one is named."""
    own = cpu_device() if rates.kind == "cpu" else find_or_assume_device(rates.device)
    if gpu is not None and _named(gpu, 1, None).device.name != own.name:
        raise ValueError(
            f"gpu is {gpu!r}, and the rates were measured on {rates.device}: measure them there, or leave one of them out"
        )
    name = own.name if rates.kind == "cpu" else rates.device
    own = dataclasses.replace(own, name=name, memory=rates.memory or own.memory)
    machine = Machine(own, rates.gpus if gpus is None else gpus)
    machine = with_rates(machine, rates.products, rates.bandwidth, rates.link, rates.host)
    source = f"measured on {rates.device}, {rates.date}"
    return dataclasses.replace(machine, device=dataclasses.replace(machine.device, source=source))


def this_machine(gpus: int | None = None) -> Machine:
    """The accelerators that PyTorch sees here, or the CPU."""
    if not torch.cuda.is_available():
        return Machine(cpu_device(), 1 if gpus is None else gpus)
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    device = dataclasses.replace(
        find_or_assume_device(properties.name), name=properties.name, memory=properties.total_memory, capability=capability
    )
    return Machine(device, torch.cuda.device_count() if gpus is None else gpus)


def with_rates(
    machine: Machine,
    rates: Mapping[str, float],
    bandwidth: float | None = None,
    link: float | None = None,
    host: float | None = None,
) -> Machine:
    """The machine with measured rates in the place of the data sheet's: of large products (FLOP/s by precision), memory and links,
    and the host's seconds for an operation.

    A measured rate is already below the peak: the shares that a step reaches of it are larger accordingly; of a measured link it is
    all.
    """
    if not rates or any(rate <= 0 for rate in rates.values()):
        raise ValueError(f"rates are {dict(rates)!r}: FLOP/s above 0 by precision, as in {{'bf16': 7.9e14}}")
    device = machine.device
    efficiency = device.efficiency.scaled(1 / MEASURED_PRODUCTS, 1.0 if bandwidth is None else 1 / MEASURED_BANDWIDTH)
    if device.type == "cpu":
        efficiency = dataclasses.replace(
            Efficiency.uniform(MEASURED_PRODUCTS, MEASURED_BANDWIDTH), host_s=efficiency.host_s, step_s=efficiency.step_s
        )
    if host is not None:
        efficiency = dataclasses.replace(efficiency, host_s=host)
    device = dataclasses.replace(
        device,
        rates=MappingProxyType({**device.rates, **rates}),
        bandwidth=bandwidth or device.bandwidth,
        link=device.link if link is None else link / efficiency.link,
        source="measured",
        efficiency=efficiency,
    )
    return dataclasses.replace(machine, device=device)
