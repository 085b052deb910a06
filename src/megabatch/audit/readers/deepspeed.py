"""Read a DeepSpeed configuration. "auto" is unknown: another file sets the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...optimizers import FAMILIES, family_of
from ..documents import Document, Reading
from ..facts import TrainingFacts
from ..formats.json_text import edit_json, parse_json

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
    "schedule_lr": "scheduler.params.warmup_max_lr",
    "loss_scaling": "fp16.loss_scale",
    "two_precisions": "fp16.enabled",
    "offloads_parameters": "zero_optimization.offload_param.device",
    "zero_stage": "zero_optimization.stage",
    "batch_from_memory": "autotuning.enabled",
    "decays_gains": "the optimizer's parameter groups",
    "gather": "the loss",
    "token_mean": "the loss",
}
# Schedules with warm-up. Their steps of warm-up and their rate if the file does not state them (lr_schedules.py). The cosine
# schedule scales the optimizer's rate, the others replace it.
WARMUP, WARMUP_STEPS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"), 1000
REPLACES_RATE, WARMUP_RATE = ("WarmupLR", "WarmupDecayLR"), 1e-3


def read(name: str, text: str, table: Mapping[str, Any]) -> Reading:
    def reread(after: str) -> TrainingFacts:
        return facts_of(name, parse_json(after, name))

    document = Document(name, text, KEYS, lambda changes, training: _translate(changes, training, table), edit_json, reread)
    return Reading(facts_of(name, table), document)


def facts_of(name: str, table: Mapping[str, Any]) -> TrainingFacts:
    """Return the facts of a DeepSpeed configuration."""

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
    optimizer = family_of(str(at(table, "optimizer.type") or ""))
    betas = at(table, "optimizer.params.betas")
    default_beta2 = 0.999 if betas is None and optimizer is not None and FAMILIES[optimizer].uses_beta2 else None
    fp16, bf16 = at(table, "fp16.enabled") is True, at(table, "bf16.enabled") is True
    loss_scale = number("fp16.loss_scale", float)
    scheduler = at(table, "scheduler.type")
    stated = at(table, "scheduler.params")
    stated = stated if isinstance(stated, dict) else {}
    stage = at(table, "zero_optimization.stage")
    return TrainingFacts(
        tool="deepspeed",
        batch=batch,
        micro=micro,
        accumulation=accumulation,
        accumulates="plain",
        ranks=ranks,
        optimizer=optimizer,
        lr=number("optimizer.params.lr", float),
        schedule_lr=_schedule_lr(number, scheduler, stated),
        beta2=betas[1] if isinstance(betas, list) and len(betas) == 2 and betas[1] != "auto" else default_beta2,
        weight_decay=number("optimizer.params.weight_decay", float),
        warmup=_warmup(number, scheduler, stated),
        steps=number("scheduler.params.total_num_steps"),
        # Without the key, 0.19.3 and later clip at 1, earlier versions not at all: the file does not say which version reads it.
        clip_norm=number("gradient_clipping", float),
        clip_at="step",
        schedule_at="step",
        precision="fp16" if fp16 else "bf16" if bf16 else None,
        two_precisions=fp16 and bf16,
        # 0, the default, is a dynamic scale; 1 is no scale.
        loss_scaling=loss_scale != 1 if fp16 else None,
        zero_stage=stage if isinstance(stage, int) and not isinstance(stage, bool) else None,
        offloads_parameters=at(table, "zero_optimization.offload_param.device") in ("cpu", "nvme"),
        batch_from_memory=at(table, "autotuning.enabled") is True,
    )


def _warmup(number: Any, kind: Any, stated: Mapping[str, Any]) -> float | None:
    """Return the steps of warm-up; None without a scheduler in the file, because one may be passed to the engine."""
    if kind not in WARMUP:
        return None
    steps: float | None = number("scheduler.params.warmup_num_steps", float) if "warmup_num_steps" in stated else WARMUP_STEPS
    return steps


def _schedule_lr(number: Any, kind: Any, stated: Mapping[str, Any]) -> float | None:
    if kind not in REPLACES_RATE:
        return None
    rate: float | None = number("scheduler.params.warmup_max_lr", float) if "warmup_max_lr" in stated else WARMUP_RATE
    return rate or None


def at(table: Mapping[str, Any], path: str) -> Any:
    """Return the value at "section.key", or None."""
    place: Any = table
    for key in path.split("."):
        place = place.get(key) if isinstance(place, dict) else None
    return place


def _number(name: str, table: Mapping[str, Any], path: str, kind: type) -> Any:
    value = at(table, path)
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
            betas = at(table, KEYS[fact])
            value = [betas[0] if isinstance(betas, list) and betas else 0.9, value]
        elif fact == "loss_scaling":
            value = 0
        elif fact == "optimizer":
            value = "AdamW"
        elif fact == "offloads_parameters":
            value = "none"
        elif fact == "lr" and training.schedule_lr is not None:
            edits[KEYS["schedule_lr"]] = value
        edits[KEYS[fact]] = value
    return edits
