"""`search` and `embed` use the tower of the query or file: x for queries, y for documents, or the one that `--side` names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from megabatch import cli, config
from megabatch.training.inference import _embed, embed, opened, search
from megabatch.training.loop import train

TEXT = {"name": "text", "options": {"width": 16, "depth": 1, "heads": 2, "length": 24}}
IMAGE = {"name": "cnn", "options": {"size": 8}}
# Text that a terminal or rich would interpret.
WILD = [
    "a \\[/b] [bold]b[/bold]",
    "[link=http://x]y[/link] :smile: [/]",
    "c\x1b[2J\x1b]0;title\x07d",
    "e\x9b31mf\r\ngone\u202eback",
]


def train_once(folder: Path, source: Path, x: dict, y: dict, data: dict | None = None) -> Path:
    table = {
        "out": str(folder / "run"),
        "data": {"source": str(source), "held_out": 0.5, **(data or {})},
        "x": x,
        "y": y,
        "loss": {"dim": 8},
        "batch": {"size": 8, "chunk": 8},
        "schedule": {"steps": 1},
        "compute": {"device": "cpu"},
        "watch": {"bar": False, "report": False},
    }
    return train(config.build(table))


def write_pairs(path: Path, pairs) -> Path:
    path.write_text("".join(json.dumps({"query": query, "positive": document}) + "\n" for query, document in pairs))
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Train a run of queries and documents, with one tower each."""
    folder = tmp_path_factory.mktemp("texts")
    pairs = write_pairs(folder / "pairs.jsonl", [(f"query {n}", f"document {n}") for n in range(24)])
    return train_once(folder, pairs, TEXT, TEXT)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Train a run of texts with control characters and markup, with one tower for both sides."""
    folder = tmp_path_factory.mktemp("shared")
    pairs = write_pairs(folder / "pairs.jsonl", [(f"query {n}", WILD[n % len(WILD)]) for n in range(24)])
    return train_once(folder, pairs, TEXT, {"name": "x"})


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Create a table with two columns of images and one of captions."""
    folder = tmp_path_factory.mktemp("tables")
    lines = ["left,right,caption"]
    for n in range(16):
        for side, colour in (("left", (15 * n, 0, 0)), ("right", (0, 15 * n, 0))):
            Image.new("RGB", (8, 8), colour).save(folder / f"{side}-{n}.png")
        lines.append(f"left-{n}.png,right-{n}.png,caption {n}")
    (folder / "pairs.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def captioned(tables):
    return train_once(tables / "captioned", tables / "pairs.csv", IMAGE, TEXT, {"x": "left", "y": "caption"})


@pytest.fixture(scope="module")
def images(tables):
    return train_once(tables / "images", tables / "pairs.csv", IMAGE, IMAGE, {"x": "left", "y": "right"})


def written(out: Path) -> tuple[torch.Tensor, list[str]]:
    with safe_open(out, "pt") as file:
        return file.get_tensor("embeddings"), json.loads(file.metadata()["keys"])


def through(run: Path, side: str, raws: list) -> torch.Tensor:
    """Return the embeddings by the tower of one side."""
    with opened(run) as parts:
        return _embed(parts, raws, side).cpu()


def test_the_towers_of_the_sides_differ(texts):
    """Otherwise the tests below could not distinguish them."""
    assert (through(texts, "x", ["query 1"]) - through(texts, "y", ["query 1"])).abs().max() > 0.01


def test_a_query_finds_documents(texts):
    answers = search(texts, "query 3", 4)
    assert len(answers) == 4 and all(answer.text.startswith("document") for answer in answers)
    nearest = through(texts, "x", ["query 3"]) @ through(texts, "y", [answers[0].text]).T
    assert answers[0].score == pytest.approx(float(nearest), abs=1e-5)


def test_a_document_finds_queries_when_its_side_is_named(texts):
    answers = search(texts, "document 3", 4, side="y")
    assert len(answers) == 4 and all(answer.text.startswith("query") for answer in answers)
    nearest = through(texts, "y", ["document 3"]) @ through(texts, "x", [answers[0].text]).T
    assert answers[0].score == pytest.approx(float(nearest), abs=1e-5)


@pytest.mark.parametrize("side", ["x", "y"])
def test_embed_uses_the_tower_of_the_side(texts, side, tmp_path):
    (tmp_path / "lines.txt").write_text("query 1\n\nquery 2\n")
    assert embed(texts, [tmp_path / "lines.txt"], tmp_path / "e.safetensors", side=side) == 2
    rows, keys = written(tmp_path / "e.safetensors")
    assert keys == ["query 1", "query 2"]
    torch.testing.assert_close(rows, through(texts, side, keys))


def test_embed_asks_for_the_side_where_both_towers_take_texts(texts, tmp_path, capsys):
    (tmp_path / "lines.txt").write_text("query 1\n")
    assert cli.main(["embed", str(texts), str(tmp_path / "lines.txt"), "--out", str(tmp_path / "e")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--side x for queries, --side y for documents" in line
    assert cli.main(["embed", str(texts), str(tmp_path / "lines.txt"), "--out", str(tmp_path / "e"), "--side", "y"]) == 0
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_a_shared_tower_needs_no_side(shared, tmp_path):
    (tmp_path / "lines.txt").write_text("query 1\n")
    assert embed(shared, [tmp_path / "lines.txt"], tmp_path / "e") == 1
    torch.testing.assert_close(written(tmp_path / "e")[0], through(shared, "x", ["query 1"]))
    assert {answer.text for answer in search(shared, "query 1", 3)} <= set(WILD)


def test_images_and_captions_each_have_their_tower(captioned, tables, tmp_path):
    image, lines = tables / "left-3.png", tmp_path / "lines.txt"
    lines.write_text("caption 3\n")
    assert embed(captioned, [image, lines], tmp_path / "e") == 2
    rows, _ = written(tmp_path / "e")
    torch.testing.assert_close(rows[1:], through(captioned, "y", ["caption 3"]))
    torch.testing.assert_close(rows[:1], through(captioned, "x", [Image.open(image)]))
    assert all(answer.image is not None for answer in search(captioned, "caption 3", 2))
    assert all(answer.image is None and answer.text.startswith("caption") for answer in search(captioned, str(image), 2))


def test_an_image_finds_images_of_the_other_side(images, tables):
    for side, other in ((None, "right"), ("x", "right"), ("y", "left")):
        answers = search(images, str(tables / "left-3.png"), 2, side=side)
        colours = [answer.image.convert("RGB").getpixel((0, 0)) for answer in answers]
        assert all(colour[0 if other == "right" else 1] == 0 for colour in colours)


@pytest.mark.parametrize(
    ("run", "query", "side", "words"),
    [
        (
            "captioned",
            "nowhere.png",
            None,
            "there is no such image file; to search for this text, choose the side of texts: --side y",
        ),
        ("captioned", "a caption", "x", "tower x takes images"),
        ("images", "a caption", None, "towers for images only"),
        ("images", "nowhere.png", None, "there is no such image file"),
    ],
)
def test_a_query_that_no_tower_takes_is_refused(run, query, side, words, request):
    with pytest.raises(ValueError) as error:
        search(request.getfixturevalue(run), query, side=side)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("run", "file", "side", "words"),
    [
        ("texts", "a.png", None, "is an image, and this run has towers for texts only"),
        ("captioned", "a.png", "y", "is an image, and tower y of this run takes texts"),
        ("captioned", "a.txt", "x", "is a text file, and tower x of this run takes images"),
        ("images", "a.txt", None, "is a text file, and this run has towers for images only"),
        ("images", "a.png", None, "both towers of this run take images"),
        ("captioned", "a.txt", None, "there is no such file"),
        ("captioned", "empty.txt", None, "no line of text"),
    ],
)
def test_a_file_that_no_tower_takes_is_refused_and_nothing_is_written(run, file, side, words, request, tmp_path):
    run = request.getfixturevalue(run)
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(ValueError) as error:
        embed(run, [tmp_path / file], tmp_path / "e", side=side)
    assert words in str(error.value) and not (tmp_path / "e").exists()


def test_answers_are_printed_as_they_are_and_command_no_terminal(shared, capsys):
    assert cli.main(["search", str(shared), "query 1", "-k", "12"]) == 0
    printed = capsys.readouterr().out
    assert "a \\[/b] [bold]b[/bold]" in printed and ":smile:" in printed and "\\x1b[2J" in printed and "gone\\u202eback" in printed
    assert not {"\x1b", "\x07", "\x9b", "\r", "\u202e"} & set(printed)
    assert all(len(line.split()) >= 3 for line in printed.splitlines()[2:])


def test_a_text_in_an_image_run_is_searched_when_its_side_is_named(captioned):
    assert len(search(captioned, "nowhere.png", 2, side="y")) == 2
