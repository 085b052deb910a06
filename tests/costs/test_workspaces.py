"""Memory that kernels take while they run: sizes that an H200's allocator was seen to give out, and arithmetic by hand."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from megabatch.costs.memory import Setup, predict_memory
from megabatch.costs.memory.workspaces import KernelWorkspaces, convolution_bytes, reduction_bytes, weight_gradient_bytes

MIB = 2**20
HOPPER, AMPERE = (9, 0), (8, 0)
aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("rows", "width", "mib"),
    [
        # Gradients of biases: ViT-B/16 at 64 rows, GPT-2 at 8 × 1,024, ViT-L/14 at 64.
        (64 * 197, 768, 73.875),
        (8 * 1024, 2304, 132.75),
        (8 * 1024, 3072, 132.0),
        (64 * 257, 1024, 128.5),
    ],
)
def test_sums_over_rows_keep_the_partial_sums_that_were_measured(rows: int, width: int, mib: float) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        assert reduction_bytes(meta(rows, width, dtype=dtype), [0], HOPPER) == mib * MIB


def test_partial_sums_follow_from_multiprocessors_and_layout() -> None:
    # 18 blocks across 2,304 outputs in fours; 108 multiprocessors hold 16 each: 96 share an output, 128 accumulators each.
    assert reduction_bytes(meta(8192, 2304), [0], AMPERE) == 4 * 2304 * 96 * 128
    # The same dimensions taken apart are the same sum.
    assert reduction_bytes(meta(8, 1024, 2304), [0, 1], HOPPER) == reduction_bytes(meta(8192, 2304), [0], HOPPER)
    assert reduction_bytes(meta(8192, 1152, 2), [0], HOPPER) == reduction_bytes(meta(8192, 2304), [0], HOPPER)
    assert reduction_bytes(meta(2304, 8192).T, [0], HOPPER) < MIB
    # Few rows, enough outputs to fill the device, nothing: no second block.
    assert reduction_bytes(meta(64, 768), [0], HOPPER) == 0
    assert reduction_bytes(meta(8192, 400_000), [0], HOPPER) == 0
    assert reduction_bytes(meta(4096, 8192), [1], HOPPER) == 0
    assert reduction_bytes(meta(0, 768), [0], HOPPER) == reduction_bytes(meta(), None, HOPPER) == 0
    # One output: 132 multiprocessors hold four blocks of 512 threads, an accumulator each.
    assert reduction_bytes(meta(4096, 4096), None, HOPPER) == 132 * 4 * 4


def conv(rows: int, channels: int, side: int, out: int, kernel: int, stride: int = 1, dtype: torch.dtype = torch.float32) -> tuple:
    after = side // stride if kernel < side else 1
    tensors = ((rows, channels, side, side), (out, channels, kernel, kernel), (rows, out, after, after))
    return *(meta(*shape, dtype=dtype) for shape in tensors), (stride, stride), 1


def test_convolutions_take_the_workspaces_that_were_measured() -> None:
    half = torch.bfloat16
    # ResNet-50 at 64 rows. 3 × 3: input, output and weights laid out anew; in bf16 three channels are filled up to eight.
    assert convolution_bytes(*conv(64, 64, 56, 64, 3)) == (49 + 49) * MIB + 64 * 64 * 9 * 4
    assert convolution_bytes(*conv(64, 3, 224, 64, 7, 2, half)) == (98 + 49) * MIB + 64 * 8 * 49 * 2
    # 1 × 1: as they lie, unless 7 × 7 pixels are in the way; strided ones never.
    assert convolution_bytes(*conv(64, 64, 56, 256, 1)) == 0
    assert convolution_bytes(*conv(64, 512, 7, 2048, 1)) == (6.125 + 24.5) * MIB
    assert convolution_bytes(*conv(64, 1024, 14, 2048, 1, 2)) == 73.5 * MIB


def test_gradients_of_weights_keep_parts_of_their_sum_apart() -> None:
    # A product a sample: 64 × 256 × 64 numbers of fp32, in either precision.
    for dtype in (torch.float32, torch.bfloat16):
        assert weight_gradient_bytes(*conv(64, 256, 56, 64, 1, dtype=dtype)) == 4 * MIB
    # 16 parts of half a MiB, 3 of 2.25 MiB: 8 MiB are not exceeded.
    assert weight_gradient_bytes(*conv(64, 256, 56, 512, 1, 2)) == (196 + 98 + 8) * MIB
    assert weight_gradient_bytes(*conv(64, 256, 14, 256, 3)) == (12.25 + 12.25 + 2.25 + 3 * 2.25) * MIB
    # One pixel is left: a product that sums over the batch by itself.
    for function in (convolution_bytes, weight_gradient_bytes):
        assert function(*conv(32, 512, 7, 4096, 7)) == 0


def test_channels_last_and_depthwise_convolutions_are_taken_as_they_lie() -> None:
    inputs, weight, outputs, stride, groups = conv(64, 64, 56, 64, 3)
    last = inputs.to(memory_format=torch.channels_last)
    deep = meta(64, 1, 3, 3)
    for function in (convolution_bytes, weight_gradient_bytes):
        assert function(last, weight, outputs, stride, groups) == 0
        assert function(inputs, deep, outputs, stride, 64) == 0


def test_attention_sums_the_querys_gradient_in_fp32() -> None:
    query = meta(64, 12, 197, 64, dtype=torch.bfloat16)
    backward = aten._scaled_dot_product_flash_attention_backward.default
    # Measured on an H200, where cuDNN's kernel is preferred: 37.515 MiB. The other rounds 197 up to 256.
    assert KernelWorkspaces(HOPPER).of(backward, (query, query), None) == [64 * 12 * 197 * 65 * 4]
    assert KernelWorkspaces(AMPERE).of(backward, (query, query), None) == [64 * 12 * 256 * 65 * 4]


def test_embeddings_sum_parts_of_the_rows_that_share_an_index() -> None:
    def taken(indices: int) -> list[int]:
        ids = meta(indices, dtype=torch.int64)
        return KernelWorkspaces(HOPPER).of(aten.embedding_dense_backward.default, (meta(indices, 768), ids, 50257, -1, False), None)

    # GPT-2 at 8 × 1,024: measured 26.399 MiB of sums; the sorted indices and places besides.
    assert taken(8192) == [(819 + 8192) * 768 * 4 + 4 * 8192 * 8]
    assert taken(3072) == []


class Branches(nn.Module):
    """Two gradients meet at `z`, which nothing else keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        z = x * self.scale
        return (z * 2).sum() + (z * 3).sum()


