"""Batches of ranks: every sample once per epoch, identical for any number of workers, and no process left behind."""

import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from itertools import count, islice

import pytest
import torch

from megabatch.data import collate
from megabatch.data import loader as loader_module
from megabatch.data.loader import Loader, StepRange, one_pass, rank_rows
from megabatch.data.sampler import InOrder, Order
from megabatch.data.source import BadSample, Sample

RAGGED = [(0, 1), (1, 2), (3, 5), (8, 30), (38, 9), (47, 13), (60, 20)]
CLASSES = {"even": 0, "odd": 1}


class Shelves:
    """A source of numbered texts: some are bad, some raise, captions come in pairs, and every third sample has negatives."""

    def __init__(self, lengths, bad=(), breaks=()):
        self.lengths = lengths
        self.bad = frozenset(bad)
        self.breaks = frozenset(breaks)

    def read(self, shard, index, sufficient=None):
        key = f"{shard}/{index}"
        if key in self.breaks:
            raise OSError("the disk is gone")
        if key in self.bad:
            raise BadSample(key, "torn")
        negatives = tuple(f"not {key} but {n}" for n in range(index % 10)) if index % 3 == 0 else ()
        return Sample(key, f"image {key}", f"caption {index // 2}", negatives, "odd" if index % 2 else "even")

    def group(self, shard, index):
        return f"{shard}/{index}"

    def label(self, shard, index):
        return "odd" if index % 2 else "even"


def noisy(raw, seed):
    """Return the bytes of the text, with noise if there is a seed."""
    noise = torch.zeros(4) if seed is None else torch.rand(4, generator=torch.Generator().manual_seed(seed))
    return torch.cat([torch.tensor(list(raw.encode().ljust(20)[:20]), dtype=torch.float32), noise])


def tokens(raw, seed):
    row = torch.tensor(list(raw.encode().ljust(24)[:24]))
    return {"tokens": row, "mask": row != 32, "seed": torch.tensor(-1 if seed is None else seed)}


def refuses_odd(raw, seed):
    if int(raw.split("/")[1]) % 2:
        raise BadSample("", "odd")
    return noisy(raw, seed)


def fails_at_one(raw, seed):
    if raw == "image 1/1":
        raise KeyError("what prepare looked for")
    return noisy(raw, seed)


def grows(raw, seed):
    return torch.zeros(int(raw.split("/")[1]) + 1)


def changes_dtype(raw, seed):
    return torch.zeros(2, dtype=torch.float64 if raw == "image 1/1" else torch.float32)


def a_list(raw, seed):
    return [1, 2]


def the_group(raw, seed):
    return torch.tensor([os.getpid(), os.getpgrp()])


def slow(raw, seed):
    time.sleep(0.05)
    return noisy(raw, seed)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(loader_module, "PIECE_ROWS", 4)


# Processes of other tests, such as those of the session's world, do not count.
others = set()


def children():
    return [process for process in multiprocessing.active_children() if process.pid not in others]


@pytest.fixture(autouse=True)
def no_worker_is_left():
    others.clear()
    others.update(process.pid for process in multiprocessing.active_children())
    yield
    assert children() == []


def load(source, order=None, x=noisy, y=tokens, **options):
    options = {"seed": 1, "workers": 0, "rank": 0, "ranks": 1, "ids": True, "classes": None, **options}
    return Loader(source, order or Order(source.lengths, 16, 0), x, y, **options)


def leaves(batch):
    """Return everything in a batch as a flat list of comparable values."""
    flat = {}
    for name, value in batch._asdict().items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        flat.update({f"{name}.{part}": leaf for part, leaf in parts})
    return {
        name: (leaf.dtype, leaf.shape, leaf.tolist()) if isinstance(leaf, torch.Tensor) else leaf for name, leaf in flat.items()
    }


