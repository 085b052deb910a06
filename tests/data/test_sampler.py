"""Order and held-out split: every sample once per epoch, the same in every process."""

import pickle
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch.data.sampler import InOrder, Order, split, stable_hash
from megabatch.data.source import Sample

# No deadline, because the machine may be busy; derandomized, so that a failure repeats.
steadily = settings(deadline=None, derandomize=True)
lengths_of_shards = st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any)


def stream(order, first, count):
    return [order.at(position) for position in range(first, first + count)]


def everything(lengths):
    return [(shard, index) for shard, length in enumerate(lengths) for index in range(length)]


@steadily
@given(lengths_of_shards, st.integers(1, 250), st.integers(), st.integers(0, 10**6))
def test_every_epoch_is_a_permutation_of_all_samples(lengths, window, seed, epoch):
    order = Order(lengths, window, seed)
    assert sorted(stream(order, epoch * order.total, order.total)) == everything(lengths)
    assert {order.epoch(epoch * order.total + offset) for offset in (0, order.total - 1)} == {epoch}


@steadily
@given(lengths_of_shards, st.integers(1, 250), st.integers(), st.data())
def test_a_position_does_not_depend_on_earlier_calls(lengths, window, seed, data):
    order = Order(lengths, window, seed)
    positions = data.draw(st.lists(st.integers(0, 4 * order.total), max_size=30))
    assert [order.at(position) for position in positions] == [Order(lengths, window, seed).at(p) for p in positions]


@steadily
@given(lengths_of_shards, st.integers(1, 250), st.integers(), st.integers(0, 5))
def test_a_sample_stays_within_its_window_of_the_sequence_of_shards(lengths, window, seed, epoch):
    order = Order(lengths, window, seed)
    epochs_stream = stream(order, epoch * order.total, order.total)
    # The place of each sample before windows are shuffled: a window of 1 shuffles only the shards.
    unshuffled = {place: offset for offset, place in enumerate(stream(Order(lengths, 1, seed), epoch * order.total, order.total))}
    assert all(unshuffled[place] // window == offset // window for offset, place in enumerate(epochs_stream))


@steadily
@given(lengths_of_shards, st.integers(), st.integers(0, 5))
def test_shards_stay_whole_if_samples_are_not_shuffled(lengths, seed, epoch):
    order = Order(lengths, 1, seed)
    places = stream(order, epoch * order.total, order.total)
    assert all(index == 0 or before == (shard, index - 1) for before, (shard, index) in zip([None, *places], places, strict=False))


def test_epochs_seeds_windows_and_shards_are_shuffled_differently():
    order = Order([50] * 20, 100, 0)
    first, second = stream(order, 0, 1000), stream(order, 1000, 1000)
    other_seed = stream(Order([50] * 20, 100, 1), 0, 1000)
    assert first != second
    assert first != other_seed
    one_shard = Order([50], 50, 0)
    assert stream(one_shard, 0, 50) != stream(one_shard, 50, 50)
    assert stream(Order([1] * 50, 1, 0), 0, 50) != stream(Order([1] * 50, 1, 1), 0, 50)
    assert list(dict.fromkeys(shard for shard, _ in first)) != sorted(range(20))
    # Each window as indices into the unshuffled sequence.
    unshuffled = {place: offset for offset, place in enumerate(stream(Order([50] * 20, 1, 0), 0, 1000))}
    windows = [tuple(unshuffled[place] % 100 for place in first[start : start + 100]) for start in range(0, 1000, 100)]
    assert len(set(windows)) == 10
    assert all(window != tuple(range(100)) for window in windows)


def test_each_sample_is_first_equally_often():
    firsts = Counter(Order([2, 3, 1], 6, seed).at(0) for seed in range(3000))
    # 500 each are expected; five standard deviations of the binomial are 102.
    assert len(firsts) == 6
    assert all(398 < count < 602 for count in firsts.values())


def test_another_process_sees_the_same_stream():
    program = "from megabatch.data.sampler import Order; print([Order([9, 0, 4, 7], 8, 3).at(p) for p in range(50)])"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "1"}
    )
    assert result.stdout.strip() == str(stream(Order([9, 0, 4, 7], 8, 3), 0, 50))


def test_the_stream_and_the_hashes_do_not_change_between_versions():
    """A change of these numbers would resume a run with other samples, and hold out others."""
    assert stable_hash("a caption") == 6990820347259226789
    assert stable_hash(7, "x") == stable_hash("7", "x")
    assert stable_hash("\udcff") != stable_hash("?")
    assert stream(Order([3, 0, 4], 4, 5), 7, 7) == [(0, 1), (2, 0), (0, 0), (0, 2), (2, 3), (2, 2), (2, 1)]


def test_a_pickled_order_is_equal_and_does_not_contain_its_caches():
    order = Order([1000] * 50, 40_000, 7)
    before = stream(order, 39_990, 20)
    pickled = pickle.dumps(order)
    assert stream(pickle.loads(pickled), 39_990, 20) == before
    assert len(pickled) < 2000


