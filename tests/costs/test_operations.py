"""Classes of operations by name, layout and shape, utilization, and implicit operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from megabatch.costs.counting import Pass, count_work
from megabatch.costs.operations import FLOPS_EFFICIENCY, class_of, flops_of, is_transposed, utilization_of

HALF = torch.bfloat16


def op_class(operator: str, args: Any, out: Any = (), has_flops: bool = False) -> str:
    return class_of(operator, args, out, has_flops=has_flops)


def convolution(x: Tensor, *weight: int, stride: int = 1, groups: int = 1) -> str:
    """Return the class of a convolution's forward; its backward has the same, or that of a depthwise gradient."""
    w = torch.zeros(*weight, dtype=x.dtype)
    rest = (None, [stride] * 2, [0, 0], [1, 1], False, [0, 0], groups)
    forward = op_class("convolution", (x, w, *rest), has_flops=True)
    backward = op_class("convolution_backward", (x, x, w, *rest, [True, True, False]), has_flops=True)
    assert backward == ("depthwise gradient" if forward == "depthwise convolution" else forward)
    return forward


def images(channels: int, side: int, dtype: torch.dtype = HALF, last: bool = False) -> Tensor:
    x = torch.zeros(2, channels, side, side, dtype=dtype)
    return x.to(memory_format=torch.channels_last) if last else x


def test_a_pointwise_convolution_is_direct_if_it_is_a_matrix_product_without_copies() -> None:
    assert convolution(images(64, 28), 128, 64, 1, 1) == "direct convolution"
    # 14 · 14 pixels are no multiple of 8; a stride skips pixels; a larger kernel needs channels last.
    assert convolution(images(64, 14), 128, 64, 1, 1) == "convolution"
    assert convolution(images(64, 28), 128, 64, 1, 1, stride=2) == "convolution"
    assert convolution(images(64, 28), 128, 64, 3, 3) == "convolution"
    assert convolution(images(64, 14, last=True), 128, 64, 3, 3) == "direct convolution"


def test_grouped_and_few_channel_convolutions() -> None:
    assert convolution(images(64, 28), 64, 8, 3, 3, groups=8) == "grouped convolution"
    assert convolution(images(3, 28), 64, 3, 7, 7, stride=2) == "few-channel convolution"
    for dtype in (HALF, torch.float32):
        assert convolution(images(32, 28, dtype), 32, 1, 3, 3, groups=32) == "depthwise convolution"
    # cuDNN has depthwise kernels for channels last in half precision.
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
        ("max_pool2d_with_indices", "pooling"),
        ("roll", "gather or scatter"),
        ("scatter_add", "gather or scatter"),
    ],
)
def test_names_that_contain_others_are_distinguished(name: str, expected: str) -> None:
    x = torch.zeros(4, 8)
    assert op_class(name, (x,), x) == expected


def test_operands_of_the_same_layout_are_elementwise_and_others_strided() -> None:
    x = torch.zeros(4, 6, 8)
    assert op_class("add", (x, x), x) == op_class("mul", (x, torch.zeros(())), x) == op_class("mul", (x, 2.0), x) == "elementwise"
    across = x.transpose(1, 2)
    # Tensors transposed alike have the same layout; one transposed, broadcast or with gaps does not.
    assert op_class("add", (across, across), across) == "elementwise"
    assert op_class("add", (across, across), across.contiguous()) == "strided"
    assert op_class("add", (x, torch.zeros(8)), x) == op_class("where", (x[:, :1] > 0, x, x), x) == "strided"
    assert op_class("div", (x[:, :1].expand(4, 6, 8), 2.0), x) == "strided"
    wide = torch.zeros(4, 6, 16)[..., :8]
    assert op_class("silu", (wide,), x) == op_class("silu_", (wide,), wide) == "strided"
    # The labels are no operand of an elementwise operation: they are looked up.
    assert op_class("nll_loss_backward", (torch.zeros(()), torch.zeros(5, 7), torch.zeros(5)), torch.zeros(5, 7)) == "elementwise"


def test_a_copy_may_transpose_or_move_rows() -> None:
    x = torch.zeros(4, 24, 32)
    assert op_class("_to_copy", (x,), x.half()) == op_class("clone", (x.mT,), x.mT) == "copy"
    assert op_class("clone", (x.transpose(0, 1),), torch.zeros(24, 4, 32)) == "strided"
    assert op_class("clone", (x.mT,), torch.zeros(4, 32, 24)) == "transpose"
    # A dimension of size one does not change the layout.
    assert op_class("clone", (torch.zeros(4, 1, 8).mT,), torch.zeros(4, 8, 1)) == "copy"
    assert op_class("cat", ([x, x],), torch.zeros(8, 24, 32)) == "copy"
    assert op_class("stack", ([x.transpose(0, 1)] * 2,), torch.zeros(2, 24, 4, 32)) == "strided"