def all_leaves(batches):
    return [leaves(batch) for batch in batches]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_every_sample_is_seen_once_per_epoch_over_ranks_and_workers(ranks, workers):
    source = Shelves([11, 0, 23, 6])
    seen = [
        [list(batch.keys) for batch in load(source, rank=rank, ranks=ranks, workers=workers).batches(RAGGED)]
        for rank in range(ranks)
    ]
    for (_, pairs), *shares in zip(RAGGED, *seen, strict=True):
        assert sum(map(len, shares)) == pairs
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert list(map(len, shares)) == sorted(map(len, shares), reverse=True)
    stream = [key for shares in zip(*seen, strict=True) for keys in shares for key in keys]
    everything = {f"{shard}/{index}" for shard, length in enumerate(source.lengths) for index in range(length)}
    assert len(stream) == 80
    for epoch in (stream[:40], stream[40:]):
        assert len(epoch) == len(set(epoch))
        assert set(epoch) == everything


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_are_bitwise_equal_for_any_number_of_workers(workers):
    source = Shelves([11, 0, 23, 6], bad={"0/3", "2/20"})
    options = {"negatives": True, "classes": CLASSES, "rank": 1, "ranks": 2}
    expected = all_leaves(load(source, **options).batches(RAGGED))
    assert all_leaves(load(source, workers=workers, **options).batches(RAGGED)) == expected


def test_the_size_of_pieces_changes_nothing(monkeypatch):
    source = Shelves([11, 0, 23, 6], bad={"0/3", "2/20"})
    options = {"negatives": True, "classes": CLASSES}
    expected = all_leaves(load(source, **options).batches(RAGGED))
    monkeypatch.setattr(loader_module, "PIECE_ROWS", 256)
    assert all_leaves(load(source, **options).batches(RAGGED)) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_starts_at_a_position_sees_exactly_the_rest(workers):
    source = Shelves([11, 0, 23, 6])
    whole = all_leaves(load(source, workers=workers).batches(RAGGED))
    assert all_leaves(load(source, workers=workers).batches(RAGGED[4:])) == whole[4:]


def test_rows_do_not_depend_on_the_sizes_of_the_steps():
    source = Shelves([11, 0, 23, 6])
    (whole,) = load(source).batches([(0, 80)])
    parts = list(load(source).batches(RAGGED))
    assert torch.cat([part.x for part in parts]).equal(whole.x)
    assert torch.cat([part.y["seed"] for part in parts]).equal(whole.y["seed"])
    assert torch.cat([part.ids for part in parts]).equal(whole.ids)


def test_another_number_of_ranks_sees_the_same_rows_with_the_same_augmentation():
    source = Shelves([11, 0, 23, 6], bad={"2/7"})
    (alone,) = load(source).batches([(8, 31)])
    parts = [next(load(source, rank=rank, ranks=3).batches([(8, 31)])) for rank in range(3)]
    assert torch.cat([part.x for part in parts]).equal(alone.x)
    for name in alone.y:
        assert torch.cat([part.y[name] for part in parts]).equal(alone.y[name])
    assert torch.cat([part.ids for part in parts]).equal(alone.ids)
    assert [key for part in parts for key in part.keys] == alone.keys
    assert [bad for part in parts for bad in part.bad] == alone.bad == [("2/7", "torn", 2, 7)]


def test_a_batch_larger_than_the_data_crosses_epochs():
    source = Shelves([3, 4])
    (batch,) = load(source).batches([(2, 19)])
    order = Order([3, 4], 16, 0)
    assert batch.keys == ["{}/{}".format(*order.at(position)) for position in range(2, 21)]
    assert set(Counter(batch.keys).values()) == {2, 3}


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_skipped_and_named_by_the_rank_that_read_them(workers):
    source = Shelves([8, 8], bad={"0/2", "1/7"})
    order = InOrder(source.lengths)
    first, second = (next(load(source, order, rank=rank, ranks=2, workers=workers).batches([(0, 16)])) for rank in range(2))
    assert first.bad == [("0/2", "torn", 0, 2)]
    assert second.bad == [("1/7", "torn", 1, 7)]
    assert first.keys == [f"0/{index}" for index in range(8) if index != 2]
    assert len(first.x) == len(first.y["tokens"]) == len(first.ids) == 7


