"""The calls that docs/losses.md lists for people who know other libraries run, and are their formulas."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
from cases import embeddings

import megabatch
from megabatch import reference

PAGE = (Path(__file__).parents[2] / "docs" / "losses.md").read_text(encoding="utf-8")
TABLE = PAGE.split("\n## Find your loss\n", 1)[1].split("\n## ", 1)[0]
CALLS = re.findall(r"^\| .* \| `(.*)` \|$", TABLE, re.MULTILINE)


def arguments() -> dict[str, object]:
    """Return what the calls name."""
    x, y = embeddings(6)
    hard, queue = embeddings(6, seed=1)
    (teacher_x, teacher_y), (guide_x, guide_y) = embeddings(6, width=5, seed=2), embeddings(6, width=5, seed=3)
    g = torch.Generator().manual_seed(0)
    scores, teacher_scores = torch.randn(2, 6, 4, generator=g, dtype=torch.float64)
    tokens_x, tokens_y = (torch.randn(6, length, 8, generator=g, dtype=torch.float64) for length in (3, 5))
    masks = {"x_mask": torch.tensor([[1, 1, 0]]).repeat(6, 1), "y_mask": torch.tensor([[1, 1, 1, 0, 0]]).repeat(6, 1)}
    names = {"a": x, "b": y, "labels": torch.arange(6) % 2, "owner": torch.arange(6), "scale": 10.0, "bias": -5.0, "torch": torch}
    tensors = {"x": x, "y": y, "hard": hard, "queue": queue, "teacher_x": teacher_x, "teacher_y": teacher_y, "teacher_scale": 20.0}
    more = {"guide_x": guide_x, "guide_y": guide_y, "scores": scores, "teacher_scores": teacher_scores, "tokens_x": tokens_x}
    return {**names, **tensors, **more, "tokens_y": tokens_y, **masks, "Guide": megabatch.Guide}


def formulas() -> dict[str, object]:
    def matryoshka(loss, dims):
        return functools.partial(reference.matryoshka_loss, loss, dims=dims)

    return {name: getattr(reference, name) for name in dir(reference) if name.endswith("_loss")} | {"matryoshka": matryoshka}


@pytest.mark.parametrize("call", CALLS)
def test_a_documented_call_is_its_formula(call):
    ours = {name: getattr(megabatch, name) for name in megabatch.__all__}
    found, expected = (eval(call, {**arguments(), **functions}) for functions in (ours, formulas()))
    assert torch.allclose(found, expected, rtol=1e-10) and found != 0


def test_every_row_of_the_table_has_a_call():
    rows = [line for line in TABLE.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len(CALLS) > 10
