"""Devices are found by the names that people and drivers use, and their rates scale as their hardware does."""

from __future__ import annotations

import pytest

from megabatch.costs.devices import DEVICES, GIB, find_device
from megabatch.costs.hardware import find_machine
from megabatch.costs.operations import BYTES_EFFICIENCY, FLOPS_EFFICIENCY
from megabatch.costs.time import interval

NAMES = {
    "8 A100": (8, "A100-80GB"),
    "8x A100 80GB": (8, "A100-80GB"),
    "8xA100-40GB": (8, "A100-40GB"),
    "a100": (1, "A100-80GB"),
    "NVIDIA A100-SXM4-40GB": (1, "A100-40GB"),
    "NVIDIA A100 80GB PCIe": (1, "A100-PCIe-80GB"),
    "NVIDIA H100 80GB HBM3": (1, "H100-SXM"),
    "h100 nvl": (1, "H100-NVL"),
    "Tesla V100-SXM2-16GB": (1, "V100-16GB"),
    "NVIDIA GeForce RTX 4090": (1, "RTX4090"),
    "2 x 3090": (2, "RTX3090"),
    "NVIDIA RTX A6000": (1, "A6000"),
    "NVIDIA RTX 6000 Ada Generation": (1, "RTX6000-Ada"),
    "AMD Instinct MI300X": (1, "MI300X"),
    "Apple M3 Max": (1, "M3-Max"),
    "Gaudi 3": (1, "Gaudi3"),
    "GB200": (1, "GB200"),
    "H20": (1, "H20"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_device_is_found_by_every_usual_spelling(name: str) -> None:
    machine = find_machine(name)
    assert (machine.gpus, machine.device.name) == NAMES[name]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_records_are_consistent(device) -> None:
    assert find_device(device.name) is device and device.source
    rates = device.rates
    assert rates["fp32"] <= rates.get("bf16", rates["fp16"]) and 5 * GIB < device.memory < 600 * GIB
    assert all(0 < share <= 0.8 for share in (*device.efficiency.flops.values(), *device.efficiency.bytes.values()))
    # A byte takes far longer to come from another device than from memory.
    assert device.link < device.bandwidth / 2


def test_a_size_that_the_device_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"did you mean.*A100-80GB"):
        find_device("A100 32GB")


def test_an_unknown_device_with_its_memory_is_assumed_and_says_so() -> None:
    with pytest.raises(ValueError, match="no such device"):
        find_machine("Frobnicator 9000")
    device = find_machine("Frobnicator 9000", memory="48GiB").device
    assert device.memory == 48 * GIB and device.basis == "assumed" and "assumed" in device.source
    low, high = interval(1.0, device)
    known = interval(1.0, find_device("A100"))
    assert low < known[0] < 1 < known[1] < high


def test_the_fitted_device_has_the_fitted_shares_and_slower_tensor_cores_are_easier_to_feed() -> None:
    h200, a100, rtx3090 = (find_device(name).efficiency for name in ("H200", "A100", "RTX3090"))
    assert dict(h200.flops) == pytest.approx(dict(FLOPS_EFFICIENCY)) and dict(h200.bytes) == pytest.approx(dict(BYTES_EFFICIENCY))
    assert h200.flops["attention"] < a100.flops["attention"] < rtx3090.flops["attention"] <= h200.flops["matmul"]
    assert rtx3090.flops["depthwise convolution"] == h200.flops["depthwise convolution"]
