"""The verbs of a run: `train`, and what asks it afterwards: `evaluate`, `embed`, `search`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import config
from .words import SETTINGS_HELP, settings_of, table

if TYPE_CHECKING:
    from ..training.answers import Answer


def add(verbs: Any) -> None:
    train = verbs.add_parser("train", help="train a contrastive model, or go on with it", description=_train.__doc__)
    train.add_argument("settings", nargs="*", metavar="run.toml | key=value", help=SETTINGS_HELP)
    train.add_argument("--fresh", action="store_true", help="start over, deleting what an earlier run left in the folder")
    train.add_argument("--show", action="store_true", help="print the whole configuration as TOML, and do not train")
    train.set_defaults(run=_train)

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


def _train(arguments: argparse.Namespace) -> None:
    """Trains what a TOML file describes, and goes on where an earlier start was stopped. Without a file: pictures of characters and
    their names, which come with the installation. Settings go before the file's: batch.size=4096 optimizer.lr=3e-4 out=runs/a.
    Several GPUs or machines: torchrun -m megabatch train …"""
    run = settings_of(arguments.settings)
    if arguments.show:
        print(config.as_toml(run), end="")
        return
    from ..training.loop import train

    folder = train(run, fresh=arguments.fresh)
    # One rank writes the result, and shows it.
    if os.environ.get("RANK", "0") == "0":
        _show_result(folder)


def _evaluate(arguments: argparse.Namespace) -> None:
    """Recall of held-out pairs in both directions, by the newest checkpoint of a run."""
    from ..training.answers import evaluate

    found = evaluate(arguments.folder, classes=arguments.classes, device=arguments.device)
    print(json.dumps(found, indent=2)) if arguments.json else _show_quality(found)


def _embed(arguments: argparse.Namespace) -> None:
    """Writes embeddings of length one: "embeddings" (rows, dim), and "keys" in the metadata."""
    from ..training.answers import embed

    out = arguments.out or Path(arguments.folder) / "embeddings.safetensors"
    print(f"{embed(arguments.folder, arguments.files, out, arguments.device):,} embeddings in {out}")


def _search(arguments: argparse.Namespace) -> None:
    """The held-out pictures nearest to a text, or the texts nearest to a picture: a table, and a contact sheet."""
    from ..training.answers import search

    if arguments.k < 1:
        raise ValueError(f"-k is {arguments.k}: must be at least 1")
    answers = search(arguments.folder, arguments.query, arguments.k, arguments.device)
    table(["similarity", "answer", "from"], [[f"{a.score:.3f}", a.text, a.key] for a in answers])
    if any(answer.picture is not None for answer in answers):
        print("contact sheet:", _draw(arguments.query, answers, arguments.out or Path(arguments.folder) / "search.png"))


def _draw(query: str, answers: Sequence[Answer], out: Path) -> Path:
    from ..training.report.contact import Question, Shown, contact_sheet

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
    table(["direction", *(f"recall@{k}" for k in at), "median rank"], rows)
    for k, share in found.get("zero_shot", {}).items():
        print(f"zero-shot accuracy, top {k}: {share:.1%}")
