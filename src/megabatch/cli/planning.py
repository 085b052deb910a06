"""The verbs that choose a batch by arithmetic: `plan` and `audit`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .. import config


def add(verbs: Any) -> None:
    plan = verbs.add_parser("plan", help="which batch size, why, and a file that runs", description=_plan.__doc__)
    plan.add_argument("model", nargs="?", help='open_clip:ViT-L-14, "timm:NAME + text", "vit + text", package.module:function')
    plan.add_argument("--objective", choices=("contrastive", "supervised", "lm", "finetune"))
    plan.add_argument("--loss", choices=("clip", "siglip"))
    plan.add_argument("--data", help="samples there are: 10M")
    plan.add_argument("--unique", help="different ones among them")
    plan.add_argument("--seen", help="samples that training sees")
    plan.add_argument("--epochs", type=float, help="the same in passes over the data")
    plan.add_argument("--start", choices=("scratch", "pretrained", "locked"), help="the picture tower at the start")
    plan.add_argument("--gpu", help="H200, A100-80GB, 8xH100, …; by default this machine")
    plan.add_argument("--gpus", type=int)
    plan.add_argument("--memory", help="of one device: 80GiB")
    plan.add_argument("--share", type=float, help="of the memory that may be used (0.8)")
    plan.add_argument("--price", type=float, help="of a device for an hour")
    plan.add_argument("--batch", help="where it is decided already")
    plan.add_argument("--critical", type=int, help="the critical batch, measured")
    plan.add_argument("--priority", choices=("accuracy", "speed"))
    plan.add_argument("--base-lr", help="rate@batch to scale from: 1e-3@256")
    plan.add_argument("--optimizer", choices=("adamw", "sgd"))
    plan.add_argument("--precision", choices=("fp32", "bf16", "fp16"))
    plan.add_argument("--source", help="data.source of the run's file")
    measured = "what fit, profile, noise or sweep wrote: measured.json"
    plan.add_argument("--measured", type=Path, action="extend", nargs="+", metavar="FILE", help=measured)
    plan.add_argument("--rates", type=Path, metavar="FILE", help="what `megabatch env --measure --out FILE` wrote")
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
    plan.add_argument("--out", type=Path, help="write run.toml, which `megabatch train` runs; or .json, .md, .html")
    plan.add_argument("--html", type=Path, help="write a page with pictures")
    plan.set_defaults(run=_plan)

    audit = verbs.add_parser("audit", help="mistakes in a training's settings, with their fixes", description=_audit.__doc__)
    audit.add_argument(
        "files", nargs="+", metavar="FILE", help="run.toml, TrainingArguments or DeepSpeed JSON, an OpenCLIP command line"
    )
    audit.add_argument("--data", help="samples of an epoch, where the file does not tell: 10M")
    audit.add_argument("--unique", help="different samples among them")
    audit.add_argument("--ranks", type=int, help="processes of the launch")
    audit.add_argument("--base-lr", help="rate@batch that is known to be good: 5e-4@32768")
    audit.add_argument("--objective", choices=("clip", "siglip", "supervised", "lm"), help="where the file does not tell")
    audit.add_argument("--finetune", action="store_true", default=None, help="training goes on from pretrained weights")
    audit.add_argument(
        "--fail-on", choices=("error", "warning", "note"), default="error", help="from which severity on the status is 1"
    )
    audit.add_argument("--json", action="store_true", help="print JSON instead of text")
    audit.set_defaults(run=_audit)


def _plan(arguments: argparse.Namespace) -> None:
    """Which batch a training needs, how to reach it, what follows from it, each number with its reason. Without arguments: for this
    machine and the embedded default."""
    from ..planning.planner import plan
    from ..planning.show import show, write

    if arguments.model is not None and arguments.model.endswith(".toml"):
        arguments.model = config.read(arguments.model)
    shown = {"verb", "run", "json", "out", "html"}
    asked = {key: value for key, value in vars(arguments).items() if key not in shown and value is not None}
    found = plan(**asked)
    print(found.as_json()) if arguments.json else show(found)
    for path in (arguments.out, arguments.html):
        if path is not None:
            print("written:", write(found, path), file=sys.stderr)


def _audit(arguments: argparse.Namespace) -> int:
    """The classic mistakes of batch size and what goes with it: what is wrong, where, why, and the fix as a diff. The status is 1
    from a severity on, so that it can stand before a launch."""
    from ..planning.audit import audit, audit_together, exit_code, read_any
    from ..planning.question import parse_base, parse_count

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
    findings = [finding for reading in readings for finding in audit(reading, **known)]
    if len(readings) > 1:
        findings += audit_together(readings)
    if arguments.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.severity}: {finding.where}: {finding.why} ({finding.code})\n{finding.fix.rstrip()}\n")
        print(f"{len(findings)} findings" if findings else "nothing found")
    return exit_code(findings, arguments.fail_on)
