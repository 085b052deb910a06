"""The verbs `plan` and `audit`: choose a batch, and check the settings of a training, by arithmetic."""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from .. import config, objectives, optimizers, packages
from ..reporting.terminal import print_report, visible
from .arguments import add_overwrite, add_trust, check_output

if TYPE_CHECKING:
    from ..planning.plan import Plan

# Columns of the answer on a terminal.
SCREEN = 80


def add(verbs: Any) -> None:
    plan = verbs.add_parser(
        "plan", help="Choose a batch size, explain it, and write a run.toml for `train`.", description=_plan.__doc__
    )
    plan.add_argument(
        "model",
        nargs="?",
        help='Model to plan for: ViT-L/14, open_clip:NAME, "timm:NAME + text", "vit + text", package.module:function or a run.toml;'
        " by default that of the embedded default run.",
    )
    plan.add_argument(
        "--objective",
        choices=("contrastive", "supervised", "lm", "finetune"),
        help="Kind of training: contrastive pairs (default), supervised classes, a language model, or fine-tuning.",
    )
    plan.add_argument(
        "--loss", choices=objectives.PAIR_LOSSES, help=f"Contrastive loss: {_losses()} (default {objectives.DEFAULT})."
    )
    plan.add_argument("--data", metavar="N", help="Number of training samples, as 10M; tokens for a language model.")
    plan.add_argument("--unique", metavar="N", help="Number of distinct samples among them; by default all of them.")
    plan.add_argument("--seen", metavar="N", help="Number of samples that training sees, repetitions included; excludes --epochs.")
    plan.add_argument("--epochs", type=float, help="Number of passes over the data; excludes --seen.")
    plan.add_argument(
        "--start",
        choices=("scratch", "pretrained", "locked"),
        help="Image tower at the start: random weights (scratch, the default), pretrained, or pretrained and frozen (locked). A"
        " transformers model with weights is never scratch.",
    )
    plan.add_argument("--gpu", metavar="NAME", help="Device to plan for, as H200, A100-80GB or 8xH100; by default this machine.")
    plan.add_argument(
        "--gpus", type=int, metavar="N", help="Number of devices; by default as many as --gpu names, or this machine has."
    )
    plan.add_argument("--memory", help="Memory of one device, as 80GiB; by default that of the device named.")
    plan.add_argument("--share", type=float, help="Fraction of the device's memory that may be used, up to 1 (default 0.8).")
    plan.add_argument("--price", type=float, help="Price of one device per hour; adds the cost to the plan and every alternative.")
    plan.add_argument("--hours", type=float, help="Hours that training may take; the number of samples seen follows from them.")
    plan.add_argument("--budget", type=float, help="Money that training may cost, at --price; the samples seen follow from it.")
    plan.add_argument("--batch", metavar="N", help="Batch size that is already decided; the plan says how to reach it.")
    plan.add_argument("--per-gpu", type=int, metavar="N", help="Batch size on each GPU, if that is decided instead of --batch.")
    plan.add_argument("--negatives", type=int, metavar="K", help="Number of mined hard negatives per query (default 0).")
    plan.add_argument(
        "--text-length", type=int, metavar="N", help="Tokens of a text or sequence; by default what the model was made for."
    )
    plan.add_argument(
        "--image-size", type=int, metavar="N", help="Pixels of an image's side; by default what the model was made for."
    )
    plan.add_argument(
        "--lora",
        type=int,
        metavar="RANK",
        help="Plan for LoRA adapters of this rank instead of all weights; `train` has none, so no run.toml is written.",
    )
    plan.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        help="Recompute the blocks of the encoders in backward (or never do); by default memory decides.",
    )
    plan.add_argument("--nodes", type=int, metavar="N", help="Number of machines that the GPUs are spread over evenly.")
    plan.add_argument(
        "--interconnect",
        metavar="NAME",
        help="Network between the machines, for each GPU: infiniband, or a speed, as 100GbE or 25GB/s.",
    )
    plan.add_argument("--dim", type=int, metavar="N", help="Width of the embeddings; by default that of the model.")
    plan.add_argument("--classes", type=int, metavar="N", help="Number of classes of a classifier (default 1,000).")
    plan.add_argument("--critical", type=int, metavar="N", help="Critical batch size in samples, if it was measured.")
    plan.add_argument(
        "--priority",
        choices=("accuracy", "speed"),
        help="What to prefer when batch sizes differ: final accuracy (default) or speed.",
    )
    plan.add_argument(
        "--base-lr",
        metavar="RATE@BATCH",
        help="Learning rate that is known to be good at a batch size, as 1e-3@256; the plan scales it.",
    )
    plan.add_argument("--optimizer", choices=tuple(optimizers.OPTIMIZERS), help=f"Optimizer (default {optimizers.DEFAULT}).")
    plan.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        help="Precision of the encoders; by default the best that the device supports.",
    )
    plan.add_argument("--source", help="Training data to write into the run's file as data.source.")
    plan.add_argument(
        "--measured",
        type=Path,
        action="extend",
        nargs="+",
        metavar="FILE",
        help="Files measured.json of fit, profile, noise or sweep; measured values replace predictions.",
    )
    plan.add_argument(
        "--rates", type=Path, metavar="FILE", help="Speed of the device, as written by `megabatch env --measure --out FILE`."
    )
    plan.add_argument("--why", action="store_true", help="Print every number with its reason and source, and all alternatives.")
    plan.add_argument("--json", action="store_true", help="Print JSON instead of tables.")
    plan.add_argument(
        "--out", type=Path, metavar="FILE", help="File to write: .toml for `megabatch train`, or the plan as .json, .md or .html."
    )
    plan.add_argument("--html", type=Path, metavar="FILE", help="File for a web page with figures, ending in .html.")
    add_trust(plan)
    add_overwrite(plan)
    plan.set_defaults(run=_plan)

    audit = verbs.add_parser(
        "audit", help="Find mistakes in the settings of a training, and their fixes.", description=_audit.__doc__
    )
    audit.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="A run.toml; settings of OpenCLIP, Hugging Face, Sentence Transformers, DeepSpeed, accelerate, Lightning, axolotl or"
        " FlagEmbedding: a JSON, YAML, shell or Python file; or a whole command line.",
    )
    audit.add_argument("--data", metavar="N", help="Number of samples in an epoch, as 10M, if the file does not say.")
    audit.add_argument("--unique", metavar="N", help="Number of distinct samples among them.")
    audit.add_argument("--ranks", type=int, metavar="N", help="Number of processes that the training is launched with.")
    audit.add_argument(
        "--base-lr", metavar="RATE@BATCH", help="Learning rate that is known to be good at a batch size, as 5e-4@32768."
    )
    audit.add_argument("--objective", choices=get_args(objectives.AuditName), help="Kind of training, if the file does not say.")
    audit.add_argument("--finetune", action="store_true", default=None, help="Training starts from pretrained weights.")
    audit.add_argument(
        "--fail-on",
        choices=("error", "warning", "note"),
        default="error",
        help="Lowest severity that makes the exit status 1 (default error).",
    )
    audit.add_argument("--json", action="store_true", help="Print JSON instead of text.")
    audit.set_defaults(run=_audit)


