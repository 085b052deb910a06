"""Read a command line of OpenCLIP (`open_clip_train.main`, or the older `training.main`), alone or in a script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ... import objectives
from ...optimizers import family_of
from ..documents import Document, Reading
from ..facts import TrainingFacts
from ..formats.command_text import ABSENT, PRESENT, edit_flags, find_command, parse_flags
from .launcher import launch_of

MAIN = r"open_clip_train[./]main|(?<![\w.])training[./]main"
# Flags whose values are read, with the defaults of open_clip_train/params.py in 3.3.0 and 4.2. They differ in one: the precision is
# "amp" (fp16) in 3.3.0 and "amp_bf16" since 4.0, so that a command which does not state it has an unknown one.
VALUES: dict[str, Any] = {
    "--batch-size": 64,
    "--epochs": 32,
    "--lr": None,
    "--beta2": None,
    "--wd": 0.2,
    "--warmup": 10000,
    "--opt": "adamw",
    "--precision": None,
    "--model": "RN50",
    "--pretrained": "",
    "--accum-freq": 1,
    "--grad-clip-norm": None,
    "--train-data": None,
    "--train-num-samples": None,
    "--dataset-type": "auto",
    "--val-data": None,
    "--imagenet-val": None,
    "--imagenet-v2": None,
    "--resume": None,
    "--loss-dist-impl": None,
    "--torchcompile-strategy": None,
}
# Flags that select a loss; the default is the softmax loss.
LOSS_FLAGS = {spec.open_clip_flag: spec for spec in objectives.OBJECTIVES.values() if spec.open_clip_flag is not None}
SWITCHES = (
    "--local-loss",
    "--gather-with-grad",
    *LOSS_FLAGS,
    "--use-bn-sync",
    "--skip-scheduler",
    "--dataset-resampled",
    "--pretrained-image",
    "--lock-image",
    "--lock-text",
    "--use-naflex",
)
INTEGERS = ("--batch-size", "--epochs", "--warmup", "--accum-freq", "--train-num-samples")
FLOATS = ("--lr", "--beta2", "--wd", "--grad-clip-norm")
PRECISIONS: dict[str, tuple[Literal["fp32", "bf16", "fp16"], bool, bool]] = {
    # precision, loss scaling, weights in half precision
    "fp32": ("fp32", False, False),
    "amp": ("fp16", True, False),
    "amp_bf16": ("bf16", False, False),
    "amp_bfloat16": ("bf16", False, False),
    "bf16": ("bf16", False, True),
    "pure_bf16": ("bf16", False, True),
    "fp16": ("fp16", False, True),
    "pure_fp16": ("fp16", False, True),
}
KEYS = {
    "batch": "--batch-size",
    "micro": "--batch-size",
    "accumulation": "--accum-freq",
    "gather": "--local-loss --gather-with-grad",
    "lr": "--lr",
    "beta2": "--beta2",
    "warmup": "--warmup",
    "optimizer": "--opt",
    "sync_batchnorm": "--use-bn-sync",
    "precision": "--precision",
    "loss_scaling": "--precision",
    "half_weights": "--precision",
    "held_out": "--val-data",
    "duplicates": "the loss",
    "weight_decay": "--wd",
    "disagreement": "--torchcompile-strategy",
}


def read(name: str, text: str) -> Reading:
    def reread(after: str) -> TrainingFacts:
        command = find_command(after, MAIN)
        if command is None:
            raise ValueError(f"{name}: has no command with open_clip_train.main")
        return facts(flags(command.words()), launch_of(command).ranks)

    document = Document(name, text, KEYS, translate, lambda old, edits: edit_flags(old, edits, MAIN), reread)
    return Reading(reread(text), document)


def flags(words: list[str]) -> dict[str, Any]:
    """Return all flags with their values or defaults; the value of a shell variable is unknown (None)."""
    values: dict[str, Any] = VALUES | dict.fromkeys(SWITCHES, False)
    given = parse_flags(words)
    for flag, following in given.items():
        if flag in SWITCHES:
            values[flag] = True
        elif flag in VALUES:
            if not following:
                raise ValueError(f"{flag} has no value: the next flag or the end of the command follows it")
            values[flag] = _value(flag, following[0])
    if "--train-data" not in given and values["--dataset-type"] != "synthetic":
        raise ValueError("the command has no --train-data: it does not train, so there is nothing to audit")
    return values


def _value(flag: str, text: str) -> Any:
    if "$" in text:
        return None
    try:
        return int(text) if flag in INTEGERS else float(text) if flag in FLOATS else text
    except ValueError:
        raise ValueError(f"{flag} is {text!r:.80}: must be {'an integer' if flag in INTEGERS else 'a number'}") from None


def facts(values: Mapping[str, Any], ranks: int | None) -> TrainingFacts:
    precision, scaling, half = _choice("--precision", values["--precision"], PRECISIONS) or (None, None, False)
    model, samples, epochs = values["--model"] or "", values["--train-num-samples"], values["--epochs"]
    resampled = values["--dataset-resampled"]
    default_beta2 = None if "timm" in (values["--opt"] or "timm") else 0.98 if "vit" in model.lower() else 0.999
    finetuning = True if values["--pretrained"] else None if values["--resume"] or values["--pretrained-image"] else False
    return TrainingFacts(
        tool="open_clip",
        objective=next((spec.cost_name for flag, spec in LOSS_FLAGS.items() if values[flag]), objectives.DEFAULT),
        # The batches of NaFlex are counted in tokens.
        micro=None if values["--use-naflex"] else values["--batch-size"],
        ranks=ranks,
        accumulation=values["--accum-freq"],
        accumulates="features",
        gather=_gather(values),
        optimizer=family_of(values["--opt"] or ""),
        lr=values["--lr"] if values["--lr"] is not None else None if default_beta2 is None else 5e-4,
        warmup=0 if values["--skip-scheduler"] else values["--warmup"],
        beta2=values["--beta2"] if values["--beta2"] is not None else default_beta2,
        weight_decay=values["--wd"],
        decays_gains=False,
        clip_norm=values["--grad-clip-norm"] or 0.0,
        clip_at="step",
        schedule_at="step",
        epochs=None if resampled else epochs,
        samples=samples * epochs if resampled and samples and epochs else None,
        data=None if resampled else samples,
        precision=precision,
        loss_scaling=scaling,
        half_weights=half,
        # OpenCLIP's ResNets have BatchNorm, its vision transformers do not.
        batchnorm=True if model.startswith("RN") and not values["--lock-image"] else False if model.startswith("ViT") else None,
        sync_batchnorm=values["--use-bn-sync"],
        finetuning=finetuning,
        duplicates="negative",
        max_scale=100.0,
        held_out=any(values[flag] for flag in ("--val-data", "--imagenet-val", "--imagenet-v2")),
        # A locked tower without weights. `--pretrained` names weights of both towers, `--pretrained-image` those of one.
        random_tower=finetuning is False and (values["--lock-image"] or values["--lock-text"]),
        disagreement=_step_compiled(values),
    )


def _step_compiled(values: Mapping[str, Any]) -> str | None:
    if values["--torchcompile-strategy"] != "step" or (values["--accum-freq"] or 1) == 1:
        return None
    return f"--torchcompile-strategy step needs --accum-freq 1, not {values['--accum-freq']}: OpenCLIP refuses to start."


def _gather(values: Mapping[str, Any]) -> Literal["exact", "matrix", "whole", "no-gradient"]:
    """Return how negatives are gathered. The sigmoid loss always exchanges gradients, and ignores the two flags."""
    if any(values[flag] for flag in LOSS_FLAGS):
        _choice("--loss-dist-impl", values["--loss-dist-impl"], dict.fromkeys(("bidir", "shift", "reduce", "gather"), True))
        return "exact"
    if values["--local-loss"]:
        return "exact" if values["--gather-with-grad"] else "no-gradient"
    return "matrix" if values["--gather-with-grad"] else "whole"


def _choice(flag: str, value: str | None, choices: Mapping[str, Any]) -> Any:
    if value is None:
        return None
    if value not in choices:
        raise ValueError(f"{flag} is {value!r}: must be one of {', '.join(choices)}")
    return choices[value]


def translate(changes: Mapping[str, Any], training: TrainingFacts) -> dict[str, Any] | None:
    edits: dict[str, Any] = {}
    for fact, value in changes.items():
        if fact == "batch":
            micro = changes.get("micro", training.changed(changes).micro)
            if micro is None or training.ranks is None:
                return None
            edits["--batch-size"] = micro
        elif fact == "gather":
            edits |= {"--local-loss": PRESENT, "--gather-with-grad": PRESENT}
        elif fact == "sync_batchnorm":
            edits["--use-bn-sync"] = PRESENT if value else ABSENT
        elif fact in ("loss_scaling", "half_weights"):
            edits["--precision"] = "amp_bf16"
        elif fact == "warmup":
            edits |= {"--warmup": value, "--skip-scheduler": ABSENT}
        elif fact == "optimizer":
            edits["--opt"] = "adamw"
        elif fact == "disagreement":
            edits["--torchcompile-strategy"] = "task"
        elif fact in ("micro", "accumulation", "lr", "beta2"):
            edits[KEYS[fact]] = value
        else:
            return None
    return edits
