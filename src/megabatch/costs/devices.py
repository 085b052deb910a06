"""Devices: one record per GPU with its memory, peak rates and links, and the source of these numbers.

Rates are dense peaks (no sparsity). What a training step reaches of them is an assumption, stated once in `Efficiency`.
"""

# One record a line, however long.
# ruff: noqa: E501
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
    FITTED_DEVICE,
    FLOPS_EFFICIENCY,
    NO_TENSOR_CORE_CLASSES,
    TF32_CLASSES,
    OpClass,
    bytes_efficiency,
    flops_efficiency,
)

GIB = 2**30
# Names are compared by their letters and digits.
_PUNCTUATION = re.compile(r"[^A-Z0-9]")


# What the rates of a device rest on: steps that the efficiencies were fitted on, measured rates, a data sheet, or an assumption.
Basis = Literal["fitted", "measured", "data sheet", "assumed"]


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
    these numbers come from. capability: CUDA compute capability, on which the workspaces of kernels depend. basis: what its rates
    rest on, which decides how far off a predicted time may be.
    """

    name: str
    memory: int
    rates: Mapping[str, float]
    bandwidth: float
    link: float
    source: str
    efficiency: Efficiency = field(default_factory=Efficiency)
    capability: tuple[int, int] = (9, 0)
    basis: Basis = "data sheet"

    @property
    def type(self) -> Literal["cpu", "cuda"]:
        """Whose kernels are predicted: those of a CPU, or CUDA's, which stand for those of every accelerator."""
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
        return {12: 50e9, 10: 50e9, 9: 50e9, 8: 25e9}.get(self.capability[0], 12e9)


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
    efficiency = Efficiency(
        flops=flops_efficiency(rates.get("bf16", rates["fp16"]), rates["fp32"], capability),
        bytes=bytes_efficiency(1e12 * tb_s, rates["fp32"], capability),
    )
    basis: Basis = "fitted" if name == FITTED_DEVICE else "data sheet"
    return Device(name, int(gib * GIB), rates, 1e12 * tb_s, 1e9 * link_gb_s, source, efficiency, capability, basis)


