"""The study of batches: its splits, its stacked runs, and its resumable schedule."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megabatch
from benchmarks.study import data, runs, stack
from benchmarks.study.features import load, text_counts
from benchmarks.study.stack import Cell

TINY = Cell("tiny", "tiny", "scratch", "clip", 0.0, 16, 16 * 24)
WORDS = ("red blue green white black brown", "fox dog cat cow hen", "runs eats sleeps sings jumps hides waits reads")


@pytest.fixture(autouse=True)
def tiny_towers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stack.SIZES, "tiny", stack.Size(16, 1, 8))


def tiny_arrays() -> data.Arrays:
    """Return 240 sentences of three words and their words backwards, of which a third is held out."""
    sentences = list(itertools.product(*(words.split() for words in WORDS)))
    random.Random(0).shuffle(sentences)
    x = data.rows([" ".join(words).encode() for words in sentences], data.WIDTH)
    y = data.rows([" ".join(word[::-1] for word in words).encode() for words in sentences], data.WIDTH)
    return data.Arrays(x, y, 160, 40, 40)


def test_near_equal_pairs_and_pairs_of_one_entry_have_one_part() -> None:
    entries = [
        data.Entry(f"word {chr(97 + i // 26)}{chr(97 + i % 26)}", f"{chr(97 + i % 26)}{chr(97 + i // 26)} text", "")
        for i in range(400)
    ]
    entries += [data.Entry(e.x.upper() + "!", f"other of {e.y}", "") for e in entries[:100] if isinstance(e.x, str)]
    entries += [
        data.Entry(
            f"grouped {'x' * (i // 50 + 1)} {'y' * (i % 50 + 1)}", f"of {'p' * (i % 50 + 1)}{'q' * (i // 50)}", f"g{i // 10}"
        )
        for i in range(200)
    ]
    pairs, counts = data.distinct(entries)
    assert len(pairs) + sum(counts[k] for k in ("empty", "equal_pair", "equal_x", "equal_y")) == counts["read"] == len(entries)
    part = data.split(data.components(pairs, True), 40)
    parts: dict[object, set[int]] = {}
    for (x, _, group), p in zip(pairs, part, strict=True):
        for key in (data.near(x), group or data.near(x)):
            parts.setdefault(key, set()).add(int(p))
    assert all(len(found) == 1 for found in parts.values())
    assert min((part == 1).sum(), (part == 2).sum()) >= 40


def test_equal_sides_are_left_out_and_counted() -> None:
    entries = [data.Entry("aa", "one", ""), data.Entry("aa", "one", ""), data.Entry("aa", "two", ""), data.Entry("bb", "one", "")]
    pairs, counts = data.distinct([*entries, data.Entry("cc", "", ""), data.Entry("dd", "four", "")])
    assert [x for x, _, _ in pairs] == [b"aa", b"dd"]
    assert [counts[k] for k in ("equal_pair", "equal_x", "equal_y", "empty")] == [1, 1, 1, 1]


def test_a_written_source_is_read_back(tmp_path: Path) -> None:
    arrays = tiny_arrays()
    images = arrays._replace(x=np.arange(240 * 9, dtype=np.uint8).reshape(240, 9))
    for stored in (arrays, images):
        data.write(stored, tmp_path / "source")
        again = data.read(tmp_path / "source")
        assert all(np.array_equal(a, b) for a, b in zip(stored, again, strict=True))


def test_features_count_words_and_trigrams_whatever_the_case() -> None:
    texts = [b"Red fox", b"red FOX", b"red fix", b"foxy red"]
    counts = text_counts(torch.tensor(data.rows(texts, data.WIDTH))).long()
    # Seven trigrams and two words.
    assert counts[0].sum() == 9 and torch.equal(counts[0], counts[1])
    assert (counts[0] * counts[3]).sum() < (counts[0] * counts[2]).sum() < (counts[0] ** 2).sum()


@pytest.mark.parametrize(("name", "smoothing"), [("clip", 0.0), ("clip", 0.1), ("siglip", 0.0)])
def test_stacked_gradients_equal_those_of_megabatch(name: str, smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.nn.functional.normalize(torch.randn(3, 20, 8, generator=generator).double(), dim=-1) for _ in range(2))
    scale, bias = torch.tensor([5.0, 14.0, 60.0]).double(), torch.tensor([-1.0, -3.0, 0.5]).double()
    cell = TINY._replace(loss=name, smoothing=smoothing)
    stacked = stack.OBJECTIVES[name].stacked(x, y, scale, bias, smoothing)
    inputs = [t.requires_grad_() for t in (x, y, scale, bias)]
    if name == "clip":
        losses = [megabatch.clip_loss(x[r], y[r], scale[r], label_smoothing=smoothing, group=None) for r in range(3)]
    else:
        losses = [megabatch.siglip_loss(x[r], y[r], scale[r], bias[r], group=None) for r in range(3)]
    expected = torch.autograd.grad(torch.stack(losses).sum(), inputs, allow_unused=True)
    one_by_one = stack.loss_gradients(*(t.detach() for t in inputs), cell._replace(batch=2 * stack.STACKED))
    for found, also, exact in zip(stacked, one_by_one, expected, strict=True):
        if exact is not None:
            torch.testing.assert_close(found.detach(), exact, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(also, exact, rtol=1e-9, atol=1e-12)


def test_a_run_does_not_depend_on_the_others_of_its_stack() -> None:
    features = load(tiny_arrays(), torch.device("cpu"))
    together = stack.train(TINY, [1e-3, 4e-3, 1e-3], [0, 0, 1], features)
    for run, (rate, seed) in enumerate([(1e-3, 0), (4e-3, 0), (1e-3, 1)]):
        alone = stack.train(TINY, [rate], [seed], features)
        for a, b in zip(together.weights.tensors(), alone.weights.tensors(), strict=True):
            # Batched and single products round differently; Adam divides by small gradients, 24 times.
            torch.testing.assert_close(a[run], b[0], rtol=0, atol=24 * rate * 0.05)
    first, other = together.weights.x[0][0], together.weights.x[0][2]
    assert (first - other).abs().max() > 0.01


def test_a_pretrained_tower_is_used_where_the_shapes_agree() -> None:
    features = load(tiny_arrays(), torch.device("cpu"))
    start = stack.new_weights(features, TINY, [7, 8], None, torch.device("cpu"))
    images = features._replace(x=features.x._replace(values=features.x.values[:, :64]))
    weights = stack.new_weights(images, TINY, [0, 0, 1], start, torch.device("cpu"))
    assert all(torch.equal(own[run], other[0]) for own, other in zip(weights.y, start.y, strict=True) for run in range(3))
    # The other tower reads 64 pixels: none of its layers is pretrained, and it depends on the seed.
    assert torch.equal(weights.x[0][0], weights.x[0][1]) and not torch.equal(weights.x[-1][0], weights.x[-1][2])
    assert not torch.equal(weights.x[-1][0], start.x[-1][0])


def test_training_retrieves_pairs_that_it_has_not_seen() -> None:
    features = load(tiny_arrays(), torch.device("cpu"))
    trained = stack.train(TINY._replace(samples=16 * 150), [1e-2, 1e9], [0, 0], features)
    # 40 candidates: chance is 2.5 %. A run that diverged finds nothing.
    assert trained.test[0].recall(1) > 0.3
    assert trained.test[1].recall(1) < 0.1


def test_no_batch_has_a_pair_twice_and_an_epoch_has_each_once() -> None:
    features = load(tiny_arrays(), torch.device("cpu"))
    stacked = stack.Stack(TINY, [1e-3] * 2, [0, 1], features, None)
    rows = torch.cat(list(stacked._batches()))
    assert rows.shape == (TINY.steps, 2, TINY.batch)
    assert all(len(one.unique()) == TINY.batch for step in rows for one in step)
    assert all(len(rows[:10, run].unique()) == features.train for run in range(2))
    assert not torch.equal(rows[:, 0], rows[:, 1])


def test_the_rate_rises_then_falls_to_zero_and_moments_are_corrected() -> None:
    table = stack.rate_table(100)
    assert int(table[:, 0].argmax()) + 1 == 10 and table[-1, 0] < 1e-3 and table[0, 0] == pytest.approx(0.1)
    weight, gradient = torch.ones(2, 3), torch.tensor([[1.0, -2.0, 4.0]] * 2)
    moments = torch.zeros(2, 3), torch.zeros(2, 3)
    stack.update(weight, gradient, *moments, torch.tensor([0.1, 0.2]), torch.tensor([1.0, *table[0, 1:].tolist()]), 0.0)
    # The first step of Adam is the rate times the sign.
    torch.testing.assert_close(weight, 1 - torch.tensor([[0.1], [0.2]]) * gradient.sign(), rtol=1e-4, atol=1e-5)


def test_the_kernel_takes_the_same_step_as_the_formula() -> None:
    launch = pytest.importorskip("benchmarks.study.adamw").launch
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rates, now = torch.tensor([1e-3, 1e-2, 0.3]), torch.tensor([0.7, 3.0, 5.0])
    for shape in ((3, 70, 40), (3, 1, 33), (3,)):
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(shape, generator=generator).abs_() for _ in range(4)]
        formula = [t.clone() for t in tensors]
        stack.update(*formula, rates, now, 0.1)
        kernel = [t.to(device) for t in tensors]
        launch(*kernel, rates.to(device), now.to(device), 0.1)
        for found, expected in zip(kernel, formula, strict=True):
            torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("loss", "batch"), [("clip", 16), ("siglip", 16), ("clip", 96), ("siglip", 96)])
def test_a_captured_run_is_the_run_without_a_graph(loss: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "STACKED", 64)
    features = load(tiny_arrays(), torch.device("cuda"))
    cell = TINY._replace(loss=loss, batch=batch, samples=batch * 21)
    captured = stack.train(cell, [1e-3, 2e-3], [0, 1], features)
    assert captured.not_captured is None
    monkeypatch.setattr(stack.Stack, "_capture", lambda self: None)
    eager = stack.train(cell, [1e-3, 2e-3], [0, 1], features)
    for a, b in zip(captured.weights.tensors(), eager.weights.tensors(), strict=True):
        # Sums over a batch may take another order; Adam divides by small gradients, 21 times.
        torch.testing.assert_close(a, b, rtol=0, atol=21 * 2e-3 * 0.1)


def fake_rows(job: runs.Job, best: float) -> list[dict[str, Any]]:
    """Return rows of a job whose quality falls with the distance from the best rate."""
    quality = [-abs(math.log2(rate / best)) for rate in job.rates]
    return [
        {**job.cell._asdict(), "rate": r, "seed": s, "validation_mrr": q}
        for r, s, q in zip(job.rates, job.seeds, quality, strict=True)
    ]


@pytest.mark.parametrize("best", [runs.RATE * 2.0**k for k in (-7, 0, 5)])
def test_the_rate_is_followed_past_an_edge_then_run_with_all_seeds(best: float) -> None:
    rows: dict[Cell, list[dict[str, Any]]] = {TINY: []}
    for _ in range(8):
        job = runs.next_job(TINY, rows)
        if job is None:
            break
        rows[TINY] += fake_rows(job, best)
    chosen = runs.best_rate(rows[TINY])
    assert chosen == best and {row["seed"] for row in rows[TINY] if row["rate"] == best} == set(runs.SEEDS)
    tuned = [row["rate"] for row in rows[TINY] if row["seed"] == runs.SEEDS[0]]
    assert min(tuned) < best < max(tuned) and len(set(tuned)) == len(tuned)
    # A neighbour begins at this cell's rate.
    neighbour = runs.next_job(TINY._replace(batch=32), rows)
    assert neighbour is not None and sorted(set(neighbour.rates)) == [best / 2, best, 2 * best]


def test_cells_are_different_and_possible() -> None:
    found = runs.cells({"german": 300_000, "glyphs": 26_000, "code": 150_000}, ["german", "glyphs"])
    assert len(found) == len(set(found)) > 50
    assert all(cell.batch <= 26_000 for cell in found if cell.source == "glyphs")
    assert {cell.samples for cell in found} == set(runs.BUDGETS.values()) and {cell.start for cell in found} == {
        "scratch",
        "pretrained",
    }


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    data.write(tiny_arrays(), tmp_path / "tiny.npz.xz")
    records = {"tiny": {"sha256": "0", "train": 160, "pixels": None}}
    out = tmp_path / "rows.jsonl"
    # Other processes have not the tiny towers.
    small = TINY._replace(size="small", samples=16 * 13)
    work = [small, small._replace(batch=200)]
    runs.run(tmp_path, out, 2.0, "cpu", 1, work, records)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    # The batch that exceeds the pairs fails and does not stop the others.
    assert [row["batch"] for row in rows if "error" in row] == [200]
    finished = [row for row in rows if "error" not in row]
    assert runs.next_job(small, {small: finished}) is None
    hits = runs.unpack(finished[0]["hits"], 40)
    assert hits.mean() == pytest.approx(finished[0]["test_1"])
    # Killed within a line: all other rows stay, and only the missing runs are trained.
    lines = out.read_text().splitlines()
    out.write_text("\n".join(lines[:3]) + "\n" + lines[3][:50])
    runs.run(tmp_path, out, 2.0, "cpu", 1, work, records)
    again = [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]
    keys = [(row["rate"], row["seed"]) for row in again if "error" not in row]
    assert sorted(keys) == sorted((row["rate"], row["seed"]) for row in finished)