def rows_of_a_mib(rows: int) -> Tensor:
    return torch.zeros(rows, MIB // 4)


def test_gradients_that_meet_are_added_in_place() -> None:
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        Branches()(rows_of_a_mib(32)).backward()
    events = profiler.profiler.kineto_results.events()
    changes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns()) if event.name() == "[memory]"]
    real = max(sum(changes[:place]) for place in range(1, len(changes) + 1))
    predicted = predict_memory(Branches, rows_of_a_mib, 32, Setup(device="cpu"))
    # The input and two more: with a sum of its own it would be three more.
    assert real == pytest.approx(3 * 32 * MIB, rel=0.01)
    assert predicted.peak_bytes == pytest.approx(real, rel=0.01)


def test_a_rest_of_up_to_a_mib_stays_with_its_block() -> None:
    def rests(mib: float) -> int:
        made = predict_memory(Branches, lambda rows: torch.zeros(rows, int(mib * MIB) // 4), 1)
        assert sum(made.parts.values()) == made.peak_bytes
        return made.parts.get("rests", 0)

    # Three blocks out of segments of 22 MiB: half a MiB is left with each; one and a half are split off.
    assert rests(21.5) == 3 * MIB // 2
    assert rests(20.5) == 0


def test_counts_of_steps_are_on_the_device_for_the_fused_optimizer_alone() -> None:
    def state(fused: bool) -> int:
        setup = Setup(fused=fused)
        return predict_memory(lambda: nn.Linear(256, 256, bias=False), lambda rows: torch.zeros(rows, 256), 4, setup).parts[
            "optimizer"
        ]

    assert state(False) == 2 * 256 * 256 * 4
    assert state(True) == state(False) + 512
