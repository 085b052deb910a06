"""Every pair of options of every public loss: value and gradients are the formula's, or a ValueError names both options."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import embeddings
from torch import Tensor

import megabatch
from megabatch import reference
from megabatch.losses.directions import DIRECTIONS as ALL

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:scale=")]
ROWS, HARD = 7, 4
G = torch.Generator().manual_seed(0)
X, Y = embeddings(ROWS, HARD, width=6)
QUEUE, TEACHER = embeddings(3, width=6, seed=1)[0], embeddings(ROWS, width=4, seed=2)
TOKENS = [torch.randn(rows, length, 6, generator=G, dtype=torch.float64) for rows, length in ((ROWS, 3), (ROWS, 5))]
IDS, WEIGHTS = torch.arange(ROWS + HARD) % 5, torch.rand(ROWS, generator=G, dtype=torch.float64) + 0.1
GUIDE = megabatch.Guide(*embeddings(ROWS, HARD, width=3, seed=3), margin=0.1)

UNIQUE: dict[str, list[Any]] = {"ids": [IDS], "weights": [WEIGHTS]}
COMMON = UNIQUE | {"duplicates": ["positive"]}
PAIRED = COMMON | {"ids": [IDS[:ROWS]]}
MARGINS: dict[str, list[Any]] = {"drop_above": [0.1, {"x_to_y": -0.1}], "drop_ratio": [0.9, {"x_to_y": 0.8}]}
DIRECTED = {"directions": [("y_to_x",), ("x_to_x",), ALL[:2], ALL], "partition": ["joint", "separate", "by_anchor"]}
EXECUTION: dict[str, list[Any]] = {"workspace": [700], "precision": ["tf32"], "equal_shards": [True], "backend": ["eager"]}
# The inputs of each loss, the options that every call has, and the values of all others.
LOSSES: dict[str, tuple[list[Any], dict[str, Any], dict[str, list[Any]]]] = {
    "clip_loss": ([X, Y[:ROWS], 9.0], {}, PAIRED | {"symmetric": [False], "label_smoothing": [0.1], "drop_above": [0.1, -0.1]}),
    "siglip_loss": ([X, Y, 9.0, -5.0], {}, COMMON),
    "infonce_loss": (
        [X, Y, 9.0],
        {"negatives_of": torch.arange(HARD)},
        {
            **COMMON,
            **MARGINS,
            **DIRECTED,
            "label_smoothing": [0.1],
            "hardness": [3.0],
            "hardness_on": ["hard", "in_batch"],
            "guide": [GUIDE],
            "in_batch": [False],
            "queue": [QUEUE],
            "diagnostics": [True],
        },
    ),
    "dcl_loss": ([X, Y, 9.0], {"negatives_of": torch.arange(HARD)}, UNIQUE | MARGINS | DIRECTED | {"diagnostics": [True]}),
    "nt_xent_loss": ([X, Y[:ROWS], 9.0], {}, {"ids": [IDS[:ROWS]], "weights": [WEIGHTS], "diagnostics": [True]}),
    "supcon_loss": ([X, IDS[:ROWS], 9.0], {}, {"weights": [WEIGHTS]}),
    "distill_loss": (
        [X, Y[:ROWS], 9.0, *TEACHER, 20.0],
        {},
        {"symmetric": [False], "divergence": ["kl"], "weights": [WEIGHTS]},
    ),
    "maxsim_loss": (
        [*TOKENS, 2.0],
        {},
        {
            **PAIRED,
            "x_mask": [torch.rand(ROWS, 3, generator=G) > 0.3],
            "y_mask": [torch.rand(ROWS, 5, generator=G) > 0.3],
            "normalize": [True],
            "average_tokens": [True],
            "symmetric": [True],
            "label_smoothing": [0.1],
        },
    ),
    "class_softmax_loss": (
        [X, Y, torch.arange(ROWS) + 2, 9.0],
        {},
        {"margin": [0.2], "angular_margin": [0.3], "label_smoothing": [0.1], "weights": [WEIGHTS]},
    ),
}
# Further options that are needed for another one to mean anything.
COMPANY = {"duplicates": "ids", "hardness_on": "hardness"}


def pairs(loss: str) -> Iterator[dict[str, Any]]:
    values = LOSSES[loss][2] | {
        name: EXECUTION[name] for name in EXECUTION if name in inspect.signature(getattr(megabatch, loss)).parameters
    }
    for a, b in itertools.combinations(values, 2):
        yield from ({a: left, b: right} for left, right in itertools.product(values[a], values[b]))


def value_and_gradients(module: Any, loss: str, inputs: list[Any], options: dict[str, Any]) -> list[Tensor]:
    learns = [isinstance(t, Tensor) and t.is_floating_point() and index < 2 for index, t in enumerate(inputs)]
    inputs = [t.clone().requires_grad_() if learnt else t for t, learnt in zip(inputs, learns, strict=True)]
    result = getattr(module, loss)(*inputs, **options)
    value = result[0] if isinstance(result, tuple) else result
    return [value.detach(), *torch.autograd.grad(value, [t for t, learnt in zip(inputs, learns, strict=True) if learnt])]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_pair_of_options_is_the_formula_or_names_both(loss):
    inputs, always, values = LOSSES[loss]
    refused = 0
    for pair in pairs(loss):
        company = {needed: values[needed][0] for name, needed in COMPANY.items() if name in pair and needed in values}
        options = {**company, **pair, **always}
        try:
            found = value_and_gradients(megabatch, loss, inputs, options)
        except ValueError as error:
            refused += 1
            # One of them may have its default value.
            named = {
                name for name in inspect.signature(getattr(megabatch, loss)).parameters if name in str(error) and len(name) > 1
            }
            assert named & pair.keys() and len(named) >= 2, (pair, str(error))
            continue
        of_formula = {k: v for k, v in options.items() if k not in (*EXECUTION, "diagnostics")}
        for a, b in zip(found, value_and_gradients(reference, loss, inputs, of_formula), strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-11), pair
    assert refused or loss not in ("infonce_loss", "dcl_loss")
