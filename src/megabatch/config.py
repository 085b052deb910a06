"""The configuration of a run, which a plan writes and `train` reads: frozen dataclasses with TOML in and out, all checked."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import os
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union

from . import objectives, optimizers, vocabulary
from .objectives import ObjectiveName
from .optimizers import LrRule

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Section = TypeVar("Section")
# TOML has no null: this string means None where a value may be absent.
NONE = "none"
# Texts that begin so are to be replaced by the user: a plan writes them where it cannot know the value, and no run starts with one.
FILL_IN = "FILL IN"
# Columns of a comment in a file.
COMMENT_WIDTH = 100
LENGTHS = ("samples", "epochs", "steps")
SIZES = ("batch.size", "batch.per_device")
# Larger or more deeply nested files are refused.
LARGEST_FILE = 2**20
DEEPEST = 32
# A TOML key of more parts than that: tomllib takes time and memory proportional to the square of their number.
LONG_KEY = re.compile(rf"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{DEEPEST + 1}}}""")
# TOML integers, seeds of torch and positions in the stream of samples have 64 bits; floats are used in fp32.
INT64 = 2**63 - 1
FP32 = 3.4028234663852886e38
# The kernels count the rows of a batch in 32 bits.
MOST_PAIRS = 2**31 - 1
WIDEST = 2**20
# Usual rates are far below: SGD with layer-wise scaling uses up to a few tens.
LARGEST_RATE = 1000.0
# Tiles of 64 by 64 similarities. With smaller ones each operation computes a few numbers, and a step takes hours.
SMALLEST_TILE = 64 * 2**10
# Threads and worker processes that are allowed on any machine; one with many cores allows more. OpenMP ends the process if it
# cannot create threads, and crashes from a few ten thousand threads up.
MANY = 256
# What `megabatch train` and `plan` use without a file: images and names of characters. It trains in minutes on two CPU cores.
EMBEDDED = {
    "data": {"workers": 1},
    "x": {"name": "cnn", "options": {"channels": 1}},
    "y": {"name": "text"},
    "loss": {"label_smoothing": 0.1},
    "optimizer": {"lr": 4e-3},
    "schedule": {"samples": 160 * 1024},
    "evaluate": {"every": 64, "large": "auto"},
}


@dataclass(frozen=True)
class Data:
    """The training data. A pair has two sides, x and y: image and caption, or query and document.

    source: "glyphs", or a path: WebDataset shards (globs and braces), a .csv, .tsv, .parquet or .jsonl file, a folder of images
        with text files, a folder saved by Hugging Face `datasets`.
    kind: the format; None recognises it by the name of the source.
    x, y: the column or key of each side or, in shards and folders, its extensions ("jpg;png", "json:key"). None takes the usual
        names. Whether a column has texts or paths of images depends on what the towers take.
    label: the column of the class, for classification.
    negatives: the column or key of a list of hard negatives of y, or several columns, as in "negative_1;negative_2". False ignores
        them. None is an error where rows have columns with the usual names: negatives, negative, hard_negatives, neg, negative_1, …
    held_out: the evaluation data, which is not trained on: a fraction of the source, or another source of the same kind.
    window: shards are shuffled as a whole, samples within windows of this size; a window of the size of the data shuffles all of
    it. max_bad: how many training samples may be unreadable. They are skipped and logged, and one more stops the run. Each sample
        counts once; samples known to be lost in a damaged file count from the start. Held-out samples do not count: the evaluation
        reports how many it could not read.
    max_pixels: larger images are refused before they are decoded.
    reduce_jpegs: decode JPEGs at 1/2, 1/4 or 1/8 of their size where they are shrunk at least as much afterwards, which is faster
        and changes pixels slightly (docs/training.md). False decodes all pixels.
    decode: where JPEGs are decoded, cropped and resized: in the "workers", or on the CUDA "device" by nvJPEG, always from all
        pixels. Images that nvJPEG does not take are decoded in the workers.
    """

    source: str = "glyphs"
    kind: str | None = None
    x: str | None = None
    y: str | None = None
    label: str | None = None
    negatives: str | Literal[False] | None = None
    held_out: float | str = 0.1
    window: int = 65536
    workers: int = 0
    max_bad: int = 100
    max_pixels: int = 50_000_000
    reduce_jpegs: bool = True
    decode: Literal["workers", "device"] = "workers"


@dataclass(frozen=True)
class Tower:
    """One encoder.

    name: "vit", "cnn" (images) or "text", built in; "timm:NAME", "open_clip:NAME", "transformers:NAME or folder"; or
        "package.module:function", called with the options to return a Module or a `towers.BuiltTower`. The name "x" for y
        shares the tower of x.
    options: arguments of the builder (width, depth, size, …).
    weights: local file with initial weights, safetensors or a state dict that torch.load reads with weights_only.
    locked: no gradient, and evaluation mode (LiT).
    checkpointing: recompute activations inside the encoder in backward.
    """

    name: str = "vit"
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None
    locked: bool = False
    checkpointing: bool = False


