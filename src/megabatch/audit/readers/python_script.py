"""Read Python scripts without executing them: the Trainer's arguments, losses of Sentence Transformers, accelerate, Lightning."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...objectives import DEFAULT
from ..documents import Reading
from ..formats.python_text import UNKNOWN, FunctionCall, Script, edit_calls, parse_python, value_of
from ..model_names import parameters_of
from . import lightning, transformers

ARGUMENTS = re.compile(r"\w*TrainingArguments|SFTConfig|CPTConfig")
ACCELERATOR, FINDER = "Accelerator", "find_executable_batch_size"
# The first parameter of TrainingArguments can be given by position.
POSITIONAL = ("output_dir",)


class LossClass(NamedTuple):
    """A loss with in-batch negatives, by its class.

    cached: the parameter for the rows that an encoder takes at once, if the loss caches gradients. rows: its default.
    scale: the parameter of the factor or, if `inverse`, of the temperature. cached_class: the same loss with cached gradients.
    sums_cached_gradients: whether its cached gradients belong to a sum.
    """

    cached: str | None = None
    rows: int | None = None
    scale: str = "scale"
    inverse: bool = False
    cached_class: str | None = None
    sums_cached_gradients: bool = False


# Sentence Transformers' losses that compare the samples of a batch, and PyLate's.
LOSSES = {
    "MultipleNegativesRankingLoss": LossClass(cached_class="CachedMultipleNegativesRankingLoss"),
    "MultipleNegativesSymmetricRankingLoss": LossClass(cached_class="CachedMultipleNegativesSymmetricRankingLoss"),
    "CachedMultipleNegativesRankingLoss": LossClass("mini_batch_size", 32),
    "CachedMultipleNegativesSymmetricRankingLoss": LossClass("mini_batch_size", 32),
    "GISTEmbedLoss": LossClass(scale="temperature", inverse=True, cached_class="CachedGISTEmbedLoss"),
    "CachedGISTEmbedLoss": LossClass("mini_batch_size", 32, "temperature", True),
    "Contrastive": LossClass(scale="temperature", inverse=True),
    "CachedContrastive": LossClass("mini_batch_size", 32, "temperature", True, sums_cached_gradients=True),
}


def read(name: str, text: str) -> Reading:
    """Return the reading of a script."""
    script = parse_python(text, name)
    if _arguments(script) is None and lightning.MODULES & script.modules and script.find(("Trainer",)):
        return _lightning(name, text)
    if _arguments(script) is None and _fit(script) is None and script.find((ACCELERATOR, FINDER)) is None:
        raise ValueError(
            f"{name}: calls neither TrainingArguments, nor accelerate's Accelerator, nor Lightning's Trainer; describe a loop of"
            " your own in a [training] table"
        )

    def edit(before: str, edits: Mapping[Any, Any]) -> str:
        return _edit(before, edits, name)

    def parse(after: str) -> dict[str, Any]:
        return _table(parse_python(after, name))

    def extra(after: str) -> dict[str, Any]:
        return _extra(parse_python(after, name))

    training, document = transformers.read(name, text, parse, edit, extra, lambda fact, value: _translate(fact, value, script))
    return Reading(training, document._replace(keys={**document.keys, **_keys(script)}))


def _arguments(script: Script) -> FunctionCall | None:
    calls = [call for call in script.calls if ARGUMENTS.fullmatch(call.function)]
    return next((call for call in calls if transformers.MARKS & call.keywords.keys()), calls[0] if calls else None)


def _fit(script: Script) -> FunctionCall | None:
    """Return the call of `SentenceTransformer.fit`, the way to train before version 3."""
    return next((call for call in script.calls if call.function == "fit" and "train_objectives" in call.keywords), None)


def _fit_table(fit: FunctionCall, script: Script) -> dict[str, Any]:
    """Return what `fit` says in the Trainer's words, with its own defaults (sentence-transformers 2.7)."""
    loader, rates = script.find(("DataLoader", "NoDuplicatesDataLoader")), fit.keywords.get("optimizer_params")
    return {
        "per_device_train_batch_size": UNKNOWN if loader is None else loader.keywords.get("batch_size", 1),
        "num_train_epochs": fit.keywords.get("epochs", 1),
        "learning_rate": rates.get("lr", 2e-5) if isinstance(rates, dict) else 2e-5,
        "warmup_steps": fit.keywords.get("warmup_steps", 10_000),
        "weight_decay": fit.keywords.get("weight_decay", 0.01),
        "fp16": fit.keywords.get("use_amp", False),
        "do_eval": "evaluator" in fit.keywords,
        "batch_sampler": "no_duplicates" if loader is not None and "NoDuplicates" in loader.function else "batch_sampler",
    }


