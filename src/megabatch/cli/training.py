"""The verbs `train`, and for a trained run `evaluate`, `embed` and `search`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import config
from ..reporting.report import text_table
from ..reporting.terminal import print_table, visible
from .arguments import SETTINGS_HELP, add_overwrite, add_trust, check_output, settings_of

if TYPE_CHECKING:
    from ..training.inference import Answer

# The most unreadable samples and damaged files that are listed on the terminal.
MOST_LISTED = 10


def add(verbs: Any) -> None:
    train = verbs.add_parser("train", help="Train a model, or resume its training.", description=_train.__doc__)
    train.add_argument("settings", nargs="*", metavar="run.toml | key=value", help=SETTINGS_HELP)
    train.add_argument("--fresh", action="store_true", help="Start over: delete what an earlier run wrote into the run's folder.")
    train.add_argument("--show", action="store_true", help="Print every key that has a value, as TOML, instead of training.")
    add_trust(train)
    train.set_defaults(run=_train)

    evaluate = verbs.add_parser("evaluate", help="Measure the held-out quality of a run.", description=_evaluate.__doc__)
    evaluate.add_argument("--classes", action="store_true", help="Also classify images by the names of their labels (zero-shot).")
    evaluate.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
    embed = verbs.add_parser(
        "embed", help="Write embeddings of images and texts to a safetensors file.", description=_embed.__doc__
    )
    search = verbs.add_parser(
        "search", help="Find the held-out samples nearest to a text or an image.", description=_search.__doc__
    )
    for verb, run in ((evaluate, _evaluate), (embed, _embed), (search, _search)):
        verb.add_argument("folder", metavar="RUN", help="Folder of a run, as `megabatch train` wrote it.")
        verb.add_argument(
            "--device", help="Device to compute on, as cpu or cuda:1; by default the one that the run was trained on."
        )
        add_trust(verb)
        verb.set_defaults(run=run)
    embed.add_argument("files", nargs="+", metavar="FILE", help="Image files, and UTF-8 text files with one text per line.")
    embed.add_argument(
        "--side",
        choices=("x", "y"),
        help="Tower that embeds all files: x for queries, y for documents. Required if both towers take the same kind of input.",
    )
    embed.add_argument(
        "--out", type=Path, metavar="FILE", help="File to write; by default embeddings.safetensors in the run's folder."
    )
    search.add_argument("query", metavar="QUERY", help="A text, or the path of an image file.")
    search.add_argument("-k", type=int, default=5, metavar="N", help="Number of answers (default 5).")
    search.add_argument(
        "--side",
        choices=("x", "y"),
        help="Tower that embeds the query; answers come from the other side. By default the tower that takes this kind of input,"
        " or x if both do.",
    )
    search.add_argument(
        "--out", type=Path, metavar="FILE", help="PNG file of image answers; by default search.png in the run's folder."
    )
    add_overwrite(embed)
    add_overwrite(search)


def _train(arguments: argparse.Namespace) -> None:
    """Train what a TOML file describes, or resume a training that was stopped. Without a file, train on images of characters and
    their names, which are part of the installation. Settings override those of the file: batch.size=4096 optimizer.lr=3e-4
    out=runs/a. For several GPUs or machines: torchrun -m megabatch train …"""
    run = settings_of(arguments.settings)
    if arguments.show:
        print(config.as_toml(run), end="")
        return
    from ..training.loop import train

    folder = train(run, fresh=arguments.fresh, trust_code=arguments.trust_code)
    # Only the first rank writes the result and prints it.
    if os.environ.get("RANK", "0") == "0":
        _show_result(folder)


def _evaluate(arguments: argparse.Namespace) -> None:
    """Print the recall of held-out pairs in both directions, with the newest checkpoint of a run."""
    from ..training.inference import evaluate

    found = evaluate(arguments.folder, classes=arguments.classes, device=arguments.device, trust_code=arguments.trust_code)
    print(json.dumps(found, indent=2)) if arguments.json else _show_quality(found)
    if not arguments.json:
        _show_unread(found)


def _embed(arguments: argparse.Namespace) -> None:
    """Write normalised embeddings as safetensors: the tensor "embeddings" (rows, dim), and in the metadata "keys", a JSON list with
    the path of the image or the line of text that each row is of."""
    from ..training.inference import embed

    check_output(arguments.out, "--out", arguments.overwrite)
    out = arguments.out or Path(arguments.folder) / "embeddings.safetensors"
    options = {"side": arguments.side, "trust_code": arguments.trust_code}
    rows = embed(arguments.folder, arguments.files, out, arguments.device, **options)
    print(f"{rows:,} embeddings in {out}")


def _search(arguments: argparse.Namespace) -> None:
    """Print the held-out images nearest to a text, the texts nearest to an image, or the documents nearest to a query, as a table.
    Images are also drawn on a contact sheet."""
    if arguments.k < 1:
        raise ValueError(f"-k is {arguments.k}: must be at least 1")
    check_output(arguments.out, "--out", arguments.overwrite)
    from ..training.inference import search

    options = {"side": arguments.side, "trust_code": arguments.trust_code}
    answers = search(arguments.folder, arguments.query, arguments.k, arguments.device, **options)
    print_table(text_table(["similarity", "answer", "from"], [[f"{a.score:.3f}", a.text, a.key] for a in answers]))
    if any(answer.image is not None for answer in answers):
        print("contact sheet:", _draw(arguments.query, answers, arguments.out or Path(arguments.folder) / "search.png"))


def _draw(query: str, answers: Sequence[Answer], out: Path) -> Path:
    from ..reporting.contact import contact_sheet
    from ..reporting.report import Exhibit, Question

    exhibits = [Exhibit(answer.text, answer.image, None, answer.score) for answer in answers]
    contact_sheet([Question(Exhibit(query), exhibits)], out)
    return out


def _show_result(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text("utf-8")) if (folder / "result.json").exists() else {}
    if result.get("evaluation"):
        _show_quality(result["evaluation"])
    if result:
        from ..training.summary import sentences

        print("\n".join(sentences(result)))
    if result.get("bad"):
        print(f"{result['bad']:,} training samples could not be read and were skipped; {folder / 'log.jsonl'} names them")
    if (folder / "report.html").exists():
        print(f"report: {folder / 'report.html'}")


def _show_unread(found: dict[str, Any]) -> None:
    """Print the held-out samples that could not be read, and damaged files."""
    lines = [f"{each['key']}: {each['reason']}" for each in found.get("unreadable", [])]
    lines += [f"damaged: {each}" for each in found.get("damage", [])]
    for line in lines[:MOST_LISTED]:
        print(visible(line))
    if len(lines) > MOST_LISTED:
        print(f"… and {len(lines) - MOST_LISTED:,} more; --json lists them all")


def _show_quality(found: dict[str, Any]) -> None:
    from ..reporting.run_report import quality_table

    bad = found.get("bad", 0)
    unread = f"; {bad:,} of {bad + found['pairs']:,} held-out samples could not be read" if bad else ""
    if "accuracy" in found:
        print(f"held-out accuracy: {found['accuracy']:.1%} of {found['pairs']:,}{unread}")
        return
    print(f"held-out recall among {found['pairs']:,} pairs{unread}")
    quality = quality_table(found, tuple(found["sides"]))
    if quality is not None:
        print_table(quality)
    for k, share in found.get("zero_shot", {}).items():
        print(f"zero-shot accuracy, top {k}: {share:.1%}")
