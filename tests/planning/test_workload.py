"""The work and memory of a model follow the options of the run and the device."""

from __future__ import annotations

from typing import Any

import pytest

from megabatch import config
from megabatch.costs.counting import count_work
from megabatch.costs.hardware import find_machine
from megabatch.costs.strategy import Strategy
from megabatch.planning.request import Request
from megabatch.planning.workload import Workload, traced, workload

MIB = 2**20
RUN = config.build(config.EMBEDDED, ["compute.precision=bf16"])
REQUEST = Request(RUN, data=100_000)
# The loss of 8,192 pairs is the peak, because the chunks are small.
STRATEGY = Strategy(1, 8192, 64, 0, precision="bf16")


@pytest.fixture(scope="module")
def work() -> Workload:
    return workload(REQUEST, RUN, "bf16", find_machine("H200"))


def predicted(work: Workload, *overrides: str, gpu: str = "H200") -> Any:
    run = config.build(config.EMBEDDED, ["compute.precision=bf16", *overrides])
    return traced(REQUEST, run, work, find_machine(gpu))(STRATEGY)


def test_a_smaller_workspace_is_a_smaller_peak(work: Workload) -> None:
    usual, less, least = (
        predicted(work, *workspace) for workspace in ([], [f"compute.workspace={128 * MIB}"], [f"compute.workspace={64 * MIB}"])
    )
    # The workspace of the tiles, and the sums of 8,192 rows and columns.
    assert usual.parts["loss tiles"] == (256 + 16) * MIB and less.parts["loss tiles"] == (128 + 16) * MIB
    assert usual.peak_bytes - less.peak_bytes == 128 * MIB and less.peak_bytes - least.peak_bytes == 64 * MIB
    assert least.reserved_bytes < less.reserved_bytes < usual.reserved_bytes


def test_workspaces_are_those_of_the_devices_capability(work: Workload) -> None:
    h200, a100 = (predicted(work, gpu=gpu) for gpu in ("H200", "A100"))
    # cuBLAS has one workspace for forward and one for backward: 32 MiB each on 9.0, 8 MiB and 128 KiB before.
    assert h200.parts["workspace"] - a100.parts["workspace"] == 2 * (24 * MIB - 128 * 1024)
    assert h200.peak_bytes - a100.peak_bytes == h200.parts["workspace"] - a100.parts["workspace"]
    assert predicted(work, gpu="H100").peak_bytes == h200.peak_bytes and predicted(work, gpu="L4").peak_bytes == a100.peak_bytes


def test_towers_are_counted_as_the_device_computes_them() -> None:
    run = config.build(config.EMBEDDED, ["x.name=vit", "x.options={}"])
    cpu, h200 = (workload(Request(run, data=100_000), run, "fp32", find_machine(gpu)) for gpu in ("cpu", "H200"))
    on_cpu, on_cuda = (count_work(cpu.modules[0], cpu.inputs[0], device=device) for device in ("cpu", "cuda"))
    assert cpu.towers[0] == on_cpu != on_cuda == h200.towers[0]
    assert cpu.towers[0].forward.flops == h200.towers[0].forward.flops
    half = workload(Request(run, data=100_000), run, "bf16", find_machine("H200")).towers[0]
    assert {"attention"} == {call.op_class for call in half.forward.calls if "attention" in call.op_class}


def test_a_locked_tower_has_no_backward(work: Workload) -> None:
    run = config.build(config.EMBEDDED, ["compute.precision=bf16", "x.locked=true"])
    x, y = workload(Request(run, data=100_000), run, "bf16", find_machine("H200")).towers
    assert not x.backward.calls and x.trainable == 0 and x.parameters == work.towers[0].parameters
    assert y == work.towers[1] and y.backward.flops > y.forward.flops > 0
    # Images reach the device as bytes, texts as token ids: rows of some hundred bytes to some kB.
    assert all(100 <= tower.inputs <= 10_000 for tower in (x, y))