@dataclass(frozen=True)
class Loss:
    """The objective (`objectives.OBJECTIVES`) and its options, as in `clip_loss`, `siglip_loss` and `infonce_loss`.

    scale: initial value of the learnable scale of cosine similarities (1 / temperature), at least 1; None is the value of the
        loss's paper. bias: initial value of the learnable bias.
    duplicates: how pairs with an equal x or an equal y (captions of one image, images of one caption) are treated: "mask" and
        "positive" as in the losses, "negative" as all other pairs.
    dims: widths of the embeddings' prefixes over which the loss is added up (Matryoshka); empty: the full width only.
    spread_out: weight of the spread-out regulariser of both sides, which is added to the loss.
    directions, partition: of a loss over directions; empty and None: those of the loss's function.
    drop_ratio, hardness, hardness_on, in_batch: as in `infonce_loss`.
    """

    objective: ObjectiveName = objectives.DEFAULT
    dim: int = 128
    scale: float | None = None
    max_scale: float = 100.0
    bias: float = objectives.SIGMOID_BIAS
    label_smoothing: float = 0.0
    duplicates: Literal["mask", "positive", "negative"] = "mask"
    drop_above: float | None = None
    dims: tuple[int, ...] = ()
    spread_out: float = 0.0
    directions: tuple[str, ...] = ()
    partition: Literal["joint", "separate", "by_anchor"] | None = None
    drop_ratio: float | None = None
    hardness: float = 0.0
    hardness_on: Literal["all", "hard", "in_batch"] = "all"
    in_batch: bool = True


@dataclass(frozen=True)
class Batch:
    """Pairs of one optimizer step over all ranks, and how they are encoded.

    size: pairs of one step. per_device: pairs of one step on each rank, instead of `size`, which `with_ranks` then sets.
    chunk: rows that an encoder takes at once. keep: chunks whose activations are kept, not recomputed.
    schedule: how the size grows from `start` to `size` over the first `ramp` (a fraction) of the run: linearly, exponentially, or
        in doublings ("steps"). "noise" doubles the batch whenever the gradient noise shows that it is below
        the critical batch, and needs a budget in samples or epochs. "constant" is `size` throughout.
    lr_rule: how the learning rate is scaled where the batch is smaller than `size`.
    """

    size: int = 1024
    per_device: int | None = None
    chunk: int = 256
    keep: int | Literal["auto"] = "auto"
    schedule: Literal["constant", "linear", "exponential", "steps", "noise"] = "constant"
    start: int | None = None
    ramp: float = 0.5
    lr_rule: LrRule = "sqrt"


@dataclass(frozen=True)
class Optimizer:
    """The optimizer.

    name: a built-in one (`optimizers.OPTIMIZERS`), or "package.module:Class", called with the parameter groups, lr and `options`.
        AdamW uses PyTorch's fused kernel on CUDA unless the options have fused, foreach, capturable or differentiable.
    weight_decay: of matrices and convolutions; gains, biases and the logit scale get none.
    clip_norm: the largest norm of the whole gradient. ema: decay of a moving average of the weights, which evaluations use.
    """

    name: str = optimizers.DEFAULT
    lr: float = optimizers.LR
    weight_decay: float = optimizers.WEIGHT_DECAY
    betas: tuple[float, float] = optimizers.BETAS
    eps: float = optimizers.EPS
    momentum: float = optimizers.MOMENTUM
    options: Mapping[str, Any] = field(default_factory=dict)
    clip_norm: float | None = 1.0
    ema: float | None = None


@dataclass(frozen=True)
class Schedule:
    """The length of the run, as exactly one of samples, epochs and steps, and the schedule of the learning rate.

    warmup: steps from zero to the full rate, or a fraction of the run if below 1. floor: the rate at the end, as a fraction of lr.
    """

    samples: int | None = None
    epochs: float | None = None
    steps: int | None = None
    shape: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: float = 0.05
    floor: float = 0.0


@dataclass(frozen=True)
class Compute:
    """How the run is computed.

    device: "cpu", "cuda", …; None is the accelerator if there is one. precision: of autocast; "fp32" is none.
    sharding: "ddp" replicates the weights on every rank, "fsdp2" shards them over all ranks, "hsdp" shards them over the ranks of
        each node and replicates them across nodes.
    gradient_exchange: "bf16" averages the gradients of all ranks in bf16, with half the bytes of fp32: they are rounded before they
        are sent and in every sum. None averages them in the dtype of the weights.
    compile: compile the towers with torch.compile: their blocks if they repeat one, as transformers do.
    channels_last: keep the weights of convolutions in that memory format, which tensor cores read faster; None does so on CUDA in
        bf16 and fp16, for towers of a library that convolve more than images, unless the weights are sharded.
    linear_patches: compute the patch convolutions of images, as in vision transformers, as linear layers, with the same parameters
        and results; None does so on CUDA in bf16 and fp16.
    short_attention: compute attention over up to 257 positions by kernels of this package, on Hopper GPUs in bf16; results differ
        by rounding.
    bf16_residuals: with precision "bf16", keep the residual stream of transformers in bf16 too, which makes compiled steps shorter
        and rounds every sum of the stream.
    workspace: working memory of the loss in bytes, 64 KiB or more. threads: of PyTorch on a CPU.
    """

    device: str | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    sharding: Literal["ddp", "fsdp2", "hsdp"] = "ddp"
    gradient_exchange: Literal["bf16"] | None = None
    sync_batchnorm: bool = False
    compile: bool = False
    channels_last: bool | None = None
    linear_patches: bool | None = None
    short_attention: bool = False
    bf16_residuals: bool = False
    workspace: int | None = None
    threads: int | None = None

    @property
    def sharded(self) -> bool:
        return self.sharding != "ddp"


