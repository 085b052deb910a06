"""A report as one HTML page that holds all of it, loads nothing and runs nothing.

Captions, keys, paths and settings come from outside. The template escapes every value; only the style sheet is inserted as it is.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megabatch import packages
from megabatch.files import write_text

from . import figures
from .figures import Figure
from .format import plain
from .report import Report

if TYPE_CHECKING:
    from PIL.Image import Image

# Characters of names and of sentences.
SHORT, LONG = 300, 1000
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
# Pixels: images are shown at half of this, or less.
MOST_SIDE = 256


class Drawn(NamedTuple):
    """A figure as data URIs, in the colors of light and of dark pages."""

    light: str
    dark: str
    description: str


def as_html(report: Report) -> str:
    """Return the report as a page."""
    packages.require(packages.HTML)
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= FILTERS
    template = environment.from_string(_resource("report.html.j2"))
    return template.render(report=report, policy=POLICY, style=_resource("style.css")) + "\n"


def write_report(report: Report, folder: Path) -> None:
    """Write report.html and the figures that have a file name into a folder."""
    for figure in report.figures():
        if figure.file:
            figures.save(figure, folder / figure.file)
    write_text(folder / "report.html", as_html(report))


def drawn(figure: Figure) -> list[Drawn]:
    """Return the images of a figure: one, or one for each chart where these are separate."""
    parts = [Figure([chart], chart.title, size=figure.size) for chart in figure.charts] if figure.separate else [figure]
    images = []
    for part in parts:
        uris = []
        for theme in (figures.LIGHT, figures.DARK):
            buffer = io.BytesIO()
            figures.save(part, buffer, theme)
            uris.append(_uri(buffer))
        images.append(Drawn(uris[0], uris[1], part.description))
    return images


def image_uri(image: Image) -> str:
    """Return a small copy of an image as a data URI."""
    small = image.convert("RGB")
    small.thumbnail((MOST_SIDE, MOST_SIDE))
    buffer = io.BytesIO()
    small.save(buffer, "PNG")
    return _uri(buffer)


def _uri(png: io.BytesIO) -> str:
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode("ascii")


def _short(value: object) -> str:
    return plain(str(value), SHORT)


def _long(value: object) -> str:
    # A percent sign stays with its number.
    return plain(str(value), LONG).replace(" %", "\xa0%")


def _code(value: str) -> str:
    """Return a text line by line, without what cannot be written."""
    lines = value.encode("utf-8", "replace").decode("utf-8").splitlines()
    return "\n".join(line.replace("\0", "") for line in lines)


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


FILTERS: dict[str, Callable[..., Any]] = {"short": _short, "long": _long, "code": _code, "drawn": drawn, "image_uri": image_uri}
