"""Every renderer on the report of every verb, with hostile texts from outside."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser

import pytest
from PIL import Image
from rich.console import Console
from sample_reports import EVIL, VERBS, measured

from megabatch.measuring.profile import profile_report, quantities
from megabatch.measuring.profile import report as profile_reports
from megabatch.measuring.profile.curve import Size, judge, point
from megabatch.measuring.profile.quantities import Quantity, Timed
from megabatch.reporting import figures, html
from megabatch.reporting.format import bytes_text, change_text, count_text, percent_text, plain, seconds_text
from megabatch.reporting.html import POLICY, Drawn, as_html
from megabatch.reporting.markdown import as_json, as_markdown, table_markdown
from megabatch.reporting.report import Code, Column, Gallery, Notes, Report, Section, Table, pairs_table
from megabatch.reporting.terminal import print_report

TAGS = """html head meta title style body main header footer section article h1 h2 h3 p div span dl dt dd table thead tbody tr th td
    picture source img ol ul li bdi details summary pre"""


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.words = ""
        self.source = source
        self.feed(source)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data) -> None:
        self.words += data + " "


@pytest.fixture(scope="module", params=VERBS)
def report(request) -> Report:
    return VERBS[request.param]()


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setitem(html.FILTERS, "drawn", lambda figure: [Drawn("data:image/png;base64,", "data:image/png;base64,", EVIL)])


def numbers_of(report: Report) -> list[str]:
    return [
        column.text(row) for table in report.tables() for row in table.rows for column in table.columns if column.kind == "number"
    ]


def test_a_page_is_well_formed_escapes_everything_and_loads_nothing(report, undrawn):
    page = Page(as_html(report))
    assert page.source.startswith("<!DOCTYPE html>") and page.source.endswith("</html>\n")
    assert {tag for tag, _ in page.tags} <= set(TAGS.split())
    assert "<script>document.title='owned'</script>" in page.words
    attributes = [(name, value) for _, attributes in page.tags for name, value in attributes.items()]
    assert not [name for name, _ in attributes if name.startswith("on") or name in ("href", "action")]
    assert all(value.startswith("data:image/png;base64,") for name, value in attributes if name in ("src", "srcset"))
    style = re.search("<style>(.*)</style>", page.source, re.DOTALL)[1]
    assert not re.search(r"@import|url\(|//", style)
    assert ("content", POLICY) in attributes and POLICY.startswith("default-src 'none'")


def test_every_renderer_shows_the_headline_and_every_note(report, undrawn):
    out = io.StringIO()
    print_report(report, Console(file=out, width=400))
    shown = {"terminal": out.getvalue(), "html": Page(as_html(report)).words.replace("\xa0", " "), "markdown": as_markdown(report)}
    values = json.loads(as_json(report))
    assert values["headline"] == report.headline
    for name, text in shown.items():
        text = " ".join(text.replace("&lt;", "<").split())
        assert " ".join(report.headline.split()) in text, name
        for note in report.notes():
            assert name == "terminal" or " ".join(note.split())[:200] in text, (name, note)


def test_every_number_of_a_table_is_on_the_page_and_in_markdown(report, undrawn):
    words, markdown = Page(as_html(report)).words.replace("\xa0", " "), as_markdown(report)
    for number in numbers_of(report):
        assert number in words and number in markdown


def test_numbers_cannot_be_broken_over_lines(undrawn):
    page = as_html(
        Report("t", "s", "h", sections=[Section("", [Table([Column("size", "size", "{:,}".format)], [{"size": 1024}])])])
    )
    assert '<td class="number">1,024</td>' in page
    style = re.search("<style>(.*)</style>", page, re.DOTALL)[1]
    assert re.search(r"\.number, \.word \{ white-space: nowrap; \}", style) and "tabular-nums" in style


def test_json_holds_the_values_of_every_table_and_the_points_of_every_figure(report):
    values = json.loads(as_json(report))
    blocks = [block for section in values["sections"] for block in section["blocks"]]
    tables = [block for block in blocks if block["kind"] == "table"]
    assert [len(table["rows"]) for table in tables] == [len(table.rows) for table in report.tables()]
    drawn = [chart for block in blocks if block["kind"] == "figure" for chart in block["charts"]]
    assert all(chart.get("series") or chart.get("parts") for chart in drawn)


def test_every_figure_can_be_drawn(report, monkeypatch):
    monkeypatch.setattr(figures, "DPI", 40)
    for figure in report.figures():
        png = io.BytesIO()
        figures.save(figure, png, figures.DARK)
        with Image.open(png) as image:
            assert image.width > 200 and len(image.convert("RGB").getcolors(2**20)) > 10


def test_a_quantity_of_a_profile_is_one_record(monkeypatch, undrawn):
    extra = Quantity("watts", "power", "{:.0f} W".format, lambda sample: 300.0, chart="power drawn")
    for module in (quantities, profile_reports):
        monkeypatch.setattr(module, "QUANTITIES", (*quantities.QUANTITIES, extra))
    steps = [point(Size(batch, 8), Timed((0.5, 0.6), 2**20, None, 0), 1, None) for batch in (8, 16)]
    report = profile_report(measured(judge(steps, "batch", None, None)))
    assert steps[0]["watts"] == 300 and '"watts": 300.0' in as_json(report)
    assert "300 W" in as_markdown(report) and '<td class="number">300 W</td>' in as_html(report)
    assert "power drawn" in [chart.title for figure in report.figures() for chart in figure.charts]


def test_only_what_the_template_expects_is_rendered():
    everything = [Notes([EVIL]), Code(EVIL, EVIL), pairs_table([(EVIL, EVIL)]), Gallery([], EVIL)]
    page = Page(as_html(Report(EVIL, EVIL, EVIL, sections=[Section(EVIL, everything)], warning=EVIL, footer=EVIL)))
    assert {tag for tag, _ in page.tags} <= set(TAGS.split())
    # Title, subject, headline, warning, heading, note, summary, code, two cells, gallery, footer.
    assert page.words.count("<script>document.title='owned'</script>") == 12


def test_markdown_cannot_be_broken_by_texts():
    table = table_markdown(Table([Column("a", "a", kind="text")], [{"a": "x|y\nz <b>"}]))
    assert table.splitlines()[-1] == "| x\\|y z &lt;b> |"
    fenced = as_markdown(Report("t", "", "h", sections=[Section("", [Code("a\n```\n<script>")])]))
    assert fenced.endswith("````\na\n```\n<script>\n````\n")


def test_missing_values_are_dashes_and_empty_columns_are_left_out():
    table = Table([Column("a", "a"), Column("b", "b"), Column("c", "c", kind="text")], [{"a": 1, "c": "x"}, {"a": None}])
    assert [column.key for column in table.visible_columns()] == ["a", "c"]
    assert [column.text({"a": None}) for column in table.columns] == ["–", "–", ""]


def test_a_bar_is_as_long_as_its_share():
    column = Column("share", "share", percent_text, bar=True)
    assert [column.share({"share": share}) for share in (0.25, 7.0, -1, None, "x")] == [0.25, 1.0, 0.0, None, None]


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("one\n\ttwo\x00 three", 10, "one two t…"),
        ("a" * 10**6, 3, "aa…"),
        ("\ud800 \u202e x", 9, "? x"),
        ("👩‍👧", 9, "👩‍👧"),
        ("", 9, ""),
    ],
)
def test_texts_are_shown_on_one_line_without_what_is_invisible(text, limit, expected):
    assert plain(text, limit) == expected


def test_quantities_are_readable():
    counts = [count_text(n) for n in (0, 1024, 99_999, 100_000, 999_999, 1_234_567)]
    assert counts == ["0", "1,024", "99,999", "100 k", "1 M", "1.23 M"]
    sizes = [bytes_text(n) for n in (0, 1023, 2**20, 640 * 2**20, 1.5 * 2**40)]
    assert sizes == ["0 B", "1023 B", "1 MiB", "640 MiB", "1.5 TiB"]
    assert [seconds_text(s) for s in (0.0123, 9.5, 252, 7500)] == ["12.3 ms", "9.5 s", "4 min 12 s", "2 h 5 min"]
    assert [percent_text(p) for p in (0, 0.00021, 0.83, 1)] == ["0 %", "0.021 %", "83.0 %", "100 %"]
    assert [change_text(c) for c in (0.5, -0.031)] == ["+50.0 %", "−3.1 %"]
