"""Peak memory of InfoNCE over directions, measured in a new process, is linear in the batch and bounded by the workspace."""

from __future__ import annotations

import pytest
import torch
from heap import MIB, measured

import megabatch
from megabatch.losses.directions import DIRECTIONS as ALL

pytestmark = pytest.mark.slow

WIDTH = 32
CASES = {
    "four directions": {"directions": ALL},
    "every option": {"directions": ALL, "ids": True, "label_smoothing": 0.1, "drop_above": 0.1, "drop_ratio": 0.9, "hard": True},
    "guide": {"directions": ALL, "guide": True},
    "queue and hardness": {"queue": True, "hardness": 1.0, "hardness_on": "hard", "hard": True},
    "own negatives": {"in_batch": False, "hard": True},
}


def work(rows: int, workspace: int, options: dict) -> None:
    options = dict(options)
    extra = rows // 2 if options.pop("hard", False) else 0
    x, y = torch.randn(rows, WIDTH).requires_grad_(), torch.randn(rows + extra, WIDTH).requires_grad_()
    if options.get("ids"):
        options["ids"] = torch.arange(rows + extra) // 2
    if options.get("queue"):
        options["queue"] = torch.randn(rows, WIDTH)
    if options.get("guide"):
        options["guide"] = megabatch.Guide(torch.randn(rows, WIDTH), torch.randn(rows, WIDTH))
    if extra:
        options["negatives_of"] = torch.arange(extra)
    scale = torch.tensor(0.5, requires_grad=True)
    megabatch.infonce_loss(x, y, scale, workspace=workspace, **options).backward()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:scale=")
def test_extra_memory_grows_linearly_at_most(name):
    workspace = 4 * MIB
    small, large = (measured(work, (64, 4096, CASES[name]), (rows, workspace, CASES[name])) for rows in (3000, 9000))
    # The linear part: inputs, hard negatives, queue, guide, gradients and sums are fewer than 16 (rows, width) matrices. Of
    # the four similarity matrices one alone is 309 MiB.
    assert large - small < 16 * 6000 * WIDTH * 4 + 2 * MIB
    # Masks and temporaries of a tile with every option stay within about twice the workspace.
    assert large < 2 * workspace + 16 * 9000 * WIDTH * 4 + 4 * MIB
