"""Peak memory, measured in a new process, is linear in the batch and bounded by the workspace."""

from __future__ import annotations

import pytest
import torch
from heap import MIB, measured

import megabatch
from megabatch.tiles.one_piece import PANEL_CELLS

pytestmark = pytest.mark.sampled(3)

WIDTH = 32


def work(loss: str, rows: int, workspace: int, options: dict, scale: float = 0.5) -> None:
    x, y = (torch.randn(rows, WIDTH).requires_grad_() for _ in range(2))
    scalars = (scale,) if loss == "clip_loss" else (scale, -5.0)
    if options.get("ids"):
        options = {**options, "ids": torch.arange(rows) // 2}
    getattr(megabatch, loss)(x, y, *scalars, workspace=workspace, **options).backward()


def encode(rows: int, chunk: int, keep: int) -> None:
    """Run a step of a deep and narrow tower: 64 numbers for each row and layer, 8 for its embedding."""
    torch.manual_seed(0)
    layers = [layer for _ in range(16) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    tower = torch.nn.Sequential(*layers, torch.nn.Linear(64, 8))
    z = megabatch.cached(lambda x: tower(x.expand(-1, 64)), chunk=chunk, keep=keep)(torch.randn(rows, 1))
    z.square().mean().backward()


def peak(loss: str, rows: int, workspace: int, options: dict | None = None) -> int:
    return measured(work, (loss, 64, 4096, options or {}), (loss, rows, workspace, options or {}))


@pytest.mark.parametrize(
    "loss, options",
    [
        ("clip_loss", {}),
        ("clip_loss", {"ids": True, "duplicates": "positive", "label_smoothing": 0.1, "drop_above": 0.1}),
        ("siglip_loss", {}),
    ],
    ids=["clip", "clip with every option", "siglip"],
)
def test_extra_memory_grows_linearly_at_most(loss, options):
    workspace = 4 * MIB
    small, large = peak(loss, 3000, workspace, options), peak(loss, 9000, workspace, options)
    # The linear part: inputs, gradients and fp32 sums are fewer than ten (rows, width) matrices; the similarity matrix is 309 MiB.
    assert large - small < 10 * 6000 * WIDTH * 4 + 2 * MIB
    # Masks and temporaries of a tile with every option stay within about twice the workspace.
    assert large < 2 * workspace + 10 * 9000 * WIDTH * 4 + 4 * MIB


def work_on_many_cores(*args) -> None:
    torch.get_num_threads = lambda: 64
    work(*args)


@pytest.mark.parametrize("scale", [0.5, 50.0], ids=["common exponent", "no common exponent"])
@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
def test_a_matrix_that_fits_is_in_memory_once_or_one_panel_of_it(loss, scale):
    rows = 3000
    matrix = rows * rows * 4
    extra = measured(work_on_many_cores, (loss, 64, 4096, {}, scale), (loss, rows, matrix, {}, scale))
    # The sigmoid loss needs no sums over columns.
    held = matrix if loss == "clip_loss" else PANEL_CELLS * 4
    # Four blocks of rows at most, each a sixteenth of it, and what the allocator keeps of them.
    assert held < extra < 1.5 * held + 10 * rows * WIDTH * 4 + 2 * MIB


def test_the_workspace_bounds_the_temporaries():
    assert peak("clip_loss", 6000, 32 * MIB) - peak("clip_loss", 6000, 2 * MIB) > 20 * MIB


@pytest.mark.slow
def test_encoders_take_the_memory_of_a_chunk_and_of_what_is_kept():
    rows, activations = 32768, 16 * 64 * 4
    cases = ((rows, 0), (1024, 0), (1024, 16))
    whole, small, kept = (measured(encode, (64, 16, 1), (rows, chunk, keep)) for chunk, keep in cases)
    assert whole > rows * activations > 8 * small
    # Half of the chunks kept: half of the activations, and one chunk recomputed.
    assert 0.4 * rows * activations < kept < 0.8 * rows * activations


@pytest.mark.slow
def test_at_one_chunk_more_rows_add_their_embeddings_only():
    few, many = (measured(encode, (64, 16, 1), (rows, 1024, 0)) for rows in (8192, 65536))
    # Input, embedding, its gradient and temporaries: about eleven times eight numbers for each row, where activations have 1,024.
    assert many - few < (65536 - 8192) * 8 * 4 * 14 + 4 * MIB
