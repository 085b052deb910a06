"""Workspaces of kernels, compared with sizes that were measured on an H200 and with arithmetic by hand."""

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
def test_sums_over_rows_take_the_measured_partial_sums(rows: int, width: int, mib: float) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        assert reduction_bytes(meta(rows, width, dtype=dtype), [0], HOPPER) == mib * MIB


def test_partial_sums_depend_on_multiprocessors_and_layout() -> None:
    # 18 blocks for 2,304 outputs in vectors of 4; 108 multiprocessors hold 16 each: 96 blocks share an output, with 128
    # accumulators each.
    assert reduction_bytes(meta(8192, 2304), [0], AMPERE) == 4 * 2304 * 96 * 128
    # Splitting a dimension changes nothing.
    assert reduction_bytes(meta(8, 1024, 2304), [0, 1], HOPPER) == reduction_bytes(meta(8192, 2304), [0], HOPPER)
    assert reduction_bytes(meta(8192, 1152, 2), [0], HOPPER) == reduction_bytes(meta(8192, 2304), [0], HOPPER)
    assert reduction_bytes(meta(2304, 8192).T, [0], HOPPER) < MIB
    # Few rows, enough outputs to fill the device, or an empty tensor: no second block.
    assert reduction_bytes(meta(64, 768), [0], HOPPER) == 0
    assert reduction_bytes(meta(8192, 400_000), [0], HOPPER) == 0
    assert reduction_bytes(meta(4096, 8192), [1], HOPPER) == 0
    assert reduction_bytes(meta(0, 768), [0], HOPPER) == reduction_bytes(meta(), None, HOPPER) == 0
    # One output: 132 multiprocessors hold four blocks of 512 threads, with one accumulator each.
    assert reduction_bytes(meta(4096, 4096), None, HOPPER) == 132 * 4 * 4


def conv(rows: int, channels: int, side: int, out: int, kernel: int, stride: int = 1, dtype: torch.dtype = torch.float32) -> tuple:
    after = side // stride if kernel < side else 1
    tensors = ((rows, channels, side, side), (out, channels, kernel, kernel), (rows, out, after, after))
    return *(meta(*shape, dtype=dtype) for shape in tensors), (stride, stride), 1


def test_convolutions_take_the_measured_workspaces() -> None:
    half = torch.bfloat16
    # ResNet-50 at 64 rows. 3 × 3: copies of input, output and weights; in bf16 three channels are padded to eight.
    assert convolution_bytes(*conv(64, 64, 56, 64, 3)) == (49 + 49) * MIB + 64 * 64 * 9 * 4
    assert convolution_bytes(*conv(64, 3, 224, 64, 7, 2, half)) == (98 + 49) * MIB + 64 * 8 * 49 * 2
    # 1 × 1: no copies, unless the 7 × 7 pixels are not aligned; with a stride always copies.
    assert convolution_bytes(*conv(64, 64, 56, 256, 1)) == 0
    assert convolution_bytes(*conv(64, 512, 7, 2048, 1)) == (6.125 + 24.5) * MIB
    assert convolution_bytes(*conv(64, 1024, 14, 2048, 1, 2)) == 73.5 * MIB


def test_weight_gradients_take_partial_results() -> None:
    # One product per sample: 64 × 256 × 64 elements in fp32, in either precision.
    for dtype in (torch.float32, torch.bfloat16):
        assert weight_gradient_bytes(*conv(64, 256, 56, 64, 1, dtype=dtype)) == 4 * MIB
    # 16 partial results of half a MiB, 3 of 2.25 MiB: within 8 MiB.
    assert weight_gradient_bytes(*conv(64, 256, 56, 512, 1, 2)) == (196 + 98 + 8) * MIB
    assert weight_gradient_bytes(*conv(64, 256, 14, 256, 3)) == (12.25 + 12.25 + 2.25 + 3 * 2.25) * MIB
    # Outputs of one pixel: one matrix product sums over the batch.
    for function in (convolution_bytes, weight_gradient_bytes):
        assert function(*conv(32, 512, 7, 4096, 7)) == 0


def test_channels_last_and_depthwise_convolutions_take_no_workspace() -> None:
    inputs, weight, outputs, stride, groups = conv(64, 64, 56, 64, 3)
    last = inputs.to(memory_format=torch.channels_last)
    deep = meta(64, 1, 3, 3)
    for function in (convolution_bytes, weight_gradient_bytes):
        assert function(last, weight, outputs, stride, groups) == 0
        assert function(inputs, deep, outputs, stride, 64) == 0


def test_attention_accumulates_the_querys_gradient_in_fp32() -> None:
    query = meta(64, 12, 197, 64, dtype=torch.bfloat16)
    backward = aten._scaled_dot_product_flash_attention_backward.default
    # Measured on an H200, where cuDNN's kernel is preferred: 37.515 MiB. The flash kernel rounds 197 up to 256.
    assert KernelWorkspaces(HOPPER).of(backward, (query, query), None) == [64 * 12 * 197 * 65 * 4]
    assert KernelWorkspaces(AMPERE).of(backward, (query, query), None) == [64 * 12 * 256 * 65 * 4]


def test_embedding_gradients_take_partial_sums_and_sorted_indices() -> None:
    def workspace(indices: int) -> list[int]:
        ids = meta(indices, dtype=torch.int64)
        return KernelWorkspaces(HOPPER).of(aten.embedding_dense_backward.default, (meta(indices, 768), ids, 50257, -1, False), None)

    # GPT-2 at 8 × 1,024: measured 26.399 MiB of sums, and the sorted indices and positions.
    assert workspace(8192) == [(819 + 8192) * 768 * 4 + 4 * 8192 * 8]
    assert workspace(3072) == []


class Branches(nn.Module):
    """Two gradients are added at `z`, to which nothing else refers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        z = x * self.scale
        return (z * 2).sum() + (z * 3).sum()


def rows_of_a_mib(rows: int) -> Tensor:
    return torch.zeros(rows, MIB // 4)


def test_two_gradients_of_one_tensor_are_added_in_place() -> None:
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        Branches()(rows_of_a_mib(32)).backward()
    events = profiler.profiler.kineto_results.events()
    changes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns()) if event.name() == "[memory]"]
    real = max(sum(changes[:place]) for place in range(1, len(changes) + 1))
    predicted = predict_memory(Branches, rows_of_a_mib, 32, Setup(device="cpu"))
    # The input and two more; with a separate sum it would be three more.
    assert real == pytest.approx(3 * 32 * MIB, rel=0.01)
    assert predicted.peak_bytes == pytest.approx(real, rel=0.01)


def test_a_remainder_of_up_to_a_mib_is_not_split_off() -> None:
    def remainders(mib: float) -> int:
        prediction = predict_memory(Branches, lambda rows: torch.zeros(rows, int(mib * MIB) // 4), 1)
        assert sum(prediction.parts.values()) == prediction.peak_bytes
        return prediction.parts.get("rests", 0)

    # Three blocks from segments of 22 MiB: a remainder of half a MiB stays with each; one of 1.5 MiB is split off.
    assert remainders(21.5) == 3 * MIB // 2
    assert remainders(20.5) == 0


def test_step_counts_are_on_the_device_only_for_the_fused_optimizer() -> None:
    def state(fused: bool) -> int:
        setup = Setup(fused=fused)
        return predict_memory(lambda: nn.Linear(256, 256, bias=False), lambda rows: torch.zeros(rows, 256), 4, setup).parts[
            "optimizer"
        ]

    assert state(False) == 2 * 256 * 256 * 4
    assert state(True) == state(False) + 512
