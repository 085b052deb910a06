"""The study of batches: its splits, its stacked runs, and its resumable schedule."""

from __future__ import annotations

import itertools
import json
import math
import random
import struct
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


def test_gradients_with_hard_negatives_equal_those_of_megabatch() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 20, 8), (3, 40, 8)
    x, y = (torch.nn.functional.normalize(torch.randn(s, generator=generator).double(), dim=-1) for s in shapes)
    scale = torch.tensor([5.0, 14.0, 60.0]).double()
    # Some hard negatives are positives of other pairs of the batch, and are not counted for these.
    rows = torch.stack([torch.randperm(30, generator=generator)[:20] for _ in range(3)])
    hard = (rows + 1) % 30
    own = rows[:, :, None] == hard[:, None]
    assert own.any()
    found = stack.loss_gradients(x, y, scale, torch.zeros(3), TINY._replace(negatives=1), own)
    inputs = [t.requires_grad_() for t in (x, y, scale)]
    losses = []
    for r in range(3):
        ids = torch.cat([rows[r], hard[r]])
        to_y = megabatch.clip_loss(x[r], y[r], scale[r], symmetric=False, ids=ids, group=None)
        losses.append((to_y + megabatch.clip_loss(y[r, :20], x[r], scale[r], symmetric=False, group=None)) / 2)
    expected = torch.autograd.grad(torch.stack(losses).sum(), inputs)
    for gradient, exact in zip(found, expected, strict=False):
        torch.testing.assert_close(gradient.detach(), exact, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_mined_negatives_are_the_nearest_wrong_pairs_and_change_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "MINED", 1000)
    features = load(tiny_arrays(), torch.device("cpu"))
    plain = stack.train(TINY._replace(samples=16 * 100), [1e-2], [0], features)
    mined = stack.mine(plain.weights, features)
    x, y = stack.embed(plain.weights, 0, features, torch.arange(features.train))
    similarity = (x @ y.T).fill_diagonal_(-2)
    assert torch.equal(mined, similarity.argmax(1)) and not (mined == torch.arange(features.train)).any()
    hard = TINY._replace(samples=16 * 100, negatives=1)
    trained = stack.train(hard, [1e-2, 1e-2], [0, 1], features, negatives=mined)
    assert trained.test[0].recall(1) > 0.3
    assert not torch.equal(trained.weights.x[0][0], plain.weights.x[0][0])
    with pytest.raises(ValueError, match="negatives"):
        stack.train(hard, [1e-2], [0], features)


def test_the_share_of_warm_up_moves_the_peak_of_the_rate() -> None:
    features = load(tiny_arrays(), torch.device("cpu"))
    for share in (0.02, 0.1, 0.3):
        stacked = stack.Stack(TINY._replace(samples=16 * 100, warm_up=share), [1e-3], [0], features, None)
        assert int(stacked._table[:, 0].argmax()) + 1 == pytest.approx(100 * share)


@pytest.mark.slow
def test_noise_is_measured_without_changing_the_run() -> None:
    features = load(tiny_arrays(), torch.device("cpu"))
    plain = stack.train(TINY, [1e-3, 4e-3, 1e9], [0, 1, 0], features)
    measured = stack.train(TINY, [1e-3, 4e-3, 1e9], [0, 1, 0], features, measure_noise=True)
    assert all(torch.equal(a, b) for a, b in zip(plain.weights.tensors()[0][:2], measured.weights.tensors()[0][:2], strict=True))
    assert plain.noise == [[], [], []]
    assert [point.step for point in measured.noise[0]] == [6, 12, 18]
    for point in (*measured.noise[0], *measured.noise[1]):
        row = point.row()
        # In 16 pairs of 160 the gradient is neither without noise nor invisible.
        assert row["trace"] is not None and row["trace"] > 0
    assert json.loads(json.dumps(measured.noise[2][-1].row()))["step"] == 18


