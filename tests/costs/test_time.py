"""Predicted seconds of a step, compared with arithmetic by hand and with measured and published steps."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_works import small_work

from megabatch.costs.counting import Call, Pass, Work, count_work
from megabatch.costs.devices import Efficiency, find_device
from megabatch.costs.hardware import find_machine
from megabatch.costs.models import SkipCompute
from megabatch.costs.operations import BYTES_EFFICIENCY, FLOPS_EFFICIENCY, OpClass
from megabatch.costs.strategy import Strategy
from megabatch.costs.time import StepWork, seconds_of, step_time
from megabatch.objectives import LossOptions

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
WORK = small_work(175e9, 0.83e9, 2.5e9, 1100, 428_000_000, inputs=150_000)
TASK = StepWork((WORK,), "clip", 768)
H200 = find_machine("H200")


def parts_of(strategy: Strategy, task: StepWork = TASK) -> dict[str, float]:
    return step_time(task, strategy, H200).parts


def test_a_step_limited_by_the_device_is_computed_as_by_hand() -> None:
    step = step_time(TASK, Strategy(1, 256, 128, 0, precision="bf16"), H200)
    # 72 % of 989.4 TFLOP/s are 712.368, 80 % of 4.8 TB/s are 3.84: 256 · 175 GFLOP take 62.8889 ms, the 256 · 0.83 GB of rows and
    # the 2.5 GB of each of two chunks 56.6354 ms. The host launches 2 · 1,100 operations in 92.4 ms meanwhile.
    forward = 62.8889e-3 + 56.6354e-3
    assert step.parts["forward"] == pytest.approx(forward, rel=1e-5)
    assert step.parts["recomputation"] == pytest.approx(forward, rel=1e-5)
    # Everything twice, and the second chunk's gradients are added to the first's: 12 bytes for each of 428 M parameters, 1.3375 ms.
    assert step.parts["backward"] == pytest.approx(2 * forward + 1.3375e-3, rel=1e-5)
    # 256 rows of 150 kB twice, at 50 GB/s; 8·N²·D at 72 % of 66.9 TFLOP/s in fp32; 84 bytes for each parameter.
    assert step.parts["inputs"] == pytest.approx(1.536e-3)
    assert step.parts["loss"] == pytest.approx(8.3594e-6, rel=1e-4)
    assert step.parts["optimizer"] == pytest.approx(9.3625e-3)
    assert step.parts["once a step"] == 10e-3
    assert step.seconds == pytest.approx(sum(step.parts.values())) == pytest.approx(500.342e-3, rel=1e-5)


def test_a_step_limited_by_the_host_is_computed_as_by_hand() -> None:
    # 32 chunks of 1,100 operations at 42 µs are 1.4784 s, where the device needs 0.14 s. Unrecorded ones take 0.6 of that.
    parts = parts_of(Strategy(1, 256, 8, 0, precision="bf16"))
    assert parts["forward"] == pytest.approx(0.6 * 1.4784)
    assert parts["recomputation"] == pytest.approx(1.4784)
    assert parts["backward"] == pytest.approx(2 * 1.4784 + 31 * 1.3375e-3)
    # Half of the chunks are kept: their only forward is recorded by autograd.
    half = parts_of(Strategy(1, 256, 8, 16, precision="bf16"))
    assert half["forward"] == pytest.approx(0.8 * 1.4784) and half["recomputation"] == pytest.approx(1.4784 / 2)
    assert half["inputs"] == pytest.approx(1.5 * 256 * 150e3 / 50e9)
    # If all chunks are kept or accumulated, every forward is recorded.
    for whole in (Strategy(1, 256, 8, 32, precision="bf16"), Strategy(1, 256, 8, 0, precision="bf16", accumulate=True)):
        assert parts_of(whole)["forward"] == pytest.approx(1.4784)
        assert parts_of(whole)["inputs"] == pytest.approx(256 * 150e3 / 50e9)


def test_a_cpu_computes_and_launches_one_after_the_other() -> None:
    cpu = find_machine("cpu")
    cpu = dataclasses.replace(cpu, device=dataclasses.replace(cpu.device, rates={"fp32": 30e9}, bandwidth=8e9))
    small = small_work(3e9, 0.4e9, 0.4e9, 1000, 1_000_000, inputs=150_000)
    # 10 rows in two chunks: 1 s of matrix products, 0.5 s for bytes per row and 0.1 s for bytes per chunk, 2 · 1,000 operations at
    # 5 µs.
    parts = step_time(StepWork((small,), "supervised"), Strategy(1, 10, 5, 0), cpu).parts
    assert parts["recomputation"] == pytest.approx(1.6 + 0.010)
    assert parts["forward"] == pytest.approx(1.6 + 0.6 * 0.010)
    assert "inputs" not in parts and "once a step" not in parts


def test_an_operation_takes_the_longer_of_compute_and_memory_time() -> None:
    # Attention in bf16: 20 % of 989.4 TFLOP/s, a quarter of 4.8 TB/s; 1,000 rows of a GFLOP take 5.0536 ms, of 12 MB 10 ms.
    strategy = Strategy(1, 1000, 1000, 1, precision="bf16")
    light, heavy = (seconds_of(Pass((Call("attention", 1e9, moved, 0.0, 3),)), strategy, H200) for moved in (6e6, 12e6))
    assert light == pytest.approx(3 * 5.0536e-3, rel=1e-4) and heavy == pytest.approx(3 * 10e-3)


def test_every_class_has_an_efficiency_below_one() -> None:
    assert set(BYTES_EFFICIENCY) == set(get_args(OpClass))
    assert set(FLOPS_EFFICIENCY) == {
        name
        for name in BYTES_EFFICIENCY
        if any(part in name for part in ("matmul", "convolution", "gradient", "attention", "pooling"))
    }
    assert all(0 < share < 1 for share in (*FLOPS_EFFICIENCY.values(), *BYTES_EFFICIENCY.values()))
    doubled = Efficiency().scaled(2.0, 1.0)
    assert (doubled.flops["matmul"], doubled.flops["unaligned matmul"]) == (1.0, 0.38) and doubled.bytes == Efficiency().bytes


def test_classes_below_the_bandwidth_run_at_the_pace_of_the_devices_threads() -> None:
    shares = {name: find_device(name).efficiency.bytes for name in ("H200", "H100", "A100", "L40S")}
    assert shares["H200"] == pytest.approx(dict(Efficiency().bytes))
    # The same multiprocessors, and 3.35 instead of 4.8 TB/s: as many bytes per second.
    assert shares["H100"]["normalisation"] * 3.35 == pytest.approx(0.34 * 4.8)
    # 108 multiprocessors of 64 units instead of 132 of 128, at 1.41 instead of 1.98 GHz: 19.5 / 64 instead of 66.9 / 128.
    assert shares["A100"]["strided"] * 2.039 == pytest.approx(0.50 * 4.8 * (19.5 / 64) / (66.9 / 128))
    # Classes limited by the bandwidth stay so, and none is faster.
    assert all(each["elementwise"] == max(each.values()) == pytest.approx(0.8) for each in shares.values())
    assert shares["L40S"]["normalisation"] == 0.8


def test_convolutions_in_fp32_use_tf32_and_matrix_products_do_not() -> None:
    device = H200.device
    assert device.flops_per_second("fp32", "matmul") == pytest.approx(0.72 * 66.9e12)
    assert device.flops_per_second("fp32", "convolution") == pytest.approx(0.45 * 494.7e12)
    assert device.flops_per_second("fp32", "attention in fp32") == pytest.approx(0.35 * 66.9e12)
    assert device.flops_per_second("bf16", "convolution") == pytest.approx(0.45 * 989.4e12)
    # A V100 has no TF32, and its slower tensor cores are easier to feed: a larger share of its fp32 rate.
    v100 = find_device("V100")
    assert 0.45 * 15.7e12 < v100.flops_per_second("fp32", "convolution") == v100.flops_per_second("fp32", "matmul")


def test_convolutions_of_few_channels_use_no_tensor_cores() -> None:
    for op_class, share in (("few-channel convolution", 0.41), ("depthwise convolution", 0.045), ("depthwise gradient", 0.013)):
        assert (
            H200.device.flops_per_second("bf16", op_class)
            == H200.device.flops_per_second("fp32", op_class)
            == pytest.approx(share * 66.9e12)
        )
    with pytest.raises(ValueError, match="precision is 'bf16'"):
        find_device("V100").flops_per_second("bf16", "few-channel convolution")


def test_low_utilization_takes_longer_on_a_gpu_and_not_on_a_cpu() -> None:
    full = Call("half batch norm", 0.0, 1e6, 0.0)
    strategy, cpu = Strategy(1, 1000, 1000, 1), find_machine("cpu")
    for call, machine, ratio in (
        (full._replace(utilization=0.25), H200, 4),
        (full._replace(utilization=0.25), cpu, 1),
        (full._replace(implicit=True), H200, 1),
    ):
        seconds = [seconds_of(Pass((each,)), strategy, machine) for each in (call, full)]
        assert seconds[0] == pytest.approx(ratio * seconds[1])
    # A GB at 13 % of 4.8 TB/s; on a CPU, implicit operations are not counted.
    assert seconds[1] == pytest.approx(1e9 / (0.13 * 4.8e12))
    assert seconds_of(Pass((full._replace(implicit=True),)), strategy, cpu) == 0


def test_inputs_are_copied_over_the_pcie_generation_of_the_device() -> None:
    assert [find_device(name).host_copy for name in ("H200", "A100", "L4", "V100", "T4")] == [50e9, 25e9, 25e9, 12e9, 12e9]


def test_kept_chunks_save_a_forward_checkpointing_costs_one_and_accumulation_none() -> None:
    strategy = Strategy(1, 1024, 256, 0, precision="bf16")

    def recomputation(**changes: object) -> float:
        return parts_of(dataclasses.replace(strategy, **changes)).get("recomputation", 0.0)

    whole = recomputation()
    assert recomputation(keep=1) == pytest.approx(0.75 * whole)
    assert recomputation(keep=4) == recomputation(keep=99) == 0
    assert recomputation(keep=4, checkpointing=True) == pytest.approx(whole)
    assert recomputation(accumulate=True) == 0
    assert recomputation(accumulate=True, checkpointing=True) == pytest.approx(whole)
    # Recomputation inside the encoder copies no inputs.
    assert parts_of(dataclasses.replace(strategy, keep=4, checkpointing=True))["inputs"] == pytest.approx(1024 * 150e3 / 50e9)


def test_a_locked_tower_runs_one_forward() -> None:
    locked = small_work(175e9, 0.83e9, 2.5e9, 1100, 428_000_000, locked=True, inputs=150_000)
    parts = parts_of(Strategy(1, 1024, 256, 0, precision="bf16", checkpointing=True), StepWork((locked,), "clip", 768))
    assert not {"backward", "recomputation", "optimizer", "gradients' exchange"} & set(parts)
    assert parts["inputs"] == pytest.approx(1024 * 150e3 / 50e9)
    both = parts_of(Strategy(1, 1024, 256, 0, precision="bf16"), StepWork((locked, WORK), "clip", 768))
    assert both["backward"] == pytest.approx(parts_of(Strategy(1, 1024, 256, 0, precision="bf16"))["backward"])


def test_siglip_takes_three_quarters_of_the_flops_of_clip() -> None:
    clip, siglip = (parts_of(Strategy(8, 4096, 256), StepWork((WORK,), loss, 768))["loss"] for loss in ("clip", "siglip"))
    assert siglip == pytest.approx(0.75 * clip)


def test_a_side_compared_with_itself_takes_half_the_flops_of_a_product() -> None:
    def seconds(*directions: str) -> float:
        return parts_of(Strategy(8, 4096, 256), StepWork((WORK,), "infonce", 768, loss_options=LossOptions(directions)))["loss"]

    assert seconds() == seconds("x_to_y") == seconds("x_to_y", "y_to_x")
    assert seconds("x_to_y", "x_to_x") == pytest.approx(1.5 * seconds())
    assert seconds("x_to_y", "y_to_x", "x_to_x", "y_to_y") == pytest.approx(2 * seconds())


@given(st.integers(0, 12), st.integers(5, 10))
@settings(max_examples=60, deadline=None)
def test_ranks_share_the_work_and_add_communication(power: int, rows: int) -> None:
    ranks, shard = 2**power, 2**rows
    alone = step_time(TASK, Strategy(1, shard, shard, 1, precision="bf16"), H200)
    many = step_time(TASK, Strategy(ranks, shard, shard, 1, precision="bf16"), H200)
    # Weak scaling: the encoders' work on a rank is the same, the loss grows with the batch.
    for part in ("forward", "backward", "inputs", "optimizer"):
        assert many.parts[part] == pytest.approx(alone.parts[part])
    assert many.parts["loss"] == pytest.approx(ranks * alone.parts["loss"])
    assert many.seconds >= alone.seconds
    # Thousands of ranks included.
    assert many.seconds < 100 * alone.seconds


@given(st.integers(0, 10), st.integers(0, 10), st.integers(0, 64), st.sampled_from(["bf16", "fp32"]))
@settings(max_examples=100, deadline=None)
def test_more_rows_more_chunks_and_fewer_kept_ones_never_take_less_time(
    power: int, halvings: int, keep: int, precision: str
) -> None:
    shard = 2**power
    strategy = Strategy(1, shard, max(1, shard >> halvings), keep, precision=precision)
    seconds = step_time(TASK, strategy, H200).seconds
    assert step_time(TASK, dataclasses.replace(strategy, shard=2 * shard), H200).seconds > seconds
    assert step_time(TASK, dataclasses.replace(strategy, keep=keep + 1), H200).seconds <= seconds * (1 + 1e-9)
    if strategy.chunk > 1 and not keep:
        assert step_time(TASK, dataclasses.replace(strategy, chunk=strategy.chunk // 2), H200).seconds > seconds


def test_ddp_sends_twice_the_size_of_the_gradients() -> None:
    # 8 ranks: 2 · 7/8 · 4 bytes · 428 M parameters at 75 % of 450 GB/s, and the latency of a tree.
    parts = parts_of(Strategy(8, 256, 256, 1, precision="bf16"))
    assert parts["gradients' exchange"] == pytest.approx(2 * 7 / 8 * 4 * 428e6 / (0.75 * 450e9) + 2 * 3 * 20e-6)


def test_gradients_in_bf16_send_half_the_bytes_and_are_cast() -> None:
    # Casting to bf16 reads 4 bytes and writes 2, dividing 2 and 2, casting back 2 and 4, at 3.84 TB/s.
    parts = parts_of(Strategy(8, 256, 256, 1, precision="bf16", gradient_exchange="bf16"))
    sent, cast = 2 * 7 / 8 * 2 * 428e6 / (0.75 * 450e9), 16 * 428e6 / 3.84e12
    assert parts["gradients' exchange"] == pytest.approx(sent + cast + 2 * 3 * 20e-6)
    assert "gradients' exchange" not in parts_of(Strategy(1, 256, 256, 1, precision="bf16", gradient_exchange="bf16"))


def test_sharded_gradients_in_bf16_save_half_of_their_reduction() -> None:
    # Half of what the two tests below add up for gradients: a reduce-scatter inside a node, an all-reduce of shards across nodes.
    machine = dataclasses.replace(H200, gpus=32, network=50e9)
    saved = {}
    for sharding, ranks in (("fsdp2", 8), ("hsdp", 32)):
        plain = Strategy(ranks, 512, 512, 0, precision="bf16", sharding=sharding)
        both = (plain, dataclasses.replace(plain, gradient_exchange="bf16"))
        before, after = (step_time(TASK, strategy, machine).parts["gradients' exchange"] for strategy in both)
        saved[sharding] = before - after
    assert saved["fsdp2"] == pytest.approx(4.4385e-3 / 2, rel=1e-4)
    assert saved["hsdp"] - saved["fsdp2"] == pytest.approx(2 * 3 / 4 * 2 * 428e6 / 8 / (0.75 * 50e9))


def test_fsdp_overlaps_gathers_and_copies_weights_for_every_chunk() -> None:
    # Two gathers of 4.4385 ms overlap with a chunk; 1.712 GB are copied twice at 3.84 TB/s, 1.7833 ms, with 0.24 ms of latency.
    # Gradients are reduce-scattered once, 4.4385 ms.
    sharded = [Strategy(8, 512, chunk, 0, precision="bf16", sharding="fsdp2") for chunk in (512, 256)]
    one, two = (parts_of(strategy)["gradients' exchange"] for strategy in sharded)
    assert one == pytest.approx(1.7833e-3 + 0.24e-3 + 4.4385e-3, rel=1e-4)
    assert two - one == pytest.approx(1.7833e-3 + 0.24e-3, rel=1e-4)
    assert parts_of(sharded[0])["optimizer"] == pytest.approx(9.3625e-3 / 8)


def test_hybrid_sharding_gathers_inside_a_node_and_adds_up_shards_across_nodes() -> None:
    # 32 ranks in four nodes of 8: as in one node, and 2 · 3/4 of an eighth of the gradients over the network at 75 % of 50 GB/s.
    machine = dataclasses.replace(H200, gpus=32, network=50e9)
    one, four = (
        step_time(TASK, Strategy(ranks, 512, 512, 0, precision="bf16", sharding="hsdp"), machine).parts["gradients' exchange"]
        for ranks in (8, 32)
    )
    assert one == parts_of(Strategy(8, 512, 512, 0, precision="bf16", sharding="fsdp2"))["gradients' exchange"]
    assert four - one == pytest.approx(2 * 3 / 4 * 4 * 428e6 / 8 / (0.75 * 50e9) + 2 * 5 * 20e-6)


def count_towers(layers: int) -> tuple[Work, Work]:
    """Count the towers that benchmarks/encoders measures, with this many layers."""
    from benchmarks.encoders.model import VIT_L_14, Clip

    shallow = {name: {**VIT_L_14[name], "num_hidden_layers": layers} for name in ("vision_config", "text_config")}
    with SkipCompute():
        model = Clip({**VIT_L_14, **shallow}, "cpu")
    images = count_work(model.image, lambda rows: torch.zeros(rows, 3, 224, 224, dtype=torch.uint8), "bf16")
    texts = count_work(model.text, lambda rows: torch.zeros(rows, 77, dtype=torch.int64), "bf16")
    return images, texts


def deepen(one: Work, two: Work, layers: int) -> Work:
    """Return the work of a tower of `layers` layers: each further layer adds what the second one adds to the first."""

    def calls(name: str) -> Pass:
        first, second = ({call._replace(times=1): call.times for call in getattr(work, name).calls} for work in (one, two))
        times = {call: first.get(call, 0) + (layers - 1) * (second[call] - first.get(call, 0)) for call in second}
        return Pass(tuple(call._replace(times=number) for call, number in times.items()))

    numbers = {
        name: getattr(one, name) + (layers - 1) * (getattr(two, name) - getattr(one, name)) for name in ("parameters", "trainable")
    }
    return one._replace(forward=calls("forward"), backward=calls("backward"), **numbers)


@pytest.fixture(scope="module")
def vit_l_14() -> StepWork:
    """24 layers for images, 12 for texts: counting all of them takes 16 s, counting one and two layers takes 3."""
    pytest.importorskip("transformers")
    (image, text), (image_2, text_2) = count_towers(1), count_towers(2)
    return StepWork((deepen(image, image_2, 24), deepen(text, text_2, 12)), "clip", 768)


@pytest.mark.slow
def test_the_work_of_all_layers_is_extrapolated_exactly(vit_l_14: StepWork) -> None:
    deep, counted = vit_l_14.towers[1], count_towers(12)[1]
    assert set(deep.forward.calls) == set(counted.forward.calls) and set(deep.backward.calls) == set(counted.backward.calls)
    assert (deep.parameters, deep.trainable) == (counted.parameters, counted.trainable)


def test_measured_steps_on_an_h200_are_predicted_within_a_fifth(vit_l_14: StepWork) -> None:
    rows = [json.loads(line) for line in (RESULTS / "encoders-cuda.jsonl").read_text("utf-8").splitlines()]
    ours = [row for row in rows if row["contestant"] in ("megabatch", "uncached") and row.get("seconds") and not row["compiled"]]
    assert len(ours) >= 12
    for row in ours:
        kept = row["kept"] or {"image": 1, "text": 1}
        strategy = Strategy(1, row["pairs"], row["chunk"] or row["pairs"], min(kept.values()), precision="bf16")
        assert step_time(vit_l_14, strategy, H200).seconds == pytest.approx(row["seconds"], rel=0.2), row
        useful = 3 * sum(work.forward.flops for work in vit_l_14.towers) * row["pairs"]
        assert useful == pytest.approx(row["useful_flops"], rel=0.03)
        counted = sum(work.forward.flops + work.backward.flops for work in vit_l_14.towers) * row["pairs"]
        assert counted == pytest.approx(useful, rel=0.03)


# arXiv 2410.17243, figure 4: Inf-CL, ViT-L/14, 8 × A800, gradient cache in chunks of 128, fp16. Not used for any fit.
INF_CL = {32_768: 25.0, 65_536: 49.4, 131_072: 98.3, 262_144: 200.3}


def test_the_published_steps_of_inf_cl_are_predicted_within_a_fifth(vit_l_14: StepWork) -> None:
    for pairs, published in INF_CL.items():
        predicted = step_time(vit_l_14, Strategy(8, pairs // 8, 128, 0, precision="fp16"), find_machine("8xA800")).seconds
        assert predicted == pytest.approx(published, rel=0.2)


@pytest.mark.parametrize("model", ["clip-b32", "clip-b16"])
def test_steps_of_runs_on_an_h200_were_predicted_within_a_fifth(model: str) -> None:
    points = json.loads((RESULTS / f"{model}-profile-cuda.json").read_text("utf-8"))["found"]["points"]
    assert len(points) >= 2
    for point in points:
        assert point["predicted_seconds"] == pytest.approx(point["seconds"], rel=0.2), point
