"""Kinds of operations: by which names, layouts and shapes kernels are slower, how far they fill a device, what they call unseen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megabatch.costs.counting import Pass, count_work
from megabatch.costs.operations import class_of, utilization_of

HALF = torch.bfloat16


def kind(operator: str, args: Any, out: Any = (), has_flops: bool = False) -> str:
    return class_of(operator, args, out, has_flops=has_flops)


def convolution(x: Tensor, *weight: int, stride: int = 1, groups: int = 1) -> str:
    """The kind of a forward; that of its backward is the same."""
    w = torch.zeros(*weight, dtype=x.dtype)
    rest = (None, [stride] * 2, [0, 0], [1, 1], False, [0, 0], groups)
    forward = kind("convolution", (x, w, *rest), has_flops=True)
    backward = kind("convolution_backward", (x, x, w, *rest, [True, True, False]), has_flops=True)
    assert backward == ("depthwise gradient" if forward == "depthwise convolution" else forward)
    return forward


def images(channels: int, side: int, dtype: torch.dtype = HALF, last: bool = False) -> Tensor:
    x = torch.zeros(2, channels, side, side, dtype=dtype)
    return x.to(memory_format=torch.channels_last) if last else x


def test_a_convolution_of_one_pixel_is_direct_where_it_is_a_product_as_it_lies() -> None:
    assert convolution(images(64, 28), 128, 64, 1, 1) == "direct convolution"
    # 14 · 14 pixels are no multiple of 8; a stride leaves pixels out; a larger kernel needs channels as neighbours.
    assert convolution(images(64, 14), 128, 64, 1, 1) == "convolution"
    assert convolution(images(64, 28), 128, 64, 1, 1, stride=2) == "convolution"
    assert convolution(images(64, 28), 128, 64, 3, 3) == "convolution"
    assert convolution(images(64, 14, last=True), 128, 64, 3, 3) == "direct convolution"


def test_convolutions_of_groups_and_of_few_channels() -> None:
    assert convolution(images(64, 28), 64, 8, 3, 3, groups=8) == "grouped convolution"
    assert convolution(images(3, 28), 64, 3, 7, 7, stride=2) == "few-channel convolution"
    for dtype in (HALF, torch.float32):
        assert convolution(images(32, 28, dtype), 32, 1, 3, 3, groups=32) == "depthwise convolution"
    # cuDNN has kernels of its own for one layout, in half precision.
    assert convolution(images(32, 28, last=True), 32, 1, 7, 7, groups=32) == "depthwise convolution, channels last"
    assert convolution(images(32, 28, torch.float32, last=True), 32, 1, 7, 7, groups=32) == "depthwise convolution"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linalg_vector_norm", "reduction"),
        ("amax", "reduction"),
        ("var_mean", "reduction"),
        ("clamp_min", "elementwise"),
        ("maximum", "elementwise"),
        ("rsqrt", "elementwise"),
        ("masked_fill", "elementwise"),
        ("replication_pad2d", "copy"),
        ("constant_pad_nd", "copy"),
        ("native_group_norm", "normalisation"),
        ("_log_softmax", "softmax"),
        ("index_put", "gather or scatter"),
        ("max_pool2d_with_indices", "gather or scatter"),
        ("roll", "gather or scatter"),
        ("scatter_add", "gather or scatter"),
    ],
)
def test_names_that_hold_parts_of_others_are_told_apart(name: str, expected: str) -> None:
    x = torch.zeros(4, 8)
    assert kind(name, (x,), x) == expected


def test_an_operation_on_tensors_that_lie_alike_is_elementwise_and_any_other_strided() -> None:
    x = torch.zeros(4, 6, 8)
    assert kind("add", (x, x), x) == kind("mul", (x, torch.zeros(())), x) == kind("mul", (x, 2.0), x) == "elementwise"
    across = x.transpose(1, 2)
    # What is turned alike lies alike; a tensor turned, one that is spread over another, or one with gaps does not.
    assert kind("add", (across, across), across) == "elementwise"
    assert kind("add", (across, across), across.contiguous()) == "strided"
    assert kind("add", (x, torch.zeros(8)), x) == kind("where", (x[:, :1] > 0, x, x), x) == "strided"
    assert kind("div", (x[:, :1].expand(4, 6, 8), 2.0), x) == "strided"
    wide = torch.zeros(4, 6, 16)[..., :8]
    assert kind("silu", (wide,), x) == kind("silu_", (wide,), wide) == "strided"
    # No operand of an elementwise operation: what is looked up by it.
    assert kind("nll_loss_backward", (torch.zeros(()), torch.zeros(5, 7), torch.zeros(5)), torch.zeros(5, 7)) == "elementwise"


def test_a_copy_turns_elements_rows_or_nothing() -> None:
    x = torch.zeros(4, 6, 8)
    assert kind("_to_copy", (x,), x.half()) == kind("clone", (x.mT,), x.mT) == "copy"
    assert kind("clone", (x.transpose(0, 1),), torch.zeros(6, 4, 8)) == "strided"
    assert kind("clone", (x.mT,), torch.zeros(4, 8, 6)) == "transpose"
    # A dimension of one element is next to nothing.
    assert kind("clone", (torch.zeros(4, 1, 8).mT,), torch.zeros(4, 8, 1)) == "copy"
    assert kind("cat", ([x, x],), torch.zeros(8, 6, 8)) == "copy"
    assert kind("stack", ([x.transpose(0, 1)] * 2,), torch.zeros(2, 6, 4, 8)) == "strided"


def test_rows_of_a_norm_are_narrow_or_not() -> None:
    for width, expected in ((512, "narrow normalisation"), (768, "normalisation")):
        x = torch.zeros(4, width)
        assert kind("native_layer_norm", (x, [width], None, None, 1e-5), x) == expected
        assert kind("native_layer_norm_backward", (x, x, [width]), x) == expected
        assert kind("_fused_rms_norm", (x, [width], None, None), x) == expected


def test_blocks_tiles_and_words_that_go_partly_empty() -> None:
    x = torch.zeros(4, 8)
    # One element at a time: half a word of halves, a word of floats, and the half of them where both are written.
    assert utilization_of("strided", (x.bfloat16(),), x.bfloat16()) == 0.5
    assert utilization_of("transpose", (x,), x) == utilization_of("strided", (x.long(),), x) == 1.0
    assert utilization_of("strided", (x.bfloat16(),), x) == 0.75
    # 200 channels keep all multiprocessors busy; with channels as neighbours, blocks are cut otherwise.
    for channels, utilization in ((50, 0.25), (200, 1.0), (512, 1.0)):
        assert utilization_of("half batch norm", (images(channels, 4), torch.zeros(channels)), ()) == utilization
    assert utilization_of("batch norm", (images(50, 4, last=True),), ()) == 1.0
    # Groups of 24 channels are computed as 32.
    for width, utilization in ((24, 0.75), (48, 0.75), (32, 1.0), (4, 1.0)):
        assert utilization_of("grouped convolution", (images(4 * width, 4), torch.zeros(4 * width, width, 3, 3)), ()) == utilization
    for width, utilization in ((49, 0.6), (196, 1.0)):
        assert utilization_of("unaligned matmul", (torch.zeros(8, 16), torch.zeros(16, width)), ()) == utilization
    assert utilization_of("matmul", (torch.zeros(7, 7),), ()) == 1.0


class Turned(nn.Module):
    """A norm of what is turned, as in an MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 32), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).mT).square()


def test_a_norm_of_turned_rows_copies_them_into_order_first() -> None:
    def implicit(costs: Pass) -> list[tuple[str, float, float]]:
        return [(call.op_class, call.times * call.bytes, call.utilization) for call in costs.calls if call.implicit]

    work = count_work(Turned(), lambda rows: torch.zeros(rows, 8, 16))
    # 8 · 32 numbers of 4 bytes are read and written: of the input forward, and of it again backward.
    assert implicit(work.forward) == implicit(work.backward) == [("transpose", 2 * 4 * 8 * 32, 1.0)]
    assert not implicit(count_work(nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8)), lambda rows: torch.zeros(rows, 16)).forward)
