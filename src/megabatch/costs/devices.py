"""Devices: one record per GPU with its memory, peak rates and links, and the source of these numbers.

Rates are dense peaks (no sparsity). What a training step reaches of them is an assumption, stated once in `Efficiency`.
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
from .operations import (
    BYTES_EFFICIENCY,
    FLOPS_EFFICIENCY,
    NO_TENSOR_CORE_CLASSES,
    TF32_CLASSES,
    OpClass,
    bytes_efficiency,
)

GIB = 2**30
# Names are compared by their letters and digits.
_PUNCTUATION = re.compile(r"[^A-Z0-9]")


@dataclass(frozen=True)
class Efficiency:
    """What training reaches of the peak rates, and what the host costs: an assumption, calibrated on steps on one H200.

    flops, bytes: shares of the peak FLOP/s and of the peak bandwidth, by class of operation. link: share of the rate between GPUs.
    host_s: seconds that the host needs to launch one operation of PyTorch, while the device computes: the slower of the two
    determines the time. step_s: seconds for what a step does once, whatever its batch: clipping, the optimizer's many tensors,
    reading the loss back.
    """

    flops: Mapping[OpClass, float] = field(default_factory=lambda: FLOPS_EFFICIENCY)
    bytes: Mapping[OpClass, float] = field(default_factory=lambda: BYTES_EFFICIENCY)
    link: float = 0.75
    host_s: float = 42e-6
    step_s: float = 10e-3

    @classmethod
    def uniform(cls, flops: float, bytes: float, **rest: float) -> Efficiency:
        """Return the same shares for every class."""
        names = BYTES_EFFICIENCY
        return cls(MappingProxyType(dict.fromkeys(names, flops)), MappingProxyType(dict.fromkeys(names, bytes)), **rest)

    def scaled(self, flops: float, bytes: float) -> Efficiency:
        """Return the shares multiplied by these factors, none above 1."""
        return dataclasses.replace(self, flops=_scaled(self.flops, flops), bytes=_scaled(self.bytes, bytes))


def _scaled(shares: Mapping[OpClass, float], factor: float) -> Mapping[OpClass, float]:
    return MappingProxyType({op_class: min(1.0, factor * share) for op_class, share in shares.items()})


@dataclass(frozen=True)
class Device:
    """One accelerator, or a CPU.

    memory: bytes that PyTorch sees. rates: peak FLOP/s by precision ("fp32", "tf32", "bf16", "fp16"); unsupported ones are missing.
    bandwidth: bytes per second of its memory. link: bytes per second to the next GPU of the same machine, one way. source: where
    these numbers come from. capability: CUDA compute capability, on which the workspaces of kernels depend.
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
        """The device type, as in torch.device."""
        return "cpu" if self.name == "cpu" else "cuda"

    def flops_per_second(self, precision: str, op_class: OpClass = "matmul") -> float:
        """Return the FLOP/s that a training step reaches in this class; a ValueError if the device lacks the precision."""
        if precision not in self.rates:
            raise ValueError(f"precision is {precision!r}: {self.name} has {', '.join(self.rates)}; choose one of them")
        if precision == "fp32" and op_class in TF32_CLASSES:
            precision = "tf32" if "tf32" in self.rates else precision
        if op_class in NO_TENSOR_CORE_CLASSES:
            precision = "fp32"
        return self.rates[precision] * self.efficiency.flops[op_class]

    def bytes_per_second(self, op_class: OpClass) -> float:
        """Return the bytes per second that operations of this class read and write."""
        return self.bandwidth * self.efficiency.bytes[op_class]

    @property
    def host_copy(self) -> float:
        """Bytes per second from pinned host memory, over the PCIe generation that comes with the device."""
        return {9: 50e9, 8: 25e9}.get(self.capability[0], 12e9)


def _device(
    name: str,
    gib: float,
    tflops: tuple[float, float, float, float],
    tb_s: float,
    link_gb_s: float,
    capability: tuple[int, int],
    source: str,
) -> Device:
    """Return a record from data-sheet units. tflops: TFLOP/s in fp32, tf32, bf16 and fp16; 0 means not supported."""
    by_precision = zip(("fp32", "tf32", "bf16", "fp16"), tflops, strict=True)
    rates = MappingProxyType({precision: 1e12 * rate for precision, rate in by_precision if rate})
    efficiency = Efficiency(bytes=bytes_efficiency(1e12 * tb_s, rates["fp32"], capability))
    return Device(name, int(gib * GIB), rates, 1e12 * tb_s, 1e9 * link_gb_s, source, efficiency, capability)


_MEMORY = "; memory as PyTorch reports it"
# Links are half of the bidirectional figure of the data sheets: NVLink, or PCIe where there is no NVLink.
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
    _device("RTX4090", 23.6, (82.6, 82.6, 165, 165), 1.008, 32, (8, 9), "NVIDIA Ada whitepaper, fp32 sums, PCIe Gen4" + _MEMORY),
    _device("RTX3090", 23.6, (35.6, 35.6, 71, 71), 0.936, 32, (8, 6), "NVIDIA GA102 whitepaper, fp32 sums, PCIe Gen4" + _MEMORY),
)  # fmt: skip
# What a name without its variant means.
_DEFAULT_VARIANTS = {"H100": "H100-SXM", "A100": "A100-80GB", "A800": "A800-80GB", "V100": "V100-32GB"}


def find_device(name: str) -> Device:
    """Return the device of a name: "H200", "a100 40gb", "NVIDIA A100-SXM4-80GB", "RTX 4090".

    >>> find_device("NVIDIA A100-SXM4-80GB").name
    'A100-80GB'
    """
    short = _PUNCTUATION.sub("", name.upper())
    for affix in ("NVIDIA", "TESLA", "GEFORCE", "HBM3", "SXM2", "SXM4", "SXM5"):
        short = short.replace(affix, "")
    names = {_PUNCTUATION.sub("", device.name.upper()): device for device in DEVICES}
    names |= {variant: names[_PUNCTUATION.sub("", full.upper())] for variant, full in _DEFAULT_VARIANTS.items()}
    # "A100 80GB PCIe" is the A100 with 80 GB; the variants of an H100 differ.
    for candidate in (short, short.replace("PCIE", ""), short.removesuffix("80GB"), short.replace("80GB", "")):
        if candidate in names:
            return names[candidate]
    near = difflib.get_close_matches(short, names, 2, 0.5)
    if near:
        guess = f"did you mean {', '.join(names[n].name for n in near)}?"
    else:
        guess = f"known are {', '.join(device.name for device in DEVICES)}."
    raise ValueError(f"gpu is {name!r}: no such device is known; {guess} Or give only its memory (80GiB).")


def find_or_assume_device(name: str) -> Device:
    """Return the device of a driver's name, or an A100 of that name if it is unknown."""
    try:
        return find_device(name)
    except ValueError:
        return dataclasses.replace(find_device("A100-80GB"), name=name, source="rates of an A100, assumed: measure them")


def cpu_device() -> Device:
    """Return this machine's CPU, with assumed rates."""
    threads = torch.get_num_threads()
    memory = host_memory.total()
    rates = MappingProxyType({"fp32": 30e9 * threads})
    source = "30 GFLOP/s and 8 GB/s a thread, assumed: CPUs differ widely, measure"
    if memory is None:
        memory, source = 8 * GIB, f"8 GiB of memory, {source}"
    return Device("cpu", memory, rates, 8e9 * threads, 10e9, source, Efficiency.uniform(1.0, 1.0, host_s=5e-6, step_s=0.0))
