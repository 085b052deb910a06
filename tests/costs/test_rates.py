"""Measured rates: plausible on this machine, restored from their file, used by a plan."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from small_works import RUN, TOOLS

from megabatch import cli
from megabatch.costs.counting import count_work
from megabatch.costs.hardware import find_machine
from megabatch.costs.rates import Rates, as_text, read_rates, write_rates
from megabatch.measuring import rates, timing
from megabatch.measuring.rates import measure_here, measure_rates
from megabatch.planning.planner import plan
from megabatch.planning.problem import choose_precision
from megabatch.training.distributed import ranks

H200 = Rates("NVIDIA H200", "cuda", 139 * 2**30, 8, {"fp32": 5e13, "bf16": 8e14}, 4e12, 5e10, 3e11, 8, "2.13.0", "2026-11-15")
KEPT = Path(__file__).parents[2] / "benchmarks" / "results" / "rates-cuda.json"


def test_rates_of_this_machine_are_plausible():
    measured = measure_here(seconds=0.02)
    assert measured.kind == "cpu" and measured.device and measured.memory > 2**30
    # From a slow core to a large server.
    assert 1e8 < measured.products["fp32"] < 1e14
    assert 1e8 < measured.bandwidth < 1e13
    assert (measured.copy, measured.link, measured.ranks) == (None, None, 1)
    assert "fp32" in as_text(measured) and "GB/s" in as_text(measured)
    # A launch takes at least a few hundred instructions, on a core that may be shared.
    assert measured.host is not None and 1e-7 < measured.host < 5e-3
    assert f"{1e6 * measured.host:,.3g} µs per launched operation" in as_text(measured)


def test_a_plan_for_this_machine_measures_it_unless_another_is_named(monkeypatch, capsys):
    monkeypatch.setattr(rates, "QUICK_SECONDS", 0.01)
    measured = rates.quick_rates()
    assert measured is not None and measured.kind == "cpu" and 1e8 < measured.products["fp32"] < 1e14
    asked = []

    def planned(model=None, **options):
        asked.append(options.get("rates"))
        raise ValueError("enough")

    monkeypatch.setattr("megabatch.planning.planner.plan", planned)
    monkeypatch.setattr(rates, "quick_rates", lambda: measured)
    for arguments in ([], ["--gpu", "H200"], ["--memory", "80GiB"]):
        assert cli.main(["plan", "ViT-B/32", "--data", "1M", *arguments]) == 2
    assert asked == [measured, None, None]


def test_a_machine_that_cannot_be_measured_is_assumed(monkeypatch):
    monkeypatch.setattr(rates, "device_memory", lambda device: None)
    assert rates.quick_rates() is None


def test_a_slow_precision_is_measured_within_the_time_limit(monkeypatch):
    # Even the smallest matrix product takes longer than the time limit.
    sizes = []

    def slow(work, device, times):
        sizes.append(work().shape[0])
        return 1.0

    for module in (rates, timing):
        monkeypatch.setattr(module, "seconds_of", slow)
    assert rates._product(torch.device("cpu"), torch.float32, 0.25) == 2 * 64**3
    assert max(sizes) == 64


def test_the_host_time_is_per_counted_operation(monkeypatch):
    # A layer of a transformer, forward and backward, in one second.
    monkeypatch.setattr(rates, "seconds_each", lambda work, device, seconds: 1.0)
    calls = round(1 / rates.host_seconds(torch.device("cpu"), 0.25))
    assert 40 < calls < 200
    model = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    work = count_work(model, lambda rows: torch.zeros(rows, 4, 16), device="cpu")
    assert calls == work.forward.operations + work.backward.operations


def rates_of_rank(rank, size):
    from megabatch.config import Compute

    with ranks(Compute(device="cpu")) as world_rank:
        return measure_rates(world_rank.device, world_rank.group, 0.02)


@pytest.mark.slow
def test_ranks_measure_their_link(world):
    for measured in world.run(2, rates_of_rank):
        assert measured.ranks == 2 and 1e6 < measured.link < 1e12
        assert "sent by each of 2 ranks" in as_text(measured)


def test_rates_are_restored_from_their_file(tmp_path):
    known = dataclasses.replace(H200, host=3e-5)
    assert read_rates(write_rates(known, tmp_path / "new" / "rates.json")) == known


def test_a_file_without_the_host_time_can_be_read(tmp_path):
    table = {"measured": "rates", **dataclasses.asdict(H200)}
    del table["host"]
    (tmp_path / "rates.json").write_text(json.dumps(table))
    assert read_rates(tmp_path / "rates.json") == H200 and H200.host is None
    assert "per launched operation" not in as_text(H200)
    # The host's time is then assumed.
    assert find_machine(rates=tmp_path / "rates.json").device.efficiency.host_s == 42e-6


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"measured": "fit"}',
        *(json.dumps({"measured": "rates", **dataclasses.asdict(H200), name: 0}) for name in ("bandwidth", "host")),
    ],
)
def test_a_file_without_rates_is_refused(text, tmp_path):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(ValueError, match=r"file.json: holds no rates .*megabatch env --measure"):
        find_machine(rates=tmp_path / "file.json")
    with pytest.raises(ValueError, match="no such file"):
        find_machine(rates=tmp_path / "nowhere.json")


def test_a_machine_with_measured_rates():
    machine = find_machine(rates=H200)
    assert (machine.gpus, machine.device.name, machine.device.memory) == (8, "NVIDIA H200", 139 * 2**30)
    assert machine.device.source == "measured on NVIDIA H200, 2026-11-15"
    # Shares of the peak: large matrix products 0.75, those of a step 0.72; measured copies 0.88, elementwise operations 0.8.
    assert machine.device.flops_per_second("bf16") == pytest.approx(0.96 * 8e14)
    assert machine.device.flops_per_second("bf16", "attention") == pytest.approx(0.2 / 0.75 * 8e14)
    assert machine.device.bytes_per_second("elementwise") == pytest.approx(0.8 / 0.88 * 4e12)
    # A measured link is used in full.
    assert machine.link == pytest.approx(3e11)
    # Rates that were not measured come from the data sheet.
    assert machine.device.rates["tf32"] == find_machine("H200").device.rates["tf32"]
    assert find_machine("4xH200", rates=H200).gpus == 4
    assert find_machine(memory="80GiB", rates=H200).device.memory == 80 * 2**30


def test_a_plan_uses_the_measured_host_time():
    def with_host(host):
        return plan(RUN, tools=TOOLS, batch=1024, gpus=1, rates=dataclasses.replace(H200, host=host))

    quick, usual, slow = (with_host(host) for host in (1e-9, None, 10e-3))
    assert quick.seconds_per_step <= usual.seconds_per_step < slow.seconds_per_step
    # The towers' 1,800 operations, forward and backward, at 10 ms: the device computes in much less.
    assert slow.strategy.chunk == 1024 and slow.time["forward"] + slow.time["backward"] == pytest.approx(18.0)
    assert find_machine(rates=dataclasses.replace(H200, host=10e-3)).device.efficiency.host_s == 10e-3


def test_rates_measured_on_an_h200_agree_with_its_data_sheet_and_efficiency():
    measured, known = find_machine(rates=KEPT).device, find_machine("H200").device
    assert measured.efficiency.host_s == pytest.approx(known.efficiency.host_s, rel=0.2)
    for precision in ("fp32", "bf16"):
        assert measured.flops_per_second(precision) == pytest.approx(known.flops_per_second(precision), rel=0.1)
    assert measured.bytes_per_second("elementwise") == pytest.approx(known.bytes_per_second("elementwise"), rel=0.1)
    assert read_rates(KEPT).copy == pytest.approx(known.host_copy, rel=0.2)


def test_rates_of_another_device_are_refused():
    with pytest.raises(ValueError, match="gpu is 'A100', but the rates were measured on NVIDIA H200"):
        find_machine("A100", rates=H200)


def test_a_cpu_trains_in_fp32_by_default():
    cpu = dataclasses.replace(H200, device="some CPU", kind="cpu", gpus=1, products={"fp32": 1e11, "bf16": 1e12}, copy=None)
    machine = find_machine(rates=cpu)
    assert machine.device.name == "cpu" and machine.device.flops_per_second("fp32") == pytest.approx(0.75e11)
    # The efficiencies by class are those of CUDA kernels, not of a CPU's.
    assert machine.device.flops_per_second("fp32", "depthwise convolution") == pytest.approx(0.75e11)
    assert machine.device.bytes_per_second("gather or scatter") == pytest.approx(0.88 * 4e12)
    assert (machine.device.efficiency.host_s, machine.device.efficiency.step_s) == (5e-6, 0.0)
    assert choose_precision(None, machine) == "fp32"
    assert choose_precision("bf16", machine) == "bf16"
