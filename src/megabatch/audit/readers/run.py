"""Read the configuration of a megabatch run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megabatch import config

from ...objectives import OBJECTIVES
from ...optimizers import OPTIMIZERS, built_in_of, closest, family_of
from ..documents import Document, Reading
from ..facts import TrainingFacts
from ..formats.toml_text import edit_toml, parse_toml

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
    "random_tower": "x.weights",
    "unfilled": "data.source",
    "finetuning": "x.weights",
}
# The built-in towers and their options. The towers themselves would import torch; a test compares the two.
OPTIONS = {
    "vit": ("size", "patch", "channels", "width", "depth", "heads", "pool", "crop", "flip"),
    "cnn": ("size", "channels", "width", "depth", "hidden", "patch", "crop", "flip"),
    "text": ("length", "width", "depth", "heads", "layers", "buckets", "ngrams", "drop"),
}
INDEPENDENT = tuple(OPTIONS)
# Libraries whose towers start from random weights unless `weights` names a file; a folder of transformers may hold weights, and a
# function of the user may load some.
RANDOM = ("vit", "cnn", "text", "timm", "open_clip")


def read(name: str, text: str, table: Mapping[str, Any], facts: Mapping[str, Any]) -> Reading:
    run = config.build(table, origin=name)
    _check_towers(run, name)
    return reading_of(run, name, text, facts)


def _check_towers(run: config.Run, origin: str) -> None:
    """Raise ValueError if `train` would refuse the name of a tower, or an option of a built-in one.

    Towers of libraries and functions check their options when they are built, which an audit does not do.
    """
    for side, tower in (("x", run.x), ("y", run.y)):
        if ":" in tower.name or (side, tower.name) == ("y", "x"):
            continue
        if tower.name not in OPTIONS:
            raise ValueError(
                f"{origin}: {side}.name is {tower.name!r}: there is no such tower; name {', '.join(OPTIONS)}, or a model with its"
                " library, as timm:NAME"
            )
        known = OPTIONS[tower.name]
        for option in tower.options:
            if option not in known:
                raise ValueError(
                    f"{origin}: {side}.options has {option!r}: {tower.name} has no such option; its options are {', '.join(known)}"
                )


def reading_of(run: config.Run, name: str, text: str, facts: Mapping[str, Any]) -> Reading:
    """Return the reading of a run. facts: may contain the ranks and the data, which the file does not state."""

    def reread(after: str) -> TrainingFacts:
        return _facts(config.build(parse_toml(after, name), origin=name), facts.get("ranks"), facts.get("data"))

    keys = KEYS | {"random_tower": _locked_at_random(run) or "x.weights"}
    document = Document(name, text, keys, lambda changes, training: _translate(changes, run), _edit, reread)
    return Reading(_facts(run, facts.get("ranks"), facts.get("data")), document)


def _facts(run: config.Run, ranks: int | None, data: int | None) -> TrainingFacts:
    objective = OBJECTIVES[run.loss.objective]
    spec = OPTIMIZERS.get(run.optimizer.name)
    grows = run.batch.schedule != "constant"
    # The updates of a growing batch follow from its schedule and are unknown here, unless the length is a number of steps.
    length = {name: getattr(run.schedule, name) for name in config.LENGTHS if not grows or name == "steps"}
    return TrainingFacts(
        tool="megabatch",
        random_tower=_locked_at_random(run) is not None,
        unfilled=", ".join(config.unfilled(run)) or None,
        locked=_locked_at_random(run) is None and (run.x.locked or run.y.locked),
        objective=objective.cost_name,
        batch=run.batch.size,
        chunk=run.batch.chunk,
        ranks=ranks,
        gather="exact" if objective.contrastive else None,
        optimizer=family_of(run.optimizer.name),
        lr=run.optimizer.lr,
        warmup=run.schedule.warmup,
        beta2=run.optimizer.betas[1] if spec is not None and spec.uses_beta2 else None,
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
        duplicates=run.loss.duplicates if objective.contrastive else None,
        max_scale=run.loss.max_scale if objective.contrastive else None,
        rate_follows=run.batch.lr_rule != "none" if grows else None,
        held_out=run.data.held_out != 0,
        **length,
    )


def _locked_at_random(run: config.Run) -> str | None:
    """Return the key of the weights that a locked tower lacks."""
    for side, tower in (("x", run.x), ("y", run.y)):
        used = side == "x" or OBJECTIVES[run.loss.objective].contrastive
        if used and tower.locked and tower.weights is None and tower.name.partition(":")[0] in RANDOM:
            return f"{side}.weights"
    return None


def _batchnorm(run: config.Run) -> bool | None:
    towers = [run.x, run.y] if OBJECTIVES[run.loss.objective].contrastive else [run.x]
    return False if all(tower.name in ("x", *INDEPENDENT) or tower.locked for tower in towers) else None


def _finetuning(run: config.Run) -> bool | None:
    """Return whether all trained towers start from weights; None if only one does, or if a builder may load some."""
    two = OBJECTIVES[run.loss.objective].contrastive and run.y.name != "x"
    towers = [run.x, run.y] if two else [run.x]
    started = [tower.weights is not None or tower.locked for tower in towers]
    if all(started):
        return not all(tower.locked for tower in towers)
    return None if any(started) or any(tower.name.partition(":")[0] not in RANDOM for tower in towers) else False


def _translate(changes: Mapping[str, Any], run: config.Run) -> dict[str, str] | None:
    edits = {}
    for fact, value in changes.items():
        if fact not in KEYS or fact in ("micro", "random_tower", "finetuning"):
            return None
        if fact == "beta2":
            value = [run.optimizer.betas[0], value]
        elif fact == "optimizer":
            value = built_in_of(value)
        elif fact == "held_out":
            value = 0.1
        elif fact == "rate_follows":
            value = closest(run.optimizer.name).lr_rule
        edits[KEYS[fact]] = literal(value)
    return edits


def _edit(text: str, edits: Mapping[str, str]) -> str:
    """Return the edited text. If its lines cannot be found (inline tables, dotted keys), write the whole run again."""
    wanted = config.build(parse_toml(text, "run"), [f"{key}={value}" for key, value in edits.items()])
    try:
        edited = edit_toml(text, edits)
        if config.build(parse_toml(edited, "run")) == wanted:
            return edited
    except ValueError:
        pass
    return config.as_toml(wanted)


def literal(value: Any) -> str:
    """Return a value in TOML syntax, which overrides use too."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)
