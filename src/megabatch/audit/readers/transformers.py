"""Read Hugging Face TrainingArguments, written by `to_json_string` or by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...optimizers import FAMILIES, family_of
from ..documents import Document, Reading, edit_json
from ..facts import TrainingFacts

MARKS = {"per_device_train_batch_size", "num_train_epochs", "learning_rate", "warmup_ratio", "warmup_steps", "lr_scheduler_type"}
# From transformers' training_args.py. A default that changed between versions (average_tokens_across_devices) is unknown.
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "optim": "adamw_torch",
    "fp16": False,
    "bf16": False,
    "auto_find_batch_size": False,
    "do_eval": False,
}
KEYS = {
    "batch": "per_device_train_batch_size",
    "micro": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "lr": "learning_rate",
    "warmup": "warmup_steps",
    "beta2": "adam_beta2",
    "weight_decay": "weight_decay",
    "optimizer": "optim",
    "steps": "max_steps",
    "token_mean": "average_tokens_across_devices",
    "batch_from_memory": "auto_find_batch_size",
    "held_out": "eval_strategy",
    "duplicates": "batch_sampler",
    "gather": "the loss",
    "sync_batchnorm": "the model",
}
# Schedules without warm-up, whatever warmup_steps is, and the same schedule with warm-up.
WITHOUT_WARMUP = {"constant": "constant_with_warmup"}


def read(name: str, text: str, table: Mapping[str, Any]) -> Reading:
    values = DEFAULTS | dict(table)
    for key, default in DEFAULTS.items():
        _check(name, key, values[key], default)
    document = Document(name, text, KEYS, lambda changes, training: _translate(changes, training, values), edit_json)
    return Reading(_facts(values, table), document)


def _check(name: str, key: str, value: Any, default: Any) -> None:
    number = isinstance(default, (int, float)) and not isinstance(default, bool)
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) if number else isinstance(value, type(default))
    # None in a file means the default of a limit.
    if not fits and value is not None:
        raise ValueError(f"{name}: {key} is {value!r}: must have the type of its default, {default!r}")
    if key in ("per_device_train_batch_size", "gradient_accumulation_steps") and (not isinstance(value, int) or value < 1):
        raise ValueError(f"{name}: {key} is {value!r}: must be an integer of at least 1")


def _facts(values: Mapping[str, Any], table: Mapping[str, Any]) -> TrainingFacts:
    strategy = values.get("eval_strategy", values.get("evaluation_strategy", "no"))
    scheduler = values["lr_scheduler_type"]
    tokens = values.get("average_tokens_across_devices")
    steps = values["max_steps"] if (values["max_steps"] or -1) > 0 else None
    sampler = table.get("batch_sampler")
    optimizer = family_of(values["optim"] or DEFAULTS["optim"])
    return TrainingFacts(
        micro=values["per_device_train_batch_size"],
        accumulation=values["gradient_accumulation_steps"],
        accumulates="plain",
        optimizer=optimizer,
        lr=values["learning_rate"],
        warmup=0 if scheduler in WITHOUT_WARMUP else values["warmup_steps"] or values["warmup_ratio"],
        beta2=values["adam_beta2"] if optimizer and FAMILIES[optimizer].uses_beta2 else None,
        weight_decay=values["weight_decay"],
        decays_gains=False,
        clip_norm=values["max_grad_norm"] or 0.0,
        clip_at="step",
        schedule_at="step",
        steps=steps,
        epochs=None if steps else values["num_train_epochs"],
        precision="fp16" if values["fp16"] else "bf16" if values["bf16"] else "fp32",
        loss_scaling=bool(values["fp16"]),
        token_mean=None if tokens is None else "total" if tokens else "rank",
        # Sentence Transformers' arguments state how a batch is sampled.
        duplicates=None if sampler is None else "mask" if str(sampler).startswith("no_duplicates") else "negative",
        batch_from_memory=bool(values["auto_find_batch_size"]),
        held_out=bool(values["do_eval"]) or strategy != "no",
    )


def _translate(changes: Mapping[str, Any], training: TrainingFacts, values: Mapping[str, Any]) -> dict[str, Any] | None:
    edits: dict[str, Any] = {}
    for fact, value in changes.items():
        if fact == "batch":
            micro = changes.get("micro", training.changed(changes).micro)
            if micro is None or training.ranks is None:
                return None
            value = micro
        elif fact == "token_mean":
            value = True
        elif fact == "held_out":
            value = "epoch"
        elif fact == "duplicates":
            value = "no_duplicates"
        elif fact == "optimizer":
            value = "adamw_torch"
        elif fact in ("gather", "sync_batchnorm") or fact not in KEYS:
            return None
        edits[KEYS[fact]] = value
    if "warmup" in changes and values["lr_scheduler_type"] in WITHOUT_WARMUP:
        edits["lr_scheduler_type"] = WITHOUT_WARMUP[values["lr_scheduler_type"]]
    return edits