@dataclass(frozen=True)
class Checkpoint:
    """every: steps between two checkpoints; None writes one at the end and on SIGTERM or SIGINT only. keep: how many stay."""

    every: int | None = 200
    keep: int = 2


@dataclass(frozen=True)
class Watch:
    """Output of a run beside log.jsonl: progress bar, report.html with curves and contact sheet, TensorBoard, W&B project."""

    bar: bool = True
    report: bool = True
    tensorboard: bool = False
    wandb: str | None = None


@dataclass(frozen=True)
class Evaluate:
    """every: steps between two evaluations; None evaluates at the end only. limit: the most held-out pairs that are used.

    templates: texts around the class names for zero-shot classification.
    large: batches of single steps after the training, with the same chunk. Their time and memory are reported, the weights stay as
        they are. "auto" is 4,096 and 16,384 pairs, and 65,536 on a GPU.
    """

    every: int | None = None
    limit: int = 10_000
    large: tuple[int, ...] | Literal["auto"] = ()
    templates: tuple[str, ...] = ("{}",)


@dataclass(frozen=True)
class Planned:
    """What the plan predicted, for the report to compare with the measurements."""

    peak_bytes: int | None = None
    seconds_per_step: float | None = None


@dataclass(frozen=True)
class Run:
    """The whole configuration of one `megabatch train`."""

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


DEFAULTS = Run()


def read(path: str | Path, overrides: Iterable[str] = ()) -> Run:
    """Return the run that a TOML file describes, with "section.key=value" overrides; other keys have their defaults."""
    return build(parse_toml(_text_of(path), str(path)), overrides, str(path))


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """Return the table of a TOML text. name: of the file, for errors."""
    too_deep = f"{name}: is nested too deeply; at most {DEEPEST} levels of lists and tables are allowed"
    if len(text) > LARGEST_FILE:
        raise ValueError(_too_large(name))
    if LONG_KEY.search(text):
        raise ValueError(too_deep)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{name}: is not valid TOML ({error})") from None
    except RecursionError:
        raise ValueError(too_deep) from None
    except ValueError as error:
        # Python refuses integers of more than 4300 digits; an impossible date is a ValueError too.
        raise ValueError(f"{name}: holds a value that cannot be read ({error})") from None


def _text_of(path: str | Path) -> str:
    """Return the text of a configuration file."""
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file; name the TOML file of a run, or none for the embedded default") from None
    except IsADirectoryError:
        raise ValueError(f"{path}: is a directory; name the TOML file in it, as in {os.path.join(path, 'run.toml')}") from None
    except ValueError as error:
        # A path with a NUL character.
        raise ValueError(f"{str(path)!r}: is not a path ({error}); name the TOML file of a run") from None
    if len(content) > LARGEST_FILE:
        raise ValueError(_too_large(path))
    try:
        # Some editors begin a file with a byte order mark.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text (byte {error.start:,}); save it as UTF-8") from None


def _too_large(path: str | Path) -> str:
    return f"{path}: is larger than {LARGEST_FILE:,} bytes, the limit of a configuration; name the TOML file of a run"


def build(table: Mapping[str, Any], overrides: Iterable[str] = (), origin: str = "run") -> Run:
    """Return the run that a nested table describes, after checking it.

    >>> build({"schedule": {"epochs": 10}}, ["optimizer.lr=3e-4"]).optimizer.lr
    0.0003
    """
    if not isinstance(table, Mapping):
        raise ValueError(f"{origin} is {_shown(table)}: must be a table of sections")
    copied: dict[str, Any] = _copied(table, origin)
    overrides = list(overrides)
    for override in overrides:
        _forget(copied, override)
    for override in overrides:
        _put(copied, override)
    _put_per_device(copied, origin)
    run = _section(Run, copied, origin)
    check(run)
    return run


def with_ranks(run: Run, ranks: int) -> Run:
    """Return the run with batch.size set from batch.per_device, if it has that, on so many ranks.

    >>> with_ranks(build({"batch": {"per_device": 512}, "schedule": {"epochs": 1}}), 8).batch.size
    4096
    """
    if run.batch.per_device is None:
        return run
    run = dataclasses.replace(run, batch=dataclasses.replace(run.batch, size=ranks * run.batch.per_device, per_device=None))
    check(run)
    return run