def test_noise_between_batches_is_that_of_their_gradients() -> None:
    features = load(tiny_arrays(), torch.device("cpu"))
    stacked = stack.Stack(TINY, [1e-3, 1e-3], [0, 1], features, None)
    for run, found in enumerate(stacked._noise(3)):
        batches = list(stacked._drawn("noise", 3, stack.noise_batches(TINY)))
        assert not set(batches[0][run].tolist()) & set(batches[1][run].tolist())
        flat = [torch.cat([g[run].flatten() for g in stacked._gradients(rows)]).double() for rows in batches]
        mean = torch.stack(flat).mean(0)
        # The variance of batch means, times the batch, is that of a sample.
        variance = sum((g - mean).square().sum() for g in flat) / (len(flat) - 1) * TINY.batch
        assert found is not None and found.trace == pytest.approx(float(variance), rel=1e-6)
        assert found.signal == pytest.approx(float(mean.square().sum() - variance / TINY.batch / len(flat)), rel=1e-6)


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
@pytest.mark.parametrize(
    ("loss", "batch", "hard"),
    [("clip", 16, 0), ("siglip", 16, 0), ("clip", 96, 0), ("siglip", 96, 0), ("clip", 16, 1), ("clip", 96, 1)],
)
def test_a_captured_run_is_the_run_without_a_graph(loss: str, batch: int, hard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "STACKED", 64)
    features = load(tiny_arrays(), torch.device("cuda"))
    cell = TINY._replace(loss=loss, batch=batch, samples=batch * 21, negatives=hard)
    negatives = (torch.arange(features.train, device="cuda") + 1) % features.train if hard else None
    # Noise is measured between replays of the graph, and does not change the run.
    captured = stack.train(cell, [1e-3, 2e-3], [0, 1], features, negatives=negatives, measure_noise=True)
    assert captured.not_captured is None and len(captured.noise[1]) == len(stack.NOISE_SHARES)
    monkeypatch.setattr(stack.Stack, "_capture", lambda self: None)
    eager = stack.train(cell, [1e-3, 2e-3], [0, 1], features, negatives=negatives)
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


def test_where_pairs_repeat_often_rates_of_the_whole_range_are_tried() -> None:
    cell = runs.cell_for("german", runs.PLAIN, 4096, 4_000_000)

    def row(rate: float, pairs: int, seed: int = 0) -> dict[str, float]:
        return {"rate": rate, "seed": seed, "validation_mrr": -abs(math.log2(rate / runs.RATE)), "pairs": pairs}

    for pairs in (4_000_000, 40_000):
        near = [row(runs.RATE * 2.0**k, pairs, seed) for k in (-1, 0, 1) for seed in runs.SEEDS]
        job = runs.next_job(cell, {cell: near})
        if pairs == 4_000_000:
            assert job is None
            continue
        assert job is not None and set(job.rates) == {runs.COARSE[0], runs.COARSE[-1]}
        far = [row(rate, pairs) | {"validation_mrr": 1.0 if rate == runs.COARSE[-1] else -9.0} for rate in job.rates]
        # The best is now the last rate that was tried: the search goes on past it.
        beyond = runs.next_job(cell, {cell: [*near, *far]})
        assert beyond is not None and min(beyond.rates) > runs.COARSE[-1]
        # Between rates a factor of 4 apart, those beside the best are tried too.
        more = [row(rate, pairs) | {"validation_mrr": -9.0} for rate in beyond.rates]
        beside = runs.next_job(cell, {cell: [*near, *far, *more]})
        assert beside is not None and beside.rates == [runs.COARSE[-1] / 2]


def test_cells_are_different_and_possible() -> None:
    found = runs.cells({"german": 300_000, "glyphs": 26_000, "code": 150_000}, ["german", "glyphs"])
    assert len(found) == len(set(found)) > 50
    assert all(cell.batch <= 26_000 for cell in found if cell.source == "glyphs")
    assert {cell.samples for cell in found} == set(runs.BUDGETS.values()) and {cell.start for cell in found} == {
        "scratch",
        "pretrained",
    }
    assert {cell.warm_up for cell in found} == {stack.WARM_UP, *runs.WARM_UPS} and {cell.negatives for cell in found} == {0, 1}
    # The plain cells of all sources come before other kinds, and every kind of the first source before those of the second.
    first = next(i for i, cell in enumerate(found) if cell.kind != runs.PLAIN)
    assert {cell.samples for cell in found[:first]} == set(runs.BUDGETS.values())
    second = next(i for i, cell in enumerate(found) if cell.kind != runs.PLAIN and cell.source == "glyphs")
    assert {cell.kind for cell in found} == {cell.kind for cell in found[:second]}


def test_sources_that_confirm_have_plain_cells_whose_pairs_repeat_seldom() -> None:
    few, many = runs.CONFIRMATION[:2]
    found = runs.cells({few: 130_000, many: 2_000_000}, runs.CONFIRMATION)
    assert {cell.kind for cell in found} == {runs.PLAIN} and len(found) == len(set(found))
    budgets = {name: {cell.samples for cell in found if cell.source == name} for name in (few, many)}
    assert budgets == {few: {250_000, 1_000_000}, many: set(runs.BUDGETS.values())}
    assert all({1024, 4096, 16384} <= {c.batch for c in found if c.samples == budget} for budget in budgets[many])


