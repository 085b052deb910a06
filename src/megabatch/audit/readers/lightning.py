"""Read a YAML configuration of Lightning's CLI, or the keywords of its Trainer in a script."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ...objectives import DEFAULT, SIGMOID, PairLoss
from ...optimizers import FAMILIES, family_of
from ..documents import Document, Reading
from ..facts import TrainingFacts
from .deepspeed import at

MODULES = {"lightning", "pytorch_lightning"}
MARKS = {"trainer"}
KEYS = {
    "batch": "data.init_args.batch_size",
    "micro": "data.init_args.batch_size",
    "accumulation": "trainer.accumulate_grad_batches",
    "precision": "trainer.precision",
    "loss_scaling": "trainer.precision",
    "half_weights": "trainer.precision",
    "eval_every": "trainer.val_check_interval",
    "held_out": "trainer.limit_val_batches",
    "sync_batchnorm": "trainer.sync_batchnorm",
    "steps": "trainer.max_steps",
    "lr": "optimizer.init_args.lr",
    "beta2": "optimizer.init_args.betas",
    "weight_decay": "optimizer.init_args.weight_decay",
    "optimizer": "optimizer.class_path",
    "batch_from_memory": "trainer.callbacks",
    "disagreement": "trainer",
    "decays_gains": "configure_optimizers",
    "gather": "the loss",
}
PRECISIONS: dict[str, tuple[Literal["fp32", "bf16", "fp16"], bool, bool]] = {
    # precision, loss scaling, weights in half precision
    "32": ("fp32", False, False),
    "32-true": ("fp32", False, False),
    "16": ("fp16", True, False),
    "16-mixed": ("fp16", True, False),
    "16-true": ("fp16", False, True),
    "bf16": ("bf16", False, False),
    "bf16-mixed": ("bf16", False, False),
    "bf16-true": ("bf16", False, True),
}
# Settings for debugging that keep a run from training on the data.
DEBUG = ("fast_dev_run", "overfit_batches")
# Words in the class of a model that name its objective.
OBJECTIVES: tuple[tuple[str, PairLoss], ...] = (
    (SIGMOID, SIGMOID),
    (r"clip(?!p)|simclr|contrastive|infonce|biencoder|bi_encoder|dual_?encoder|two_?tower", DEFAULT),
)


def read(name: str, text: str, parse: Callable[[str], Mapping[str, Any]], edit: Callable[[str, Mapping[str, Any]], str]) -> Reading:
    table = parse(text)

    def reread(after: str) -> TrainingFacts:
        return _facts(name, parse(after))

    document = Document(
        name, text, KEYS | _places(table), lambda changes, training: _translate(changes, training, table), edit, reread
    )
    return Reading(reread(text), document)


def _places(table: Mapping[str, Any]) -> dict[str, str]:
    """Return where this file states facts that a model or a data module of its own may take."""
    places = {}
    for fact, names in {
        "micro": ("batch_size", "train_batch_size", "per_device_batch_size"),
        "lr": ("lr", "learning_rate"),
    }.items():
        sections = ("data.init_args", "data", "model.init_args", "model", "optimizer.init_args", "optimizer")
        paths = [f"{section}.{name}" for section in sections for name in names]
        found = next((path for path in paths if _is_number(at(table, path))), None)
        if found is not None:
            places[fact] = found
    return places | ({"batch": places["micro"]} if "micro" in places else {})


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _facts(name: str, table: Mapping[str, Any]) -> TrainingFacts:
    trainer = at(table, "trainer")
    if not isinstance(trainer, dict):
        raise ValueError(f"{name}: trainer is {trainer!r}: must be a mapping of the Trainer's arguments")
    places = _places(table)
    micro = at(table, places["micro"]) if "micro" in places else None
    precision, scaling, half = PRECISIONS.get(str(trainer.get("precision", "32-true")), (None, None, None))
    optimizer = family_of(str(at(table, "optimizer.class_path") or ""))
    betas = at(table, "optimizer.init_args.betas")
    beta2 = betas[1] if isinstance(betas, list) and len(betas) == 2 and _is_number(betas[1]) else None
    if beta2 is None and optimizer is not None and FAMILIES[optimizer].uses_beta2:
        beta2 = 0.999
    clip = trainer.get("gradient_clip_val", 0.0)
    return TrainingFacts(
        tool="lightning",
        objective=_objective(table),
        micro=_count(micro),
        ranks=_ranks(trainer),
        accumulation=_count(trainer.get("accumulate_grad_batches", 1)),
        accumulates="plain",
        optimizer=optimizer,
        lr=at(table, places["lr"]) or None if "lr" in places else None,
        beta2=beta2,
        weight_decay=_positive(at(table, "optimizer.init_args.weight_decay")),
        clip_norm=_positive(clip),
        clip_at="step",
        schedule_at=None,
        steps=_count(trainer.get("max_steps")),
        epochs=None if _count(trainer.get("max_steps")) else _count(trainer.get("max_epochs")),
        precision=precision,
        loss_scaling=scaling,
        half_weights=half,
        sync_batchnorm=trainer.get("sync_batchnorm") is True,
        eval_every=_count(trainer.get("val_check_interval")),
        held_out=False if trainer.get("limit_val_batches") in (0, 0.0) else None,
        batch_from_memory=_finds_batch(trainer),
        disagreement=" ".join(sentence for sentence, _ in _contradictions(trainer)) or None,
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**15 else None


def _positive(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e15 else None


def _objective(table: Mapping[str, Any]) -> PairLoss | None:
    named = f"{at(table, 'model.class_path') or ''} {at(table, 'model.init_args.loss') or ''}".lower()
    return next((objective for pattern, objective in OBJECTIVES if re.search(pattern, named)), None)


def _ranks(trainer: Mapping[str, Any]) -> int | None:
    devices, nodes = trainer.get("devices", "auto"), _count(trainer.get("num_nodes", 1))
    if isinstance(devices, str) and re.fullmatch(r"[1-9]\d{0,5}", devices):
        devices = int(devices)
    each = len(devices) or None if isinstance(devices, list) else _count(devices)
    return None if each is None or nodes is None else each * nodes


def _finds_batch(trainer: Mapping[str, Any]) -> bool:
    callbacks = trainer.get("callbacks")
    named = [at(entry, "class_path") for entry in callbacks if isinstance(entry, dict)] if isinstance(callbacks, list) else []
    return any(str(entry).endswith("BatchSizeFinder") for entry in named) or bool(trainer.get("auto_scale_batch_size"))


def _contradictions(trainer: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    for key in DEBUG:
        if trainer.get(key) not in (None, False, 0, 0.0):
            found.append((f"trainer.{key} is {trainer[key]!r}, for debugging: the run does not train on the data.", {key: False}))
    if trainer.get("use_distributed_sampler") is False and (_ranks(trainer) or 1) > 1:
        sentence = "trainer.use_distributed_sampler is False: unless the data module shards the data, all ranks train on the same"
        sentence += " samples."
        found.append((sentence, {"use_distributed_sampler": True}))
    return found


def _translate(changes: Mapping[str, Any], training: TrainingFacts, table: Mapping[str, Any]) -> dict[str, Any] | None:
    keys = KEYS | _places(table)
    edits: dict[str, Any] = {}
    for fact, value in changes.items():
        if fact == "batch":
            micro = changes.get("micro", training.changed(changes).micro)
            if micro is None or training.ranks is None or "micro" not in _places(table):
                return None
            value = micro
        elif fact in ("loss_scaling", "half_weights", "precision"):
            value = "bf16-mixed"
        elif fact == "held_out":
            value = 1.0
        elif fact == "beta2":
            value = [0.9, value]
        elif fact == "optimizer":
            value = "torch.optim.AdamW"
        elif fact == "disagreement":
            for _, settings in _contradictions(table["trainer"]):
                edits |= {f"trainer.{key}": setting for key, setting in settings.items()}
            continue
        elif fact in ("gather", "decays_gains", "batch_from_memory") or fact not in keys:
            return None
        if fact in ("lr", "beta2", "micro") and keys[fact] == KEYS[fact] and at(table, KEYS[fact].rpartition(".")[0]) is None:
            return None
        edits[keys[fact]] = value
    return edits
