"""The benchmark of fp8 layers: which layers it converts, what its settings share, its rows and its table."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import fp8, whole_steps
from benchmarks.report import read_rows
from benchmarks.study import data
from benchmarks.whole_steps import Bench, Case

SIZE = fp8.Size(width=32, depth=1, length=4, batch=16, steps=12, lr=1e-2)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder with a source whose pairs are a text of three letters and the same text in capitals."""
    letters = np.random.default_rng(0).permutation(26**3)[:400]
    texts = np.stack([97 + letters // 26**2, 97 + letters // 26 % 26, 97 + letters % 26], 1).astype(np.uint8)
    x = np.pad(texts, ((0, 0), (0, data.WIDTH - 3)))
    folder = tmp_path_factory.mktemp("source")
    data.write(data.Arrays(x, np.where(x > 0, x - 32, x), 336, 0, 64), folder / "names.npz.xz")
    return folder


def test_a_seed_has_the_same_order_in_every_setting_and_no_pair_twice_in_an_epoch():
    rows = torch.stack(list(fp8.batches(50, 16, 7, seed=1)))
    assert rows.shape == (7, 16)
    assert all(len(epoch.unique()) == 48 for epoch in (rows[:3], rows[3:6]))
    assert rows.equal(torch.stack(list(fp8.batches(50, 16, 7, seed=1))))
    assert not rows[0].equal(next(fp8.batches(50, 16, 7, seed=2)))


def test_the_test_pairs_are_none_of_the_training_pairs(source):
    training, test = fp8.load(source / "names.npz.xz", SIZE.length, "cpu")
    assert training.x.shape == (336, 4) and test.y.shape == (64, 4)
    assert not {tuple(row) for row in training.x.tolist()} & {tuple(row) for row in test.x.tolist()}


@pytest.mark.slow
def test_a_training_lowers_the_loss_and_is_reproducible(source):
    pairs = fp8.load(source / "names.npz.xz", SIZE.length, "cpu")
    setting = fp8.Setting(fp8.BF16, SIZE, pairs, "cpu")
    row, other, again = (setting.train(seed) for seed in (1, 0, 1))
    # Untrained towers have the loss of chance.
    assert row["loss"] < 0.95 * math.log(SIZE.batch) and 0 < row["recall"] == row["recall_in_bf16"] < 1
    assert other["losses"] != row["losses"] == again["losses"]


@pytest.mark.slow
def test_settings_without_fp8_run_anywhere_and_make_a_table(source, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    size = [f"--{key}={value}" for key, value in SIZE._replace(steps=3)._asdict().items()]
    options = ["--device", "cpu", "--settings", "bf16", "--seeds", "2", "--source", "names", *size]
    options += ["--data", str(source), "--out", str(out)]
    assert fp8.main(options) == 0
    rows = read_rows(out)
    assert [(row["setting"], row["seed"]) for row in rows] == [("bf16", 0), ("bf16", 1)]
    assert all(row["seconds_per_step"] > 0 and row["pairs"] == 64 for row in rows)
    assert "| names | bf16 |" in capsys.readouterr().out
    slow = [row | {"setting": "fp8", "seconds_per_step": 2 * row["seconds_per_step"], "recall": 0.5} for row in rows]
    failed = {"source": "names", "setting": "fp8_rows", "seed": 0, "failed": "the process ended with code 1"}
    lines = fp8.markdown([*slow, *rows, failed]).splitlines()
    assert "| 50.0% | 50.0%, 50.0% |" in lines[2] and lines[2].endswith("| 0.50× |") and lines[3].endswith("| 1.00× |")
    assert "the process ended with code 1" in lines[4]


def test_fp8_on_a_cpu_is_refused_in_a_sentence(capsys):
    with pytest.raises(SystemExit):
        fp8.main(["--device", "cpu"])
    assert "fp8 layers need a CUDA device of capability 8.9 or later, and this is cpu" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"capability 8\.9"):
        Bench([Case.of("tiny:16+fp8_rows")], "cpu")


@pytest.mark.parametrize("recipe", fp8.RECIPES.values(), ids=fp8.RECIPES)
def test_only_layers_whose_widths_are_multiples_of_16_are_converted(recipe):
    float8_linear = pytest.importorskip("torchao.float8.float8_linear")
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32), nn.Linear(32, 20), nn.Linear(20, 32))
    x = torch.randn(64, 32)
    weights, expected = list(block.parameters()), block(x)
    fp8.convert(block, recipe, emulate=True)
    assert [isinstance(layer, float8_linear.Float8Linear) for layer in block] == [True, False, True, False, False]
    assert all(new is old for new, old in zip(block.parameters(), weights, strict=True))
    # Each product rounds to 3 bits behind the leading one.
    difference = (block(x) - expected).norm() / expected.norm()
    assert 1e-3 < difference < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_a_lost_chunk_is_found_in_steps_with_fp8_layers(recipe, monkeypatch):
    pytest.importorskip("torchao")
    monkeypatch.setattr(whole_steps, "convert", functools.partial(fp8.convert, emulate=True))
    monkeypatch.setattr(whole_steps, "unavailable", lambda device: None)
    # With a scale per tensor, two chunks at once have other embeddings than one by one, and `cached` refuses that.
    chunks = ("", "/16") if recipe == "fp8" else ("", "/16", "/16x2")
    cases = [Case.of(f"tiny:32{chunk}+{recipe}") for chunk in chunks]
    bench = Bench(cases, "cpu")
    # torchao's layers do not know the autocast of a CPU.
    bench.clip.use("float32")
    for case in cases:
        row = bench.row(case, 1)
        # The difference from bf16 is that of fp8; from the same chunks it is that of rounding.
        assert row["difference"] > 0.02 and row["same_chunks_difference"] < 0.02, row

    class LosesAChunk(whole_steps.Megabatch):
        def step(self, batch):
            return super().step(batch.first(len(batch.images) - self.chunk))

    monkeypatch.setattr(whole_steps, "Megabatch", LosesAChunk)
    for case in cases[1:]:
        assert "two passes with the same layers" in bench.row(case, 1)["failed"]