def _losses() -> str:
    """Return the contrastive losses for a help text.

    >>> _losses()
    'softmax (clip), sigmoid (siglip)'
    """
    return ", ".join(f"{objectives.OBJECTIVES[name].title} ({name})" for name in objectives.PAIR_LOSSES)


def _plan(arguments: argparse.Namespace) -> None:
    """Choose the batch size that a training needs, how to reach it, and the other settings, each with its reason. Without
    arguments, plan the embedded default run on this machine."""
    with _rare_garbage_collection():
        _print_plan(arguments)


def _print_plan(arguments: argparse.Namespace) -> None:
    progress = _Progress()
    progress(f"planning {visible(str(arguments.model or 'the embedded default'))}")
    from ..planning.planner import plan
    from ..planning.report import check_target, plan_report, screen, write

    for name in ("out", "html"):
        path = getattr(arguments, name)
        if path is not None:
            check_target(path, f"--{name}")
        check_output(path, f"--{name}", arguments.overwrite, make_folder=True)
    if arguments.model is not None and arguments.model.endswith(".toml"):
        arguments.model = config.read(arguments.model)
    not_options = {"verb", "run", "json", "out", "html", "overwrite", "why"}
    options = {key: value for key, value in vars(arguments).items() if key not in not_options and value is not None}
    if any(path is not None and path.suffix == ".html" for path in (arguments.out, arguments.html)):
        packages.require(packages.PLAN_PAGE)
    if not {"gpu", "memory", "rates"} & options.keys():
        progress("measuring the speed of this machine")
        from ..measuring.rates import quick_rates

        options |= {"rates": rates} if (rates := quick_rates()) is not None else {}
    try:
        found = plan(**options, progress=progress)
    finally:
        progress.end()
    if arguments.json:
        print(found.as_json())
    elif arguments.why:
        print_report(plan_report(found))
    else:
        print_report(screen(found), width=SCREEN)
        print("", *textwrap.wrap(_next_step(arguments, found), SCREEN), sep="\n")
    for path in (arguments.out, arguments.html):
        if path is not None:
            print("Plan written to", write(found, path), file=sys.stderr)


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """A context in which Python rarely looks for cycles: a plan makes millions of objects, and looking is a fifth of its time.

    Nor does it look when the process ends, which takes another tenth.
    """
    atexit.register(gc.freeze)
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Progress:
    """What is being done, as one line on standard error that is overwritten; nothing where that is not a terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._width = 0

    def __call__(self, text: str) -> None:
        if self._terminal:
            print(f"\r{text} …".ljust(self._width), end="", file=sys.stderr, flush=True)
            self._width = len(text) + 3

    def end(self) -> None:
        """Clear the line."""
        if self._terminal:
            print("\r" + " " * self._width, end="\r", file=sys.stderr, flush=True)


def _next_step(arguments: argparse.Namespace, plan: Plan) -> str:
    from ..planning.report import without_run

    if plan.run is None:
        return f"Next: {without_run(plan)} --why shows every number and its source."
    if arguments.out is None or arguments.out.suffix != ".toml":
        return "--why shows every number and its source; --out run.toml writes the file for `megabatch train`."
    return f"Next: megabatch audit {arguments.out}, then megabatch train {arguments.out}. --why shows every number and its source."


def _audit(arguments: argparse.Namespace) -> int:
    """Find common mistakes in the batch size and the settings that depend on it: what is wrong, where, why, and the fix as a diff.
    The exit status is 1 if something at least as severe as --fail-on was found, so a script can check before a launch."""
    from ..audit import audit, audit_report, audit_together, exit_code, read_any
    from ..planning.request import parse_base, parse_count

    base = parse_base(arguments.base_lr) or (None, None)
    known = {
        "data": parse_count(arguments.data, "data"),
        "unique": parse_count(arguments.unique, "unique"),
        "ranks": arguments.ranks,
        "base_lr": base[0],
        "base_batch": base[1],
        "objective": arguments.objective,
        "finetuning": arguments.finetune,
    }
    known = {name: value for name, value in known.items() if value is not None}
    readings = [read_any(file, **known) for file in arguments.files]
    found = [(reading.document.name, finding) for reading in readings for finding in audit(reading, **known)]
    several = len(readings) > 1
    findings = [finding._replace(where=f"{name}: {finding.where}") if several else finding for name, finding in found]
    if several:
        findings += audit_together(readings)
    if arguments.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        print_report(audit_report(findings))
    return exit_code(findings, arguments.fail_on)
