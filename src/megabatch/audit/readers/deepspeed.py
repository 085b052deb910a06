"""Read a DeepSpeed configuration. "auto" is unknown: another file sets the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...optimizers import FAMILIES, family_of
from ..documents import Document, Reading, edit_json
from ..facts import TrainingFacts

MARKS = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "zero_optimization",
    "gradient_clipping",
}
KEYS = {
    "batch": "train_batch_size",
    "micro": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
    "lr": "optimizer.params.lr",
    "beta2": "optimizer.params.betas",
    "weight_decay": "optimizer.params.weight_decay",
    "optimizer": "optimizer.type",
    "warmup": "scheduler.params.warmup_num_steps",
    "steps": "scheduler.params.total_num_steps",
    "loss_scaling": "fp16.loss_scale",
    "batch_from_memory": "autotuning.enabled",
    "decays_gains": "the optimizer's parameter groups",
    "gather": "the loss",
    "token_mean": "the loss",
}
# Schedules with warm-up, and its steps if the file does not state them.
WARMUP, WARMUP_STEPS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"), 1000


def read(name: str, text: str, table: Mapping[str, Any]) -> Reading:
    document = Document(name, text, KEYS, lambda changes, training: _translate(changes, training, table), edit_json)
    return Reading(_facts(name, table), document)


def _facts(name: str, table: Mapping[str, Any]) -> TrainingFacts:
    def number(path: str, kind: type = int) -> Any:
        return _number(name, table, path, kind)

    batch, micro, accumulation = (
        number("train_batch_size"),
        number("train_micro_batch_size_per_gpu"),
        number("gradient_accumulation_steps"),
    )
    if accumulation is None and "gradient_accumulation_steps" not in table:
        # The file gives two of three numbers: the third follows from the ranks, or is one.
        accumulation = None if batch is not None and micro is not None else 1
    ranks = batch // (micro * accumulation) if batch and micro and accumulation and batch % (micro * accumulation) == 0 else None
    optimizer = family_of(str(_at(table, "optimizer.type") or ""))
    betas = _at(table, "optimizer.params.betas")
    default_beta2 = 0.999 if betas is None and optimizer is not None and FAMILIES[optimizer].uses_beta2 else None
    fp16, bf16 = _at(table, "fp16.enabled") is True, _at(table, "bf16.enabled") is True
    loss_scale = number("fp16.loss_scale", float)
    return TrainingFacts(
        batch=batch,
        micro=micro,
        accumulation=accumulation,
        accumulates="plain",
        ranks=ranks,
        optimizer=optimizer,
        lr=number("optimizer.params.lr", float),
        beta2=betas[1] if isinstance(betas, list) and len(betas) == 2 else default_beta2,
        weight_decay=number("optimizer.params.weight_decay", float),
        warmup=_warmup(number, _at(table, "scheduler.type"), _has(table, "scheduler.params", "warmup_num_steps")),
        steps=number("scheduler.params.total_num_steps"),
        clip_norm=number("gradient_clipping", float),
        clip_at="step",
        schedule_at="step",
        precision="fp16" if fp16 else "bf16" if bf16 else None,
        # 0, the default, is a dynamic scale; 1 is no scale.
        loss_scaling=loss_scale != 1 if fp16 else None,
        batch_from_memory=_at(table, "autotuning.enabled") is True,
    )


def _warmup(number: Any, kind: Any, stated: bool) -> float | None:
    """Return the steps of warm-up; None without a scheduler in the file, because one may be passed to the engine."""
    if kind not in WARMUP:
        return None
    return number("scheduler.params.warmup_num_steps", float) if stated else WARMUP_STEPS


def _at(table: Mapping[str, Any], path: str) -> Any:
    place: Any = table
    for key in path.split("."):
        place = place.get(key) if isinstance(place, dict) else None
    return place


def _has(table: Mapping[str, Any], path: str, key: str) -> bool:
    place = _at(table, path)
    return isinstance(place, dict) and key in place


def _number(name: str, table: Mapping[str, Any], path: str, kind: type) -> Any:
    value = _at(table, path)
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        raise ValueError(f'{name}: {path} is {value!r}: must be {"an integer" if kind is int else "a number"}, or "auto"')
    if value < 0 or (kind is int and value == 0):
        raise ValueError(f"{name}: {path} is {value!r}: must be above 0")
    return value


def _translate(changes: Mapping[str, Any], training: TrainingFacts, table: Mapping[str, Any]) -> dict[str, Any] | None:
    changes = dict(changes)
    if "batch" in changes and training.micro is not None and "micro" not in changes:
        changes["micro"] = training.changed(changes).micro
    if "train_batch_size" not in table and "micro" in changes:
        changes.pop("batch", None)
    edits: dict[str, Any] = {}
    # DeepSpeed keeps a copy of the weights in fp32.
    for fact, value in ((fact, value) for fact, value in changes.items() if fact != "half_weights"):
        if fact in ("decays_gains", "gather", "token_mean") or fact not in KEYS:
            return None
        if fact == "beta2":
            betas = _at(table, KEYS[fact])
            value = [betas[0] if isinstance(betas, list) and betas else 0.9, value]
        elif fact == "loss_scaling":
            value = 0
        elif fact == "optimizer":
            value = "AdamW"
        edits[KEYS[fact]] = value
    return edits