def unfilled(run: Run) -> dict[str, str]:
    """Return the values that are still to be filled in, by their keys."""
    values = {f"{name}.{key}": value for name, section in as_table(run).items() if isinstance(section, dict)
              for key, value in section.items()}  # fmt: skip
    return {key: value for key, value in values.items() if isinstance(value, str) and value.startswith(FILL_IN)}


def require_filled(run: Run) -> None:
    """Raise ValueError if a value is still to be filled in."""
    missing = [f"{key} ({value.removeprefix(FILL_IN).strip(': ')})" for key, value in unfilled(run).items()]
    if missing:
        raise ValueError(f"the run is not complete: fill in {', '.join(missing)}, in its file or as key=value")


def as_table(run: Run) -> dict[str, Any]:
    """Return the run as nested dicts of plain values. None is left out, or "none" where it is not the default."""
    return _plain(run)


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one, with keys such as "batch.size"."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def as_toml(run: Run, comments: Mapping[str, str] | None = None) -> str:
    """Return the run as TOML with every value; `read` restores it.

    comments: written above the keys, such as {"batch.size": "reason"}; the key "" is for the top of the file.
    """
    comments = comments or {}
    table = as_table(run)
    lines = _comment(comments.get(""))
    lines += [f"{key} = {_literal(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for name, section in table.items():
        if isinstance(section, dict) and section:
            lines += ["", f"[{name}]"]
            for key, value in section.items():
                lines += [*_comment(comments.get(f"{name}.{key}")), f"{key} = {_literal(value)}"]
    return "\n".join(lines) + "\n"


def _comment(text: str | None) -> list[str]:
    """Return a text as lines of a comment. TOML allows no control characters in one."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text or "")
    return [f"# {line}" for line in textwrap.wrap(plain, COMMENT_WIDTH - 2)]


def is_torch_optimizer(name: str) -> bool:
    """Return whether an optimizer's name has the form "torch.optim:Class", without a path into other modules."""
    package, _, kind = name.partition(":")
    return package == "torch.optim" and kind.isidentifier()


def check(run: Run) -> None:
    """Raise ValueError where a value breaks a rule or contradicts another one."""
    _check_values(run)
    for name, value, fine, rule in _rules(run):
        if not fine:
            raise ValueError(f"{name} is {_shown(value)}: {rule}")
    _check_length(run.schedule, run.batch)
    if isinstance(run.data.held_out, float) and not 0 <= run.data.held_out < 1:
        raise ValueError(f"data.held_out is {run.data.held_out!r}: a fraction must be in [0, 1); a path names another source")
    if run.batch.schedule != "constant" and not 1 <= (run.batch.start or 0) <= run.batch.size:
        raise ValueError(
            f"batch.start is {run.batch.start!r}: a growing batch ({run.batch.schedule}) must start between 1 and"
            f" batch.size = {run.batch.size}"
        )
    _check_used(run)
    _check_scale(run.loss)
    if run.batch.schedule == "noise":
        _check_noise(run)


def _rules(run: Run) -> list[tuple[str, Any, bool, str]]:
    """Return the rules for single values: key, value, whether it follows the rule, and the rule in words."""
    cores = os.cpu_count() or 1
    many = max(MANY, 4 * cores)
    pairs = f"must be at least 1, and at most {MOST_PAIRS}"
    contrastive = run.loss.objective in objectives.PAIR_LOSSES
    return [
        ("batch.size", run.batch.size, _within(run.batch.size, 1, MOST_PAIRS), pairs),
        ("batch.size", run.batch.size,
         run.batch.size > 1 or run.batch.per_device is not None or bool(run.data.negatives) or not contrastive,
         f'must be at least 2 over all ranks: "{run.loss.objective}" compares the samples of a batch, and a single pair has no'
         " negative unless data.negatives names hard ones: nothing would be learnt; raise it, since batch.chunk limits the memory"),
        ("batch.per_device", run.batch.per_device, _within(run.batch.per_device, 1, MOST_PAIRS), pairs),
        ("batch.chunk", run.batch.chunk, _within(run.batch.chunk, 1, MOST_PAIRS), f"{pairs}; lower it when memory runs out"),
        ("batch.keep", run.batch.keep, run.batch.keep == "auto" or run.batch.keep >= 0, 'must be "auto" or at least 0'),
        ("batch.ramp", run.batch.ramp, 0 < run.batch.ramp <= 1, "must be a fraction of the run, above 0 and at most 1"),
        ("optimizer.lr", run.optimizer.lr, 0 < run.optimizer.lr <= LARGEST_RATE,
         f"must be above 0, and at most {LARGEST_RATE:g}; usual are 1e-4 to 1e-2 for adamw, up to 10 for sgd"),
        ("optimizer.weight_decay", run.optimizer.weight_decay, 0 <= run.optimizer.weight_decay <= 1000,
         "must not be negative, and at most 1000; usual are 0 to 0.5"),
        ("optimizer.betas", run.optimizer.betas, all(0 <= b < 1 for b in run.optimizer.betas), "must lie in [0, 1)"),
        ("optimizer.eps", run.optimizer.eps, 1e-30 <= run.optimizer.eps <= 1, "must lie in [1e-30, 1]; usual is 1e-8"),
        ("optimizer.momentum", run.optimizer.momentum, 0 <= run.optimizer.momentum < 1, "must lie in [0, 1)"),
        ("optimizer.clip_norm", run.optimizer.clip_norm, _above(run.optimizer.clip_norm, 0), 'must be above 0, or "none"'),
        ("optimizer.ema", run.optimizer.ema, run.optimizer.ema is None or 0 < run.optimizer.ema < 1, "must lie between 0 and 1"),
        ("schedule.warmup", run.schedule.warmup, run.schedule.warmup >= 0, "must not be negative"),
        ("schedule.floor", run.schedule.floor, 0 <= run.schedule.floor <= 1, "must be a fraction of lr, from 0 to 1"),
        ("loss.dim", run.loss.dim, _within(run.loss.dim, 1, WIDEST), f"must be at least 1, and at most {WIDEST}"),
        ("loss.scale", run.loss.scale, _above(run.loss.scale, 0), "must be above 0"),
        ("loss.max_scale", run.loss.max_scale, run.loss.max_scale > 0, "must be above 0"),
        ("loss.label_smoothing", run.loss.label_smoothing, 0 <= run.loss.label_smoothing < 1, "must lie in [0, 1)"),
        ("loss.drop_above", run.loss.drop_above, run.loss.drop_above is None or -2 < run.loss.drop_above <= 2,
         "must be above -2, where no negative is left, and at most 2: it is a difference of cosine similarities"),
        ("loss.dims", run.loss.dims,
         len(set(run.loss.dims)) == len(run.loss.dims) and all(_within(dim, 1, run.loss.dim) for dim in run.loss.dims),
         f"must be different widths, each at least 1 and at most loss.dim, {run.loss.dim}"),
        ("loss.spread_out", run.loss.spread_out, 0 <= run.loss.spread_out <= 1000, "must lie in [0, 1000]; usual is 1"),
        ("loss.directions", run.loss.directions,
         len(set(run.loss.directions)) == len(run.loss.directions) and set(run.loss.directions) <= set(objectives.DIRECTIONS),
         f"must be different names among {', '.join(objectives.DIRECTIONS)}"),
        ("loss.partition", run.loss.partition,
         objectives.contains_positives(run.loss.directions, run.loss.partition),
         "must be joint where a softmax over loss.directions would not contain the positive"),
        ("loss.drop_ratio", run.loss.drop_ratio, run.loss.drop_ratio is None or 0 < run.loss.drop_ratio <= 2,
         "must lie in (0, 2]: it multiplies the similarity of the positive; usual is 0.95"),
        ("loss.hardness", run.loss.hardness, 0 <= run.loss.hardness <= 1000 and not run.loss.hardness * run.loss.label_smoothing,
         "must lie in [0, 1000], and be 0 with loss.label_smoothing; usual is 5 to 9"),
        ("loss.bias", run.loss.bias, _within(run.loss.bias, -1000, 1000), "must lie in [-1000, 1000]; usual is -10"),
        ("data.window", run.data.window, run.data.window >= 1, "must be at least 1, which does not shuffle within shards"),
        ("data.workers", run.data.workers, run.data.workers >= 0, "must not be negative; 0 reads in the training process"),
        ("data.workers", run.data.workers, run.data.workers <= many,
         f"must be at most {many} processes: this machine has {cores} cores"),
        ("data.max_bad", run.data.max_bad, run.data.max_bad >= 0, "must not be negative"),
        ("data.max_pixels", run.data.max_pixels, run.data.max_pixels >= 1, "must be at least 1"),
        ("checkpoint.every", run.checkpoint.every, _above(run.checkpoint.every, 0), 'must be at least 1, or "none"'),
        ("checkpoint.keep", run.checkpoint.keep, run.checkpoint.keep >= 1, "must be at least 1"),
        ("evaluate.every", run.evaluate.every, _above(run.evaluate.every, 0), 'must be at least 1, or "none"'),
        ("evaluate.limit", run.evaluate.limit, run.evaluate.limit >= 1, "must be at least 1"),
        ("evaluate.large", run.evaluate.large,
         run.evaluate.large == "auto" or all(_within(size, 1, MOST_PAIRS) for size in run.evaluate.large),
         f"every batch in it {pairs}"),
        ("evaluate.templates", run.evaluate.templates, all("{}" in each for each in run.evaluate.templates),
         "each must hold {} where the name of the class goes, as in 'a photo of a {}'"),
        ("evaluate.templates", run.evaluate.templates, len(run.evaluate.templates) > 0, "must hold at least one, for example '{}'"),
        ("compute.channels_last", run.compute.channels_last, not (run.compute.channels_last and run.compute.sharded),
         f'must be left out with compute.sharding "{run.compute.sharding}", which shards weights in the usual memory format only;'
         ' or choose sharding "ddp"'),
        ("compute.short_attention", run.compute.short_attention,
         not (run.compute.short_attention and (run.x.checkpointing or run.y.checkpointing)),
         "must be false with x.checkpointing or y.checkpointing, which compute blocks again by other kernels; or turn those off"),
        ("compute.gradient_exchange", run.compute.gradient_exchange,
         run.compute.gradient_exchange is None or not run.compute.sharded or contrastive,
         f'must be left out with compute.sharding "{run.compute.sharding}" and loss.objective "{run.loss.objective}", whose chunks'
         ' would be added up in bf16 too; or choose sharding "ddp"'),
        ("compute.workspace", run.compute.workspace, _within(run.compute.workspace, SMALLEST_TILE, INT64),
         f"must be at least {SMALLEST_TILE} bytes; leave it out for the default of the device"),
        ("compute.threads", run.compute.threads, _above(run.compute.threads, 0), "must be at least 1"),
        ("compute.threads", run.compute.threads, _within(run.compute.threads, 1, many),
         f"must be at most {many}: this machine has {cores} cores"),
        ("planned.peak_bytes", run.planned.peak_bytes, _within(run.planned.peak_bytes, 0, INT64), "must not be negative"),
        ("planned.seconds_per_step", run.planned.seconds_per_step, _above(run.planned.seconds_per_step, 0), "must be above 0"),
    ]  # fmt: skip


def _check_length(schedule: Schedule, batch: Batch) -> None:
    """Raise ValueError unless exactly one length is given, and it is positive and fits into 64 bits."""
    lengths = {name: getattr(schedule, name) for name in LENGTHS}
    given = {name: value for name, value in lengths.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"schedule has {' and '.join(given)}: give one of samples, epochs, steps")
    for name, value in given.items():
        if value <= 0:
            raise ValueError(f"schedule.{name} is {value!r}: must be above 0")
    if not given:
        raise ValueError("schedule has no length: give one of samples, epochs, steps")
    if schedule.steps is not None and schedule.steps * batch.size > INT64:
        raise ValueError(
            f"schedule.steps is {schedule.steps} and batch.size {batch.size}: that is more samples than 64 bits can count; train"
            " for fewer steps"
        )


def _check_values(section: Any, prefix: str = "") -> None:
    """Raise ValueError where a number is not finite or too large, or a string cannot be written to a file."""
    hints = _hints(type(section))
    for entry in dataclasses.fields(section):
        name, value = prefix + entry.name, getattr(section, entry.name)
        if dataclasses.is_dataclass(value):
            _check_values(value, f"{name}.")
        elif isinstance(value, Mapping):
            _check_option(name, value)
        else:
            remedy = f'; leave it out, or set it to "{NONE}"' if type(None) in typing.get_args(hints[entry.name]) else ""
            for each in value if isinstance(value, tuple) else (value,):
                _check_value(name, each, remedy)


def _check_value(name: str, value: Any, remedy: str) -> None:
    """Raise ValueError where one value of a key cannot be computed with, or cannot be written."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}: must be a finite number{remedy}")
    if isinstance(value, float) and abs(value) > FP32:
        raise ValueError(f"{name} is {value!r}: must not exceed {FP32:g}, the largest number of fp32{remedy}")
    if isinstance(value, int) and not -INT64 - 1 <= value <= INT64:
        raise ValueError(f"{name} is {_shown(value)}: must fit into 64 bits")
    if isinstance(value, str):
        if not value:
            raise ValueError(f"{name} is '': must not be empty{remedy}")
        if "\0" in value:
            raise ValueError(f"{name} is {_shown(value)}: must not contain a NUL character")
        _check_unicode(name, value)


def _check_option(name: str, value: Any, depth: int = 0) -> None:
    """Raise ValueError where an entry of an `options` table cannot be written to a configuration file or a checkpoint."""
    if depth > DEEPEST:
        raise ValueError(f"{name[:80]}: is nested too deeply; at most {DEEPEST} levels of lists and tables are allowed")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{name} has the key {_shown(key)}: must be a text")
            _check_unicode(name, key)
            _check_option(f"{name}.{key}", item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_option(name, item, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}: must be a finite number")
    elif isinstance(value, int) and not -INT64 - 1 <= value <= INT64:
        raise ValueError(f"{name} is {_shown(value)}: must fit into 64 bits")
    elif isinstance(value, str):
        _check_unicode(name, value)
    elif value is None:
        raise ValueError(f"{name} is null: TOML has no null; leave it out")
    elif not isinstance(value, (bool, int, float)):
        raise ValueError(
            f"{name} is {_shown(value)}: a {type(value).__name__} cannot be written to a checkpoint; give a text, a number, a list"
            " or a table"
        )


def _check_unicode(name: str, text: str) -> None:
    # Command lines and JSON can contain half of a surrogate pair, for example for bytes of a file name that are not UTF-8.
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{name} is {_shown(text)}: must be valid Unicode to be written to run.toml; rename the file")


class Use(NamedTuple):
    """A key that only some values of the key `choice` use. instead: the key in which other values take such a setting."""

    key: str
    choice: str
    users: tuple[str, ...]
    instead: str = ""


GROWING = ("linear", "exponential", "steps")
USES = (
    *(Use(key, "loss.objective", users) for key, users in objectives.users_of_keys().items()),
    Use("batch.start", "batch.schedule", (*GROWING, "noise")),
    Use("batch.ramp", "batch.schedule", GROWING),
    Use("batch.lr_rule", "batch.schedule", (*GROWING, "noise")),
    *(Use(key, "optimizer.name", users, "optimizer.options") for key, users in optimizers.users_of_keys().items()),
)


def _check_used(run: Run) -> None:
    """Raise ValueError where a key is set that the chosen objective, schedule or optimizer does not use.

    Default values pass: a complete run.toml contains every key.
    """
    for use in USES:
        value, chosen = _get(run, use.key), _get(run, use.choice)
        # False states explicitly that nothing is used.
        if chosen in use.users or value == _get(DEFAULTS, use.key) or value is False:
            continue
        users = " and ".join(f'"{user}"' for user in use.users)
        instead = f", or give it in {use.instead}" if use.instead and ":" in str(chosen) else ""
        raise ValueError(
            f'{use.key} is {_shown(value)}: {use.choice} "{chosen}" does not use it, only {users} does; leave it out{instead}'
        )


def without_unused(run: Run) -> Run:
    """Return the run with every unused key at its default, for runs whose objective, schedule or optimizer was replaced.

    >>> run = build({"batch": {"schedule": "linear", "start": 64}, "schedule": {"steps": 10}})
    >>> without_unused(dataclasses.replace(run, batch=dataclasses.replace(run.batch, schedule="constant"))).batch.start
    """
    for use in USES:
        if _get(run, use.choice) not in use.users:
            section, _, name = use.key.partition(".")
            changed = dataclasses.replace(getattr(run, section), **{name: _get(DEFAULTS, use.key)})
            run = dataclasses.replace(run, **{section: changed})
    return run


def _get(run: Run, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(run, section), name)


def _check_scale(loss: Loss) -> None:
    """Raise ValueError where a scale is implausible: embeddings are normalised, so similarities are in [-1, 1]."""
    for name, value in (("scale", loss.scale), ("max_scale", loss.max_scale)):
        if value is not None and value < 1:
            raise ValueError(
                f"loss.{name} is {value!r}: it multiplies cosine similarities and must be at least 1; it looks like a temperature:"
                f" did you mean {1 / value:.4g}, which is 1/{value:g}?"
            )
    if loss.scale is not None and loss.scale > loss.max_scale:
        raise ValueError(
            f"loss.scale is {loss.scale!r}: must not exceed loss.max_scale = {loss.max_scale!r}; lower it, or raise the limit"
        )


def _check_noise(run: Run) -> None:
    """Raise ValueError where the batch cannot follow the noise of the gradient."""
    refused = 'batch.schedule is "noise"'
    if objectives.OBJECTIVES[run.loss.objective].contrastive:
        raise ValueError(
            f"{refused} and loss.objective {run.loss.objective!r}: it compares samples with each other, so a larger batch is "
            "another loss with more negatives, which the noise does not measure; choose steps, linear or exponential"
        )
    if run.schedule.steps is not None:
        raise ValueError(
            f"{refused} and schedule.steps {run.schedule.steps}: the number of samples, and with it the learning rate, would"
            " depend on the noise; give schedule.samples or schedule.epochs"
        )
    if run.compute.sharded:
        raise ValueError(
            f'{refused} and compute.sharding "{run.compute.sharding}": no rank holds the gradient of its own rows alone; choose '
            'sharding "ddp", or steps, linear or exponential'
        )
    if run.batch.start == 1:
        raise ValueError(f"{refused} and batch.start 1: noise is measured between samples of a batch; start with at least 2")


def _above(value: float | None, limit: float) -> bool:
    return value is None or value > limit


def _within(value: float | None, low: float, high: float) -> bool:
    return value is None or low <= value <= high


# The fields of a section and their types, evaluated once.
_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


def _section(kind: type[Section], table: Mapping[str, Any], where: str) -> Section:
    hints = _hints(kind)
    unknown = [key for key in table if key not in hints]
    if unknown and len(unknown[0]) > 60:
        raise ValueError(f"{where}: there is no key {_shown(unknown[0])}; known are {', '.join(hints)}")
    if unknown:
        named = vocabulary.foreign(unknown[0])
        if named is not None:
            raise ValueError(f"{where}: there is no key {unknown[0]!r}; {named.remedy(unknown[0])}")
        near = difflib.get_close_matches(unknown[0], hints, 1)
        guess = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(hints)}"
        raise ValueError(f"{where}: there is no key {unknown[0]!r}; {guess}")
    return kind(**{key: _value(hints[key], value, f"{where}: {key}") for key, value in table.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    """Return the value converted to its annotation: sections from tables, floats from integers, tuples from lists."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} is {_shown(value)}: must be a table")
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
        literals = [choice for choice in choices if typing.get_origin(choice) is Literal]
        if literals and all(choice is type(None) or choice in literals for choice in choices):
            return _value(literals[0], value, where)
        raise ValueError(f"{where} is {_shown(value)}: must be {_words(hint)}{_remedy(hint, value)}")
    if origin is Literal:
        if value not in choices:
            raise ValueError(f"{where} is {_shown(value)}: must be one of {', '.join(repr(c) for c in choices)}")
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
    raise ValueError(f"{where} is {_shown(value)}: must be {_words(hint)}{_remedy(hint, value)}")


