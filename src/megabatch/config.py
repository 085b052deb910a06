"""What a plan writes and a run reads: frozen dataclasses, TOML in and out. Nothing here is executed, all of it is checked."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Section = TypeVar("Section")
# TOML has no null: this text stands for None where a value may be absent.
NONE = "none"
LENGTHS = ("samples", "epochs", "steps")
# What is trained where no file says anything else: pictures and names of characters, at a batch that two cores' budget pays for.
EMBEDDED = {
    "data": {"workers": 1},
    "x": {"name": "cnn", "options": {"channels": 1}},
    "y": {"name": "text"},
    "loss": {"label_smoothing": 0.1},
    "optimizer": {"lr": 4e-3},
    "schedule": {"samples": 768 * 1024},
    "evaluate": {"every": 128},
}


@dataclass(frozen=True)
class Data:
    """Where the pairs come from. A pair has two sides, x and y: picture and caption, or query and document.

    source: "glyphs", or a path: WebDataset shards (globs and braces), a .csv, .tsv, .parquet or .jsonl file, a folder of pictures
        with text files, a folder saved by Hugging Face `datasets`.
    kind: None tells it from the source's name.
    x, y: the column, the key or, in shards and folders, the extensions ("jpg;png", "json:key") of each side; None takes the usual
        names. Whether a column holds texts or paths of pictures follows from what the towers take.
    label: the column of the class, for objective "classify".
    negatives: the column or key of a list of hard negatives of y; they are taken only where this names one.
    held_out: what is kept from training and evaluated on: a fraction of the source, or another source of the same kind.
    window: shards are shuffled as a whole, samples within windows of this many; one as long as the data shuffles all of it.
    max_bad: so many unreadable samples are skipped, each named in the log; one more stops the run.
    max_pixels: larger pictures are refused before they are decoded.
    """

    source: str = "glyphs"
    kind: Literal["glyphs", "webdataset", "table", "folder", "datasets", "jsonl"] | None = None
    x: str | None = None
    y: str | None = None
    label: str | None = None
    negatives: str | None = None
    held_out: float | str = 0.1
    window: int = 65536
    workers: int = 0
    max_bad: int = 100
    max_pixels: int = 50_000_000


@dataclass(frozen=True)
class Tower:
    """One encoder.

    name: "vit", "cnn" (pictures) or "text", built in; "timm:NAME", "open_clip:NAME", "transformers:NAME or folder"; or
        "package.module:function", which is called with the options and returns a Module, or a `towers.Tower`. As the name of y, "x"
        is the tower of x, for both sides.
    options: arguments of the builder (width, depth, size, …).
    weights: local file to start from, safetensors or a state dict that torch.load reads with weights_only.
    locked: no gradient, evaluation mode (LiT).
    checkpointing: recompute activations inside the encoder.
    """

    name: str = "vit"
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None
    locked: bool = False
    checkpointing: bool = False


@dataclass(frozen=True)
class Loss:
    """What is learnt. Options as in `clip_loss` and `siglip_loss`; `scale` and `bias` are where the learnable ones start.

    duplicates: what pairs with equal captions are to each other: "mask" and "positive" as in the losses; "negative" as any other.
    """

    objective: Literal["clip", "siglip", "classify"] = "clip"
    dim: int = 128
    scale: float | None = None
    max_scale: float = 100.0
    bias: float = -10.0
    label_smoothing: float = 0.0
    duplicates: Literal["mask", "positive", "negative"] = "mask"
    drop_above: float | None = None


@dataclass(frozen=True)
class Batch:
    """How many pairs an optimizer step takes, over all ranks, and how they go through the encoders.

    size: pairs of one step; chunk: rows through an encoder at once; keep: chunks whose activations are kept.
    schedule: how the size grows from `start` to `size`: over the samples of the first `ramp` (a fraction of the run), linearly,
        exponentially, or in doublings ("steps"); "noise" doubles whenever the gradient's noise says that the critical batch is
        larger, with a budget in samples or epochs; "constant" is `size` throughout.
    lr_rule: how the learning rate follows where the batch is smaller than `size`.
    """

    size: int = 1024
    chunk: int = 256
    keep: int | Literal["auto"] = "auto"
    schedule: Literal["constant", "linear", "exponential", "steps", "noise"] = "constant"
    start: int | None = None
    ramp: float = 0.5
    lr_rule: Literal["linear", "sqrt", "none"] = "sqrt"


@dataclass(frozen=True)
class Optimizer:
    """name: "adamw", "sgd", or "package.module:Class", called with the parameter groups, lr and `options`.

    weight_decay: for matrices and convolutions; gains, biases, embeddings of a scale and the logit scale get none.
    clip_norm: the largest norm of the whole gradient. ema: decay of a moving average of the weights, evaluated in their place.
    """

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    momentum: float = 0.9
    options: Mapping[str, Any] = field(default_factory=dict)
    clip_norm: float | None = 1.0
    ema: float | None = None


@dataclass(frozen=True)
class Schedule:
    """How long, and the course of the learning rate. Exactly one of samples, epochs, steps.

    warmup: steps from zero to the full rate (a fraction of the run if below 1). floor: the rate at the end, as a share of lr.
    """

    samples: int | None = None
    epochs: float | None = None
    steps: int | None = None
    shape: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: float = 0.05
    floor: float = 0.0


@dataclass(frozen=True)
class Compute:
    """device: "cpu", "cuda", …; None: the accelerator if there is one. precision: of autocast; "fp32" is none.

    sharding: over ranks: "ddp" copies the weights, "fsdp2" shards them. tile: working memory of the loss in bytes.
    threads: of PyTorch on a CPU.
    """

    device: str | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    sharding: Literal["ddp", "fsdp2"] = "ddp"
    sync_batchnorm: bool = False
    compile: bool = False
    tile: int | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Checkpoint:
    """every: steps between two; None: at the end and on SIGTERM or SIGINT only. keep: the newest that stay."""

    every: int | None = 200
    keep: int = 2


@dataclass(frozen=True)
class Watch:
    """What a run says while it runs, beside one JSON line a step; `report`: whether it ends with curves, contact sheet and page."""

    bar: bool = True
    report: bool = True
    tensorboard: bool = False
    wandb: str | None = None


@dataclass(frozen=True)
class Evaluate:
    """every: steps between two evaluations; None: at the end only. limit: held-out pairs taken, at most.

    templates: sentences around the class names of a zero-shot classification.
    large: after the training, one step each at batches of so many pairs, with the same chunk: their time and memory are reported,
        the weights stay as they are.
    """

    every: int | None = None
    limit: int = 10_000
    large: tuple[int, ...] = ()
    templates: tuple[str, ...] = ("{}",)


@dataclass(frozen=True)
class Planned:
    """What the plan predicted, for the report to set beside what was measured."""

    peak_bytes: int | None = None
    seconds_a_step: float | None = None


@dataclass(frozen=True)
class Run:
    """One training, whole: what `megabatch train` runs."""

    out: str = "runs/glyphs"
    seed: int = 0
    data: Data = field(default_factory=Data)
    x: Tower = field(default_factory=lambda: Tower("cnn"))
    y: Tower = field(default_factory=lambda: Tower("text"))
    loss: Loss = field(default_factory=Loss)
    batch: Batch = field(default_factory=Batch)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    compute: Compute = field(default_factory=Compute)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    watch: Watch = field(default_factory=Watch)
    evaluate: Evaluate = field(default_factory=Evaluate)
    planned: Planned = field(default_factory=Planned)


def read(path: str | Path, overrides: Iterable[str] = ()) -> Run:
    """The run that a TOML file describes, with "section.key=value" overrides; what the file does not say is the default."""
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file; name a run's TOML file, or none for the embedded default") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: is not valid TOML ({error})") from None
    return build(table, overrides, str(path))


def build(table: Mapping[str, Any], overrides: Iterable[str] = (), origin: str = "run") -> Run:
    """The run of a nested table, checked.

    >>> build({"schedule": {"epochs": 10}}, ["optimizer.lr=3e-4"]).optimizer.lr
    0.0003
    """
    table = _copy(table)
    overrides = list(overrides)
    for override in overrides:
        _forget(table, override)
    for override in overrides:
        _put(table, override)
    run = _section(Run, table, origin)
    check(run)
    return run


def as_table(run: Run) -> dict[str, Any]:
    """The run as nested dicts of plain values: None is left out, or "none" where the default is something else."""
    return _plain(run)


def as_toml(run: Run) -> str:
    """The run as TOML, every value written out: `read` gives it back equal."""
    table = as_table(run)
    lines = [f"{key} = {_literal(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for name, section in table.items():
        if isinstance(section, dict) and section:
            lines += ["", f"[{name}]"] + [f"{key} = {_literal(value)}" for key, value in section.items()]
    return "\n".join(lines) + "\n"


def check(run: Run) -> None:
    """Raises ValueError where values contradict each other or a rule."""
    rules = [
        ("batch.size", run.batch.size, run.batch.size >= 1, "must be at least 1"),
        ("batch.chunk", run.batch.chunk, run.batch.chunk >= 1, "must be at least 1; lower it when memory runs out"),
        ("batch.keep", run.batch.keep, run.batch.keep == "auto" or run.batch.keep >= 0, 'must be "auto" or at least 0'),
        ("batch.ramp", run.batch.ramp, 0 < run.batch.ramp <= 1, "is a fraction of the run: above 0, at most 1"),
        ("optimizer.lr", run.optimizer.lr, 0 < run.optimizer.lr < math.inf, "must be above 0"),
        ("optimizer.weight_decay", run.optimizer.weight_decay, run.optimizer.weight_decay >= 0, "must not be negative"),
        ("optimizer.betas", run.optimizer.betas, all(0 <= b < 1 for b in run.optimizer.betas), "must lie in [0, 1)"),
        ("optimizer.clip_norm", run.optimizer.clip_norm, _above(run.optimizer.clip_norm, 0), 'must be above 0, or "none"'),
        ("optimizer.ema", run.optimizer.ema, run.optimizer.ema is None or 0 < run.optimizer.ema < 1, "must lie between 0 and 1"),
        ("schedule.warmup", run.schedule.warmup, run.schedule.warmup >= 0, "must not be negative"),
        ("schedule.floor", run.schedule.floor, 0 <= run.schedule.floor <= 1, "is a share of lr: 0 to 1"),
        ("loss.dim", run.loss.dim, run.loss.dim >= 1, "must be at least 1"),
        ("loss.scale", run.loss.scale, _above(run.loss.scale, 0), "must be above 0"),
        ("loss.max_scale", run.loss.max_scale, run.loss.max_scale > 0, "must be above 0"),
        ("loss.label_smoothing", run.loss.label_smoothing, 0 <= run.loss.label_smoothing < 1, "must lie in [0, 1)"),
        ("data.window", run.data.window, run.data.window >= 1, "must be at least 1, which does not shuffle within shards"),
        ("data.workers", run.data.workers, run.data.workers >= 0, "must not be negative; 0 reads in the training process"),
        ("data.max_bad", run.data.max_bad, run.data.max_bad >= 0, "must not be negative"),
        ("data.max_pixels", run.data.max_pixels, run.data.max_pixels >= 1, "must be at least 1"),
        ("checkpoint.every", run.checkpoint.every, _above(run.checkpoint.every, 0), 'must be at least 1, or "none"'),
        ("checkpoint.keep", run.checkpoint.keep, run.checkpoint.keep >= 1, "must be at least 1"),
        ("evaluate.every", run.evaluate.every, _above(run.evaluate.every, 0), 'must be at least 1, or "none"'),
        ("evaluate.limit", run.evaluate.limit, run.evaluate.limit >= 1, "must be at least 1"),
        ("compute.threads", run.compute.threads, _above(run.compute.threads, 0), "must be at least 1"),
        ("out", run.out, bool(run.out), "must name the folder of the run"),
    ]  # fmt: skip
    for name, value, fine, rule in rules:
        if not fine:
            raise ValueError(f"{name} is {value!r}: {rule}")
    lengths = {name: getattr(run.schedule, name) for name in LENGTHS}
    given = {name: value for name, value in lengths.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"schedule has {' and '.join(given)}: give one of samples, epochs, steps")
    for name, value in given.items():
        if value <= 0:
            raise ValueError(f"schedule.{name} is {value!r}: must be above 0")
    if not given:
        raise ValueError("schedule does not say how long to train: give one of samples, epochs, steps")
    if isinstance(run.data.held_out, float) and not 0 <= run.data.held_out < 1:
        raise ValueError(f"data.held_out is {run.data.held_out!r}: a fraction must lie in [0, 1); a path names another source")
    if run.batch.schedule != "constant" and not 1 <= (run.batch.start or 0) <= run.batch.size:
        raise ValueError(
            f"batch.start is {run.batch.start!r}: a batch that grows ({run.batch.schedule}) starts between 1 and"
            f" batch.size = {run.batch.size}"
        )
    if run.batch.schedule == "noise":
        _check_noise(run)


def _check_noise(run: Run) -> None:
    """Raises ValueError where a batch cannot follow the noise of the gradient."""
    refused = 'batch.schedule is "noise"'
    if run.loss.objective != "classify":
        raise ValueError(
            f"{refused} and loss.objective {run.loss.objective!r}: its samples are compared with each other, so a larger batch is "
            "another loss with more negatives, of which the noise says nothing; choose steps, linear or exponential"
        )
    if run.schedule.steps is not None:
        raise ValueError(
            f"{refused} and schedule.steps {run.schedule.steps}: how many samples that is would depend on what the noise allows,"
            " and with it the learning rate; give schedule.samples or schedule.epochs"
        )
    if run.compute.sharding == "fsdp2":
        raise ValueError(
            f'{refused} and compute.sharding "fsdp2": no rank holds a gradient of its own rows alone; choose sharding "ddp", or '
            "steps, linear or exponential"
        )
    if run.batch.start == 1:
        raise ValueError(f"{refused} and batch.start 1: noise shows between samples of a batch; start with at least 2")


def _above(value: float | None, limit: float) -> bool:
    return value is None or value > limit


def _section(kind: type[Section], table: Mapping[str, Any], where: str) -> Section:
    hints = typing.get_type_hints(kind)
    unknown = [key for key in table if key not in hints]
    if unknown:
        near = difflib.get_close_matches(unknown[0], hints, 1)
        guess = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(hints)}"
        raise ValueError(f"{where}: there is no key {unknown[0]!r}; {guess}")
    return kind(**{key: _value(hints[key], value, f"{where}: {key}") for key, value in table.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    """The value as its annotation wants it: sections from tables, floats from integers, tuples from lists."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} is {value!r}: must be a table")
        return _section(hint, value, where)
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value == NONE and type(None) in choices:
            return None
        for choice in choices:
            try:
                return _value(choice, value, where)
            except ValueError:
                continue
        literals = [c for c in choices if typing.get_origin(c) is Literal]
        if literals:
            return _value(literals[0], value, where)
        raise ValueError(f"{where} is {value!r}: must be {_words(hint)}")
    if origin is Literal:
        if value not in choices:
            raise ValueError(f"{where} is {value!r}: must be one of {', '.join(repr(c) for c in choices)}")
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        wanted = choices[:1] * len(value) if choices[-1] is Ellipsis else choices
        if len(wanted) == len(value):
            return tuple(_value(c, v, where) for c, v in zip(wanted, value, strict=True))
    if origin is Mapping and isinstance(value, Mapping):
        return dict(value)
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ValueError(f"{where} is {value!r}: must be {_words(hint)}")