def test_a_sample_that_prepare_refuses_is_a_bad_sample_with_its_key():
    (batch,) = load(Shelves([4]), InOrder([4]), x=refuses_odd).batches([(0, 4)])
    assert batch.bad == [("0/1", "odd", 0, 1), ("0/3", "odd", 0, 3)]
    assert batch.keys == ["0/0", "0/2"]
    assert len(batch.x) == len(batch.y["mask"]) == len(batch.ids) == 2


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("bad", [(), [f"0/{index}" for index in range(30)]], ids=["no share", "all bad"])
def test_a_rank_without_rows_gets_tensors_of_the_right_shape_and_dtype(workers, bad):
    source = Shelves([30, 30], bad=bad)
    order = InOrder(source.lengths)
    options = {"ranks": 4, "workers": workers, "negatives": True, "classes": CLASSES}
    # Rank 3 has no row in the first step, and the other steps read the shard that may be bad.
    empty, *_ = load(source, order, rank=3, **options).batches([(0, 3), (3, 9)])
    (full,) = load(source, order, rank=0, **options).batches([(30, 40)])
    assert empty.keys == []
    assert empty.x.shape == (0, *full.x.shape[1:])
    assert empty.x.dtype == full.x.dtype
    for side in ("y", "negatives"):
        assert {name: (leaf.shape, leaf.dtype) for name, leaf in getattr(empty, side).items()} == {
            name: ((0, *leaf.shape[1:]), leaf.dtype) for name, leaf in getattr(full, side).items()
        }
    assert empty.ids.shape == empty.labels.shape == (0,)
    assert empty.ids.dtype == empty.labels.dtype == torch.int64


def test_a_rank_with_only_bad_samples_gets_a_batch_without_rows_that_names_them():
    source = Shelves([6, 6], bad=[f"0/{index}" for index in range(6)])
    (batch,) = load(source, InOrder(source.lengths)).batches([(0, 6)])
    assert batch.x.shape == (0, 24)
    assert [bad.key for bad in batch.bad] == [f"0/{index}" for index in range(6)]


def test_a_source_without_readable_samples_gives_batches_without_tensors_that_name_them():
    source = Shelves([3], bad={"0/0", "0/1", "0/2"})
    (batch,) = load(source, InOrder([3])).batches([(0, 3)])
    assert batch.x is None and batch.y is None
    assert batch.keys == []
    assert batch.bad == [(f"0/{index}", "torn", 0, index) for index in range(3)]


def test_batches_are_pinned_only_on_request(monkeypatch):
    asked = []

    def empty(shape, *, dtype, pin_memory):
        asked.append((tuple(shape), pin_memory))
        return torch.zeros(shape, dtype=dtype)

    monkeypatch.setattr(collate.torch, "empty", empty)
    (plain,) = load(Shelves([8])).batches([(0, 8)])
    assert {shape for shape, _ in asked} >= {(8, 24)} and not any(pinned for _, pinned in asked)
    asked.clear()
    # 8 rows of 24 numbers have 768 bytes in fp32 and 1,536 in int64; a mask has 192.
    monkeypatch.setattr(collate, "MOST_PINNED", 768)
    (batch,) = load(Shelves([8]), pinned=True).batches([(0, 8)])
    assert leaves(batch) == leaves(plain)
    assert sorted(asked) == [((8,), True), ((8, 24), False), ((8, 24), True), ((8, 24), True)]


def test_negatives_of_all_rows_follow_each_other_with_their_ids():
    source = Shelves([8])
    (batch,) = load(source, InOrder([8]), negatives=True).batches([(0, 8)])
    expected = [text for index in range(8) for text in source.read(0, index).negatives]
    assert [bytes(row.tolist()).decode().strip() for row in batch.negatives["tokens"]] == expected
    assert len(expected) == 9
    assert len(batch.ids) == 8 + len(expected)
    assert len(set(batch.ids[8:].tolist())) == len(expected)
    assert len(set(batch.negatives["seed"].tolist())) == len(expected)


def test_negatives_are_none_unless_requested():
    (without,) = load(Shelves([8])).batches([(0, 8)])
    assert without.negatives is None
    assert len(without.ids) == 8
    # Sample 0/1 has none: the tensor has zero rows and is not None, so that all ranks compute the same loss.
    (asked,) = load(Shelves([8]), InOrder([8]), negatives=True).batches([(1, 1)])
    assert asked.negatives["tokens"].shape == (0, 24)


