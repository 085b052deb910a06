"""The verbs of the `megabatch` command: each parses its arguments, calls the library, prints the answer.

What a verb alone needs is imported by it: `megabatch env` works where nothing but torch is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch import __version__, config, environment

if TYPE_CHECKING:
    from megabatch.training.answers import Answer


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of one command line: 0; 2 where the arguments cannot be met; 1, or 128 and the signal's number, where a run
    stopped before its end. `argv` None reads sys.argv."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.verb is None:
        parser.print_help()
        return 0
    # Towers and optimizers that a user names may lie in the folder where the command was given; installed ones go before them.
    sys.path.append(os.getcwd())
    try:
        return int(arguments.run(arguments) or 0)
    except ValueError as error:
        # By our convention a ValueError names the value, the rule and the remedy: a traceback would only bury them.
        return _complain(error, 2)
    except OSError as error:
        # A full disk, a folder that may not be written: what is wrong is in the message.
        return _complain(error, 1)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("PIL", "matplotlib", "rich", "safetensors"):
            raise
        return _complain(f"`megabatch {arguments.verb}` needs {error.name}: pip install 'megabatch[train]'", 2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megabatch", description="Contrastive training at the batch that the problem needs, on the hardware there is."
    )
    parser.add_argument("--version", action="version", version=f"megabatch {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")

    train = verbs.add_parser("train", help="train a contrastive model, or go on with it", description=_train.__doc__)
    train.add_argument("settings", nargs="*", metavar="run.toml | key=value", help="a run's file, and settings that go before it")
    train.add_argument("--fresh", action="store_true", help="start over, deleting what an earlier run left in the folder")
    train.add_argument("--show", action="store_true", help="print the whole configuration as TOML, and do not train")
    train.set_defaults(run=_train)

    _add_plan(verbs)
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

    evaluate = verbs.add_parser("evaluate", help="held-out quality of a run", description=_evaluate.__doc__)
    evaluate.add_argument("--classes", action="store_true", help="also classify pictures by the names of their labels (zero-shot)")
    evaluate.add_argument("--json", action="store_true", help="print JSON instead of a table")
    embed = verbs.add_parser("embed", help="embeddings of pictures and texts, as safetensors", description=_embed.__doc__)
    search = verbs.add_parser("search", help="the nearest pictures or texts", description=_search.__doc__)
    for verb, run in ((evaluate, _evaluate), (embed, _embed), (search, _search)):
        verb.add_argument("folder", metavar="RUN", help="the folder of a run")
        verb.add_argument("--device", help="where to compute; by default where it was trained")
        verb.set_defaults(run=run)
    embed.add_argument("files", nargs="+", metavar="FILE", help="pictures, or text files with a text in each line")
    embed.add_argument("--out", type=Path, help="where to write; by default embeddings.safetensors in the run's folder")
    search.add_argument("query", metavar="TEXT", help="a text, or the path of a picture")
    search.add_argument("-k", type=int, default=5, help="how many answers (5)")
    search.add_argument("--out", type=Path, help="where to draw the answers; by default search.png in the run's folder")

    env = verbs.add_parser("env", help="describe this machine and its software, to paste into a bug report")
    env.add_argument("--json", action="store_true", help="print JSON instead of text")
    env.set_defaults(run=_env)
    return parser


def _add_plan(verbs: Any) -> None:
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
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
    plan.add_argument("--out", type=Path, help="write run.toml, which `megabatch train` runs; or .json, .md, .html")
    plan.add_argument("--html", type=Path, help="write a page with pictures")
    plan.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> None:
    """Which batch a training needs, how to reach it, what follows from it, each number with its reason. Without arguments: for this
    machine and the embedded default."""
    from megabatch.planning.planner import plan
    from megabatch.planning.show import show, write

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
    from megabatch.planning.audit import audit, audit_together, exit_code, read_any
    from megabatch.planning.question import parse_base, parse_count

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


def _train(arguments: argparse.Namespace) -> int:
    """Trains what a TOML file describes, and goes on where an earlier start was stopped. Without a file: pictures of characters and
    their names, which come with the installation. Settings go before the file's: batch.size=4096 optimizer.lr=3e-4 out=runs/a.
    Several GPUs or machines: torchrun -m megabatch train …"""
    settings = arguments.settings
    file = settings[0] if settings and "=" not in settings[0] else None
    overrides = settings if file is None else settings[1:]
    run = config.build(config.EMBEDDED, overrides) if file is None else config.read(file, overrides)
    if arguments.show:
        print(config.as_toml(run), end="")
        return 0
    from megabatch.training.loop import Stopped, train

    try:
        folder = train(run, fresh=arguments.fresh)
    except Stopped as stopped:
        return _complain(stopped, stopped.status)
    _show_result(folder)
    return 0


def _evaluate(arguments: argparse.Namespace) -> None:
    """Recall of held-out pairs in both directions, by the newest checkpoint of a run."""
    from megabatch.training.answers import evaluate

    found = evaluate(arguments.folder, classes=arguments.classes, device=arguments.device)
    print(json.dumps(found, indent=2)) if arguments.json else _show_quality(found)


def _embed(arguments: argparse.Namespace) -> None:
    """Writes embeddings of length one: "embeddings" (rows, dim), and "keys" in the metadata."""
    from megabatch.training.answers import embed

    out = arguments.out or Path(arguments.folder) / "embeddings.safetensors"
    print(f"{embed(arguments.folder, arguments.files, out, arguments.device):,} embeddings in {out}")


def _search(arguments: argparse.Namespace) -> None:
    """The held-out pictures nearest to a text, or the texts nearest to a picture: a table, and a contact sheet."""
    from megabatch.training.answers import search

    if arguments.k < 1:
        raise ValueError(f"-k is {arguments.k}: must be at least 1")
    answers = search(arguments.folder, arguments.query, arguments.k, arguments.device)
    _table(["similarity", "answer", "from"], [[f"{a.score:.3f}", a.text, a.key] for a in answers])
    if any(answer.picture is not None for answer in answers):
        print("contact sheet:", _draw(arguments.query, answers, arguments.out or Path(arguments.folder) / "search.png"))


def _env(arguments: argparse.Namespace) -> None:
    report = environment.describe()
    print(json.dumps(report, indent=2) if arguments.json else environment.as_text(report))


def _draw(query: str, answers: Sequence[Answer], out: Path) -> Path:
    from megabatch.training.report.contact import Question, Shown, contact_sheet

    found = [Shown(answer.text, answer.picture, None, answer.score) for answer in answers]
    contact_sheet([Question(Shown(query, None, None, None), found)], out)
    return out


def _show_result(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text("utf-8")) if (folder / "result.json").exists() else {}
    if result.get("evaluation"):
        _show_quality(result["evaluation"], result.get("chance"))
    if (folder / "report.html").exists():
        print(f"report: {folder / 'report.html'}")


def _show_quality(found: dict[str, Any], chance: dict[str, float] | None = None) -> None:
    if "accuracy" in found:
        print(f"held-out accuracy: {found['accuracy']:.1%} of {found['pairs']:,}")
        return
    at = list(found["x_to_y"])
    x, y = found["sides"]
    directions = ((f"{x} → {y}", "x_to_y", "x_median_rank"), (f"{y} → {x}", "y_to_x", "y_median_rank"))
    rows = [[name, *(f"{found[side][k]:.1%}" for k in at), f"{found[median]:g}"] for name, side, median in directions]
    if chance is not None:
        rows.append(["chance", *(f"{chance[k]:.2%}" for k in at), f"{(found['pairs'] + 1) / 2:g}"])
    print(f"held-out recall among {found['pairs']:,} pairs")
    _table(["direction", *(f"recall@{k}" for k in at), "median rank"], rows)
    for k, share in found.get("zero_shot", {}).items():
        print(f"zero-shot accuracy, top {k}: {share:.1%}")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        # Captions are data, not markup.
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    Console().print(table)


def _complain(error: object, status: int) -> int:
    print("megabatch: error:", " ".join(str(error).splitlines()), file=sys.stderr)
    return status
