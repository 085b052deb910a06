"""Read a command line of OpenCLIP (`open_clip_train.main`, or the older `training.main`), alone or in a script."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from ... import objectives
from ...optimizers import family_of
from ..documents import ABSENT, PRESENT, Command, Document, Reading, edit_flags
from ..facts import TrainingFacts

MAIN = r"open_clip_train[./]main|(?<![\w.])training[./]main"
# Flags whose values are read, with the defaults of open_clip_train/params.py (3.3.0).
VALUES: dict[str, Any] = {
    "--batch-size": 64,
    "--epochs": 32,
    "--lr": None,
    "--beta2": None,
    "--wd": 0.2,
    "--warmup": 10000,
    "--opt": "adamw",
    "--precision": "amp",
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
}


def read(name: str, text: str) -> Reading:
    command = Command.find(text, MAIN)
    assert command is not None
    values = flags(command.words(MAIN))
    training = facts(values, ranks_of(command, text))
    document = Document(name, text, KEYS, translate, lambda old, edits: edit_flags(old, edits, MAIN))
    return Reading(training, document)


def flags(words: list[str]) -> dict[str, Any]:
    """Return all flags with their values or defaults; the value of a shell variable is unknown (None)."""
    values: dict[str, Any] = VALUES | dict.fromkeys(SWITCHES, False)
    given = {word.partition("=")[0] for word in words}
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in SWITCHES:
            values[flag] = True
        elif flag in VALUES:
            if not equals and place + 1 == len(words):
                raise ValueError(f"{flag} has no value: the command line ends after it")
            values[flag] = _value(flag, value if equals else words[place + 1])
    if "--train-data" not in given and values["--dataset-type"] != "synthetic":
        raise ValueError("the command has no --train-data: it does not train, so there is nothing to audit")
    return values


def _value(flag: str, text: str) -> Any:
    if "$" in text:
        return None
    try:
        return int(text) if flag in INTEGERS else float(text) if flag in FLOATS else text
    except ValueError:
        raise ValueError(f"{flag} is {text!r}: must be {'an integer' if flag in INTEGERS else 'a number'}") from None


def ranks_of(command: Command, text: str) -> int | None:
    """Return the number of processes that torchrun, srun (with #SBATCH lines) or plain python starts; None if unknown."""
    main = re.search(MAIN, command.text)
    assert main is not None
    head = command.text[: main.start()]
    if re.search(r"torchrun|torch\.distributed\.(run|launch)", head):
        return _product(head, r"--nproc[_-]per[_-]node", r"--nnodes", default=1)
    if re.search(r"\bsrun\b", head):
        return _product(text, r"--ntasks-per-node", r"--nodes", default=None)
    return 1 if re.search(r"\bpython", head) and not re.search(r"mpirun|horovodrun|deepspeed|accelerate|\$", head) else None


def _product(text: str, each: str, nodes: str, default: int | None) -> int | None:
    numbers = []
    for pattern in (each, nodes):
        match = re.search(pattern + r"[= ]+(\S+)", text)
        number = int(match[1]) if match and match[1].isdigit() else None if match else default
        if number is None:
            return None
        numbers.append(number)
    return numbers[0] * numbers[1]


def facts(values: Mapping[str, Any], ranks: int | None) -> TrainingFacts:
    precision, scaling, half = _choice("--precision", values["--precision"], PRECISIONS) or (None, None, None)
    model, samples, epochs = values["--model"] or "", values["--train-num-samples"], values["--epochs"]
    resampled = values["--dataset-resampled"]
    default_beta2 = None if "timm" in (values["--opt"] or "timm") else 0.98 if "vit" in model.lower() else 0.999
    return TrainingFacts(
        objective=next((spec.cost_name for flag, spec in LOSS_FLAGS.items() if values[flag]), objectives.DEFAULT),
        micro=values["--batch-size"],
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
        finetuning=True if values["--pretrained"] else None if values["--resume"] or values["--pretrained-image"] else False,
        duplicates="negative",
        max_scale=100.0,
        held_out=any(values[flag] for flag in ("--val-data", "--imagenet-val", "--imagenet-v2")),
    )


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
        elif fact in ("micro", "accumulation", "lr", "beta2"):
            edits[KEYS[fact]] = value
        else:
            return None
    return edits