def test_the_functions_of_a_c_file_are_found() -> None:
    text = (
        "int table[] =\n{\n1\n};\n\nstatic int __init one(int a,\n\t\tint b)\n{\n\treturn a;\n}\n"
        "/* Two. */\nchar *\ntwo (void)\n{\n  x ();\n}\n"
    )
    found = [(entry.x, data.clean(entry.y)) for entry in data._c_functions(text)]
    assert found == [("one", b"return a;"), ("two", b"x ();")]


def test_messages_that_both_languages_translate_are_paired(tmp_path: Path) -> None:
    german = {
        "": "header",
        "menu\4_Open": "Ö_ffnen",
        "%d file\0%d files": "%d Datei\0%d Dateien",
        "Python": "Python",
        "Cut": "Schnitt",
    }
    french = {"": "en-tête", "menu\4_Open": "_Ouvrir", "%d file\0%d files": "%d fichier\0%d fichiers", "Python": "python"}
    for language, messages, order in (("de", german, "<"), ("fr", french, ">")):
        file = tmp_path / f"program/usr/share/locale/{language}/LC_MESSAGES/program.mo"
        file.parent.mkdir(parents=True)
        file.write_bytes(compiled(messages, order))
    assert list(data.messages(tmp_path)) == [
        data.Entry("Ö_ffnen", "_Ouvrir", "open"),
        data.Entry("%d Datei", "%d fichier", "dfile"),
    ]


def compiled(messages: dict[str, str], order: str) -> bytes:
    """Return messages as a catalog of gettext in a byte order: the header, the tables of both sides, then the texts."""
    texts = [text.encode() for side in (messages.keys(), messages.values()) for text in side]
    start = 28 + 8 * len(texts)
    ends = list(itertools.accumulate((len(text) + 1 for text in texts), initial=start))
    table = [number for text, offset in zip(texts, ends, strict=False) for number in (len(text), offset)]
    head = (0x950412DE, 0, len(messages), 28, 28 + 8 * len(messages), 0, 0)
    return struct.pack(f"{order}{7 + len(table)}I", *head, *table) + b"".join(text + b"\0" for text in texts)


def test_sources_that_were_not_built_have_no_cells(tmp_path: Path) -> None:
    (tmp_path / "german.npz.xz").write_bytes(b"")
    pairs = runs.training_pairs({"german": {"train": 300_000}, "code": {"train": 150_000}}, tmp_path)
    found = runs.cells(pairs, ["german", "code"])
    # Pretrained towers come from the source that is missing.
    assert {cell.source for cell in found} == {"german"} and {cell.start for cell in found} == {"scratch"}


def test_a_row_belongs_to_its_cell_also_if_it_was_written_before_a_field_was_added() -> None:
    cell = TINY._replace(warm_up=0.3, negatives=1)
    row = json.loads(json.dumps(cell._asdict()))
    assert runs.cell_of(row) == cell
    del row["warm_up"], row["negatives"]
    assert runs.cell_of(row) == TINY


def test_hard_negatives_and_noise_are_priced() -> None:
    plain = runs.cell_for("german", runs.PLAIN, 1024, runs.NOISE_SAMPLES)
    seconds = {}
    for cell in (plain, plain._replace(negatives=1), plain._replace(warm_up=0.3)):
        seconds[cell] = runs.estimate(runs.Job(cell, [1e-3], [0]), 2048, 2048)
    base = seconds[plain._replace(warm_up=0.3)]
    # Noise, which the other kinds do not measure, is a small part.
    assert base < seconds[plain] < 1.3 * base and base < seconds[plain._replace(negatives=1)] < 2 * base


@pytest.mark.slow
def test_a_row_of_any_kind_is_repeated_from_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data.write(tiny_arrays(), tmp_path / "tiny.npz.xz")
    monkeypatch.setattr(runs, "PLAIN", TINY.kind)
    monkeypatch.setattr(runs, "MINING_SAMPLES", 160 * 20)
    monkeypatch.setattr(runs, "NOISE_SAMPLES", TINY.samples)
    for cell in (TINY, TINY._replace(warm_up=0.3), TINY._replace(negatives=1)):
        job = runs.Job(cell, [1e-2, 5e-3], [0, 1])
        rows = list(runs.rows_of(job, runs.Trainer(tmp_path, torch.device("cpu")).train(job)))
        row = json.loads(json.dumps(rows[1]))
        assert runs.cell_of(row) == cell and ("noise_scale" in row) == (cell == TINY)
        again = runs.Job(runs.cell_of(row), [row["rate"]], [row["seed"]])
        (repeated,) = runs.rows_of(again, runs.Trainer(tmp_path, torch.device("cpu")).train(again))
        assert repeated["validation_mrr"] == pytest.approx(row["validation_mrr"], abs=0.02)


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
