"""keep: which chunks keep their graphs, and how many fit."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from small_encoders import batch, tower
from torch import nn

import megabatch


def recomputed(model: nn.Sequential) -> list[int]:
    """Return a list that records the rows of every run of the model's first layer."""
    rows: list[int] = []
    model[0].register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    return rows


@pytest.mark.parametrize("keep, again", [(0, [1, 4, 4]), (1, [4, 4]), (2, [4]), (3, [])])
def test_the_last_chunks_are_the_ones_that_are_kept(keep, again):
    model = tower()
    rows = recomputed(model)
    encode = megabatch.cached(model, chunk=4, keep=keep)
    z = encode(batch(9))
    assert rows == [4, 4, 1] and encode.kept == keep
    z.sum().backward()
    assert rows[3:] == again


def test_without_gradients_nothing_is_recorded_and_nothing_recomputed():
    model = tower()
    rows = recomputed(model)
    with torch.no_grad():
        z = megabatch.cached(model, chunk=4, keep=1)(batch(9))
    assert rows == [4, 4, 1] and not z.requires_grad


def test_keep_auto_keeps_one_chunk_at_first_and_then_what_memory_allows(monkeypatch):
    model = tower()
    encode = megabatch.cached(model, chunk=1, keep="auto")
    graph = megabatch.cached(model, chunk=1, keep="auto")
    graph(batch(1)).sum().backward()
    size = int(graph._keep.unit_bytes)
    assert size > 0
    room = 5 * size
    monkeypatch.setattr("megabatch.chunks.keep.free_bytes", lambda device: room)
    kept = []
    for _ in range(3):
        z = encode(batch(10))
        kept.append(encode.kept)
        z.sum().backward()
    assert kept == [1, 6, 6]
    room = 0
    encode(batch(10)).sum().backward()
    assert encode.kept == 1


def test_keep_auto_counts_the_graph_and_not_the_weights():
    model = nn.Sequential(nn.Linear(8, 32, bias=False), nn.ReLU(), nn.Linear(32, 4, bias=False))
    encode = megabatch.cached(model, chunk=16, keep="auto")
    encode(torch.randn(32, 8))
    assert encode._keep.unit_bytes == 32 * 4, "the result of the ReLU, which both neighbours share"


def test_keep_auto_measures_a_whole_chunk_and_not_the_remainder(monkeypatch):
    model = tower()
    encode, whole = (megabatch.cached(model, chunk=4, keep="auto") for _ in range(2))
    whole(batch(4)).sum().backward()
    encode(batch(9)).sum().backward()
    assert encode.kept == 2 and encode._keep.unit_bytes == whole._keep.unit_bytes
    monkeypatch.setattr("megabatch.chunks.keep.free_bytes", lambda device: int(4 * whole._keep.unit_bytes))
    encode(batch(17)).sum().backward()
    assert encode.kept == 3


def test_free_memory_on_a_cpu_is_half_of_what_is_available():
    from megabatch.chunks.keep import free_bytes

    assert 2**20 < free_bytes(torch.device("cpu")) < 2**50
    with nullcontext() if torch.backends.mps.is_available() else pytest.raises(ValueError, match="cannot be read"):
        free_bytes(torch.device("mps"))
