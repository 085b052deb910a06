"""Counted costs of forward and backward, compared with arithmetic by hand: FLOPs, bytes, operations and their classes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megabatch.costs.counting import Call, Pass, count_work
from megabatch.costs.operations import FLOPS_EFFICIENCY


def rows_of(*shape: int):
    return lambda rows: torch.zeros(rows, *shape)


def calls_of(costs: Pass, *classes: str) -> list[Call]:
    return [call for call in costs.calls if call.op_class in classes]


def with_flops(costs: Pass) -> list[tuple[str, float]]:
    """Return class and FLOPs of every call that has FLOPs."""
    return [(call.op_class, call.flops) for call in costs.calls for _ in range(call.times) if call.flops]


def test_a_matrix_product_is_counted_as_by_hand() -> None:
    # 2 · in · out per row; (rows, 10) → (rows, 20).
    work = count_work(nn.Linear(10, 20), rows_of(10))
    assert (work.forward.flops, work.parameters, work.trainable, work.inputs) == (400, 220, 220, 40)
    # Forward reads a row of 10 and writes one of 20, in fp32; the weights and the bias are read once.
    assert calls_of(work.forward, "matmul") == [Call("matmul", 400, 4 * 30, 4 * 220)]
    # The inputs need no gradient. The output's gradient is one expanded element, read once; a weight gradient of 200 is written.
    assert calls_of(work.backward, "matmul") == [Call("matmul", 400, 4 * 10, 4 * 200 + 4)]


def test_equal_operations_are_grouped_into_one_call() -> None:
    work = count_work(nn.Sequential(*(nn.Linear(16, 16) for _ in range(5))), rows_of(16))
    assert [(call.times, call.flops) for call in calls_of(work.forward, "matmul")] == [(5, 512)]
    # All layers but the first compute a gradient of their inputs, too.
    assert (work.forward.flops, work.backward.flops) == (5 * 512, 9 * 512)
    more = count_work(nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))), rows_of(16))
    # A layer is one matrix product in forward; two in backward, and the sum for the bias.
    assert more.forward.operations - work.forward.operations == 1
    assert more.backward.operations - work.backward.operations == 3


def test_costs_per_row_do_not_depend_on_the_number_of_rows() -> None:
    work = count_work(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), lambda rows: torch.zeros(3 * rows, 8))
    assert work.forward.flops == 3 * 2 * 2 * 8 * 64
    # The activation reads and writes 64 elements for each of three rows.
    (activation,) = (call for call in calls_of(work.forward, "elementwise") if call.bytes)
    assert (activation.bytes, activation.fixed) == (3 * 2 * 64 * 4, 0)


class Attention(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.weight, self.causal = nn.Parameter(torch.ones(8)), causal

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=self.causal)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attention_is_counted_in_both_directions_and_causal_attention_by_half(precision: str, device: str) -> None:
    # Two products of length² · head for each of 4 heads, 2 FLOPs each; five in backward. torch.utils.flop_counter says 0 on a CPU.
    forward = 2 * 2 * 4 * 16 * 16 * 8
    op_class = "attention in fp32" if precision == "fp32" else "attention"
    for causal, share in ((False, 1), (True, 0.5)):
        work = count_work(Attention(causal), rows_of(4, 16, 8), precision, device=device)
        assert with_flops(work.forward) == [(op_class, share * forward)]
        assert with_flops(work.backward) == [(op_class, share * 2.5 * forward)]


def test_flash_attention_moves_no_score_matrix() -> None:
    # Scores of 256 × 256 for each head, in half precision, are 131 kB: they are not written.
    work = count_work(Attention(), rows_of(4, 256, 8), "bf16")
    (attention,) = calls_of(work.forward, "attention")
    assert attention.bytes < 256 * 256 * 2


def convolution(*channels: int, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(*channels, 3, padding=1, groups=groups, bias=False)


def test_the_backward_of_a_depthwise_convolution_is_not_overcounted() -> None:
    # 9 products for each of 32 · 8 · 8 outputs; torch's formula counts 32 times as many in backward.
    forward, gradient = 2 * 9 * 32 * 8 * 8, "depthwise gradient"
    alone = count_work(convolution(32, 32, groups=32), rows_of(32, 8, 8))
    assert with_flops(alone.forward) == [("depthwise convolution", forward)]
    assert with_flops(alone.backward) == [(gradient, forward)]
    # After another convolution, its input needs a gradient, too.
    pair = nn.Sequential(nn.Conv2d(32, 32, 1, bias=False), convolution(32, 32, groups=32))
    point = 2 * 32 * 32 * 8 * 8
    work = count_work(pair, rows_of(32, 8, 8), "bf16")
    assert with_flops(work.forward) == [("direct convolution", point), ("depthwise convolution", forward)]
    assert with_flops(work.backward) == [(gradient, 2 * forward), ("direct convolution", point)]


def test_both_gradients_of_a_convolution_read_the_gradient_of_the_output() -> None:
    work = count_work(nn.Sequential(convolution(16, 32), convolution(32, 64)), rows_of(16, 8, 8))
    above, below = calls_of(work.backward, "convolution")
    # The second one reads 32 · 64 inputs and writes their gradient; the gradient of its outputs is one expanded element.
    assert (above.flops, above.bytes) == (2 * 2 * 9 * 32 * 64 * 64, 4 * 2 * 32 * 64)
    # Weights are read and their gradient is written once for all rows.
    assert above.fixed == 4 * (2 * 9 * 32 * 64 + 2)
    # The first one's inputs need no gradient: one kernel reads 16 · 64 inputs, and the 32 · 64 elements of the gradient once.
    assert (below.flops, below.bytes) == (2 * 9 * 16 * 32 * 64, 4 * (16 + 32) * 64)
    deep = count_work(nn.Sequential(*(convolution(16, 16) for _ in range(3))), rows_of(16, 8, 8))
    assert 4 * 4 * 16 * 64 in [call.bytes for call in calls_of(deep.backward, "convolution")]


def test_grouped_convolutions_have_a_class() -> None:
    forward = 2 * 9 * 32 * 8 * 8 * 8
    work = count_work(convolution(32, 32, groups=4), rows_of(32, 8, 8), "bf16")
    assert with_flops(work.forward) == with_flops(work.backward) == [("grouped convolution", forward)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_convolution_of_three_channels_is_a_few_channel_one(precision: str) -> None:
    work = count_work(nn.Sequential(convolution(3, 16), convolution(16, 16)), rows_of(3, 8, 8), precision)
    assert [op_class for op_class, _ in with_flops(work.forward)] == ["few-channel convolution", "convolution"]
    assert [op_class for op_class, _ in with_flops(work.backward)] == ["convolution", "few-channel convolution"]


@pytest.mark.parametrize(
    ("shape", "precision", "op_class"),
    [
        ((16, 32), "bf16", "matmul"),
        ((16, 32), "fp16", "matmul"),
        ((16, 20), "bf16", "unaligned matmul"),
        ((10, 16), "fp16", "unaligned matmul"),
        ((10, 20), "fp32", "matmul"),
    ],
)
def test_widths_that_are_no_multiple_of_eight_are_unaligned(shape: tuple[int, int], precision: str, op_class: str) -> None:
    work = count_work(nn.Linear(*shape), rows_of(shape[0]), precision)
    flops = 2 * shape[0] * shape[1]
    assert with_flops(work.forward) == with_flops(work.backward) == [(op_class, flops)]


@pytest.mark.parametrize(("precision", "op_class"), [("fp32", "batch norm"), ("bf16", "half batch norm")])
def test_batch_norm_has_a_class_for_half_precision(precision: str, op_class: str) -> None:
    work = count_work(nn.Sequential(convolution(8, 8), nn.BatchNorm2d(8)), rows_of(8, 8, 8), precision)
    for costs in (work.forward, work.backward):
        assert len(calls_of(costs, op_class)) == 1 and len(calls_of(costs, "batch norm", "half batch norm")) == 1


@pytest.mark.parametrize(
    ("module", "op_class"),
    [
        (nn.LayerNorm(8), "narrow normalisation"),
        (nn.Softmax(-1), "softmax"),
        (nn.MaxPool2d(2, padding=1), "pooling"),
        (nn.GELU(), "elementwise"),
    ],
)
def test_operations_without_flops_have_classes(module: nn.Module, op_class: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), module)
    bare, work = (count_work(each, rows_of(8, 8), loss=lambda out: out.square().sum()) for each in (model[:1], model))
    for costs, without in ((work.forward, bare.forward), (work.backward, bare.backward)):
        assert op_class in {call.op_class for call in costs.calls if call not in without.calls and call.bytes}
        assert costs.flops == without.flops


def test_a_given_loss_is_counted() -> None:
    def loss(out: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out, torch.zeros(len(out), dtype=torch.int64))

    bare, work = (count_work(nn.Linear(8, 1024), rows_of(8), loss=each) for each in (None, loss))
    for costs, without in ((work.forward, bare.forward), (work.backward, bare.backward)):
        assert not calls_of(without, "softmax") and len(calls_of(costs, "softmax")) == 1
        # It reads and writes at least the logits.
        assert calls_of(costs, "softmax")[0].bytes >= 2 * 4 * 1024
    # One of 1,024 log-probabilities is read, at its label; the gradient of all is written.
    assert not any(call.bytes >= 4 * 1024 for call in calls_of(work.forward, "elementwise"))
    assert [call.bytes for call in calls_of(work.backward, "elementwise") if call.bytes >= 4 * 1024] == [4 * 1024 + 8]


def test_an_embedding_reads_only_the_rows_it_looks_up() -> None:
    work = count_work(nn.Embedding(1000, 16), lambda rows: torch.zeros(rows, 4, dtype=torch.int64))
    (call,) = calls_of(work.forward, "gather or scatter")
    # Four indices of 8 bytes, and four rows of 16 elements.
    assert (call.bytes, call.fixed) == (4 * 8 + 4 * 16 * 4, 0)


def test_implicit_operations_move_bytes_and_are_not_launched_by_the_host() -> None:
    with_bias, without = (nn.Sequential(nn.Conv2d(16, 32, 3, padding=1, bias=bias)) for bias in (True, False))
    more, less = (count_work(each, rows_of(16, 8, 8)) for each in (with_bias, without))
    # The bias is added to 32 · 64 elements, which are read and written; in backward their gradient is summed.
    assert [call[:4] for call in more.forward.calls if call.implicit] == [("strided", 0, 2 * 4 * 32 * 64, 0)]
    assert [call[:4] for call in more.backward.calls if call.implicit] == [("reduction", 0, 4 * 32 * 64, 0)]
    assert not any(call.implicit for call in (*less.forward.calls, *less.backward.calls))
    assert (more.forward.operations, more.backward.operations) == (less.forward.operations, less.backward.operations)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"embedding": self.linear(x) * mask, "mask": mask}


def test_inputs_and_outputs_may_be_dicts() -> None:
    work = count_work(Named(), lambda rows: {"x": torch.zeros(rows, 8), "mask": torch.ones(rows, 8, dtype=torch.uint8)})
    assert work.inputs == 8 * 4 + 8 and work.forward.flops == work.backward.flops == 2 * 8 * 8


class ByRow(nn.Module):
    """Calls one operation per row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.linear(row[None]) for row in x])


