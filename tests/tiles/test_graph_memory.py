"""Copies to and from the memory of a CUDA graph, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from interpreted import IN_INTERPRETER

from megabatch.tiles.fused import graph_memory
from megabatch.tiles.fused.graph_memory import BLOCK, MOST, CopiedInputs, ScaledGradients, can_copy

pytestmark = IN_INTERPRETER

KINDS = {
    "one": [(3, 5)],
    "a scalar": [()],
    "matrices and scalars": [(BLOCK + 1, 2), (7, 3), (), ()],
    "whole blocks": [(BLOCK,), (2, BLOCK), (1,)],
}


def tensors(shapes: list[tuple[int, ...]], *dtypes: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape).to(dtypes[place % len(dtypes)]) for place, shape in enumerate(shapes)]


@pytest.mark.parametrize("shapes", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float16, torch.float32), (torch.int64, torch.float64)], ids=str)
def test_inputs_are_copied(shapes, dtypes):
    sources = tensors(shapes, *dtypes)
    # One value more than each has, which must stay.
    places = [torch.full((t.numel() + 1,), 7, dtype=t.dtype) for t in sources]
    inputs = CopiedInputs([place[:-1].view(t.shape) for place, t in zip(places, sources, strict=True)])
    for _ in range(2):
        inputs.fill(sources, torch.zeros(()))
    for source, place in zip(sources, places, strict=True):
        assert torch.equal(place[:-1], source.flatten()) and place[-1] == 7


def test_inputs_that_a_kernel_cannot_read_as_they_are():
    place = torch.zeros(4, 4)
    inputs = CopiedInputs([place])
    transposed, shifted = torch.randn(4, 4).T, torch.randn(17)[1:].view(4, 4)
    negated = torch.randn(4, 4, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    for source in (transposed, shifted, negated):
        inputs.fill([source], torch.zeros(()))
        assert torch.equal(place, source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_a_value_is_delivered_to_the_result_of_the_last_call(dtype):
    inputs, value = CopiedInputs([torch.zeros(3)]), torch.tensor(1.5, dtype=dtype)
    # Before the first call, nobody reads it.
    inputs.deliver(value)
    results = [torch.zeros((), dtype=dtype) for _ in range(3)]
    for number, result in enumerate(results):
        inputs.fill([torch.zeros(3)], result)
        inputs.deliver(value + number)
    assert [float(result) for result in results] == [1.5, 2.5, 3.5]


@pytest.mark.parametrize("shapes", KINDS.values(), ids=KINDS)
def test_gradients_are_multiplied_and_rounded_once(shapes):
    gradients = tensors(shapes, torch.float16, torch.float32)
    negated = torch.tensor([0.3j]).conj().imag[0]
    assert negated.is_neg()
    for factor in (torch.tensor(0.3), torch.ones(3)[1] * 0.3, negated):
        targets = [torch.empty_like(t) for t in gradients]
        ScaledGradients(gradients).scale(factor, targets)
        for gradient, target in zip(gradients, targets, strict=True):
            assert torch.equal(target, (gradient.float() * factor).to(gradient.dtype))


def test_what_one_launch_cannot_copy():
    assert can_copy([torch.zeros(2), torch.zeros((), dtype=torch.int64)])
    assert not can_copy([]) and not can_copy([torch.zeros(2)] * (MOST + 1))
    assert not can_copy([torch.zeros(0, 3)]) and not can_copy([torch.zeros(3, dtype=torch.complex64)])
    assert not can_copy([torch.zeros(4, 3).T]) and not can_copy([torch.zeros(5)[1:]])


class Launches:
    """Takes the place of the kernel and of Triton's launcher, and records the arguments of each launch, by address.

    first: what the kernel is called with, which compiles it. later: what the launcher gets after that; stream: the current one.
    """

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.first, self.later, self.stream = [], [], 5

    def __getitem__(self, grid):
        def launch(*arguments, BLOCK):
            self.first.append((grid, *(t.data_ptr() if isinstance(t, Tensor) else t for t in arguments), BLOCK))
            return self

        return launch

    def run(self, x, y, z, stream, function, metadata, *rest):
        # No launch metadata, and no hooks.
        assert (stream, function, metadata, *rest[:3]) == (5, "function", "metadata", None, None, None)
        self.later.append(((x, y, z), *rest[3:]))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    new = Launches()
    monkeypatch.setattr(graph_memory, "copy_kernel", new)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: new.stream, raising=False)
    return new


@pytest.mark.parametrize("shapes", KINDS.values(), ids=KINDS)
def test_a_later_launch_gets_the_same_arguments_on_the_stream_of_the_first(launches, shapes):
    own, others, value = tensors(shapes, torch.float32), tensors(shapes, torch.float32), torch.zeros(())
    inputs, gradients = CopiedInputs(own), ScaledGradients(own)
    for _ in range(2):
        inputs.fill(others, value)
        gradients.scale(value, others)
        launches.stream = 6
    assert len(launches.first) == 2 and launches.later == launches.first


def test_a_later_launch_copies_what_a_kernel_cannot_read(launches):
    own, value = torch.zeros(4, 4), torch.zeros(())
    inputs, gradients = CopiedInputs([own]), ScaledGradients([own])
    transposed, shifted = torch.randn(4, 4).T, torch.ones(3)[1]
    for source, factor in ((own, value), (transposed, shifted)):
        inputs.fill([source], value)
        gradients.scale(factor, [own])
    (_, result, _, copy, *_), (_, _, factor, source, *_) = launches.later
    assert result == value.data_ptr() and source == own.data_ptr()
    assert copy % 16 == factor % 16 == 0 and copy != transposed.data_ptr() and factor != shifted.data_ptr()


def test_a_launch_on_another_device_than_the_current_one(launches, monkeypatch):
    current = iter((0, -1, 0, -1))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: next(current))
    own, others, value = [torch.zeros(3)], [torch.ones(3)], torch.zeros(())
    inputs, gradients = CopiedInputs(own), ScaledGradients(own)
    for _ in range(2):
        inputs.fill(others, value)
        gradients.scale(value, others)
    assert len(launches.later) == 2 and next(current, None) is None