def test_ids_are_equal_for_equal_texts_and_in_every_process():
    source = Shelves([8, 8])
    (batch,) = load(source, InOrder(source.lengths)).batches([(0, 16)])
    ids = batch.ids.tolist()
    assert ids[0] == ids[1] == ids[8] == ids[9]
    assert len(set(ids)) == 4
    assert all(0 <= number < 2**63 for number in ids)
    assert ids[0] == 6335092284317671042
    (without,) = load(source, ids=False).batches([(0, 16)])
    assert without.ids is None


class Images(Shelves):
    """A source whose sides are not texts."""

    def read(self, shard, index, sufficient=None):
        return super().read(shard, index)._replace(y=object())


def test_ids_of_images_come_from_their_keys():
    (batch,) = load(Images([8, 8]), y=None).batches([(0, 32)])
    assert len(set(zip(batch.keys, batch.ids.tolist(), strict=True))) == len(set(batch.ids.tolist())) == 16


def test_labels_are_class_numbers_and_unknown_labels_are_bad_samples():
    (batch,) = load(Shelves([4]), InOrder([4]), classes=CLASSES).batches([(0, 4)])
    assert batch.labels.tolist() == [0, 1, 0, 1]
    (batch,) = load(Shelves([4]), InOrder([4]), classes={"odd": 5}).batches([(0, 4)])
    assert batch.labels.tolist() == [5, 5]
    assert batch.bad[0] == ("0/0", "its label is 'even', which is not one of the 1 classes", 0, 0)


def test_augmentation_differs_by_position_side_and_seed_and_is_off_for_evaluation():
    source = Shelves([4])
    options = {"order": InOrder([4]), "x": tokens}
    (batch,) = load(source, **options).batches([(0, 8)])
    seeds = batch.x["seed"].tolist() + batch.y["seed"].tolist()
    assert len(set(seeds)) == 16
    (other,) = load(source, seed=2, **options).batches([(0, 8)])
    assert not set(seeds) & set(other.x["seed"].tolist())
    (plain,) = load(source, augment=False, **options).batches([(0, 8)])
    assert set(plain.x["seed"].tolist() + plain.y["seed"].tolist()) == {-1}


def test_one_side_alone_can_be_loaded():
    (batch,) = load(Shelves([4]), y=None).batches([(0, 4)])
    assert batch.y is None
    assert len(batch.x) == 4


def test_one_pass_in_order_sees_each_sample_once_as_stored():
    source = Shelves([3, 0, 4])
    batches = list(load(source, InOrder(source.lengths), augment=False, ranks=1).batches(one_pass(7, 3)))
    assert [len(batch.keys) for batch in batches] == [3, 3, 1]
    assert [key for batch in batches for key in batch.keys] == [f"0/{i}" for i in range(3)] + [f"2/{i}" for i in range(4)]
    assert list(one_pass(6, 3)) == [StepRange(0, 3), StepRange(3, 3)]


