"""What the tests of towers share."""

from __future__ import annotations

import pytest
from torch import Tensor


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the lengths of the sequences that the kernels of short attention are launched for."""
    from megabatch.towers import attention_kernels

    seen = []
    forward = attention_kernels.forward

    def counted(q: Tensor, *args: object) -> tuple[Tensor, Tensor]:
        seen.append(q.shape[2])
        return forward(q, *args)

    monkeypatch.setattr(attention_kernels, "forward", counted)
    return seen
