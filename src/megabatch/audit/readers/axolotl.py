"""Read YAML files of axolotl, whose keys are those of the Trainer by other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..documents import Reading
from ..formats.yaml_text import edit_yaml, parse_yaml
from ..model_names import parameters_of
from . import transformers

MARKS = {"base_model"}
# The Trainer's name of each key.
NAMES = {
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
}
OWN = {theirs: own for own, theirs in NAMES.items()}
PASSED = (*transformers.DEFAULTS, "deepspeed", "eval_strategy", "use_cache", "average_tokens_across_devices")
KEYS = {"adapter": "adapter", "quantized": "load_in_4bit", "held_out": "val_set_size"}


def read(name: str, text: str) -> Reading:
    def parse(after: str) -> dict[str, Any]:
        return _arguments(parse_yaml(after, name))

    def edit(before: str, edits: Mapping[str, Any]) -> str:
        table = parse_yaml(before, name)
        own: dict[str, Any] = {OWN.get(key, key): value for key, value in edits.items()}
        if own.pop("eval_strategy", None):
            own["val_set_size"] = 0.05
        # One of the two states the warm-up.
        if "warmup_steps" in own and "warmup_ratio" in table:
            own["warmup_ratio"] = 0.0
        return edit_yaml(before, own)

    table = parse_yaml(text, name)

    def extra(after: str) -> dict[str, Any]:
        return _extra(parse_yaml(after, name))

    training, document = transformers.read(name, text, parse, edit, extra, lambda fact, value: _translate(fact, table))
    keys = {fact: OWN.get(key, key) for fact, key in document.keys.items()} | KEYS
    return Reading(training, document._replace(keys=keys))


def _arguments(table: Mapping[str, Any]) -> dict[str, Any]:
    named = {NAMES.get(key, key): value for key, value in table.items()}
    arguments = {key: named[key] for key in PASSED if named.get(key) is not None}
    # "auto" is bf16 where the GPU has it.
    half, auto = named.get("fp16"), named.get("bf16") == "auto"
    arguments |= {"fp16": half is True, "bf16": named.get("bf16") is True or (auto and half is not True)}
    arguments["lr_scheduler_type"] = str(named.get("lr_scheduler_type", "cosine"))
    arguments["optim"] = str(named.get("optim", "adamw_torch_fused"))
    checkpointing = named.get("gradient_checkpointing")
    arguments["gradient_checkpointing"] = checkpointing not in (None, False)
    evaluates = bool(named.get("val_set_size") or named.get("test_datasets"))
    steps = named.get("eval_steps")
    arguments["do_eval"] = evaluates
    arguments["eval_strategy"] = "no" if not evaluates else "steps" if isinstance(steps, (int, float)) and steps else "epoch"
    if arguments.get("save_strategy") is not None:
        arguments["save_strategy"] = str(arguments["save_strategy"])
    return arguments


def _extra(table: Mapping[str, Any]) -> dict[str, Any]:
    lora = str(table.get("adapter") or "").lower() in ("lora", "qlora", "dora")
    quantized = table.get("load_in_4bit") is True or table.get("load_in_8bit") is True
    facts = {
        "tool": "axolotl",
        "objective": None if table.get("rl") else "lm",
        "finetuning": True,
        "adapter": lora,
        "quantized": quantized,
        "parameters": parameters_of(str(table.get("base_model"))),
    }
    return {fact: value for fact, value in facts.items() if value is not None}


def _translate(fact: str, table: Mapping[str, Any]) -> dict[str, Any] | None:
    if fact != "adapter":
        return None
    kind = "qlora" if table.get("load_in_4bit") is True else "lora"
    return {"adapter": kind, "lora_r": 32, "lora_alpha": 16, "lora_target_linear": True}
