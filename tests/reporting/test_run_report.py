"""The report of a run: of a complete folder, of parts, and of hostile files."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import pytest
from PIL import Image

from megabatch import config
from megabatch.reporting import html
from megabatch.reporting.contact import FRAMES, contact_sheet, read_contact
from megabatch.reporting.figures import save
from megabatch.reporting.history import read_history
from megabatch.reporting.html import POLICY, Drawn
from megabatch.reporting.report import Exhibit, Question
from megabatch.reporting.run_report import curve_charts, curves_figure, memory_figure, write_run_report

EVIL = "</pre></title><script>document.title='owned'</script>\"'><img src=http://evil.example/x onerror=alert(1)>"
ODD = ["a caption " * 1000, "😀 👩‍👩‍👧 漢字 עברית ﷽ ก็", "\u202eturned round\x00\x07\ud800", "", "\n\t", EVIL]
TAGS = """html head meta title style body main header footer section article h1 h2 h3 p div span dl dt dd table thead tbody tr th td
    picture source img ol ul li bdi details summary pre"""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def step(number: int, **more) -> dict:
    usual = {"loss": 5 / number, "recall": 0.1, "lr": 1e-3, "pairs_per_s": 4000.0, "memory_bytes": 2**29}
    return {"event": "step", "step": number, "samples": 1024 * number, "batch": 1024, **usual, **more}


def evaluation(number: int, first: float = 0.25) -> dict:
    shares = {"1": first, "5": 0.5, "10": 0.75}
    found = {
        "sides": ["image", "text"],
        "pairs": 2000,
        "x_to_y": shares,
        "y_to_x": shares,
        "x_median_rank": 5.0,
        "y_median_rank": 4.5,
    }
    return {"event": "evaluation", "step": number, "samples": 1024 * number, **found}


def write_log(run: Path, *rows: dict, end: str = "\n") -> Path:
    path = run / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + end)
    return path


def whole_run(run: Path) -> Path:
    """A run with all of its parts, each of which says something evil."""
    (run / "contact").mkdir(parents=True)
    for name, colour in (("asked", "navy"), ("found", "gold")):
        Image.new("RGB", (40, 20), colour).save(run / "contact" / f"{name}.png")
    settings = config.Run(data=config.Data(source=EVIL), schedule=config.Schedule(samples=2048))
    (run / "run.toml").write_text(config.as_toml(settings))
    (run / "environment.json").write_text(json.dumps({"megabatch": "1.2.3", "devices": [{"name": EVIL, "memory": 2**30}], EVIL: 1}))
    rows = [{"event": "bad", "key": f"shard:{EVIL}", "reason": EVIL}, {"event": "note", "text": EVIL}]
    write_log(run, step(1), step(2), evaluation(2, first=0.1), *rows)
    flat = [{"pairs": 1024 * n, "chunk": 256, "seconds": n, "peak_bytes": 2**29 + n} for n in (4, 16)]
    result = {"steps": 2, "samples": 2048, "seconds": 9.5, "pairs_per_s": 215.6, "peak_bytes": 3 * 2**28, "parameters": 3456789}
    result |= {"planned": {"peak_bytes": 2**29, "seconds_per_step": 5.0}, "evaluation": evaluation(2), "bad": 1, "flat": flat}
    (run / "result.json").write_text(json.dumps(result))
    answers = [{"text": text, "image": "contact/found.png", "right": not place, "score": 0.5} for place, text in enumerate(ODD)]
    written = [{**answer, "image": None} for answer in answers]
    queries = [
        {"text": EVIL, "image": None, "answers": answers},
        {"text": "a", "image": "contact/asked.png", "answers": written},
    ]
    (run / "contact.json").write_text(json.dumps({"queries": queries}))
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    path = whole_run(tmp_path_factory.mktemp("runs") / "glyphs <b>")
    assert write_run_report(path) == path / "report.html"
    return path


def undraw(monkeypatch) -> list[str]:
    """Draw no figures, which takes most of the time; return the titles of the charts that would be drawn."""
    titles: list[str] = []

    def drawn(figure):
        titles.extend(chart.title for chart in figure.charts)
        return [Drawn("data:image/png;base64,", "data:image/png;base64,", figure.description)]

    monkeypatch.setitem(html.FILTERS, "drawn", drawn)
    return titles


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.words = ""
        self.source = (run / "report.html").read_text("utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data) -> None:
        self.words += data + " "


def test_nothing_from_outside_becomes_markup(run):
    page = Page(run)
    assert {tag for tag, _ in page.tags} == set(TAGS.split())
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on") or name in ("href", "action")]
    # Captions (and the texts that name their images), the source, the key, the reason, the note and the machine are there.
    assert page.words.count("<script>document.title='owned'</script>") >= 8
    assert page.words.count("glyphs <b>") == 2


def test_the_page_loads_nothing(run):
    page = Page(run)
    loaded = [a[name] for _, a in page.tags for name in ("src", "srcset") if name in a]
    assert len(loaded) > 15
    assert all(address.startswith("data:image/png;base64,") for address in loaded)
    others = [value for _, a in page.tags for name, value in a.items() if name not in ("src", "srcset", "alt")]
    assert not [value for value in others if "://" in value]
    style = re.search("<style>(.*)</style>", page.source, re.DOTALL)[1]
    assert not re.search(r"@import|url\(|//", style)
    metas = [a for tag, a in page.tags if tag == "meta"]
    assert {"http-equiv": "Content-Security-Policy", "content": POLICY} in metas
    assert POLICY.startswith("default-src 'none'")


def test_the_report_says_what_was_reached_beside_chance_and_plan(run):
    words = " ".join(Page(run).words.split())
    for said in (
        "25.0 % of 2,000 held-out texts find their own image first; chance would be 0.05 %.",
        "text → image 25.0 % 50.0 % 75.0 % 4.5",
        "chance 0.05 % 0.25 % 0.5 % 1,000.5",
        "3.46 M",
        "peak memory 512 MiB 768 MiB +50.0 %",
        "4 times the pairs take 1 times the memory",
        "16,384 256 16 s 512 MiB",
        "1 sample was skipped.",
        "1,024, in chunks of 256",
        "devices 0 · memory 1 GiB",
    ):
        assert said in words.replace("\xa0", " "), said


def test_answers_are_marked_right_or_wrong(run):
    page = Page(run)
    kinds = [a["class"] for tag, a in page.tags if tag == "li" and "class" in a]
    assert kinds == (["right"] + ["wrong"] * 5) * 2
    assert page.words.count("✓ ") == 2 + 1 and page.words.count("✗ ") == 10 + 1


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_shows_captions_as_text(run):
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={run / 'profile'}", "--dump-dom"]
    shown = subprocess.run(
        [*command, (run / "report.html").as_uri()], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "<title>glyphs &lt;b&gt; · megabatch</title>" in shown
    assert "&lt;script&gt;document.title='owned'&lt;/script&gt;" in shown
    assert "<script" not in shown
    assert "<footer>megabatch 1.2.3</footer>" in shown


@pytest.mark.parametrize("lacking", ["run.toml", "environment.json", "log.jsonl", "result.json", "contact.json", "contact"])
@pytest.mark.parametrize("how", ["missing", "garbage", "other"])
def test_a_report_of_parts(tmp_path, lacking, how, monkeypatch):
    undraw(monkeypatch)
    run = whole_run(tmp_path / "run")
    part = run / lacking
    if lacking == "contact":
        shutil.rmtree(part)
    else:
        part.unlink()
    if how != "missing" and lacking != "contact":
        part.write_bytes(b"\xff\x00 = [" if how == "garbage" else b'[1, {"queries": 5, "event": "step"}]')
    write_run_report(run)
    words = Page(run).words
    assert ("has not finished" in words) == (lacking == "result.json")
    assert ("Training curves" in words) == (lacking != "log.jsonl")
    assert ("Questions and answers" in words) == (lacking != "contact.json")
    assert ("lines of log.jsonl could not be read" in words) == (lacking == "log.jsonl" and how != "missing")


def test_an_empty_folder_has_a_report_and_no_folder_none(tmp_path):
    write_run_report(tmp_path)
    assert "Nothing has been evaluated" in Page(tmp_path).words
    with pytest.raises(ValueError, match="there is no such folder"):
        write_run_report(tmp_path / "nowhere")


def test_numbers_that_are_none_are_left_out(tmp_path, monkeypatch):
    undraw(monkeypatch)
    write_log(
        tmp_path,
        step(1, loss=float("nan"), lr=None, pairs_per_s="fast", memory_bytes=10**400),
        {**step(1), "step": "two"},
        [],
        {"event": 3},
    )
    result = {
        "evaluation": {"pairs": 0, "y_to_x": {"1": None}, "x_to_y": 3},
        "planned": None,
        "flat": [7, {"pairs": 5}],
        "seconds": "9",
    }
    (tmp_path / "result.json").write_text(json.dumps(result))
    write_run_report(tmp_path)
    assert "nan" not in Page(tmp_path).words.lower().replace("finance", "")
    assert "3 lines of log.jsonl could not be read" in Page(tmp_path).words


def test_a_run_that_classifies_shows_its_accuracy(tmp_path, monkeypatch):
    drawn = undraw(monkeypatch)
    rows = [step(n, accuracy=0.5 + n / 10) for n in (1, 2)]
    write_log(tmp_path, *[{k: v for k, v in row.items() if k != "recall"} for row in rows], evaluation(2) | {"accuracy": 0.7})
    found = {"evaluation": {"pairs": 2000, "accuracy": 0.8}, "chance": {"accuracy": 0.01}}
    (tmp_path / "result.json").write_text(json.dumps(found))
    write_run_report(tmp_path)
    assert "80.0 % of 2,000 held-out samples are classified correctly; chance would be 1.0 %." in Page(tmp_path).words.replace(
        "\xa0", " "
    )
    assert "in-batch accuracy" in drawn and "in-batch recall at 1" not in drawn


def test_a_run_on_texts_has_no_images(tmp_path):
    settings = config.Run(x=config.Tower("text"), schedule=config.Schedule(steps=1))
    (tmp_path / "run.toml").write_text(config.as_toml(settings))
    (tmp_path / "result.json").write_text(json.dumps({"evaluation": evaluation(1) | {"sides": ["query", "document"]}}))
    questions = [{"text": "who?", "image": None, "answers": [{"text": "you", "image": None, "right": True, "score": 1.0}]}] * 2
    (tmp_path / "contact.json").write_text(json.dumps({"queries": questions}))
    write_run_report(tmp_path)
    page = Page(tmp_path)
    assert "held-out documents find their own query first" in page.words
    assert "img" not in {tag for tag, _ in page.tags}


def test_a_failed_write_leaves_the_report_that_was_there(tmp_path, monkeypatch):
    write_run_report(tmp_path)
    before = (tmp_path / "report.html").read_bytes()

    def full(path, page, **options):
        path.write_bytes(page[:100].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_run_report(tmp_path)
    assert (tmp_path / "report.html").read_bytes() == before


def test_images_outside_the_run_are_not_shown(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "secret.png")
    Image.new("RGB", (4, 4)).save(run / "own.png")
    (run / "link.png").symlink_to(tmp_path / "secret.png")
    (run / "text.png").write_text("no image")
    (run / "torn.png").write_bytes((run / "own.png").read_bytes()[:40])
    names = ["own.png", "../secret.png", str(tmp_path / "secret.png"), "link.png", "text.png", "torn.png", "", "\0", 5, "none.png"]
    (run / "contact.json").write_text(json.dumps({"queries": [{"text": "q", "image": name, "answers": 3} for name in names]}))
    assert [question.asked.image is not None for question in read_contact(run)] == [True] + [False] * 9


def test_an_image_of_too_many_pixels_is_not_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr("megabatch.reporting.contact.MOST_PIXELS", 15)
    Image.new("RGB", (4, 4)).save(tmp_path / "large.png")
    (tmp_path / "contact.json").write_text(json.dumps({"queries": [{"text": "q", "image": "large.png"}]}))
    assert read_contact(tmp_path)[0].asked.image is None


def test_what_a_resumed_run_says_replaces_what_was_said_before(tmp_path):
    rows = [step(1), step(2), evaluation(2, 0.1), step(3), step(4), evaluation(4, 0.2)]
    # Resumed from a checkpoint at step 1, and killed in the middle of a line.
    again = step(2, loss=0.5)
    history = read_history(write_log(tmp_path, *rows, again, end='\n{"event": "step", "st'))
    assert [row["step"] for row in history.steps] == [1, 2]
    assert history.steps[1]["loss"] == 0.5
    assert [row["x_to_y"]["1"] for row in history.evaluations] == [0.1]
    history = read_history(write_log(tmp_path, *rows, again, evaluation(2, 0.3), end='\n{"event": "step", "st'))
    assert [row["x_to_y"]["1"] for row in history.evaluations] == [0.3]
    assert history.unread == 1


def test_curves_hold_every_finite_number_against_samples(tmp_path):
    rows = [step(1, loss=3.0), step(2, loss=float("inf")), step(3, loss=2.0), evaluation(3)]
    charts = {chart.title: chart for chart in curve_charts(read_history(write_log(tmp_path, *rows)))}
    assert [series.points for series in charts["loss"].series] == [[(1024, 3.0), (3072, 2.0)]]
    assert charts["held-out recall, mean of both directions"].series[1].points == [(3072, 0.5)]
    assert len(charts) == 6


@pytest.mark.parametrize("steps", [0, 1, 2000])
def test_curves_of_any_length_can_be_drawn(tmp_path, steps):
    log = write_log(tmp_path, *[step(n + 1, lr=0.0, pairs_per_s=None) for n in range(steps)])
    save(curves_figure(log), tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as image:
        assert image.width > 1000 and len(image.convert("RGB").getcolors(2**24)) > 10


def test_drawing_leaves_matplotlib_as_it_was(tmp_path, monkeypatch):
    # None in place of a module is one that cannot be imported.
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    before = matplotlib.rcParams.copy()
    save(curves_figure(write_log(tmp_path, step(1), step(2))), tmp_path / "curves.png")
    assert matplotlib.rcParams.copy() == before


def test_contact_sheet_frames_the_right_answers_green_and_the_wrong_ones_red(tmp_path):
    answers = [Exhibit(text, right=right) for text, right in zip(ODD, (True, False, None, False, True, None), strict=True)]
    images = [answer._replace(image=Image.new("L", (3, 300), 128)) for answer in answers]
    questions = [
        Question(Exhibit(EVIL), images),
        Question(Exhibit("", Image.new("RGBA", (500, 2))), answers[:1]),
        Question(Exhibit("x"), []),
    ]
    contact_sheet(questions, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        seen = [sheet.getpixel((2 * 28 + (n + 1) * (240 + 28) + 120, 28 + 2)) for n in range(6)]
    assert [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in seen] == [FRAMES[answer.right] for answer in answers]
    with pytest.raises(ValueError, match="at least one"):
        contact_sheet([], tmp_path / "sheet.png")


@pytest.mark.parametrize("rows", [1, 2])
def test_memory_against_pairs_can_be_drawn(rows):
    png = io.BytesIO()
    save(memory_figure([(4096, 2**29), (65536, 2**29 + 2**20)][:rows]), png)
    assert Image.open(png).width > 500
