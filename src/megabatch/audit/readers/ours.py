"""A run of megabatch as facts, and changed facts as keys of its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megabatch import config

from ..documents import Document, Reading, edit_toml, table_of
from ..training import Optimizer, Training

KEYS = {
    "objective": "loss.objective",
    "batch": "batch.size",
    "micro": "batch.size",
    "chunk": "batch.chunk",
    "lr": "optimizer.lr",
    "optimizer": "optimizer.name",
    "beta2": "optimizer.betas",
    "weight_decay": "optimizer.weight_decay",
    "warmup": "schedule.warmup",
    "steps": "schedule.steps",
    "ema": "optimizer.ema",
    "duplicates": "loss.duplicates",
    "max_scale": "loss.max_scale",
    "held_out": "data.held_out",
    "sync_batchnorm": "compute.sync_batchnorm",
    "rate_follows": "batch.lr_rule",
    "precision": "compute.precision",
}
# The built-in towers look at each row by itself.
WITHOUT_BATCHNORM = ("vit", "cnn", "text", "x")


def read(name: str, text: str, table: Mapping[str, Any], known: Mapping[str, Any]) -> Reading:
    return reading(config.build(table, origin=name), name, text, known)


def reading(run: config.Run, name: str, text: str, known: Mapping[str, Any]) -> Reading:
    """A run and its text; `known` may say the ranks, which the file does not."""
    document = Document(name, text, KEYS, lambda changes, training: _translate(changes, run), _edit)
    return Reading(facts(run, known.get("ranks"), known.get("data")), document)


def facts(run: config.Run, ranks: int | None, data: int | None) -> Training:
    optimizer = optimizer_of(run.optimizer.name)
    contrastive = run.loss.objective != "classify"
    grows = run.batch.schedule != "constant"
    # How many updates a batch that grows makes is the schedule's business; a number of steps says it in any case.
    length = {name: getattr(run.schedule, name) for name in config.LENGTHS if not grows or name == "steps"}
    return Training(
        objective=run.loss.objective if run.loss.objective != "classify" else "supervised",
        batch=run.batch.size,
        chunk=run.batch.chunk,
        ranks=ranks,
        gather="exact" if contrastive else None,
        optimizer=optimizer,
        lr=run.optimizer.lr,
        warmup=run.schedule.warmup,
        beta2=run.optimizer.betas[1] if run.optimizer.name == "adamw" else None,
        weight_decay=run.optimizer.weight_decay,
        decays_gains=False,
        clip_norm=run.optimizer.clip_norm or 0.0,
        clip_at="step",
        schedule_at="step",
        ema=run.optimizer.ema,
        ema_at="step",
        data=data,
        precision=run.compute.precision,
        loss_scaling=run.compute.precision == "fp16",
        batchnorm=_batchnorm(run),
        sync_batchnorm=run.compute.sync_batchnorm,
        finetuning=_finetuning(run),
        duplicates=run.loss.duplicates if contrastive else None,
        max_scale=run.loss.max_scale if contrastive else None,
        rate_follows=run.batch.lr_rule != "none" if grows else None,
        held_out=run.data.held_out != 0,
        **length,
    )


def optimizer_of(name: str) -> Optimizer | None:
    """The family of an optimizer's name, where it tells it."""
    lowered = name.lower()
    if "lamb" in lowered:
        return "lamb"
    if "lars" in lowered:
        return "lars"
    if "adam" in lowered:
        return "adam"
    return "sgd" if "sgd" in lowered else None


def _batchnorm(run: config.Run) -> bool | None:
    towers = [run.x] if run.loss.objective == "classify" else [run.x, run.y]
    return False if all(tower.name in WITHOUT_BATCHNORM or tower.locked for tower in towers) else None


def _finetuning(run: config.Run) -> bool | None:
    """Whether all that learns starts from weights; None where one tower does, or where a builder may load some."""
    towers = [run.x] if run.loss.objective == "classify" or run.y.name == "x" else [run.x, run.y]
    started = [tower.weights is not None or tower.locked for tower in towers]
    if all(started):
        return not all(tower.locked for tower in towers)
    return None if any(started) or any(":" in tower.name for tower in towers) else False


def _translate(changes: Mapping[str, Any], run: config.Run) -> dict[str, str] | None:
    edits = {}
    for fact, value in changes.items():
        if fact not in KEYS or fact == "micro":
            return None
        if fact == "beta2":
            value = [run.optimizer.betas[0], value]
        elif fact == "optimizer":
            value = "adamw" if value == "adam" else value
        elif fact == "held_out":
            value = 0.1
        elif fact == "rate_follows":
            value = "linear" if run.optimizer.name == "sgd" else "sqrt"
        edits[KEYS[fact]] = literal(value)
    return edits


def _edit(text: str, edits: Mapping[str, str]) -> str:
    """The edited text; the whole run written anew where its lines could not be found (inline tables, dotted keys)."""
    wanted = config.build(table_of(text, "run"), [f"{key}={value}" for key, value in edits.items()])
    try:
        edited = edit_toml(text, edits)
        if config.build(table_of(edited, "run")) == wanted:
            return edited
    except ValueError:
        pass
    return config.as_toml(wanted)


def literal(value: Any) -> str:
    """A value as TOML, which is also what an override takes."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)