def _remedy(hint: Any, value: Any) -> str:
    """Return the hint to write an integer that was given as 1e6."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) <= INT64
    return f"; write {int(value)}" if whole and int in (hint, *typing.get_args(hint)) else ""


def _words(hint: Any) -> str:
    names = {str: "a text", int: "an integer", float: "a number", bool: "true or false", type(None): "left out"}
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(choice) for choice in choices)
    if origin is tuple:
        return f"a list of {len(choices)} values" if choices[-1] is not Ellipsis else "a list"
    if origin is Mapping:
        return "a table"
    if origin is Literal:
        return " or ".join(repr(choice) for choice in choices)
    return names.get(hint, str(hint))


def _copied(value: Any, where: str, depth: int = 0) -> Any:
    """Return a deep copy of nested tables and lists; integers beyond 64 bits are refused."""
    if depth > DEEPEST:
        raise ValueError(f"{where[:80]}: is nested too deeply; at most {DEEPEST} levels of lists and tables are allowed")
    if isinstance(value, Mapping):
        wrong = next((key for key in value if not isinstance(key, str)), None)
        if wrong is not None:
            raise ValueError(f"{where} has the key {_shown(wrong)}: must be a text")
        return {key: _copied(item, f"{where}: {key}" if depth == 0 else f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(item, where, depth + 1) for item in value]
    if isinstance(value, int) and not -INT64 - 1 <= value <= INT64:
        raise ValueError(f"{where} is {_shown(value)}: must fit into 64 bits")
    return value


def _shown(value: Any) -> str:
    """Return the repr of a value for an error, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:
        return "an integer of more than 4300 digits"
    return text if len(text) <= 80 else f"{text[:64]}… ({len(text):,} characters)"


