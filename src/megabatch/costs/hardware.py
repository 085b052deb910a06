"""Machines: a number of devices, found by name, on this computer, or from measured rates."""

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
# Measured rates are those of large matrix products and copies, which are already below the peaks: on an H200 by a quarter and an
# eighth.
MEASURED_PRODUCTS, MEASURED_BANDWIDTH = 0.75, 0.88


@dataclass(frozen=True)
class Machine:
    """A number of devices.

    node: devices in each computer. network: bytes per second between computers, for each device, one way.
    """

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
        """Bytes per second that a ring over all devices reaches on its slowest link."""
        slowest = self.device.link if self.gpus <= self.node else min(self.network, self.device.link)
        return slowest * self.device.efficiency.link

    def with_gpus(self, gpus: int) -> Machine:
        """Return this machine with another number of devices."""
        return dataclasses.replace(self, gpus=gpus)


def parse_bytes(text: str | int) -> int:
    """Return the bytes of "80GiB", "24GB" or "512 MiB"; GB is 10⁹, GiB is 2³⁰.

    >>> parse_bytes("80GiB"), parse_bytes("24GB")
    (85899345920, 24000000000)
    """
    parsed = re.fullmatch(r"\s*(-?[0-9.]+)\s*([A-Za-z]*)\s*", str(text))
    unit = UNITS.get(parsed[2].upper()) if parsed else None
    if parsed is None or unit is None or parsed[1].count(".") > 1:
        raise ValueError(f"memory is {text!r}: must read like 80GiB or 24GB")
    size = float(parsed[1]) * unit
    if not 1 <= size <= MOST_BYTES:
        raise ValueError(f"memory is {str(text)[:40]!r}: must be above 0, and at most {MOST_BYTES:g} bytes")
    return int(size)


def find_machine(
    gpu: str | None = None,
    gpus: int | None = None,
    memory: str | int | None = None,
    rates: str | Path | Rates | None = None,
) -> Machine:
    """Return the machine that is described; with no arguments, this one.

    gpu: a name, "8xA100-80GB", "8 A100" or "8x A100 80GB" with a number, or "cpu". memory: of each device; alone, or with a name
    that is not known, it describes a device with the rates of an A100. rates: measured rates, or their file, that replace those of
    the table; alone, they describe the machine where they were measured.
    """
    if gpus is not None and gpus < 1:
        raise ValueError(f"gpus is {gpus}: must be at least 1; a CPU counts as one")
    size = None if memory is None else parse_bytes(memory)
    counted = re.fullmatch(r"\s*(\d+)(?:\s*[x×*]\s*|\s+)(.+)", gpu) if gpu else None
    if counted:
        if gpus is not None and gpus != int(counted[1]):
            raise ValueError(f"gpu is {gpu!r} and gpus is {gpus}: give the number once")
        gpus, gpu = int(counted[1]), counted[2]
    measured = read_rates(rates) if isinstance(rates, (str, Path)) else rates
    machine = _machine_by_name(gpu, gpus, size) if measured is None else _machine_by_rates(measured, gpu, gpus)
    return machine if size is None else dataclasses.replace(machine, device=dataclasses.replace(machine.device, memory=size))


def _machine_by_name(gpu: str | None, gpus: int | None, size: int | None) -> Machine:
    if gpu is None and size is None:
        return this_machine(gpus)
    if gpu is None:
        device = find_device("A100-80GB")
        device = dataclasses.replace(
            device, name="unnamed", source="rates of an A100, assumed: name the device (gpu=…)", basis="assumed"
        )
    elif gpu.strip().lower() == "cpu":
        device = cpu_device()
    else:
        device = find_device(gpu) if size is None else find_or_assume_device(gpu)
    return Machine(device, 1 if gpus is None else gpus)


def _machine_by_rates(rates: Rates, gpu: str | None, gpus: int | None) -> Machine:
    """Return the machine that rates were measured on; a ValueError if `gpu` names another one."""
    device = cpu_device() if rates.kind == "cpu" else find_or_assume_device(rates.device)
    if gpu is not None and _machine_by_name(gpu, 1, None).device.name != device.name:
        raise ValueError(f"gpu is {gpu!r}, but the rates were measured on {rates.device}: measure them there, or omit one of them")
    name = device.name if rates.kind == "cpu" else rates.device
    device = dataclasses.replace(device, name=name, memory=rates.memory or device.memory)
    machine = Machine(device, rates.gpus if gpus is None else gpus)
    machine = with_rates(machine, rates.products, rates.bandwidth, rates.link, rates.host)
    source = f"measured on {rates.device}, {rates.date}"
    return dataclasses.replace(machine, device=dataclasses.replace(machine.device, source=source))


def this_machine(gpus: int | None = None) -> Machine:
    """Return the accelerators that PyTorch sees here, or the CPU."""
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
    """Return the machine with measured rates in place of those of the data sheet.

    rates: FLOP/s of large matrix products, by precision. bandwidth, link: bytes per second. host: the host's seconds per operation.
    Measured rates are already below the peaks, so the shares that a step reaches of them are larger; of a measured link it reaches
    all.
    """
    if not rates or any(rate <= 0 for rate in rates.values()):
        raise ValueError(f"rates are {dict(rates)!r}: must be FLOP/s above 0 by precision, as in {{'bf16': 7.9e14}}")
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
        basis="measured",
    )
    return dataclasses.replace(machine, device=device)
