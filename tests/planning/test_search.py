"""The search for the fastest strategy, with memory and time models of a few numbers."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_works import small_work

from megabatch.costs.hardware import find_machine
from megabatch.costs.strategy import Strategy
from megabatch.costs.time import StepWork, step_time
from megabatch.planning.search import best_chunk, candidate_strategies, chunk_sizes, search

GIB = 2**30
WORK = small_work(175e9, 0.83e9, 2.5e9, 1100, 428_000_000)


def memory(strategy: Strategy) -> int:
    """Return the memory of a model by arithmetic: state, one chunk's graph, kept graphs, embeddings."""
    state = 7 * GIB // strategy.owners
    graph = int((0.03 if strategy.checkpointing else 0.2) * GIB * strategy.chunk)
    return state + graph * max(1, min(strategy.keep, strategy.chunks)) + strategy.shard * 20_000


def seconds(strategy: Strategy) -> float:
    return step_time(StepWork((WORK,), "clip", 768), strategy, find_machine("H200", strategy.ranks)).seconds


@given(st.integers(1, 64), st.integers(0, 13), st.floats(7.3, 500))
@settings(max_examples=150, deadline=None)
def test_what_is_chosen_fits_and_the_next_size_up_does_not(ranks, power, gib):
    candidates = candidate_strategies(ranks * 2**power, ranks, precisions=("bf16",))
    limit = int(gib * GIB)
    try:
        result = search(candidates, memory, seconds, limit)
    except ValueError:
        assert all(memory(dataclasses.replace(each, chunk=1)) > limit for each in candidates)
        return
    strategy = result.strategy
    assert strategy.shard * strategy.ranks == strategy.batch == ranks * 2**power
    assert result.peak == memory(strategy) <= limit
    assert result.seconds == seconds(strategy)
    if strategy.chunk < strategy.shard:
        assert memory(dataclasses.replace(strategy, chunk=2 * strategy.chunk, keep=0)) > limit
    if strategy.keep < strategy.chunks:
        assert memory(dataclasses.replace(strategy, keep=strategy.keep + 1)) > limit
    # No other strategy at its largest chunk is faster by more than the factor that simplicity is worth.
    others = [best for each in candidates if (best := best_chunk(each, memory, seconds, limit))]
    assert result.seconds <= 1.05**2 * min(other.seconds for other in others)


@given(st.floats(8, 400), st.floats(1, 4), st.booleans())
@settings(max_examples=150, deadline=None)
def test_more_memory_never_means_a_smaller_chunk_and_never_more_time(gib, more, checkpointing):
    (strategy,) = candidate_strategies(8192, 1, precisions=("bf16",), checkpointing=(checkpointing,))
    less = best_chunk(strategy, memory, seconds, int(gib * GIB))
    rich = best_chunk(strategy, memory, seconds, int(gib * more * GIB))
    assert less is not None and rich is not None
    assert rich.strategy.chunk >= less.strategy.chunk
    candidates = candidate_strategies(8192, 1, precisions=("bf16",))
    assert (
        search(candidates, memory, seconds, int(gib * more * GIB)).seconds
        <= 1.05 * search(candidates, memory, seconds, int(gib * GIB)).seconds
    )


def test_a_model_that_does_not_fit_at_one_row_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"5.0 GiB of memory may be used, but the model takes at least 7.0 GiB"):
        search(candidate_strategies(64, 1, precisions=("bf16",)), memory, seconds, 5 * GIB)


def test_tensor_parallelism_is_named_if_sharded_weights_do_not_fit():
    with pytest.raises(ValueError, match=r"even with sharded weights.*tensor parallelism"):
        search(candidate_strategies(64, 8, precisions=("bf16",)), memory, seconds, GIB // 2)


@pytest.mark.parametrize("spare", range(9))
def test_as_many_chunks_are_kept_as_fit(spare):
    # A graph in use takes 1,000 bytes per row, a kept one 10: 8 chunks of 128 rows, of which the first kept one is free.
    def cheap(strategy):
        return 1000 * strategy.chunk + 10 * strategy.chunk * max(0, strategy.keep - 1)

    result = best_chunk(Strategy(1, 1024, 1024), cheap, seconds, 128_000 + spare * 1280)
    assert result is not None
    assert (result.strategy.chunk, result.strategy.keep) == (128, min(8, 1 + spare))


def test_weights_that_do_not_fit_on_one_rank_are_sharded():
    result = search(candidate_strategies(64, 8, precisions=("bf16",)), memory, seconds, 5 * GIB)
    assert result.strategy.sharding == "fsdp2"


def test_hybrid_sharding_keeps_a_copy_of_the_weights_on_every_node():
    strategies = {
        each.sharding: each for each in candidate_strategies(64, 32, precisions=("bf16",), shardings=("ddp", "fsdp2", "hsdp"))
    }
    assert {name: strategy.owners for name, strategy in strategies.items()} == {"ddp": 1, "fsdp2": 32, "hsdp": 8}


def test_a_batch_that_is_no_multiple_of_the_ranks_and_zero_ranks_are_refused():
    with pytest.raises(ValueError, match=r"must be a multiple.* 96 or 104"):
        candidate_strategies(100, 8, precisions=("bf16",))
    with pytest.raises(ValueError, match="gpus is 0"):
        candidate_strategies(100, 0, precisions=("bf16",))


@given(st.integers(1, 10**6))
def test_chunk_sizes_rise_to_the_shard(shard):
    sizes = chunk_sizes(shard)
    assert sizes == sorted(set(sizes)) and sizes[-1] == shard and sizes[0] == (1 if shard > 1 else shard)
