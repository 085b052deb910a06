"""The benchmark of whole steps: its cases, its check of gradients, its table."""

from __future__ import annotations

import argparse
import functools
import json

import pytest
import torch
from torch import nn

import megabatch
from benchmarks import whole_steps
from benchmarks.report import read_rows
from benchmarks.whole_steps import Bench, Case


@pytest.mark.parametrize(
    ("words", "case"),
    [
        ("b32:2048", Case("b32", 2048)),
        ("l14:2048/256", Case("l14", 2048, 256)),
        ("l14:2048/256x2k3+fused", Case("l14", 2048, 256, 2, 3, ("fused",))),
        ("bert:64/8kauto+fused+layers", Case("bert", 64, 8, 1, "auto", ("fused", "layers"))),
    ],
)
def test_a_case_is_read_as_it_is_written(words, case):
    assert Case.of(words) == case == Case.of(str(case))


@pytest.mark.parametrize("words", ["b32", "b33:8", "b32:8x2", "b32:8+faster", "b32:-8"])
def test_other_words_are_refused(words):
    with pytest.raises(argparse.ArgumentTypeError, match="MODEL:PAIRS"):
        Case.of(words)


def test_kept_rows_make_a_table_in_which_each_is_compared_with_the_first_of_its_kind():
    rows = read_rows(whole_steps.FILE)
    lines = whole_steps.markdown(rows).splitlines()
    assert len(lines) == len(rows) + 4
    assert all("| 1.00× |" in line for line in lines if "| plain |" in line)
    failed = whole_steps.markdown([*rows, {"case": Case("b32", 8)._asdict(), "failed": "out of memory"}])
    assert "| b32 | 8 |  | plain | out of memory |" in failed


@pytest.mark.slow
def test_steps_are_timed_if_their_gradients_are_those_of_a_plain_step(monkeypatch):
    cases = [Case.of(words) for words in ("tiny:16+linear", "tiny:16/4x2k1+linear+fused", "tiny:16/4kauto+linear")]
    bench = Bench(cases, "cpu")
    for case in cases:
        row = bench.row(case, 1)
        assert row["seconds"] > 0 and row["difference"] < whole_steps.AGREEMENT, row
    right = megabatch.clip_loss
    monkeypatch.setattr(megabatch, "clip_loss", lambda *inputs: 1.1 * right(*inputs))
    assert "the gradients differ" in bench.row(cases[0], 1)["failed"]


@pytest.mark.slow
def test_residuals_in_bf16_change_the_blocks_of_both_towers(monkeypatch):
    title, kind, shape = whole_steps.MODELS["tiny"]
    deeper = {name: shape[name] | {"num_hidden_layers": 6} for name in ("vision_config", "text_config")}
    monkeypatch.setitem(whole_steps.MODELS, "tiny", (title, kind, shape | deeper))
    case = Case.of("tiny:8/4+residuals")
    bench = Bench([case], "cpu")
    assert 0 < bench.row(case, 1)["difference"] < whole_steps.AGREEMENT
    layers = [module for module in bench.clip.modules() if type(module).__name__ in whole_steps.LAYERS]
    assert len(layers) == 12 and all(layer._forward_pre_hooks for layer in layers)


@pytest.mark.slow
def test_a_failure_of_one_case_is_a_row(tmp_path):
    out = tmp_path / "rows.jsonl"
    assert whole_steps.main(["tiny_bert:8", "tiny:8+fp8", "--device", "cpu", "--runs", "1", "--out", str(out)]) == 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [("seconds" in row, "failed" in row) for row in rows] == [(True, False), (False, True)]


def test_fp8_on_a_cpu_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match=r"CUDA device of capability 8\.9"):
        Bench([Case.of("tiny:16+fp8_rows")], "cpu")


@pytest.mark.parametrize("recipe", whole_steps.RECIPES.values(), ids=whole_steps.RECIPES)
def test_only_layers_whose_widths_are_multiples_of_16_are_converted(recipe):
    float8_linear = pytest.importorskip("torchao.float8.float8_linear")
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32), nn.Linear(32, 20), nn.Linear(20, 32))
    x = torch.randn(64, 32)
    weights, expected = list(block.parameters()), block(x)
    whole_steps.convert(block, recipe, emulate=True)
    assert [isinstance(layer, float8_linear.Float8Linear) for layer in block] == [True, False, True, False, False]
    assert all(new is old for new, old in zip(block.parameters(), weights, strict=True))
    # Each product rounds to 3 bits behind the leading one.
    difference = (block(x) - expected).norm() / expected.norm()
    assert 1e-3 < difference < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", whole_steps.RECIPES)
def test_a_lost_chunk_is_found_in_steps_with_fp8_layers(recipe, monkeypatch):
    pytest.importorskip("torchao")
    monkeypatch.setattr(whole_steps, "convert", functools.partial(whole_steps.convert, emulate=True))
    monkeypatch.setattr(whole_steps, "fp8_unavailable", lambda device: None)
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
