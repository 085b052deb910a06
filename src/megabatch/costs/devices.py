"""Devices: memory, rates and links of known ones, each with its source.

Rates are dense peaks (no sparsity). What a training step reaches of them is an assumption, written once here: Efficiency.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch

from .. import host_memory
from .op_classes import Kind
from .op_efficiency import BYTES, FLOPS, IN_TF32, WITHOUT_TENSOR_CORES, bytes_shares

GIB = 2**30
# Of the name as people write it, letters and digits count.
_NOISE = re.compile(r"[^A-Z0-9]")


@dataclass(frozen=True)
class Efficiency:
    """What training reaches of the peaks, and what the host costs: an assumption, calibrated on steps on one H200.

    flops, bytes: by kind of operation. link: of the rate between GPUs. host_s: seconds of the host for one operation of PyTorch,
    which it calls while the device computes: the slower of both is waited for. step_s: for what a step does once, whatever its
    batch: clipping, the optimizer's many tensors, reading back the loss.
    """

    flops: Mapping[Kind, float] = field(default_factory=lambda: FLOPS)
    bytes: Mapping[Kind, float] = field(default_factory=lambda: BYTES)
    link: float = 0.75
    host_s: float = 42e-6
    step_s: float = 10e-3

    @classmethod
    def uniform(cls, flops: float, bytes: float, **rest: float) -> Efficiency:
        """One share for every kind."""
        return cls(MappingProxyType(dict.fromkeys(BYTES, flops)), MappingProxyType(dict.fromkeys(BYTES, bytes)), **rest)

    def scaled(self, flops: float, bytes: float) -> Efficiency:
        """The same kinds against other rates, none above all of them."""
        less = [{kind: min(1.0, f * share) for kind, share in of.items()} for of, f in ((self.flops, flops), (self.bytes, bytes))]
        return dataclasses.replace(self, flops=MappingProxyType(less[0]), bytes=MappingProxyType(less[1]))


@dataclass(frozen=True)
class Device:
    """One accelerator (or a CPU).

    memory: bytes that PyTorch sees. rates: FLOP/s by precision ("fp32", "tf32", "bf16", "fp16"); one that is missing is not
    supported. bandwidth, link: bytes a second, of its memory and to the next GPU of the same machine, one way. capability: of CUDA,
    major and minor, by which kernels take their workspaces.
    """

    name: str
    memory: int
    rates: Mapping[str, float]
    bandwidth: float
    link: float
    source: str
    efficiency: Efficiency = field(default_factory=Efficiency)
    capability: tuple[int, int] = (9, 0)

    @property
    def type(self) -> Literal["cpu", "cuda"]:
        """As torch names it."""
        return "cpu" if self.name == "cpu" else "cuda"

    def flops_per_second(self, precision: str, kind: Kind = "product") -> float:
        """FLOP/s that a training step reaches in a kind of products; a ValueError where the device does not have the precision."""
        if precision not in self.rates:
            raise ValueError(f"precision is {precision!r}: {self.name} has {', '.join(self.rates)}; choose one of them")
        if precision == "fp32" and kind in IN_TF32:
            precision = "tf32" if "tf32" in self.rates else precision
        if kind in WITHOUT_TENSOR_CORES:
            precision = "fp32"
        return self.rates[precision] * self.efficiency.flops[kind]

    def bytes_per_second(self, kind: Kind) -> float:
        """Bytes a second that a kind of operations reads and writes."""
        return self.bandwidth * self.efficiency.bytes[kind]

    @property
    def copy(self) -> float:
        """Bytes a second from pinned memory of the host: PCIe of the generation that goes with the device."""
        return {9: 50e9, 8: 25e9}.get(self.capability[0], 12e9)


def _device(
    name: str,
    gib: float,
    rates: tuple[float, float, float, float],
    tb_s: float,
    link_gb_s: float,
    capability: tuple[int, int],
    source: str,
) -> Device:
    """rates: TFLOP/s in fp32, tf32, bf16 and fp16; 0 is not supported."""
    named = zip(("fp32", "tf32", "bf16", "fp16"), rates, strict=True)
    peaks = MappingProxyType({precision: 1e12 * rate for precision, rate in named if rate})
    efficiency = Efficiency(bytes=bytes_shares(1e12 * tb_s, peaks["fp32"], capability))
    return Device(name, int(gib * GIB), peaks, 1e12 * tb_s, 1e9 * link_gb_s, source, efficiency, capability)


_MEMORY = "; memory as PyTorch reports it"
# Links are half of the two-way figure of the data sheets: NVLink, or PCIe where there is none.
DEVICES = (
    _device("H200", 139.8, (66.9, 494.7, 989.4, 989.4), 4.8, 450, (9, 0), "NVIDIA H100 data sheet, memory of the H200's" + _MEMORY),
    _device("H100-SXM", 79.0, (66.9, 494.7, 989.4, 989.4), 3.35, 450, (9, 0), "NVIDIA H100 data sheet, SXM5"),
    _device("H100-PCIe", 79.0, (51, 378, 756, 756), 2.0, 64, (9, 0), "NVIDIA H100 data sheet and product brief, PCIe"),
    _device("A100-80GB", 79.1, (19.5, 156, 312, 312), 2.039, 300, (8, 0), "NVIDIA A100 data sheet, SXM4 80GB" + _MEMORY),
    _device("A100-40GB", 39.4, (19.5, 156, 312, 312), 1.555, 300, (8, 0), "NVIDIA A100 data sheet, SXM4 40GB" + _MEMORY),
    _device("A800-80GB", 79.1, (19.5, 156, 312, 312), 2.039, 200, (8, 0), "as A100-80GB, NVLink 400 instead of 600 GB/s two ways"),
    _device("L40S", 44.4, (91.6, 183, 362, 362), 0.864, 32, (8, 9), "NVIDIA L40S data sheet, PCIe Gen4" + _MEMORY),
    _device("L4", 21.8, (30.3, 60, 121, 121), 0.300, 32, (8, 9), "NVIDIA L4 data sheet, halved for sparsity; memory: T4's share"),
    _device("A10G", 21.8, (31, 35, 70, 70), 0.600, 32, (8, 6), "AWS G5, 24 GB, 600 GB/s; rates recalled, not verified: measure"),
    _device("V100-32GB", 31.7, (15.7, 0, 0, 125), 0.900, 150, (7, 0), "NVIDIA V100 data sheet, SXM2" + _MEMORY),
    _device("V100-16GB", 15.7, (15.7, 0, 0, 125), 0.900, 150, (7, 0), "NVIDIA V100 data sheet, SXM2" + _MEMORY),
    _device("T4", 14.5, (8.1, 0, 0, 65), 0.320, 16, (7, 5), "NVIDIA T4 data sheet, PCIe Gen3" + _MEMORY),
    _device("RTX4090", 23.6, (82.6, 82.6, 165, 165), 1.008, 32, (8, 9), "NVIDIA Ada whitepaper, sums in fp32, PCIe Gen4" + _MEMORY),
    _device("RTX3090", 23.6, (35.6, 35.6, 71, 71), 0.936, 32, (8, 6), "NVIDIA GA102 whitepaper, sums in fp32, PCIe Gen4" + _MEMORY),
)  # fmt: skip
# What a name without its variant means.
_USUAL = {"H100": "H100-SXM", "A100": "A100-80GB", "A800": "A800-80GB", "V100": "V100-32GB"}


def find_device(name: str) -> Device:
    """The known device that a name means: "H200", "a100 40gb", "NVIDIA A100-SXM4-80GB", "RTX 4090".

    >>> find_device("NVIDIA A100-SXM4-80GB").name
    'A100-80GB'
    """
    wanted = _NOISE.sub("", name.upper())
    for noise in ("NVIDIA", "TESLA", "GEFORCE", "HBM3", "SXM2", "SXM4", "SXM5"):
        wanted = wanted.replace(noise, "")
    names = {_NOISE.sub("", device.name.upper()): device for device in DEVICES}
    names |= {short: names[_NOISE.sub("", full.upper())] for short, full in _USUAL.items()}
    # "A100 80GB PCIe" is the A100 with 80 GB; an H100's variants differ.
    for candidate in (wanted, wanted.replace("PCIE", ""), wanted.removesuffix("80GB"), wanted.replace("80GB", "")):
        if candidate in names:
            return names[candidate]
    near = difflib.get_close_matches(wanted, names, 2, 0.5)
    guess = f"did you mean {', '.join(names[n].name for n in near)}?" if near else "known are " + ", ".join(d.name for d in DEVICES)
    raise ValueError(f"gpu is {name!r}: no such device is known; {guess} Or give its memory alone (80GiB)")


def find_or_assume_device(name: str) -> Device:
    """The known device of a driver's name, or the one that is assumed for it."""
    try:
        return find_device(name)
    except ValueError:
        return dataclasses.replace(find_device("A100-80GB"), name=name, source="rates of an A100, assumed: measure them")


def cpu_device() -> Device:
    """This machine's CPU, by assumption."""
    threads = torch.get_num_threads()
    memory = host_memory.total()
    rates = MappingProxyType({"fp32": 30e9 * threads})
    source = "30 GFLOP/s and 8 GB/s a thread, assumed: CPUs differ widely, measure"
    if memory is None:
        memory, source = 8 * GIB, f"8 GiB of memory, {source}"
    return Device("cpu", memory, rates, 8e9 * threads, 10e9, source, Efficiency.uniform(1.0, 1.0, host_s=5e-6, step_s=0.0))
