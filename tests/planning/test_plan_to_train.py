"""From a question to the first two steps: a plan is written, its own audit finds nothing, and `train` starts from the file."""

from __future__ import annotations

import csv
import json
import random

import pytest
from PIL import Image
from safetensors.torch import save_file

from megabatch import config
from megabatch.audit import audit, read_any
from megabatch.planning.planner import plan
from megabatch.planning.report import write
from megabatch.towers import build_tower
from megabatch.training.loop import train

ROWS = 200


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a folder with pairs of texts with hard negatives, images with captions and classes, and a small BERT."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    names = [f"{rng.choice(('red', 'green', 'blue'))} {i} {rng.random():.6f}" for i in range(ROWS)]
    with open(folder / "texts.jsonl", "w", encoding="utf-8") as file:
        for i, name in enumerate(names):
            negatives = [names[(i + step) % ROWS] for step in (1, 2)]
            file.write(json.dumps({"query": name, "positive": f"a {name}", "hard": negatives}) + "\n")
    with open(folder / "images.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["image", "caption", "kind"])
        for i, name in enumerate(names):
            Image.new("RGB", (32, 32), (i, 255 - i, i * 7 % 256)).save(folder / f"{i}.png")
            table.writerow([f"{i}.png", name, name.split()[0]])
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Return a folder with a BERT of a few thousand weights."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("bert")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=300, max_position_embeddings=32, **sizes)).save_pretrained(folder)
    return folder


def weights_of(tower, dim, side, folder):
    """Return a file with weights of a tower, as an earlier training would have left them."""
    path = folder / f"{side}.safetensors"
    save_file(build_tower(tower, dim, side=side).module.state_dict(), path)
    return path


IMAGES, TEXTS = {"x": "image", "y": "caption"}, {"x": "query", "y": "positive"}
QUESTIONS = {
    "embedded default": (None, {}, {}),
    "images and captions": ("vit + text", {}, IMAGES),
    "sigmoid loss within a budget of hours": ("cnn + text", {"loss": "siglip", "hours": 1.0}, IMAGES),
    "locked image tower": ("cnn + text", {"start": "locked"}, IMAGES),
    "pretrained towers at a batch per device": ("cnn + text", {"start": "pretrained", "per_gpu": 32}, IMAGES),
    "text embedder from scratch": ("text", {"price": 2.0, "budget": 40.0}, TEXTS),
    "fine-tuned text towers": ("text + text", {"objective": "finetune"}, TEXTS),
    "hard negatives": ("text + text", {"objective": "finetune", "negatives": 2}, TEXTS),
    "fine-tuned BERT": ("bert", {"objective": "finetune"}, TEXTS),
    "classifier": ("vit", {"objective": "supervised", "classes": 3}, {"x": "image", "label": "kind"}),
    "fine-tuned classifier with SGD": ("cnn", {"objective": "finetune", "optimizer": "sgd"}, {"x": "image", "label": "kind"}),
    "a run's own file": ("file", {"gpu": "cpu"}, TEXTS),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_plan_passes_its_own_audit_and_trains(question, data, bert, tmp_path):
    model, asked, columns = QUESTIONS[question]
    source = data / ("images.csv" if columns.get("x") == "image" else "texts.jsonl")
    if model == "bert":
        model = f"transformers:{bert}"
    elif model == "file":
        text = {"name": "text", "options": {"width": 32, "depth": 1, "heads": 2}}
        own = {"data": {"source": str(source), **columns, "negatives": False}, "x": text, "y": text, "schedule": {"epochs": 400}}
        model = config.build(own)
    asked = {"gpu": "cpu", **asked} if model is None or isinstance(model, config.Run) else {"gpu": "cpu", "data": "2M", **asked}
    planned = plan(model, **asked)
    path = write(planned, tmp_path / "run.toml")
    overrides = [f"data.{side}={column}" for side, column in columns.items()]
    for key, value in config.unfilled(planned.run).items():
        # Nothing is trained with a value that is still to be filled in.
        with pytest.raises(ValueError, match=key):
            train(config.read(path))
        side = key.partition(".")[0]
        filled = {"data.source": source, "data.negatives": "hard", "data.label": "kind"}.get(key)
        if filled is None:
            tower = getattr(planned.run, side)
            filled = weights_of(config.Tower(tower.name, tower.options), planned.run.loss.dim, side, tmp_path)
        assert value.startswith(config.FILL_IN)
        overrides.append(f"{key}={filled}")
    if columns == TEXTS and not asked.get("negatives"):
        overrides.append("data.negatives=false")
    run = config.read(path, overrides)
    whole = tmp_path / "filled.toml"
    whole.write_text(config.as_toml(run), encoding="utf-8")
    findings = audit(read_any(whole, ranks=1), data=planned.data, ranks=1)
    assert not [finding for finding in findings if finding.severity != "note"], findings
    # The plan is for millions of samples; the first steps need only a few of them.
    short = [f"batch.size={min(32, run.batch.size)}", "schedule.steps=2", "schedule.warmup=1", f"out={tmp_path / 'run'}"]
    quiet = ["watch.report=false", "watch.bar=false", "evaluate.large=[]", "evaluate.limit=20", "data.workers=0"]
    folder = train(config.read(whole, short + quiet))
    steps = [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]
    assert sum(step["event"] == "step" for step in steps) == 2
