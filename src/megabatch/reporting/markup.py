"""Pieces of HTML. Captions, keys, paths and settings come from outside: on the page, they have gone through `text`."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Iterable
from importlib import resources
from typing import TYPE_CHECKING, Any

from .drawing import DARK, LIGHT
from .wording import plain

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_LETTERS = 300
# Sentences may be longer than names.
LONG = 1000
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
# Pixels: pictures are shown at half of this, or less.
MOST_SIDE = 256


def text(value: Any, limit: int = MOST_LETTERS) -> str:
    """Anything from outside as text of a page or of an attribute, on one line.

    >>> text("<b> & 'c'")
    '&lt;b&gt; &amp; &#x27;c&#x27;'
    """
    return html.escape(plain(str(value), limit))


def document(title: str, body: str) -> str:
    """A whole page that loads nothing and runs nothing. title: a text, which is escaped; body: HTML."""
    style = resources.files(__package__).joinpath("style.css").read_text("utf-8")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{text(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}</main>
</body>
</html>
"""


def block(value: str) -> str:
    """A text from outside as it is, line by line."""
    lines = value.encode("utf-8", "replace").decode("utf-8").splitlines()
    return "<pre>" + "\n".join(html.escape(line.replace("\0", "")) for line in lines) + "</pre>\n"


def section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{''.join(parts)}</section>\n"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of numbers, given as HTML: all but the first column are right-aligned."""
    lines = [_row("th", head), *(_row("td", row) for row in rows)]
    return f'<div class="scroll"><table>\n{"".join(lines)}</table></div>\n'


def pairs(rows: Iterable[tuple[Any, Any]]) -> str:
    """A table of names and values from outside."""
    lines = (f"<tr><th>{text(name)}</th><td>{text(value)}</td></tr>\n" for name, value in rows)
    return f'<div class="scroll"><table>\n{"".join(lines)}</table></div>\n'


def image(picture: Image, words: str) -> str:
    """A picture, inside the page."""
    small = picture.convert("RGB")
    small.thumbnail((MOST_SIDE, MOST_SIDE))
    buffer = io.BytesIO()
    small.save(buffer, "PNG")
    return f'<img src="{_uri(buffer)}" alt="{text(words)}">'


def figure(draw: Callable[..., None], subject: Any, words: str) -> str:
    """What draw(subject, file, theme) draws, in the colours of the page, light or dark."""
    drawn = []
    for theme in (LIGHT, DARK):
        buffer = io.BytesIO()
        draw(subject, buffer, theme)
        drawn.append(_uri(buffer))
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{drawn[1]}">'
    return f'<picture>{dark}<img src="{drawn[0]}" alt="{text(words)}"></picture>\n'


def _row(tag: str, cells: Iterable[str]) -> str:
    marks = ("", *[' class="n"'] * 100)
    return "<tr>" + "".join(f"<{tag}{mark}>{cell}</{tag}>" for mark, cell in zip(marks, cells, strict=False)) + "</tr>\n"


def _uri(png: io.BytesIO) -> str:
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode("ascii")
