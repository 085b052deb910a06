"""The search for a way to a batch, over memory and time models of a few numbers; and the time model's arithmetic."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megabatch.planning.counting import Work, count_work
from megabatch.planning.hardware import find_machine
from megabatch.planning.how import How
from megabatch.planning.search import all_ways, best_chunk, chunk_sizes, search
from megabatch.planning.time import Task, step_time

GIB = 2**30
WORK = Work(flops=175e9, bytes=0.83e9, pass_bytes=2.5e9, operations=1100, parameters=428_000_000, learning=428_000_000)
H200 = find_machine("H200")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "encoders-cuda.jsonl"


def memory(how: How) -> int:
    """A model's memory by arithmetic: state, one chunk's graph, kept graphs, embeddings."""
    state = 7 * GIB // (how.ranks if how.sharding == "fsdp2" else 1)
    graph = int((0.03 if how.checkpointing else 0.2) * GIB * how.chunk)
    return state + graph * max(1, min(how.keep, how.chunks)) + how.shard * 20_000


def seconds(how: How) -> float:
    return step_time(Task((WORK,), "clip", 768), how, find_machine("H200", how.ranks)).seconds


@given(st.integers(1, 64), st.integers(0, 13), st.floats(7.3, 500))
@settings(max_examples=150, deadline=None)
def test_what_is_chosen_fits_and_the_next_size_up_does_not(ranks, power, gib):
    ways = all_ways(ranks * 2**power, ranks, precisions=("bf16",))
    limit = int(gib * GIB)
    try:
        found = search(ways, memory, seconds, limit)
    except ValueError:
        assert all(memory(dataclasses.replace(way, chunk=1)) > limit for way in ways)
        return
    how = found.how
    assert how.shard * how.ranks == how.batch == ranks * 2**power
    assert found.peak == memory(how) <= limit
    assert found.seconds == seconds(how)
    if how.chunk < how.shard:
        assert memory(dataclasses.replace(how, chunk=2 * how.chunk, keep=0)) > limit
    if how.keep < how.chunks:
        assert memory(dataclasses.replace(how, keep=how.keep + 1)) > limit
    # No other way at its largest chunk is faster by more than what simplicity is worth.
    others = [best for way in ways if (best := best_chunk(way, memory, seconds, limit))]
    assert found.seconds <= 1.05**2 * min(other.seconds for other in others)


@given(st.floats(8, 400), st.floats(1, 4), st.booleans())
@settings(max_examples=150, deadline=None)
def test_more_memory_never_means_a_smaller_chunk_and_never_more_time(gib, more, checkpointing):
    (way,) = all_ways(8192, 1, precisions=("bf16",), checkpointing=(checkpointing,))
    less = best_chunk(way, memory, seconds, int(gib * GIB))
    rich = best_chunk(way, memory, seconds, int(gib * more * GIB))
    assert less is not None and rich is not None
    assert rich.how.chunk >= less.how.chunk
    ways = all_ways(8192, 1, precisions=("bf16",))
    assert (
        search(ways, memory, seconds, int(gib * more * GIB)).seconds <= 1.05 * search(ways, memory, seconds, int(gib * GIB)).seconds
    )


def test_a_model_that_does_not_fit_at_one_row_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"5.0 GiB that may be used: the model takes 7.0 GiB at the smallest chunk"):
        search(all_ways(64, 1, precisions=("bf16",)), memory, seconds, 5 * GIB)


@pytest.mark.parametrize("spare", range(9))
def test_as_many_chunks_are_kept_as_there_is_room_for(spare):
    # A graph in use takes 1,000 bytes a row, one that is kept 10: 8 chunks of 128 rows, the first kept one being free.
    def cheap(how):
        return 1000 * how.chunk + 10 * how.chunk * max(0, how.keep - 1)

    found = best_chunk(How(1, 1024, 1024), cheap, seconds, 128_000 + spare * 1280)
    assert found is not None
    assert (found.how.chunk, found.how.keep) == (128, min(8, 1 + spare))


def test_weights_that_do_not_fit_whole_are_sharded():
    found = search(all_ways(64, 8, precisions=("bf16",)), memory, seconds, 5 * GIB)
    assert found.how.sharding == "fsdp2"


def test_a_batch_that_ranks_cannot_share_and_no_ranks_at_all():
    with pytest.raises(ValueError, match="must be a multiple"):
        all_ways(100, 8, precisions=("bf16",))
    with pytest.raises(ValueError, match="gpus is 0"):
        all_ways(100, 0, precisions=("bf16",))


@given(st.integers(1, 10**6))
def test_chunk_sizes_rise_to_the_shard(shard):
    sizes = chunk_sizes(shard)
    assert sizes == sorted(set(sizes)) and sizes[-1] == shard and sizes[0] == (1 if shard > 1 else shard)


def test_a_step_by_hand():
    # H200 in bf16 at 60 % of 989.4 TFLOP/s, 80 % of 4.8 TB/s, 15 µs an operation, 8 ms a step: 256 rows in two chunks, none kept.
    forward = 256 * 175e9 / 593.64e12 + (256 * 0.83e9 + 2 * 2.5e9) / 3.84e12 + 2 * 1100 * 15e-6
    step = step_time(Task((WORK,), "clip", 768), How(1, 256, 128, 0, precision="bf16"), H200)
    assert step.parts["forward"] == pytest.approx(forward)
    assert step.parts["backward"] == pytest.approx(2 * forward)
    assert step.parts["recomputation"] == pytest.approx(forward)
    # 8·N²·D in fp32 at 60 % of 66.9 TFLOP/s.
    assert step.parts["loss"] == pytest.approx(8 * 256**2 * 768 / (0.6 * 66.9e12))
    assert step.parts["once a step"] == 8e-3
    assert step.seconds == pytest.approx(sum(step.parts.values()))


def test_kept_chunks_save_a_forward_checkpointing_costs_one_and_accumulation_none():
    task = Task((WORK,), "clip", 768)
    how = How(1, 1024, 256, 0, precision="bf16")

    def again(**changes):
        return step_time(task, dataclasses.replace(how, **changes), H200).parts.get("recomputation", 0.0)

    whole = again()
    assert again(keep=1) == pytest.approx(0.75 * whole)
    assert again(keep=4) == again(keep=99) == 0
    assert again(keep=4, checkpointing=True) == pytest.approx(whole)
    assert again(accumulate=True) == 0


def test_a_locked_tower_goes_forward_once():
    locked = WORK._replace(learning=0)
    parts = step_time(Task((locked,), "clip", 768), How(1, 1024, 256, 0, precision="bf16"), H200).parts
    assert "backward" not in parts and "recomputation" not in parts


def test_siglip_takes_three_quarters_of_clips_products():
    clip, siglip = (step_time(Task((WORK,), loss, 768), How(8, 4096, 256), H200).parts["loss"] for loss in ("clip", "siglip"))
    assert siglip == pytest.approx(0.75 * clip)


@given(st.integers(0, 12), st.integers(5, 10))
@settings(max_examples=60, deadline=None)
def test_ranks_share_the_work_and_add_exchange(power, rows):
    ranks, shard = 2**power, 2**rows
    task = Task((WORK,), "clip", 768)
    alone = step_time(task, How(1, shard, shard, 1, precision="bf16"), H200)
    many = step_time(task, How(ranks, shard, shard, 1, precision="bf16"), H200)
    # Weak scaling: the encoders' work on a rank is the same, the loss grows with the batch.
    assert many.parts["forward"] == pytest.approx(alone.parts["forward"])
    assert many.parts["loss"] == pytest.approx(ranks * alone.parts["loss"])
    assert many.seconds >= alone.seconds
    # Thousands of ranks included.
    assert many.seconds < 100 * alone.seconds


def test_gradients_travel_twice_their_size_round_the_ring():
    # 8 ranks: 2 · 7/8 · 4 bytes · 428 M parameters at 75 % of 450 GB/s, and the latency of a tree.
    parts = step_time(Task((WORK,), "clip", 768), How(8, 256, 256, 1, precision="bf16"), H200).parts
    assert parts["gradients' exchange"] == pytest.approx(2 * 7 / 8 * 4 * 428e6 / (0.75 * 450e9) + 2 * 3 * 20e-6)


def test_products_are_counted_as_written_down():
    # 2·in·out for each row; (rows, 10) → (rows, 20).
    work = count_work(nn.Linear(10, 20), lambda rows: torch.zeros(rows, 10))
    assert (work.flops, work.parameters, work.learning) == (400, 220, 220)


class Attention(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attention_on_a_cpu_is_counted(precision):
    # torch.utils.flop_counter counts 0: two products of length² · head for each head, 2 FLOP each.
    work = count_work(Attention(), lambda rows: torch.zeros(rows, 4, 16, 8), precision)
    assert work.flops == 2 * 2 * 4 * 16 * 16 * 8


def test_a_depthwise_convolution_is_not_overcounted():
    # 9 products for each of 32 · 8 · 8 outputs. The model's backward is twice that; torch's formula counts 16 times as much.
    work = count_work(nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False), lambda rows: torch.zeros(rows, 32, 8, 8))
    assert work.flops == 2 * 9 * 32 * 8 * 8


def test_frozen_weights_do_not_count_as_learning():
    model = nn.Sequential(nn.Linear(10, 20).requires_grad_(False), nn.Linear(20, 5))
    work = count_work(model, lambda rows: torch.zeros(rows, 10))
    assert (work.parameters, work.learning) == (220 + 105, 105)


@pytest.fixture(scope="module")
def vit_l_14():
    """The towers that benchmarks/encoders measured, built of nothing and counted."""
    transformers = pytest.importorskip("transformers")
    from benchmarks.encoders.model import VIT_L_14

    with torch.device("meta"):
        model = transformers.CLIPModel(transformers.CLIPConfig(**VIT_L_14))
    model = model.to_empty(device="cpu")

    class Named(nn.Module):
        def __init__(self, encoder, name):
            super().__init__()
            self.encoder, self.name = encoder, name

        def forward(self, inputs):
            return self.encoder(**{self.name: inputs}).pooler_output

    images = count_work(Named(model.vision_model, "pixel_values"), lambda rows: torch.zeros(rows, 3, 224, 224), "bf16")
    texts = count_work(Named(model.text_model, "input_ids"), lambda rows: torch.zeros(rows, 77, dtype=torch.int64), "bf16")
    return Task((images, texts), "clip", 768)


def test_measured_steps_on_an_h200_are_predicted_within_a_fifth(vit_l_14):
    rows = [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()]
    ours = [row for row in rows if row["contestant"] in ("megabatch", "uncached") and row.get("seconds") and not row["compiled"]]
    assert len(ours) >= 12
    for row in ours:
        kept = row["kept"] or {"image": 1, "text": 1}
        how = How(1, row["pairs"], row["chunk"] or row["pairs"], min(kept.values()), precision="bf16")
        predicted = step_time(vit_l_14, how, H200).seconds
        assert predicted == pytest.approx(row["seconds"], rel=0.2), row
        useful = 3 * sum(work.flops for work in vit_l_14.towers) * row["pairs"]
        assert useful == pytest.approx(row["useful_flops"], rel=0.03)


# One forward of a row of open_clip's ViT-B-32 in bf16, as `count_work` counts its picture and its text tower.
VIT_B_32 = (
    Work(8817623040.0, 34190940.0, 527142936.0, 270, 87849216, 87849216),
    Work(5959540736.0, 44503332.0, 330308488.0, 301, 63428096, 63428096),
)


def test_another_model_on_an_h200_is_predicted_within_a_fifth():
    points = json.loads((RESULTS.parent / "clip-b32-profile-cuda.json").read_text("utf-8"))["found"]["points"]
    assert [point["batch"] for point in points] == [256, 512, 1024, 2048]
    for point in points:
        how = How(1, point["batch"], point["chunk"], point["keep"], precision="bf16")
        assert step_time(Task(VIT_B_32, "clip", 512), how, H200).seconds == pytest.approx(point["seconds"], rel=0.2)


# arXiv 2410.17243, figure 4: Inf-CL, ViT-L/14, 8 × A800, gradient cache in chunks of 128, fp16. Nothing was fitted to these.
INF_CL = {32_768: 25.0, 65_536: 49.4, 131_072: 98.3, 262_144: 200.3}


def test_the_published_steps_of_inf_cl_are_predicted_within_a_fifth(vit_l_14):
    for pairs, published in INF_CL.items():
        predicted = step_time(vit_l_14, How(8, pairs // 8, 128, 0, precision="fp16"), find_machine("8xA800")).seconds
        assert predicted == pytest.approx(published, rel=0.2)