_MEMORY = "; memory as PyTorch reports it"
_NOMINAL = "; memory: 96 % of the nominal size"
_ADA, _AMPERE, _BLACKWELL = "NVIDIA Ada whitepaper", "NVIDIA GA102 whitepaper", "NVIDIA RTX Blackwell whitepaper"
# Rates of GeForce cards are those with fp32 sums, which PyTorch uses: half of the figure with fp16 sums. They have no NVLink, except
# the RTX 3090 as a pair; links are then those of PCIe. All other links are half of the bidirectional figure of the data sheets.
DEVICES = (
    _device("B200", 178.4, (75, 1125, 2250, 2250), 7.7, 900, (10, 0), "NVIDIA DGX B200 data sheet, per GPU, dense" + _MEMORY),
    _device("GB200", 184.0, (80, 1250, 2500, 2500), 8.0, 900, (10, 0), "NVIDIA GB200 NVL72 data sheet, per GPU, dense" + _NOMINAL),
    _device("H200", 139.8, (66.9, 494.7, 989.4, 989.4), 4.8, 450, (9, 0), "NVIDIA H100 data sheet, memory of the H200's" + _MEMORY),
    _device("H200-NVL", 139.8, (60, 418, 836, 836), 4.8, 450, (9, 0), "NVIDIA H200 data sheet, NVL, dense" + _MEMORY),
    _device("H100-SXM", 79.0, (66.9, 494.7, 989.4, 989.4), 3.35, 450, (9, 0), "NVIDIA H100 data sheet, SXM5"),
    _device("H100-NVL", 93.1, (60, 418, 836, 836), 3.9, 300, (9, 0), "NVIDIA H100 data sheet, NVL 94 GB, dense" + _MEMORY),
    _device("H100-PCIe", 79.0, (51, 378, 756, 756), 2.0, 64, (9, 0), "NVIDIA H100 data sheet and product brief, PCIe"),
    _device("GH200", 94.5, (66.9, 494.7, 989.4, 989.4), 4.0, 450, (9, 0), "NVIDIA GH200 data sheet, 96 GB HBM3" + _MEMORY),
    _device("H800-SXM", 79.0, (66.9, 494.7, 989.4, 989.4), 3.35, 200, (9, 0), "as H100-SXM, NVLink 400 instead of 900 GB/s two ways"),
    _device("H20", 94.5, (44, 74, 148, 148), 4.0, 450, (9, 0), "NVIDIA H20 figures, as several independent listings give them" + _NOMINAL),
    _device("A100-80GB", 79.1, (19.5, 156, 312, 312), 2.039, 300, (8, 0), "NVIDIA A100 data sheet, SXM4 80GB" + _MEMORY),
    _device("A100-40GB", 39.4, (19.5, 156, 312, 312), 1.555, 300, (8, 0), "NVIDIA A100 data sheet, SXM4 40GB" + _MEMORY),
    _device("A100-PCIe-80GB", 79.1, (19.5, 156, 312, 312), 1.935, 32, (8, 0), "NVIDIA A100 data sheet, PCIe 80GB" + _MEMORY),
    _device("A100-PCIe-40GB", 39.4, (19.5, 156, 312, 312), 1.555, 32, (8, 0), "NVIDIA A100 data sheet, PCIe 40GB" + _MEMORY),
    _device("A800-80GB", 79.1, (19.5, 156, 312, 312), 2.039, 200, (8, 0), "as A100-80GB, NVLink 400 instead of 600 GB/s two ways"),
    _device("A40", 44.4, (37.4, 74.8, 149.7, 149.7), 0.696, 32, (8, 6), "NVIDIA A40 data sheet, PCIe Gen4, dense" + _NOMINAL),
    _device("A30", 23.5, (10.3, 82, 165, 165), 0.933, 32, (8, 0), "NVIDIA A30 data sheet, PCIe Gen4, dense" + _NOMINAL),
    _device("A10", 22.1, (31.2, 62.5, 125, 125), 0.600, 32, (8, 6), "NVIDIA A10 data sheet, PCIe Gen4, dense" + _MEMORY),
    _device("A10G", 21.8, (31, 35, 70, 70), 0.600, 32, (8, 6), "AWS G5, 24 GB, 600 GB/s; rates recalled, not verified: measure"),
    _device("A6000", 47.4, (38.7, 77.4, 154.8, 154.8), 0.768, 32, (8, 6), "NVIDIA RTX A6000 data sheet, dense, PCIe Gen4" + _MEMORY),
    _device("A5000", 23.5, (27.8, 55.5, 111.1, 111.1), 0.768, 32, (8, 6), "NVIDIA RTX A5000 data sheet, dense, PCIe Gen4" + _NOMINAL),
    _device("RTX6000-Ada", 47.4, (91.1, 182, 364, 364), 0.960, 32, (8, 9), "NVIDIA RTX 6000 Ada data sheet, dense, PCIe Gen4" + _NOMINAL),
    _device("RTX-PRO-6000", 94.9, (125, 250, 500, 500), 1.792, 64, (12, 0), "NVIDIA RTX PRO 6000 Blackwell data sheet; tensor rates from listings (504 TFLOP/s in fp16, 252 in tf32)"),
    _device("L40S", 44.4, (91.6, 183, 362, 362), 0.864, 32, (8, 9), "NVIDIA L40S data sheet, PCIe Gen4" + _MEMORY),
    _device("L40", 44.4, (90.5, 90.5, 181, 181), 0.864, 32, (8, 9), "NVIDIA L40 data sheet, PCIe Gen4, dense" + _MEMORY),
    _device("L4", 21.8, (30.3, 60, 121, 121), 0.300, 32, (8, 9), "NVIDIA L4 data sheet, halved for sparsity; memory: T4's share"),
    _device("V100-32GB", 31.7, (15.7, 0, 0, 125), 0.900, 150, (7, 0), "NVIDIA V100 data sheet, SXM2" + _MEMORY),
    _device("V100-16GB", 15.7, (15.7, 0, 0, 125), 0.900, 150, (7, 0), "NVIDIA V100 data sheet, SXM2" + _MEMORY),
    _device("T4", 14.5, (8.1, 0, 0, 65), 0.320, 16, (7, 5), "NVIDIA T4 data sheet, PCIe Gen3" + _MEMORY),
    _device("P100", 15.9, (10.6, 0, 0, 21.2), 0.732, 16, (6, 0), "NVIDIA P100 data sheet, SXM2 and PCIe Gen3" + _MEMORY),
    _device("RTX5090", 31.4, (104.8, 104.8, 209.5, 209.5), 1.792, 64, (12, 0), _BLACKWELL + ", fp32 sums, PCIe Gen5" + _MEMORY),
    _device("RTX5080", 15.5, (56.3, 56.3, 112.6, 112.6), 0.960, 64, (12, 0), _BLACKWELL + ", fp32 sums, PCIe Gen5" + _NOMINAL),
    _device("RTX5070Ti", 15.5, (43.9, 43.9, 87.9, 87.9), 0.896, 64, (12, 0), _BLACKWELL + ", fp32 sums, PCIe Gen5" + _NOMINAL),
    _device("RTX5070", 11.6, (30.9, 30.9, 61.7, 61.7), 0.672, 64, (12, 0), _BLACKWELL + ", fp32 sums, PCIe Gen5" + _NOMINAL),
    _device("RTX4090", 23.6, (82.6, 82.6, 165, 165), 1.008, 32, (8, 9), _ADA + ", fp32 sums, PCIe Gen4" + _MEMORY),
    _device("RTX4080", 15.6, (48.7, 48.7, 97.5, 97.5), 0.717, 32, (8, 9), _ADA + ", fp32 sums, PCIe Gen4" + _MEMORY),
    _device("RTX4070Ti", 11.6, (40.1, 40.1, 80.2, 80.2), 0.504, 32, (8, 9), _ADA + ", fp32 sums, PCIe Gen4" + _NOMINAL),
    _device("RTX4070", 11.6, (29.1, 29.1, 58.3, 58.3), 0.504, 32, (8, 9), _ADA + ", fp32 sums, PCIe Gen4" + _NOMINAL),
    _device("RTX4060Ti", 15.6, (22.1, 22.1, 44.1, 44.1), 0.288, 16, (8, 9), _ADA + ", 16 GB, fp32 sums, PCIe Gen4 ×8" + _NOMINAL),
    _device("RTX4060", 7.7, (15.1, 15.1, 30.2, 30.2), 0.272, 16, (8, 9), _ADA + ", fp32 sums, PCIe Gen4 ×8" + _NOMINAL),
    _device("RTX3090Ti", 23.6, (40, 40, 80, 80), 1.008, 32, (8, 6), _AMPERE + ", fp32 sums, PCIe Gen4" + _MEMORY),
    _device("RTX3090", 23.6, (35.6, 35.6, 71, 71), 0.936, 32, (8, 6), _AMPERE + ", fp32 sums, PCIe Gen4" + _MEMORY),
    _device("RTX3080Ti", 11.6, (34.1, 34.1, 68.2, 68.2), 0.912, 32, (8, 6), _AMPERE + ", fp32 sums, PCIe Gen4" + _NOMINAL),
    _device("RTX3080", 9.6, (29.8, 29.8, 59.5, 59.5), 0.760, 32, (8, 6), _AMPERE + ", 10 GB, fp32 sums, PCIe Gen4" + _MEMORY),
    _device("RTX3070", 7.7, (20.3, 20.3, 40.6, 40.6), 0.448, 32, (8, 6), _AMPERE + ", fp32 sums, PCIe Gen4" + _MEMORY),
    _device("RTX3060", 11.6, (12.7, 12.7, 25.5, 25.5), 0.360, 32, (8, 6), "NVIDIA GeForce RTX 3060 specifications, 12 GB, fp32 sums" + _MEMORY),
    _device("RTX2080Ti", 10.7, (13.4, 0, 0, 53.8), 0.616, 16, (7, 5), "NVIDIA Turing whitepaper, fp32 sums, PCIe Gen3" + _MEMORY),
    _device("MI300X", 191.5, (163.4, 653.7, 1307.4, 1307.4), 5.3, 64, (9, 4), "AMD Instinct MI300X data sheet, dense; links 64 GB/s each" + _MEMORY),
    _device("MI325X", 255.5, (163.4, 653.7, 1307.4, 1307.4), 6.0, 64, (9, 4), "AMD Instinct MI325X data sheet, dense; links 64 GB/s each" + _NOMINAL),
    _device("MI250X", 63.9, (23.9, 0, 191.5, 191.5), 1.6, 50, (9, 0), "AMD Instinct MI250X data sheet, one of its two dies, which PyTorch sees as a device" + _NOMINAL),
    _device("Gaudi3", 124.0, (14.3, 229, 1835, 1835), 3.67, 75, (0, 0), "Intel at Hot Chips 2024, matrix engine; fp32: half of its bf16 vector rate; links: three of 24 ports of 200 GbE; tf32 not verified" + _NOMINAL),
    _device("M1-Max", 48.0, (10.4, 0, 0, 10.4), 0.400, 10, (0, 0), "Apple M1 Max, 32 GPU cores, 64 GB of which macOS lets the GPU use three quarters"),
    _device("M2-Max", 72.0, (13.6, 0, 0, 13.6), 0.400, 10, (0, 0), "Apple M2 Max, 38 GPU cores of 128 lanes at 1.398 GHz, 96 GB of which macOS lets the GPU use three quarters"),
    _device("M2-Ultra", 144.0, (27.2, 0, 0, 27.2), 0.800, 10, (0, 0), "Apple M2 Ultra, 76 GPU cores of 128 lanes at 1.398 GHz, 192 GB of which macOS lets the GPU use three quarters"),
    _device("M3-Max", 96.0, (14.3, 0, 14.3, 14.3), 0.400, 10, (0, 0), "Apple M3 Max, 40 GPU cores of 128 lanes at 1.398 GHz, 128 GB of which macOS lets the GPU use three quarters"),
    _device("M3-Ultra", 384.0, (28.6, 0, 28.6, 28.6), 0.819, 10, (0, 0), "Apple M3 Ultra, 80 GPU cores, as two M3 Max, 512 GB of which macOS lets the GPU use three quarters"),
    _device("M4-Max", 96.0, (17.2, 0, 17.2, 17.2), 0.546, 10, (0, 0), "Apple M4 Max, 40 GPU cores of 128 lanes at 1.678 GHz, 128 GB of which macOS lets the GPU use three quarters"),
    _device("M4-Pro", 48.0, (9.2, 0, 9.2, 9.2), 0.273, 10, (0, 0), "Apple M4 Pro, 20 GPU cores, 64 GB of which macOS lets the GPU use three quarters; rate not verified"),
)  # fmt: skip
# What a name without its variant means.
_DEFAULT_VARIANTS = {
    "H100": "H100-SXM",
    "H800": "H800-SXM",
    "A100": "A100-80GB",
    "A100PCIE": "A100-PCIe-80GB",
    "A800": "A800-80GB",
    "V100": "V100-32GB",
    "RTXA6000": "A6000",
    "RTXA5000": "A5000",
    "6000ADA": "RTX6000-Ada",
    "RTX6000": "RTX6000-Ada",
    "RTXPRO6000BLACKWELL": "RTX-PRO-6000",
    "RTX4080SUPER": "RTX4080",
    "RTX4070TISUPER": "RTX4070Ti",
    "RTX4070SUPER": "RTX4070",
    "HL325L": "Gaudi3",
    **{f"APPLE{chip}": f"{chip[:2]}-{chip[2:]}" for chip in ("M1Max", "M2Max", "M3Max", "M4Max", "M4Pro", "M2Ultra", "M3Ultra")},
}
# Parts of drivers' and vendors' names that do not tell devices apart.
_AFFIXES = (
    "NVIDIA",
    "TESLA",
    "GEFORCE",
    "AMD",
    "INSTINCT",
    "INTEL",
    "GPU",
    "HBM3E",
    "HBM3",
    "SXM2",
    "SXM4",
    "SXM5",
    "SXM6",
    "GENERATION",
)
_SIZE = re.compile(r"(?<!\d)(\d{1,3})\s*GI?B(?![A-Z])")