def _words(hint: Any) -> str:
    names = {str: "a text", int: "an integer", float: "a number", bool: "true or false", type(None): "left out"}
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(choice) for choice in choices)
    if origin is tuple:
        return f"a list of {len(choices)} values" if choices[-1] is not Ellipsis else "a list"
    if origin is Mapping:
        return "a table"
    return names.get(hint, str(hint))


def _copy(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in table.items()}


def _forget(table: dict[str, Any], override: str) -> None:
    """Leaves out what the file says and an override makes void: another length of the run, the options of another tower."""
    path, _, text = override.partition("=")
    section, _, key = path.strip().partition(".")
    before = table.get(section)
    if not isinstance(before, dict):
        return
    if section == "schedule" and key in LENGTHS:
        void: tuple[str, ...] = LENGTHS
    elif key == "name" and before.get("name") != text.strip():
        void = ("options", "weights")
    else:
        return
    table[section] = {name: value for name, value in before.items() if name not in void}


def _put(table: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals:
        raise ValueError(f"override {override!r}: must read section.key=value, as in batch.size=4096")
    *sections, key = path.strip().split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ValueError(f"override {override!r}: {section!r} holds a value, not a section")
    table[key] = _parsed(text.strip())


def _parsed(text: str) -> Any:
    """A number, true, false, a list or a quoted text; anything else is a text, so that paths need no quotes."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _plain(section: Any) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for entry in dataclasses.fields(section):
        value = getattr(section, entry.name)
        if dataclasses.is_dataclass(value):
            table[entry.name] = _plain(value)
        elif value is not None:
            table[entry.name] = list(value) if isinstance(value, tuple) else value
        elif entry.default is not None:
            table[entry.name] = NONE
    return table


def _literal(value: Any) -> str:
    """A value as TOML; JSON's texts, numbers and lists are TOML's too, tables are written inline."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(key)} = {_literal(v)}" for key, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_literal(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value)
    # TOML allows the character DEL only escaped, JSON does not care.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
