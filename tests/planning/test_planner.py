"""A plan writes what training does: a planned file gives the same plan again, and there is none for what `train` cannot do."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from small_works import WORK, Stated
from torch import nn

from megabatch import config
from megabatch.cli.planning import _next_step
from megabatch.planning.estimator import Tools
from megabatch.planning.plan import Plan
from megabatch.planning.planner import plan
from megabatch.planning.report import as_toml, plan_report, screen, write
from megabatch.planning.workload import Workload
from megabatch.reporting.markdown import as_markdown
from megabatch.towers import build_tower


def counted(request, run, precision, machine):
    return Workload(WORK, (nn.Identity(), nn.Identity()), (lambda rows: rows, lambda rows: rows))


def predict(request, run, work, machine):
    """Return a memory model in which every batch fits."""
    return lambda strategy: Stated(2**30, 2**30, {"state": 2**30}, "backward", {"backward": 2**30})


ASKED = {"tools": Tools(counted, predict), "data": "2M", "gpu": "8xA100-80GB"}
BERT = "transformers:bert-base-uncased"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the names of two towers: a folder with a small BERT, and one with its configuration alone."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    shape = BertConfig(vocab_size=300, max_position_embeddings=32, **sizes)
    saved, empty = tmp_path_factory.mktemp("saved"), tmp_path_factory.mktemp("empty")
    BertModel(shape).save_pretrained(saved)
    shape.save_pretrained(empty)
    return {"SAVED": f"transformers:{saved}", "EMPTY": f"transformers:{empty}"}


MODELS = (
    (None, {}), ("ViT-L/14", {}), ("timm:vit_base_patch16_224 + text", {}), ("vit", {"objective": "supervised"}), (BERT, {}),
    ("SAVED", {}), ("EMPTY", {}), (f"timm:resnet50 + {BERT}", {}), ("ViT-B/32", {"loss": "siglip", "optimizer": "sgd"}),
)  # fmt: skip


@pytest.mark.parametrize("start", ["scratch", "pretrained", "locked"])
@pytest.mark.parametrize(("model", "more"), MODELS, ids=lambda value: str(value))
@pytest.mark.usefixtures("without_law")
def test_a_planned_file_gives_the_plan_that_wrote_it(model, more, start, folders, tmp_path):
    # The embedded default is a run of its own, whose towers are random.
    more = {**more, "start": "scratch" if model is None else start}
    # Fewer than a million pairs from scratch get label smoothing too.
    for data in ("500K", "20M"):
        first = plan(folders.get(model, model), **{**ASKED, **more, "data": data})
        path = write(first, tmp_path / f"{data}.toml")
        again = plan(config.read(path), **{**ASKED, "data": data})
        assert again.batch == first.batch and again.usual == first.usual and again.seen == first.seen
        assert (again.run.optimizer, again.run.schedule) == (first.run.optimizer, first.run.schedule)
        assert again.run.loss == first.run.loss and again.warnings == first.warnings


def test_a_tower_that_training_builds_with_weights_is_planned_as_pretrained(folders):
    towers = {name: [build_tower(config.Tower(folders[name]), 16, side="x").module for _ in range(2)] for name in folders}
    loads = {
        name: all(torch.equal(a, b) for a, b in zip(*(tower.state_dict().values() for tower in pair), strict=True))
        for name, pair in towers.items()
    }
    assert loads == {"SAVED": True, "EMPTY": False}
    for name in folders:
        written = config.build({"x": {"name": folders[name]}, "y": {"name": "x"}, "schedule": {"steps": 9}})
        for model in (written, folders[name]):
            found = plan(model, **ASKED, seen="6M")
            started = {start: plan(folders["EMPTY"], start=start, **ASKED, seen="6M") for start in ("scratch", "pretrained")}
            like = started["pretrained" if loads[name] else "scratch"]
            assert found.batch == like.batch and found.run.optimizer.lr == like.run.optimizer.lr
            assert any("weights" in note and folders[name] in note for note in found.notes) == loads[name]
    # Only the image tower decides, and a language model is trained elsewhere, from what its trainer says.
    assert plan(f"vit + {folders['SAVED']}", **ASKED).batch == plan("vit + text", **ASKED).batch
    language = {start: plan("gpt2", objective="lm", start=start, **{**ASKED, "data": "20B"}) for start in started}
    assert language["scratch"].batch != language["pretrained"].batch


def test_what_a_function_starts_from_is_said_to_be_assumed():
    for start, word in (("scratch", "random"), ("pretrained", "pretrained")):
        found = plan("package.module:image + package.module:text", start=start, **ASKED)
        assert any("package.module:image" in note and word in note for note in found.notes)


@pytest.mark.parametrize("more", [{"start": "pretrained"}, {"objective": "finetune"}, {"loss": "nt_xent"}, {"negatives": 3}])
def test_a_plan_for_adapters_has_numbers_but_no_file_that_would_train_all_weights(more, tmp_path):
    name = "ViT-B/32" if "loss" in more else BERT
    whole, found = plan(name, **ASKED, **{"start": "pretrained", **more}), plan(name, **ASKED, **more, lora=8)
    assert found.run is None and whole.run is not None
    with pytest.raises(ValueError, match=r"lora is 8.* no adapters.*LoraConfig\(r=8"):
        write(found, tmp_path / "run.toml")
    assert not list(tmp_path.iterdir())
    for suffix in ("json", "md"):
        assert write(found, tmp_path / f"plan.{suffix}").read_text("utf-8")
    assert Plan.from_json(found.as_json()) == found
    # Nothing is to be filled in, and samples stay samples.
    assert not any("Fill in" in note for note in found.notes) and any("Fill in" in note for note in whole.notes)
    assert found.negatives_per_query == whole.negatives_of(found.batch)
    assert "sequences" not in as_markdown(screen(found)) and "sequences" not in as_markdown(plan_report(found))
    # The file of a run has no adapters either.
    given = config.build({"x": {"name": BERT}, "y": {"name": "x"}, "schedule": {"steps": 9}})
    with pytest.raises(ValueError, match="lora is 8"):
        as_toml(plan(given, **ASKED, lora=8))


def test_the_next_step_is_training_only_where_a_file_for_it_was_written():
    whole, adapters = (plan(BERT, **ASKED, start="pretrained", lora=rank) for rank in (None, 8))
    language = plan("gpt2", objective="lm", **{**ASKED, "data": "20B"})
    for found, out, trains in (
        (whole, "run.toml", True), (whole, "plan.md", False), (adapters, "run.toml", False), (language, "run.toml", False)
    ):  # fmt: skip
        assert (f"megabatch train {out}" in _next_step(argparse.Namespace(out=Path(out)), found)) == trains
    assert all("--out run.toml" not in _next_step(argparse.Namespace(out=None), found) for found in (adapters, language))