def test_a_billion_samples_in_thirty_thousand_shards_are_supported():
    lengths = [33_000 + shard % 1000 for shard in range(30_000)]
    order = Order(lengths, 1000, 0)
    assert order.total > 10**9
    positions = [*range(995, 1005), order.total // 2, *range(order.total - 5, order.total + 5), 10**12]
    places = [order.at(position) for position in positions]
    assert len(set(places)) >= len(places) - 2
    assert all(0 <= index < lengths[shard] for shard, index in places)


@steadily
@given(lengths_of_shards, st.integers(0, 3))
def test_in_order_repeats_the_stored_order(lengths, epoch):
    order = InOrder(lengths)
    assert stream(order, epoch * order.total, order.total) == everything(lengths)
    assert order.epoch(epoch * order.total) == epoch


@pytest.mark.parametrize("make", [InOrder, lambda lengths: Order(lengths, 4, 0)])
@pytest.mark.parametrize(("lengths", "message"), [([], "0 samples"), ([0, 0], "0 samples"), ([3, -1], "shard 1 has length -1")])
def test_lengths_without_samples_are_refused(make, lengths, message):
    with pytest.raises(ValueError, match=message):
        make(lengths)


def test_a_window_of_zero_is_refused():
    with pytest.raises(ValueError, match="window is 0"):
        Order([3], 0, 0)


# A name with such a high hash that no fraction in these tests holds it out.
TRAINED = next(name for name in map(str, range(1000)) if stable_hash(name) > 0.99 * 2**63)


class Groups:
    """A source with groups only, which counts the calls of `group`."""

    def __init__(self, shards):
        self.shards = shards
        self.asked = 0

    @property
    def lengths(self):
        return [len(shard) for shard in self.shards]

    def read(self, shard, index, sufficient=None):
        return Sample(f"{shard}/{index}", "x", self.shards[shard][index])

    def group(self, shard, index):
        self.asked += 1
        return self.shards[shard][index]

    def label(self, shard, index):
        return self.shards[shard][index][0]


def texts(source):
    return [source.read(*place).y for place in everything(source.lengths)]


def keys(source):
    return [source.read(*place).key for place in everything(source.lengths)]


groups = st.lists(st.lists(st.text(max_size=3), max_size=20), max_size=6)


@steadily
@given(groups, st.floats(0, 0.9))
def test_the_parts_are_disjoint_and_complete_and_keep_groups_together(shards, fraction):
    source = Groups([[TRAINED, "a", "b"], *shards])
    training, held_out = split(source, fraction)
    assert sorted(keys(training) + keys(held_out)) == sorted(keys(source))
    assert not set(texts(training)) & set(texts(held_out))
    assert len(training.lengths) == len(held_out.lengths) == len(source.lengths)
    assert source.asked <= sum(source.lengths)


@steadily
@given(groups, groups, st.floats(0.1, 0.9), st.randoms())
def test_only_the_group_decides_what_is_held_out(shards, others, fraction, random):
    shards = [[TRAINED, "a", "b"], *shards]
    shuffled = random.sample(shards + others, len(shards + others))
    held_out = set(texts(split(Groups(shards), fraction)[1]))
    held_out_of_more = set(texts(split(Groups(shuffled), fraction)[1]))
    assert held_out == held_out_of_more & {text for shard in shards for text in shard}


def test_the_fraction_is_about_that_of_the_groups_and_a_larger_one_holds_out_more():
    source = Groups([[f"group {number}" for number in range(start, start + 1000)] for start in range(0, 10_000, 1000)])
    tenth, fifth = (set(texts(split(source, fraction)[1])) for fraction in (0.1, 0.2))
    # Six standard deviations of the binomial with 10,000 trials.
    assert abs(len(tenth) - 1000) < 180
    assert abs(len(fifth) - 2000) < 240
    assert tenth < fifth


def test_subsets_read_their_samples_and_can_be_pickled():
    source = Groups([["a", TRAINED], [], ["c", "d", TRAINED]])
    for part in split(source, 0.5):
        part = pickle.loads(pickle.dumps(part))
        for shard, index in everything(part.lengths):
            sample = part.read(shard, index)
            assert part.group(shard, index) == sample.y
            assert part.label(shard, index) == sample.y[0]


def test_a_subset_takes_eight_bytes_per_sample():
    training, _ = split(Groups([[TRAINED] * 100] * 5), 0.3)
    assert [indices.itemsize * len(indices) for indices in training.indices] == [800] * 5


def test_a_fraction_of_zero_holds_nothing_out_and_reads_no_group():
    source = Groups([["a", "b"], ["c"]])
    training, held_out = split(source, 0.0)
    assert keys(training) == keys(source)
    assert list(held_out.lengths) == [0, 0]
    assert source.asked == 0


def test_a_training_part_without_samples_is_refused():
    with pytest.raises(ValueError, match=r"all 5 samples are held out by the fraction 0\.999"):
        split(Groups([["the only group"] * 5]), 0.999)
    with pytest.raises(ValueError, match="nothing is left to train on: all 0 samples"):
        split(Groups([[]]), 0.1)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_fraction_outside_of_zero_to_one_is_refused(fraction):
    with pytest.raises(ValueError, match="held-out fraction"):
        split(Groups([["a"]]), fraction)