def _table(script: Script) -> dict[str, Any]:
    """Return the arguments of the Trainer, with None for values that are not written out."""
    call, fit = _arguments(script), _fit(script)
    if call is None and fit is not None:
        table = _fit_table(fit, script)
    elif call is None:
        accelerator = script.find((ACCELERATOR,))
        keywords = {} if accelerator is None else accelerator.keywords
        table = {key: keywords[key] for key in ("gradient_accumulation_steps", "split_batches") if key in keywords}
        half = keywords.get("mixed_precision")
        # What an accelerate loop does not say in the Accelerator is unknown.
        unknown = dict.fromkeys(("per_device_train_batch_size", "learning_rate", "warmup_steps", "num_train_epochs", "adam_beta2"))
        table = unknown | table | {"fp16": half == "fp16", "bf16": half == "bf16", "do_eval": True, "max_grad_norm": None}
    else:
        table = dict(zip(POSITIONAL, call.positional, strict=False)) | dict(call.keywords)
        # Cross-encoders score pairs one by one.
        if call.function.startswith("CrossEncoder"):
            table.pop("batch_sampler", None)
        elif "sentence_transformers" in script.modules:
            table.setdefault("batch_sampler", "batch_sampler")
    if _switches_on(script, "use_cache"):
        table["use_cache"] = True
    return {key: None if value is UNKNOWN else value for key, value in table.items()}


def _switches_on(script: Script, name: str) -> bool:
    """Return whether a keyword or an attribute of this name is set to True, as in `model.config.use_cache = True`."""
    if any(call.keywords.get(name) is True for call in script.calls):
        return True
    assignments = [node for node in ast.walk(script.tree) if isinstance(node, ast.Assign)]
    return any(
        isinstance(target, ast.Attribute) and target.attr == name and value_of(node.value, {}) is True
        for node in assignments
        for target in node.targets
    )


def _extra(script: Script) -> dict[str, Any]:
    """Return the facts that a script states outside of the arguments."""
    finder = script.find((FINDER,))
    facts: dict[str, Any] = {
        "finetuning": _finetuning(script),
        "parameters": next((found for call in script.calls for found in [parameters_of(_first_text(call))] if found), None),
        "adapter": True if script.find(("LoraConfig", "get_peft_model")) else None,
        "data_parallel": True if script.find(("DataParallel",)) else None,
        "scale_outside_ddp": True if _learnable_scale(script) else None,
    }
    if _arguments(script) is None and _fit(script) is None:
        facts |= {"tool": "accelerate", "held_out": True}
    if finder is not None:
        dropped = any(call.function == FINDER and "reduce_batch_size_fn" in call.keywords for call in script.decorators)
        facts |= {"batch_from_memory": True, "reduce_function": True if dropped else None}
    call = script.find(LOSSES)
    if call is not None:
        facts |= _loss(call, "pylate" in script.modules)
    return {fact: value for fact, value in facts.items() if value is not None}


def _loss(call: FunctionCall, pylate: bool) -> dict[str, Any]:
    loss = LOSSES[call.function]
    # Similarities that are no cosines, such as dot products, have a scale of their own.
    number = None if "similarity_fct" in call.keywords else _number(call.keywords.get(loss.scale))
    gather = call.keywords.get("gather_across_devices", False)
    chunk = call.keywords.get(loss.cached, loss.rows) if loss.cached else None
    return {
        "tool": "sentence_transformers",
        "objective": DEFAULT,
        "gather": "exact" if gather is True else "none" if gather is False else None,
        "chunk": chunk if isinstance(chunk, int) and not isinstance(chunk, bool) and chunk > 0 else None,
        "scale": None if not number else 1 / number if loss.inverse else number,
        "cached_gradient_sum": loss.sums_cached_gradients and pylate,
    }


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and 1e-30 < value < 1e15 else None


