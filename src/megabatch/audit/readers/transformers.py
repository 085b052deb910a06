"""Read Hugging Face TrainingArguments, also those of Sentence Transformers: from JSON, YAML, a command line or a Python call."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...objectives import DEFAULT
from ...optimizers import FAMILIES, family_of
from ..documents import Document, Reading
from ..facts import TrainingFacts, with_facts
from . import deepspeed

MARKS = {"per_device_train_batch_size", "num_train_epochs", "learning_rate", "warmup_ratio", "warmup_steps", "lr_scheduler_type"}
# Keys that only the arguments of Sentence Transformers have.
SENTENCE_TRANSFORMERS = {"batch_sampler", "multi_dataset_batch_sampler", "router_mapping"}
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
    "eval_steps": None,
    "logging_steps": 500,
    "gradient_checkpointing": False,
    "load_best_model_at_end": False,
    "save_strategy": "steps",
    "save_steps": 500,
}
KEYS = {
    "batch": "per_device_train_batch_size",
    "micro": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "lr": "learning_rate",
    "warmup": "warmup_steps",
    "warmup_share": "warmup_ratio",
    "beta2": "adam_beta2",
    "weight_decay": "weight_decay",
    "optimizer": "optim",
    "steps": "max_steps",
    "two_precisions": "fp16",
    "eval_every": "eval_steps",
    "checkpointing": "gradient_checkpointing",
    "use_cache": "use_cache",
    "split_batches": "accelerator_config.split_batches",
    "token_mean": "average_tokens_across_devices",
    "batch_from_memory": "auto_find_batch_size",
    "held_out": "eval_strategy",
    "duplicates": "batch_sampler",
    "disagreement": "deepspeed",
    "offloads_parameters": "deepspeed.zero_optimization.offload_param",
    "data_parallel": "the launch",
    "gather": "the loss",
    "sync_batchnorm": "the model",
}
# Schedules without warm-up, whatever warmup_steps is, and the same schedule with warm-up.
WITHOUT_WARMUP = {"constant": "constant_with_warmup"}
# DeepSpeed's keys that must agree with an argument unless they are "auto" (transformers/integrations/deepspeed.py).
DEEPSPEED_KEYS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}
LARGEST_DEEPSPEED = 2**18
Parse = Callable[[str], Mapping[str, Any]]
Edit = Callable[[str, Mapping[str, Any]], str]


def read(
    name: str,
    text: str,
    parse: Parse,
    edit: Edit,
    extra: Callable[[str], Mapping[str, Any]],
    translate: Callable[[str, Any], Any] | None = None,
) -> Reading:
    """Read arguments. parse, edit: of the format. extra: returns the facts that a text states outside of the arguments.

    translate: returns the edits for a fact that the format states elsewhere, such as the loss in a script, or None.
    """

    def reread(after: str) -> TrainingFacts:
        return _facts(name, parse(after), extra(after))

    table = parse(text)

    def edits_of(changes: Mapping[str, Any], training: TrainingFacts) -> dict[Any, Any] | None:
        edits: dict[Any, Any] = {}
        for fact, value in changes.items():
            elsewhere = translate(fact, value) if translate is not None else None
            own = elsewhere or _translate(fact, value, changes, training, DEFAULTS | dict(table), name)
            if own is None:
                return None
            edits |= own
        return edits

    return Reading(reread(text), Document(name, text, KEYS, edits_of, edit, reread))


def _checked(name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    values = DEFAULTS | dict(table)
    for key, default in DEFAULTS.items():
        _check(name, key, values[key], default)
    return values


def _check(name: str, key: str, value: Any, default: Any) -> None:
    # None is unknown, or the default of a limit.
    if value is None:
        return
    if key == "eval_steps":
        default = 500
    number = isinstance(default, (int, float)) and not isinstance(default, bool)
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) if number else isinstance(value, type(default))
    if not fits:
        raise ValueError(f"{name}: {key} is {value!r}: must have the type of its default, {default!r}")
    if key in ("per_device_train_batch_size", "gradient_accumulation_steps") and (not isinstance(value, int) or value < 1):
        raise ValueError(f"{name}: {key} is {value!r}: must be an integer of at least 1")


def _facts(name: str, table: Mapping[str, Any], extra: Mapping[str, Any]) -> TrainingFacts:
    values = _checked(name, table)
    strategy = _strategy(values)
    scheduler = values["lr_scheduler_type"]
    tokens = values.get("average_tokens_across_devices")
    steps = values["max_steps"] if (values["max_steps"] or -1) > 0 else None
    sampler = table.get("batch_sampler")
    optimizer = family_of(values["optim"] or DEFAULTS["optim"])
    warmup, share = _warmup(values)
    config = _deepspeed_table(name, values.get("deepspeed"))
    zero = deepspeed.facts_of(f"{name}: deepspeed", config) if config else TrainingFacts()
    sentences = bool(SENTENCE_TRANSFORMERS & table.keys())
    facts = TrainingFacts(
        tool="sentence_transformers" if sentences else "transformers",
        # A sampler without duplicates serves losses with in-batch negatives only.
        objective=DEFAULT if str(sampler).startswith("no_duplicates") else None,
        micro=values["per_device_train_batch_size"],
        accumulation=values["gradient_accumulation_steps"],
        accumulates="plain",
        optimizer=optimizer,
        lr=values["learning_rate"],
        warmup=0 if scheduler in WITHOUT_WARMUP else warmup,
        warmup_share=share,
        beta2=values["adam_beta2"] if optimizer and FAMILIES[optimizer].uses_beta2 else None,
        weight_decay=values["weight_decay"],
        decays_gains=False,
        # DeepSpeed clips, not the Trainer, which only fills in what is "auto" there.
        clip_norm=zero.clip_norm if values.get("deepspeed") and not _is_auto(config) else values["max_grad_norm"] or 0.0,
        clip_at="step",
        schedule_at="step",
        steps=steps,
        epochs=None if steps else values["num_train_epochs"],
        precision="fp16" if values["fp16"] else "bf16" if values["bf16"] else "fp32",
        two_precisions=bool(values["fp16"] and values["bf16"]) or zero.two_precisions,
        loss_scaling=bool(values["fp16"]),
        zero_stage=zero.zero_stage,
        offloads_parameters=zero.offloads_parameters,
        checkpointing=bool(values["gradient_checkpointing"]),
        use_cache=_is_true(table.get("use_cache")),
        eval_every=_eval_every(values, strategy),
        split_batches=_split_batches(values),
        token_mean=None if tokens is None else "total" if tokens else "rank",
        # Sentence Transformers' arguments state how a batch is sampled.
        duplicates=None if sampler is None else "mask" if str(sampler).startswith("no_duplicates") else "negative",
        batch_from_memory=bool(values["auto_find_batch_size"]),
        held_out=bool(values["do_eval"]) or strategy != "no",
        disagreement=" ".join(_disagreements(name, values)[0]) or None,
    )
    return with_facts(facts, extra)


def _is_auto(config: Mapping[str, Any] | None) -> bool:
    return config is not None and config.get("gradient_clipping") == "auto"


def _is_true(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _strategy(values: Mapping[str, Any]) -> str:
    strategy = values.get("eval_strategy", values.get("evaluation_strategy", "no"))
    return "no" if strategy is None or strategy is False else str(strategy).lower()


def _warmup(values: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return steps or a share below 1, and the stated share where it is 1 or more. Steps replace a share."""
    steps, ratio = values["warmup_steps"], values["warmup_ratio"]
    if steps is None or ratio is None:
        return steps or None, None
    if steps or ratio < 1:
        return steps or ratio, None
    return None, ratio