def _put_per_device(table: dict[str, Any], origin: str) -> None:
    """Set the size of a table's batch to its per_device, which is right on one rank. ValueError if both are given."""
    batch = table.get("batch")
    if not isinstance(batch, dict) or batch.get("per_device") in (None, NONE):
        return
    if "size" in batch:
        raise ValueError(
            f"{origin}: batch has size {_shown(batch['size'])} and per_device {_shown(batch['per_device'])}: give one of the two;"
            " size counts the pairs on all ranks together, per_device those on each"
        )
    if isinstance(batch["per_device"], int) and not isinstance(batch["per_device"], bool):
        batch["size"] = batch["per_device"]


def _forget(table: dict[str, Any], override: str) -> None:
    """Remove from the file's table what an override makes void: the old length of the run, the options of another tower, and keys
    that the new objective, schedule or optimizer does not use."""
    path, _, text = override.partition("=")
    path, text = path.strip(), text.strip()
    section, _, key = path.partition(".")
    void = [use.key for use in USES if use.choice == path and _parsed(text) not in use.users]
    before = table.get(section)
    if isinstance(before, dict):
        if section == "schedule" and key in LENGTHS:
            void += [f"schedule.{name}" for name in LENGTHS]
        elif path in SIZES:
            void += SIZES
        elif key == "name" and before.get("name") != _parsed(text):
            void += [f"{section}.options", f"{section}.weights"]
    for each in void:
        section, _, key = each.partition(".")
        if isinstance(table.get(section), dict):
            table[section].pop(key, None)