def _first_text(call: FunctionCall) -> str:
    return next((value for value in call.positional[:1] if isinstance(value, str)), "")


def _finetuning(script: Script) -> bool | None:
    if any(call.function == "from_pretrained" for call in script.calls):
        return True
    return True if any(call.function in ("SentenceTransformer", "ColBERT") and _first_text(call) for call in script.calls) else None


def _learnable_scale(script: Script) -> bool:
    """Return whether a loss class of the script has a parameter for the scale and is used beside, not inside, a model."""
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.ClassDef) or not node.name.endswith("Loss") or script.find((node.name,)) is None:
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Call):
                function = inner.value.func
                made = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                names = [target.attr for target in inner.targets if isinstance(target, ast.Attribute)]
                if made == "Parameter" and any(re.search(r"scale|temp|tau", name) for name in names):
                    return True
    return False


def _keys(script: Script) -> dict[str, str]:
    call = script.find(LOSSES)
    keys = {"reduce_function": f"@{FINDER}", "scale_outside_ddp": "the loss", "batch_from_memory": FINDER}
    keys = keys if script.find((FINDER,)) else {key: name for key, name in keys.items() if key != "batch_from_memory"}
    if call is not None:
        loss = LOSSES[call.function]
        keys |= {"scale": f"{call.function}({loss.scale})", "gather": f"{call.function}(gather_across_devices)"}
        keys |= {"chunk": f"{call.function}({loss.cached})", "cached_gradient_sum": call.function}
    return keys


def _translate(fact: str, value: Any, script: Script) -> dict[Any, Any] | None:
    """Return edits of calls other than the arguments."""
    call = script.find(LOSSES)
    if call is None:
        return None
    loss = LOSSES[call.function]
    if fact == "scale":
        return {(call.function, loss.scale): 1 / value if loss.inverse else value}
    if fact == "gather":
        return {(call.function, "gather_across_devices"): True}
    if fact == "chunk":
        if loss.cached is None and loss.cached_class is not None:
            return {(call.function, loss.cached_class): None, (loss.cached_class, "mini_batch_size"): value}
        return None if loss.cached is None else {(call.function, loss.cached): value}
    return None


def _edit(text: str, edits: Mapping[Any, Any], name: str) -> str:
    """Return the script with keywords set, and with classes renamed where an edit maps (old, new) to None."""
    call = _arguments(parse_python(text, name))
    for key, value in edits.items():
        if isinstance(key, tuple) and value is None:
            text = re.sub(rf"\b{key[0]}\b", key[1], text)
        elif isinstance(key, tuple):
            text = edit_calls(text, {key: value}, name)
        elif call is None:
            text = edit_calls(text, {(ACCELERATOR, key.rpartition(".")[2]): value}, name)
        else:
            keyword, _, inner = key.partition(".")
            if "." in inner:
                raise ValueError("a nested value of a call is not edited")
            text = edit_calls(text, {(call.function, keyword): {inner: value} if inner else value}, name)
    return text


def _lightning(name: str, text: str) -> Reading:
    def parse(after: str) -> dict[str, Any]:
        call = parse_python(after, name).find(("Trainer",))
        keywords = {} if call is None else call.keywords
        return {"trainer": {key: None if value is UNKNOWN else value for key, value in keywords.items()}}

    def edit(before: str, edits: Mapping[str, Any]) -> str:
        if any(not key.startswith("trainer.") for key in edits):
            raise ValueError("only the Trainer's arguments are edited in a script")
        return edit_calls(before, {("Trainer", key.partition(".")[2]): value for key, value in edits.items()}, name)

    return lightning.read(name, text, parse, edit)