def test_if_operations_depend_on_the_rows_all_costs_are_per_row() -> None:
    work = count_work(ByRow(), rows_of(16))
    assert work.forward.flops == pytest.approx(2 * 16 * 32) and not any(call.fixed for call in work.forward.calls)
    assert len(with_flops(work.forward)) == 16


class ReadsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else x


def test_a_model_that_reads_values_of_its_inputs_is_refused() -> None:
    with pytest.raises(ValueError, match="ReadsValues cannot be counted"):
        count_work(ReadsValues(), rows_of(8))


def test_frozen_weights_are_not_trainable() -> None:
    model = nn.Sequential(nn.Linear(10, 20).requires_grad_(False), nn.Linear(20, 5))
    work = count_work(model, rows_of(10))
    assert (work.parameters, work.trainable) == (220 + 105, 105)
    # Backward stops above them.
    assert work.forward.flops == 400 + 200 and work.backward.flops == 200
    locked = count_work(model.requires_grad_(False), rows_of(10))
    assert (locked.trainable, locked.backward) == (0, Pass()) and locked.forward == work.forward


def test_every_class_with_flops_has_an_efficiency() -> None:
    model = nn.Sequential(
        convolution(3, 16), nn.BatchNorm2d(16), nn.GELU(), convolution(16, 16, groups=16), nn.Flatten(), nn.Linear(1024, 10)
    )
    for precision in ("fp32", "bf16"):
        work = count_work(model, rows_of(3, 8, 8), precision)
        assert {op_class for op_class, _ in with_flops(work.forward) + with_flops(work.backward)} <= set(FLOPS_EFFICIENCY)