def _put(table: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals:
        raise ValueError(f"override {_shown(override)}: must read section.key=value, as in batch.size=4096")
    *sections, key = path.strip().split(".")
    value = _copied(_parsed(text.strip()), path.strip()[:80], len(sections) + 1)
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ValueError(f"override {_shown(override)}: {_shown(section)} is a value, not a section")
    table[key] = value


def _parsed(text: str) -> Any:
    """Return a number, true, false, a list, a table as in JSON or TOML, or a quoted string; anything else is a string, so that
    paths need no quotes."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        if not (text.startswith("{") and text.endswith("}")):
            return text
        try:
            return parse_toml(f"value = {text}", "the table")["value"]
        except ValueError:
            # Such as the braces of a path.
            return text
    except RecursionError:
        raise ValueError(
            f"{_shown(text)}: is nested too deeply; at most {DEEPEST} levels of lists and tables are allowed"
        ) from None
    except ValueError:
        # Python refuses integers of more than 4300 digits.
        raise ValueError(f"{_shown(text)}: must fit into 64 bits") from None


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
    if isinstance(section, Batch) and section.per_device is not None:
        # The size follows from the number of ranks, which the file does not state.
        del table["size"]
    return table


def _literal(value: Any) -> str:
    """Return a value as TOML: strings, numbers and lists as in JSON, tables inline."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(key)} = {_literal(v)}" for key, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_literal(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value)
    # TOML requires DEL to be escaped, JSON does not.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
