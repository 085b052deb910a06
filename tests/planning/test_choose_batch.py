"""The batch of a request: what is trained follows from the request, and the machine plays no part unless time decides."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megabatch import evidence
from megabatch.costs.counting import Call, Pass, Work
from megabatch.planning.choose_batch import choose_batch, task_of
from megabatch.planning.problem import problem_of
from megabatch.planning.request import Request


def problem(model, gpu="8xA100-80GB", **asked):
    return problem_of(Request(model, gpu=gpu, source="pairs/{0..9}.tar", **asked))


def estimator(params=151_000_000, chunk=256, op_class="gemm"):
    """Return what `choose_batch` asks an estimator for: parameters, no measurements, and the fastest strategy of a batch."""
    work = Work(Pass((Call(op_class, 1.0, 1.0, 0.0),)), Pass(), params, params)
    return SimpleNamespace(
        parameters=params,
        calibration=SimpleNamespace(noise=None, sweep=None, same_data=False),
        task=SimpleNamespace(towers=(work,)),
        fastest=lambda size: SimpleNamespace(seconds=0.1 + size / 1000, strategy=SimpleNamespace(chunk=chunk)),
    )


def chosen(model, params=151_000_000, **asked):
    return choose_batch(problem(model, **asked), estimator(params))


@pytest.mark.parametrize(
    ("model", "asked", "kind", "start"),
    [
        ("ViT-B/32", {}, "image-text", "scratch"),
        ("ViT-B/32", {"start": "locked"}, "image-text", "locked"),
        ("ViT-B/32", {"objective": "finetune"}, "image-text", "pretrained"),
        ("vit + text", {}, "image-text", "scratch"),
        ("transformers:bert-base-uncased + transformers:bert-base-uncased", {"objective": "finetune"}, "embedder", "pretrained"),
        ("transformers:bert-base-uncased + x", {"lora": 16}, "embedder", "pretrained"),
        ("vit", {"objective": "supervised"}, "classifier", "scratch"),
        ("timm:resnet50", {"objective": "finetune"}, "classifier", "pretrained"),
        ("package.module:model", {"objective": "lm"}, "lm", "scratch"),
    ],
)
def test_the_request_says_what_is_trained_and_from_what(model, asked, kind, start):
    task = task_of(problem(model, data="1M", **asked))
    assert (task.kind, task.start) == (kind, start)


def test_optimizer_loss_negatives_and_duplicates_of_the_request_reach_the_rules():
    asked = {"data": "1M", "unique": "200k", "optimizer": "sgd", "loss": "siglip", "negatives": 7, "seen": "3M", "lora": 8}
    task = task_of(problem("ViT-B/32", **asked), 10**8)
    assert (task.optimizer, task.loss, task.negatives, task.params, task.lora) == ("sgd", "siglip", 7, 10**8, 8)
    assert (task.data, task.unique, task.seen) == (10**6, 200_000, 3 * 10**6)


def test_the_machine_does_not_decide_the_batch():
    for model, asked in [("ViT-B/32", {"data": "10M"}), ("vit", {"data": "1.2M", "objective": "supervised"})]:
        assert len({chosen(model, gpu=gpu, **asked).batch for gpu in ("T4", "8xA100-80GB", "64xH100")}) == 1
    # Three GPUs hold equal parts of a batch that is nearly the same.
    odd = chosen("ViT-B/32", data="10M", gpu="3xA100-80GB")
    assert odd.batch % 3 == 0 and odd.batch == pytest.approx(chosen("ViT-B/32", data="10M").batch, rel=1e-3)
    assert odd.updates * odd.batch >= 300_000_000 > (odd.updates - 1) * odd.batch


def test_priority_and_unique_change_a_contrastive_batch():
    usual = chosen("ViT-B/32", data="10M")
    assert usual.low <= usual.batch < chosen("ViT-B/32", data="10M", priority="speed").batch == usual.high
    assert chosen("ViT-B/32", data="10M", unique=1000).batch < usual.batch


def test_language_models_follow_their_tokens_on_any_machine():
    for gpu in ("T4", "8xA100-80GB"):
        assert chosen("a.b:c", 124_000_000, data="10B", objective="lm", gpu=gpu).batch * 1024 == 2**19
    # A measured critical batch, in tokens, takes precedence.
    measured = chosen("a.b:c", 124_000_000, data="10B", objective="lm", critical=65_536)
    assert measured.batch * 1024 <= 65_536


def test_a_plan_that_is_a_bad_idea_warns_and_names_what_others_did():
    hopeless = chosen("ViT-B/32", data="100k", epochs=10)
    assert any("--start pretrained" in line for line in hopeless.warnings)
    tuned = chosen("ViT-B/32", data="100k", epochs=10, objective="finetune")
    assert tuned.warnings == () and tuned.batch < hopeless.batch
    assert tuned.others and all(recipe.task.start == "pretrained" for recipe in tuned.others)


@pytest.mark.parametrize("start", ["scratch", "pretrained", "locked"])
@pytest.mark.parametrize("priority", ["accuracy", "speed"])
@pytest.mark.parametrize("gpu", ["A100-80GB", "8xA100-80GB"])
@pytest.mark.parametrize("data", [50, 500, 1000, 2000, 10_000])
def test_a_plan_does_not_warn_of_the_batch_that_it_chose(data, gpu, priority, start):
    choice = chosen("ViT-B/32", data=data, epochs=1, gpu=gpu, priority=priority, start=start)
    assert 16 <= choice.batch <= data and choice.low <= choice.batch <= choice.high
    assert not any("smaller batch" in line for line in choice.warnings)
    # Too little training is named as such, with the epochs that would be enough.
    few = [line for line in choice.warnings if "too few to learn from" in line]
    assert bool(few) == (choice.updates < evidence.HOPELESS_UPDATES)
    assert all("too little training for any batch" in line and " epochs " in line for line in few)


def test_more_gpus_than_samples_are_refused_and_more_than_the_batch_are_warned_of():
    with pytest.raises(ValueError, match=r"gpus is 64 and data is 50: .*take at most 50 GPUs"):
        chosen("ViT-B/32", data=50, epochs=1, gpu="64xA100-80GB", start="pretrained")
    hopeless = chosen("ViT-B/32", data=500, epochs=1, gpu="64xA100-80GB", start="pretrained")
    enough = chosen("ViT-B/32", data=500, epochs=30, gpu="64xA100-80GB", start="pretrained")
    assert hopeless.batch == enough.batch == 64
    assert any("at most 16 GPUs" in line for line in hopeless.warnings)
    assert any("fewer GPUs" in line for line in enough.warnings)
    # A batch is not rounded up beyond the data, nor to where it leaves too few updates.
    for gpus, data in ((40, 70), (24, 100), (24, 6_400)):
        choice = chosen("ViT-B/32", data=data, epochs=1, gpu=f"{gpus}xA100-80GB")
        assert choice.batch % gpus == 0 and choice.batch <= min(data, max(gpus, choice.high))


def test_batch_norm_is_told_how_many_rows_it_sees():
    asked = problem("ViT-B/32", data="10M")
    few = choose_batch(asked, estimator(chunk=8, op_class="batch norm"))
    many = choose_batch(asked, estimator(chunk=256, op_class="batch norm"))
    assert any("8 rows" in line and "SyncBatchNorm" in line for line in few.notes)
    assert any("256 rows" in line and "SyncBatchNorm" not in line for line in many.notes)
    assert not any("rows of one GPU" in line for line in choose_batch(asked, estimator()).notes)
