"""Copies of several tensors in one launch, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from interpreted import IN_INTERPRETER

from megabatch.tiles.fused.copies import BLOCK, MOST, copies_of

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
def test_all_are_copied(shapes, dtypes):
    sources = tensors(shapes, *dtypes)
    # One value more than each has, which must stay.
    places = [torch.full((t.numel() + 1,), 7, dtype=t.dtype) for t in sources]
    copy = copies_of(sources)
    for _ in range(2):
        assert copy(sources, places)
    for source, place in zip(sources, places, strict=True):
        assert torch.equal(place[:-1], source.flatten()) and place[-1] == 7


@pytest.mark.parametrize("shapes", KINDS.values(), ids=KINDS)
def test_products_are_rounded_once(shapes):
    sources, factor = tensors(shapes, torch.float16, torch.float32), torch.tensor(0.3)
    targets = [torch.empty_like(t) for t in sources]
    assert copies_of(sources)(sources, targets, factor)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, (source.float() * factor).to(source.dtype))


def test_what_a_kernel_cannot_read_is_left_to_others():
    sources = tensors([(4, 4), (4,)], torch.float32)
    copy, targets = copies_of(sources), [torch.zeros(4, 4), torch.zeros(4)]
    shifted = torch.randn(17)[1:].view(4, 4)
    negated = torch.randn(4, dtype=torch.complex64).conj().imag
    for wrong in ([sources[0].T, sources[1]], [shifted, sources[1]], [sources[0], negated]):
        assert not copy(wrong, targets)
    assert not copy(sources, targets, torch.ones(1))
    assert not any(t.any() for t in targets)
    assert copies_of([]) is None and copies_of(tensors([(2,)] * (MOST + 1), torch.float32)) is None
    assert copies_of([torch.zeros(0, 3)]) is None and copies_of([torch.zeros(3, dtype=torch.complex64)]) is None