def test_rows_of_the_ranks_cover_the_batch_in_order():
    for pairs in range(12):
        for ranks in range(1, 6):
            assert [row for rank in range(ranks) for row in rank_rows(pairs, rank, ranks)] == list(range(pairs))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failure_names_the_sample_and_ends_the_workers(workers):
    source = Shelves([8, 8])
    with pytest.raises(RuntimeError, match="1/1: could not be prepared: KeyError"):
        list(load(source, x=fails_at_one, workers=workers).batches([(0, 8), (8, 8)]))
    assert children() == []
    with pytest.raises(RuntimeError, match=r"sample 5 of shard 0 could not be read: OSError\('the disk is gone'\)"):
        list(load(Shelves([8], breaks={"0/5"}), workers=workers).batches([(0, 8)]))


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (a_list, "`prepare` returned list"),
        (grows, r"0/1: was prepared to .*\[2\].*samples before it to .*\[1\]"),
        (changes_dtype, r"1/1: was prepared to .*float64"),
    ],
)
def test_samples_that_cannot_be_stacked_are_refused_by_name(prepare, message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        list(load(Shelves([2, 2]), InOrder([2, 2]), x=prepare).batches([(0, 4)]))


def test_pieces_that_do_not_fit_each_other_are_refused(monkeypatch):
    monkeypatch.setattr(loader_module, "PIECE_ROWS", 1)
    with pytest.raises(ValueError, match="0/1: was prepared to"):
        list(load(Shelves([2]), InOrder([2]), x=grows).batches([(0, 2)]))


@pytest.mark.parametrize("workers", [0, 2])
def test_global_random_generators_are_not_used(workers):
    before = torch.get_rng_state(), random.getstate()
    list(load(Shelves([8, 8]), workers=workers).batches([(0, 8), (8, 8)]))
    assert torch.get_rng_state().equal(before[0])
    assert random.getstate() == before[1]


class OneSlowShard(Shelves):
    """The first sample of the second shard takes as long as two steps below."""

    def read(self, shard, index, sufficient=None):
        if (shard, index) == (1, 0):
            time.sleep(0.4)
        return super().read(shard, index, sufficient)


@pytest.mark.slow
def test_a_slow_shard_is_hidden_by_what_was_read_before():
    source = OneSlowShard([48, 48])
    batches = load(source, InOrder(source.lengths), workers=2).batches((first, 8) for first in range(0, 96, 8))
    waited = []
    for _ in range(12):
        began = time.monotonic()
        next(batches)
        waited.append(time.monotonic() - began)
        time.sleep(0.2)
    batches.close()
    # The first batch waits for the workers to start.
    assert sum(waited[1:]) < 0.2


def test_steps_are_consumed_one_batch_and_a_few_pieces_ahead():
    asked = []

    def steps():
        for step in range(50):
            asked.append(step)
            yield step * 40, 40

    batches = load(Shelves([40]), workers=2).batches(steps())
    for taken in range(3):
        next(batches)
        # Ten pieces per batch; of the batch after the next, two workers hold four pieces.
        while asked[-1] < taken + 2:
            time.sleep(0.01)
    time.sleep(1)
    assert asked[-1] == 4
    batches.close()
    in_process = load(Shelves([40])).batches(steps())
    asked.clear()
    next(in_process)
    assert asked == [0]


def test_file_descriptors_of_pieces_are_closed():
    """Each tensor from a worker is shared memory with a file descriptor, of which a process may have a few hundred."""
    before = len(os.listdir("/proc/self/fd"))
    batches = load(Shelves([400]), workers=1, negatives=True).batches([(0, 400)])
    batch = next(batches)
    assert len(batch.keys) == 400
    assert len(os.listdir("/proc/self/fd")) - before < 40
    batches.close()


def test_closing_early_ends_the_workers_at_the_next_piece():
    batches = load(Shelves([1000]), x=slow, workers=2).batches([(0, 4), (4, 900)])
    next(batches)
    time.sleep(0.5)
    assert len(children()) == 2
    start = time.monotonic()
    batches.close()
    # The second batch alone would take 20 seconds.
    assert time.monotonic() - start < 10
    assert children() == []


@pytest.mark.slow
def test_a_killed_worker_raises_instead_of_blocking():
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        for _ in load(Shelves([100]), x=slow, workers=1).batches((step * 8, 8) for step in range(100)):
            os.kill(children()[0].pid, signal.SIGKILL)


def test_signals_to_the_group_of_the_training_process_do_not_reach_its_workers():
    (batch,) = load(Shelves([8]), x=the_group, workers=1).batches([(0, 8)])
    worker, group = batch.x[0].tolist()
    assert worker == group
    assert group != os.getpgrp()


@pytest.mark.slow
def test_a_process_that_fails_in_the_middle_ends_quickly_and_quietly():
    program = """
        import test_loader
        test_loader.loader_module.PIECE_ROWS = 4
        batches = test_loader.load(test_loader.Shelves([4000]), x=test_loader.slow, workers=1).batches([(0, 4), (4, 3900)])
        next(batches)
        raise RuntimeError("the run failed")
    """
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=os.path.dirname(__file__), capture_output=True, text=True, timeout=100
    )
    assert [line for line in result.stderr.splitlines() if "Error" in line] == ["RuntimeError: the run failed"]
    assert result.returncode == 1
    # The rest of the data would take three minutes.
    assert time.monotonic() - start < 90


