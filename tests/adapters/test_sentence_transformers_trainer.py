"""Sentence Transformers' own trainer ends at the same weights with our loss as with theirs, on one process and on two."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")

import torch
from datasets import Dataset, DatasetDict
from offline_models import bert, load, save, texts
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss as Theirs
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

from megabatch.adapters.sentence_transformers import MultipleNegativesRankingLoss as Ours

STEPS, BATCH = 3, 8
SETTINGS: dict[str, dict[str, Any]] = {
    "pairs": {},
    "hard negatives": {"columns": 3, "loss": {"hardness_mode": "hard_negatives", "hardness_strength": 5.0}},
    "accumulation": {"columns": 3, "arguments": {"gradient_accumulation_steps": 2}},
    "bf16": {"arguments": {"bf16": True}},
    "directions": {"loss": {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")}},
    "matryoshka": {"matryoshka": [16, 8]},
    "tokens": {"loss": {"mini_batch_num_tokens": 40}},
    "two datasets": {"datasets": 2},
}


def dataset(rows: int, columns: int, seed: int = 0) -> Dataset:
    names = ["anchor", "positive", "negative"][:columns]
    return Dataset.from_dict({name: texts(rows, seed=10 * seed + place) for place, name in enumerate(names)})


def train(kind: type, saved: str, setting: dict[str, Any], *, gather: bool = False, **changed: Any) -> dict[str, Any]:
    """Return the weights after some steps of the trainer. changed: training arguments."""
    columns, ranks = setting.get("columns", 2), int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load(saved)
        options = {"mini_batch_size": 3, "gather_across_devices": gather, **setting.get("loss", {})}
        loss: Any = kind(model, **options)
        if "matryoshka" in setting:
            loss = MatryoshkaLoss(model, loss, setting["matryoshka"])
        arguments = {**setting.get("arguments", {}), **changed}
        rows = BATCH * STEPS * arguments.get("gradient_accumulation_steps", 1) * ranks
        data, evaluation = dataset(rows, columns), dataset(13, columns, seed=5)
        if setting.get("datasets") == 2:
            # Ranks may draw from different datasets in one step: negatives of all ranks then need one scale.
            loss = {"a": loss, "b": kind(model, scale=20.0 if gather else 10.0, **options)}
            data, evaluation = DatasetDict(a=data, b=dataset(rows, columns, seed=3)), DatasetDict(a=evaluation, b=evaluation)
        trainer = SentenceTransformerTrainer(
            model=model,
            args=SentenceTransformerTrainingArguments(
                output_dir=folder,
                max_steps=STEPS,
                per_device_train_batch_size=BATCH,
                per_device_eval_batch_size=4,
                learning_rate=1e-2,
                optim="sgd",
                max_grad_norm=0.0,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                prompts={"anchor": "w1 w2 "},
                seed=1,
                **arguments,
            ),
            train_dataset=data,
            eval_dataset=evaluation,
            loss=loss,
        )
        trainer.train()
        results = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        # Without negatives of other ranks in either: theirs would gather in evaluation too.
        if not gather:
            losses = [value for name, value in trainer.evaluate().items() if name.endswith("loss")]
            results["evaluation"] = torch.tensor(losses)
        return results


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("model"))
    save(folder, bert())
    return folder


def on_two_ranks(
    rank: int, size: int, saved: str, name: str, gather: bool
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]:
    from accelerate.state import AcceleratorState, PartialState

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29517"}
    try:
        exact = train(Theirs, saved, SETTINGS[name], gather=gather, bf16=False) if name == "bf16" else None
        return train(Ours, saved, SETTINGS[name], gather=gather), train(Theirs, saved, SETTINGS[name], gather=gather), exact
    finally:
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[key]


def furthest(a: dict[str, Any], b: dict[str, Any]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a if name != "evaluation")


def moved(weights: dict[str, Any], saved: str) -> bool:
    start = dict(load(saved).named_parameters())
    return furthest({name: weights[name] for name in start}, {name: p.detach() for name, p in start.items()}) > 1e-2


def check(saved: str, ours: dict[str, Any], theirs: dict[str, Any], exact: dict[str, Any] | None) -> None:
    """Raise unless the weights agree; in bf16, unless ours are as close to float32's as theirs."""
    if exact is None:
        assert furthest(ours, theirs) <= 1e-6
    else:
        # The largest of thousands of rounding errors scatters by less than a factor of two.
        assert furthest(ours, exact) <= 2 * furthest(theirs, exact)
        return
    assert moved(theirs, saved)
    if "evaluation" in theirs:
        assert torch.allclose(ours["evaluation"], theirs["evaluation"], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", SETTINGS)
def test_one_process_ends_at_the_weights_of_sentence_transformers(saved, name):
    exact = train(Theirs, saved, SETTINGS[name], bf16=False) if name == "bf16" else None
    check(saved, train(Ours, saved, SETTINGS[name]), train(Theirs, saved, SETTINGS[name]), exact)


@pytest.mark.slow
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_two_processes_end_at_the_weights_of_sentence_transformers(world, saved, name, gather):
    results = world.run(2, on_two_ranks, saved, name, gather)
    for ours, theirs, exact in results:
        check(saved, ours, theirs, exact)
        assert furthest(ours, results[0][0]) == 0.0, "ranks agree"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_example_learns_offline(monkeypatch):
    path = Path(__file__).parents[2] / "examples" / "sentence_transformers_train.py"
    specification = importlib.util.spec_from_file_location("example", path)
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    first, last = (example.main(["--batch", "32", "--steps", str(steps)]) for steps in (1, 12))
    assert last < first - 0.2
