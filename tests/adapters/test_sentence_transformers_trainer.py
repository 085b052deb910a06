"""Sentence Transformers' own trainer ends at the same weights with our loss as with theirs, on one process and on two."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss as Theirs
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from st_models import bert, in_sentence_transformer, texts
from torch.utils._python_dispatch import TorchDispatchMode

from megabatch.adapters.sentence_transformers import MultipleNegativesRankingLoss as Ours

STEPS = 3
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


def train(
    kind: type,
    setting: dict[str, Any],
    *,
    gather: bool = False,
    evaluate: bool = False,
    learnable: bool = False,
    precision: str | None = None,
) -> dict[str, Any]:
    """Return the weights after some steps of the trainer, and the collectives of the last step."""
    columns, ranks = setting.get("columns", 2), int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = in_sentence_transformer(folder, bert())
        options = {"mini_batch_size": 3, "gather_across_devices": gather, **setting.get("loss", {})}
        if kind is Ours:
            options |= {"learnable_scale": learnable}
        loss = kind(model, **options)
        if "matryoshka" in setting:
            loss = MatryoshkaLoss(model, loss, setting["matryoshka"])
        arguments = {**setting.get("arguments", {})}
        if precision is not None:
            arguments["bf16"] = False
        accumulation = arguments.get("gradient_accumulation_steps", 1)
        data: Any = dataset(8 * STEPS * accumulation * ranks, columns)
        evaluation: Any = dataset(13, columns, seed=5) if evaluate else None
        if setting.get("datasets") == 2:
            loss = {"a": loss, "b": kind(model, scale=10.0, **options)}
            data = DatasetDict(a=data, b=dataset(8 * STEPS * ranks, columns, seed=3))
            evaluation = DatasetDict(a=evaluation, b=dataset(9, columns, seed=6)) if evaluate else None
        trainer = SentenceTransformerTrainer(
            model=model,
            args=SentenceTransformerTrainingArguments(
                output_dir=folder,
                max_steps=STEPS,
                per_device_train_batch_size=8,
                per_device_eval_batch_size=4,
                learning_rate=1e-3,
                optim="sgd",
                max_grad_norm=0.0,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                seed=1,
                **arguments,
            ),
            train_dataset=data,
            eval_dataset=evaluation,
            loss=loss,
        )
        trainer.train()
        result = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        if evaluate:
            with Collectives() as collectives:
                trainer.compute_loss(trainer.model_wrapped, trainer.data_collator([evaluation[0], evaluation[1]])) if False else None
            result["eval"] = torch.tensor([value for key, value in trainer.evaluate().items() if key.endswith("loss")])
            result["collectives"] = collectives.counts
        if learnable:
            result["scale"] = torch.tensor(loss.scale)
        return result


class Collectives(TorchDispatchMode):
    """Counts the collectives that run inside, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._schema.name.removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


def on_two_ranks(rank: int, size: int, name: str, gather: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    from accelerate.state import AcceleratorState, PartialState

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29517"}
    try:
        return train(Ours, SETTINGS[name], gather=gather), train(Theirs, SETTINGS[name], gather=gather)
    finally:
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[key]


def furthest(a: dict[str, Any], b: dict[str, Any]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def moved(weights: dict[str, Any]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        start = dict(in_sentence_transformer(folder, bert()).named_parameters())
    return furthest({name: weights[name] for name in start}, {name: p.detach() for name, p in start.items()}) > 1e-3


@pytest.mark.parametrize("name", SETTINGS)
def test_one_process_ends_at_the_weights_of_sentence_transformers(name):
    ours, theirs = train(Ours, SETTINGS[name]), train(Theirs, SETTINGS[name])
    assert moved(theirs)
    # In bf16 the chunks are rounded differently: theirs at another mini-batch size is as far from theirs.
    tolerance = 1e-6 if name != "bf16" else furthest(theirs, train(Theirs, {**SETTINGS[name], "loss": {"mini_batch_size": 8}}))
    print(name, furthest(ours, theirs), tolerance)
    assert furthest(ours, theirs) <= tolerance


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_two_processes_end_at_the_weights_of_sentence_transformers(world, name, gather):
    results = world.run(2, on_two_ranks, name, gather)
    for ours, theirs in results:
        print(name, gather, furthest(ours, theirs), furthest(ours, results[0][0]))
        assert furthest(ours, theirs) <= (1e-6 if name != "bf16" else 1e-3)
        assert furthest(ours, results[0][0]) == 0.0, "ranks agree"