def test_normalisation_of_narrow_rows_has_a_class() -> None:
    for width, expected in ((512, "narrow normalisation"), (768, "normalisation")):
        x = torch.zeros(4, width)
        assert op_class("native_layer_norm", (x, [width], None, None, 1e-5), x) == expected
        assert op_class("native_layer_norm_backward", (x, x, [width]), x) == expected
        assert op_class("_fused_rms_norm", (x, [width], None, None), x) == expected


def test_utilization_of_blocks_tiles_and_words() -> None:
    x = torch.zeros(4, 8)
    # One element at a time: half a word in bf16, a word in fp32, three quarters for a cast between them.
    assert utilization_of("strided", (x.bfloat16(),), x.bfloat16()) == 0.5
    assert utilization_of("transpose", (x,), x) == utilization_of("strided", (x.long(),), x) == 1.0
    assert utilization_of("strided", (x.bfloat16(),), x) == 0.75
    # 200 channels keep all multiprocessors busy; with channels last, blocks are divided otherwise.
    for channels, utilization in ((50, 0.25), (200, 1.0), (512, 1.0)):
        assert utilization_of("half batch norm", (images(channels, 4), torch.zeros(channels)), ()) == utilization
    assert utilization_of("batch norm", (images(50, 4, last=True),), ()) == 1.0
    # Groups of 24 channels are computed as 32.
    for width, utilization in ((24, 0.75), (48, 0.75), (32, 1.0), (4, 1.0)):
        assert utilization_of("grouped convolution", (images(4 * width, 4), torch.zeros(4 * width, width, 3, 3)), ()) == utilization
    for width, utilization in ((49, 0.6), (196, 1.0)):
        assert utilization_of("unaligned matmul", (torch.zeros(8, 16), torch.zeros(16, width)), ()) == utilization
    assert utilization_of("matmul", (torch.zeros(7, 7),), ()) == 1.0


class TransposedNorm(nn.Module):
    """A layer norm of a transposed tensor, as in an MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 32), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).mT).square()


def test_a_norm_of_transposed_rows_copies_them_first() -> None:
    def implicit(costs: Pass) -> list[tuple[str, float, float]]:
        return [(call.op_class, call.times * call.bytes, call.utilization) for call in costs.calls if call.implicit]

    work = count_work(TransposedNorm(), lambda rows: torch.zeros(rows, 8, 16))
    # 8 · 32 elements of 4 bytes are read and written: the input in forward, and again in backward. 8 are too few for a transpose.
    assert implicit(work.forward) == implicit(work.backward) == [("strided", 2 * 4 * 8 * 32, 1.0)]
    assert not implicit(count_work(nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8)), lambda rows: torch.zeros(rows, 16)).forward)


def test_overlapping_windows_make_pooling_slower_than_its_bytes() -> None:
    images = torch.empty(2, 8, 32, 32, device="meta")
    out = torch.empty(2, 8, 32, 32, device="meta")

    def seconds(operator, *args):
        return flops_of(operator, args, {}, out) / (FLOPS_EFFICIENCY["pooling"] * 66.9e12)

    pool, backward = torch.ops.aten.avg_pool2d.default, torch.ops.aten.avg_pool2d_backward.default
    whole, strided = ([3, 3], [1, 1], [1, 1]), ([2, 2], [2, 2], [0, 0])
    for name, expected in (
        ("avg_pool2d", "pooling"),
        ("max_pool2d_with_indices", "pooling"),
        ("_adaptive_avg_pool2d", "gather or scatter"),
    ):
        assert class_of(name, (images,), out, has_flops=True) == expected
    # In backward an input belongs to nine windows instead of one.
    assert seconds(backward, out, images, *whole) > 2.5 * seconds(backward, out, images, *strided) > 0
    assert 16e-12 * out.numel() == pytest.approx(seconds(pool, images, *whole), rel=0.05)


def test_copies_along_a_narrow_dimension_are_not_transposes() -> None:
    for width, transposed in ((8, False), (64, True)):
        tensor = torch.empty(4, width, 4096, device="meta").transpose(1, 2)
        assert is_transposed(tensor, torch.empty(4, 4096, width, device="meta")) is transposed


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_flops_are_those_of_torchs_counter(groups: int, transposed: bool) -> None:
    aten, a = torch.ops.aten, torch.empty
    images, weight = a(3, 4, 9, 9), a(4, 6 // groups, 3, 3) if transposed else a(6, 4 // groups, 3, 3)
    convolution = (images, weight, None, [2, 2], [1, 1], [1, 1], transposed, [0, 0], groups)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.mm.default, (a(3, 4), a(4, 5))),
        (aten.addmm.default, (a(5), a(3, 4), a(4, 5))),
        (aten.bmm.default, (a(2, 3, 4), a(2, 4, 5))),
        (aten.baddbmm.default, (a(2, 3, 5), a(2, 3, 4), a(2, 4, 5))),
        (aten.convolution.default, convolution),
    ]
    for operator, args in calls:
        out = operator(*args)
        assert flops_of(operator, args, {}, out) == flop_registry[operator._overloadpacket](*args, out_val=out) > 0
