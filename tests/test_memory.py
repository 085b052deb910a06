"""Peak memory, measured in a fresh process: linear in the batch, set by the tile."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

import megabatch
from benchmarks.memory import peak_of

WIDTH = 32
MIB = 2**20


def work(loss: str, rows: int, tile: int, options: dict) -> None:
    x, y = (torch.randn(rows, WIDTH).requires_grad_() for _ in range(2))
    scalars = (0.5,) if loss == "clip_loss" else (0.5, -5.0)
    if options.get("ids"):
        options = {**options, "ids": torch.arange(rows) // 2}
    getattr(megabatch, loss)(x, y, *scalars, tile=tile, **options).backward()


def child(pipe, loss: str, rows: int, tile: int, options: dict) -> None:
    torch.set_num_threads(1)
    work(loss, 64, 4096, options)
    # Inputs are made inside: they are O(rows) as well, and allocating them beforehand could hide pages that the work reuses.
    pipe.send(peak_of(lambda: work(loss, rows, tile, options), "cpu").extra_bytes)


def peak(loss: str, rows: int, tile: int, options: dict | None = None) -> int:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=child, args=(there, loss, rows, tile, options or {}))
    process.start()
    assert here.poll(120)
    result = here.recv()
    process.join()
    return result


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
    tile = 4 * MIB
    small, large = peak(loss, 3000, tile, options), peak(loss, 9000, tile, options)
    # Of the linear part: inputs, gradients and fp32 sums are fewer than ten (rows, width) matrices; the matrix would be 309 MiB.
    assert large - small < 10 * 6000 * WIDTH * 4 + 2 * MIB
    # Masks and temporaries of a tile with every option stay within about twice the working memory.
    assert large < 2 * tile + 10 * 9000 * WIDTH * 4 + 4 * MIB


def test_the_tile_sets_the_working_memory():
    assert peak("clip_loss", 6000, 32 * MIB) - peak("clip_loss", 6000, 2 * MIB) > 20 * MIB