def _eval_every(values: Mapping[str, Any], strategy: str) -> int | None:
    steps = values["eval_steps"] or values["logging_steps"]
    if strategy != "steps" or steps is None or not 1 <= steps < math.inf:
        return None
    return int(steps)


def _split_batches(values: Mapping[str, Any]) -> bool:
    given = values.get("accelerator_config")
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            given = None
    inner = given.get("split_batches") if isinstance(given, dict) else None
    return inner is True or values.get("split_batches") is True


def _deepspeed_table(name: str, given: Any) -> dict[str, Any] | None:
    """Return the DeepSpeed configuration that is written in the arguments, or in a file that they name."""
    if isinstance(given, dict):
        return given
    if not isinstance(given, str) or not given.endswith(".json") or "\0" in given:
        return None
    for path in (Path(name).parent / given, Path(given)):
        try:
            if path.is_file() and path.stat().st_size <= LARGEST_DEEPSPEED:
                table = json.loads(path.read_text("utf-8"))
                return table if isinstance(table, dict) else None
        except (OSError, ValueError, RecursionError):
            return None
    return None


def _disagreements(name: str, values: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return sentences about settings that contradict each other, and the edits that make them agree."""
    sentences: list[str] = []
    edits: dict[str, Any] = {}
    config = _deepspeed_table(name, values.get("deepspeed"))
    for path, key in DEEPSPEED_KEYS.items() if config else ():
        theirs, ours = deepspeed.at(config or {}, path), values[key]
        if theirs is None or theirs == "auto" or ours is None or theirs == ours:
            continue
        sentences.append(f"{key} is {ours!r}, but DeepSpeed's {path} is {theirs!r}: the Trainer refuses to start.")
        if isinstance(values.get("deepspeed"), dict):
            edits[f"deepspeed.{path}"] = "auto"
    strategy, saves = _strategy(values), str(values["save_strategy"]).lower()
    if values["load_best_model_at_end"] and saves not in ("best", strategy):
        sentences.append(
            f"load_best_model_at_end needs evaluations and checkpoints at the same steps, but eval_strategy is {strategy!r} and"
            f" save_strategy is {saves!r}: the Trainer refuses to start."
        )
        if strategy == "no":
            edits["load_best_model_at_end"] = False
        else:
            edits["save_strategy"] = strategy
    return sentences, edits


def _translate(
    fact: str, value: Any, changes: Mapping[str, Any], training: TrainingFacts, values: Mapping[str, Any], name: str
) -> dict[str, Any] | None:
    """Return the keys and values that change a fact, or None if arguments cannot change it."""
    if fact == "batch":
        micro = changes.get("micro", training.changed(changes).micro)
        return None if micro is None or training.ranks is None else {KEYS[fact]: micro}
    if fact == "disagreement":
        return _disagreements(name, values)[1] or None
    if fact in ("gather", "sync_batchnorm", "data_parallel") or fact not in KEYS:
        return None
    if fact == "warmup" and values["lr_scheduler_type"] in WITHOUT_WARMUP:
        return {KEYS[fact]: value, "lr_scheduler_type": WITHOUT_WARMUP[values["lr_scheduler_type"]]}
    if fact == "eval_every" and values["load_best_model_at_end"]:
        return {KEYS[fact]: value, "save_steps": value}
    if fact == "offloads_parameters":
        return {"deepspeed.zero_optimization.offload_param.device": "none"} if isinstance(values.get("deepspeed"), dict) else None
    if fact == "two_precisions" and not (values["fp16"] and values["bf16"]):
        return {"deepspeed.fp16.enabled": "auto", "deepspeed.bf16.enabled": "auto"} if values.get("deepspeed") else None
    if fact == "held_out":
        return {"evaluation_strategy" if "evaluation_strategy" in values else KEYS[fact]: "epoch"}
    written = {"token_mean": True, "duplicates": "no_duplicates", "optimizer": "adamw_torch"}
    return {KEYS[fact]: written.get(fact, value)}