def test_everything_sent_to_spawned_workers_can_be_pickled(monkeypatch):
    source = Shelves([11], bad={"0/3"})
    expected = all_leaves(load(source, negatives=True).batches([(0, 11)]))
    whole = loader_module._workers
    monkeypatch.setattr(loader_module, "_workers", lambda reader, *rest: whole(pickle.loads(pickle.dumps(reader)), *rest))
    assert all_leaves(load(source, workers=1, negatives=True).batches([(0, 11)])) == expected
    data_loader = whole(None, iter([]), 1)
    pickle.dumps((data_loader.collate_fn, data_loader.worker_init_fn))


def test_a_loader_can_be_pickled():
    source = Shelves([11])
    again = pickle.loads(pickle.dumps(load(source)))
    assert all_leaves(again.batches([(0, 11)])) == all_leaves(load(source).batches([(0, 11)]))


def test_batches_of_an_endless_run_can_be_taken_one_by_one():
    batches = load(Shelves([5]), workers=1).batches(StepRange(step * 3, 3) for step in count())
    assert [len(batch.keys) for batch in islice(batches, 4)] == [3, 3, 3, 3]
    batches.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "ranks": 2}, "rank is 2 of 2"),
        ({"workers": -1}, "workers is -1"),
        ({"negatives": True, "y": None}, "prepare_y"),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        load(Shelves([3]), **options)


def test_rows_are_the_same_without_simplejpeg(tmp_path, monkeypatch):
    pytest.importorskip("simplejpeg")
    from PIL import Image

    from megabatch.config import Data
    from megabatch.data import decoding, open_source
    from megabatch.towers.inputs import PrepareImage

    for number in range(6):
        image = Image.radial_gradient("L").rotate(40 * number).resize((200, 150 + number))
        image.convert("RGB" if number % 3 else "L").save(tmp_path / f"{number}.jpg", quality=70)
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    prepare, source = PrepareImage(48, crop=0.5, flip=True), open_source(Data(source=str(tmp_path)))
    kinds = set()

    def pixels():
        (batch,) = load(source, x=prepare, augment=True).batches([(0, 6)])
        return batch.x

    def decode(image, file):
        decoded = decode_to_tensor(image, file)
        kinds.add(type(decoded))
        return decoded

    decode_to_tensor = decoding._decode_to_tensor
    monkeypatch.setattr(decoding, "_decode_to_tensor", decode)
    expected = pixels()
    assert kinds == {torch.Tensor}
    monkeypatch.setattr(decoding, "_import_simplejpeg", lambda: None)
    assert torch.equal(pixels(), expected)
    assert kinds == {torch.Tensor, type(None)}


def test_jpegs_are_reduced_as_far_as_the_preparation_of_their_side_allows(tmp_path):
    from PIL import Image

    from megabatch.config import Data
    from megabatch.data import open_source
    from megabatch.towers.inputs import PrepareImage

    for number in range(2):
        Image.radial_gradient("L").convert("RGB").rotate(40 * number).save(tmp_path / f"{number}.jpg", quality=95)
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    source = open_source(Data(source=str(tmp_path)))
    sizes = []

    class Recorded(PrepareImage):
        def __call__(self, raw, seed):
            sizes.append(raw.size)
            return super().__call__(raw, seed)

    def pixels(prepare, reduce_jpegs):
        sizes.clear()
        (batch,) = load(source, x=prepare, reduce_jpegs=reduce_jpegs).batches([(0, 2)])
        return batch.x.int(), set(sizes)

    whole, whole_sizes = pixels(Recorded(32), reduce_jpegs=False)
    reduced, reduced_sizes = pixels(Recorded(32), reduce_jpegs=True)
    assert (whole_sizes, reduced_sizes) == ({(256, 256)}, {(32, 32)})
    # Rounding, except at the edges that the rotation made.
    assert 0 < (whole - reduced).abs().float().mean() <= 1
    # A preparation that does not say what it needs gets all pixels.
    _, own_sizes = pixels(lambda raw, seed: (sizes.append(raw.size), torch.zeros(1))[1], reduce_jpegs=True)
    assert own_sizes == {(256, 256)}