# What PyTorch sees of the size in a device's name: firmware keeps some, and 80 GB are 74.5 or 80 GiB.
SMALLEST_SHARE, LARGEST_SHARE = 0.85, 1.05


def _short(name: str) -> str:
    short = _PUNCTUATION.sub("", name.upper())
    for affix in _AFFIXES:
        short = short.replace(affix, "")
    return short


def find_device(name: str) -> Device:
    """Return the device of a name: "H200", "a100 40gb", "NVIDIA A100-SXM4-80GB", "RTX 4090", "4090".

    >>> find_device("NVIDIA A100-SXM4-80GB").name
    'A100-80GB'
    """
    size = _SIZE.search(name.upper())
    without_size = _short(_SIZE.sub("", name.upper()))
    names = {_short(device.name): device for device in DEVICES}
    names |= {_short(variant): names[_short(full)] for variant, full in _DEFAULT_VARIANTS.items()}
    for base in (without_size, f"RTX{without_size}"):
        # "NVIDIA A100 80GB PCIe" is A100-PCIe-80GB; an H100 has no size in its name, and "H100 80GB" fits it.
        for candidate in (base, f"{base}{size[1]}GB") if size else (base,):
            found = names.get(candidate)
            if found is not None and (size is None or SMALLEST_SHARE < found.memory / (int(size[1]) * GIB) <= LARGEST_SHARE):
                return found
    short = _short(name)
    near = difflib.get_close_matches(short, names, 3, 0.5)
    if near:
        guess = f"did you mean {', '.join(dict.fromkeys(names[n].name for n in near))}?"
    else:
        guess = f"known are {', '.join(device.name for device in DEVICES)}."
    raise ValueError(
        f"gpu is {name!r}: no such device is known; {guess} Or give its memory too (--memory 80GiB): the rates are then assumed."
    )


def find_or_assume_device(name: str) -> Device:
    """Return the device of a driver's name, or an A100 of that name if it is unknown."""
    try:
        return find_device(name)
    except ValueError:
        source = f"rates of an A100, assumed, since {name} is not known: measure them with megabatch env --measure"
        return dataclasses.replace(find_device("A100-80GB"), name=name, source=source, basis="assumed")


def cpu_device() -> Device:
    """Return this machine's CPU, with assumed rates."""
    threads = torch.get_num_threads()
    memory = host_memory.total()
    rates = MappingProxyType({"fp32": 30e9 * threads})
    source = "30 GFLOP/s and 8 GB/s a thread, assumed: CPUs differ widely, measure"
    if memory is None:
        memory, source = 8 * GIB, f"8 GiB of memory, {source}"
    efficiency = Efficiency.uniform(1.0, 1.0, host_s=5e-6, step_s=0.0)
    return Device("cpu", memory, rates, 8e9 * threads, 10e9, source, efficiency, basis="assumed")
