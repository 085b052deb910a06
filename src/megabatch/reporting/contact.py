"""Contact sheets: queries on the left, their answers on the right, framed by whether they are right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch import packages
from megabatch.files import replacing

from .format import plain
from .history import number
from .report import Exhibit, Question

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

# Pixels: side of a cell, space around it, width of its frame, side of its mark, font size, line height.
CELL, GAP, FRAME, MARK, LETTERS, LINE = 240, 28, 6, 32, 20, 26
CAPTION_LINES = 3
MOST_CHARACTERS = 400
MOST_PIXELS = 50_000_000
INK, FAINT, PAPER, GROUND = "#26262b", "#6f6f78", "#ffffff", "#f4f4f5"
FRAMES = {True: "#1a9c5b", False: "#d0402f", None: "#c9c9ce"}


def contact_sheet(questions: Sequence[Question], out: Path | str) -> None:
    """Write the sheet as PNG: a row for each question; right answers have a green frame and a tick, wrong ones a red frame and
    a cross."""
    if not questions:
        raise ValueError("a contact sheet needs at least one question; none was given")
    packages.require(packages.CONTACT_SHEET)
    from PIL import Image, ImageDraw

    columns = 1 + max(len(question.answers) for question in questions)
    height = CELL + CAPTION_LINES * LINE + 2 * GAP
    sheet = Image.new("RGB", (columns * (CELL + GAP) + 2 * GAP, len(questions) * height + GAP), PAPER)
    draw, font = ImageDraw.Draw(sheet), _font()
    for row, question in enumerate(questions):
        top = GAP + row * height
        _cell(sheet, draw, font, question.asked, (GAP, top), framed=False)
        for place, answer in enumerate(question.answers):
            # Twice the space between a question and its answers.
            _cell(sheet, draw, font, answer, (2 * GAP + (place + 1) * (CELL + GAP), top), framed=True)
    with replacing(out) as temporary:
        sheet.save(temporary, "PNG")


def read_contact(run: Path) -> list[Question]:
    """Return the questions of a run's contact.json, none if it does not exist. Images outside of the run's folder are left out."""
    try:
        contents = json.loads((run / "contact.json").read_text("utf-8"))
    except (OSError, ValueError):
        return []
    questions = contents.get("queries") if isinstance(contents, dict) else None
    return [
        Question(_exhibit(question, run), [_exhibit(answer, run) for answer in _tables(question.get("answers"))])
        for question in _tables(questions)
    ]


def _tables(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _exhibit(entry: dict[str, Any], run: Path) -> Exhibit:
    right = entry.get("right")
    return Exhibit(
        text=str(entry.get("text") or ""),
        image=_read_image(run, entry.get("image")),
        right=right if isinstance(right, bool) else None,
        score=number(entry, "score"),
    )


def _read_image(run: Path, name: Any) -> Image | None:
    """Return the image if it is a readable PNG of sensible size inside the run's folder: a run may come from someone else."""
    from PIL import Image, UnidentifiedImageError

    if not isinstance(name, str):
        return None
    try:
        path = (run / name).resolve()
        if not path.is_relative_to(run.resolve()):
            return None
        with path.open("rb") as file, Image.open(file, formats=("PNG",)) as image:
            if image.width * image.height > MOST_PIXELS:
                return None
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError, Image.DecompressionBombWarning):
        return None


def _cell(sheet: Image, draw: ImageDraw, font: FreeTypeFont, item: Exhibit, place: tuple[int, int], *, framed: bool) -> None:
    left, top = place
    box = (left, top, left + CELL, top + CELL)
    draw.rectangle(box, fill=GROUND)
    if item.image is None:
        lines = _wrapped(item.text, font, CELL - 4 * FRAME, (CELL - 4 * FRAME - MARK) // LINE)
        _lines(draw, font, lines, (left + 2 * FRAME, top + 2 * FRAME), INK)
    else:
        image = _resized(item.image)
        sheet.paste(image, (left + (CELL - image.width) // 2, top + (CELL - image.height) // 2))
        _lines(draw, font, _wrapped(item.text, font, CELL, CAPTION_LINES), (left, top + CELL + 6), FAINT)
    if framed:
        draw.rectangle(box, outline=FRAMES[item.right], width=FRAME)
        _mark(draw, font, item.right, (left + CELL, top + CELL))


def _mark(draw: ImageDraw, font: FreeTypeFont, right: bool | None, corner: tuple[int, int]) -> None:
    """Draw a tick or a cross in the lower right corner, for readers who cannot distinguish the colors."""
    if right is None:
        return
    x, y = corner
    draw.rectangle((x - MARK, y - MARK, x, y), fill=FRAMES[right])
    draw.text((x - MARK // 2, y - MARK // 2), "✓" if right else "✗", font=font, fill=PAPER, anchor="mm")


def _resized(image: Image) -> Image:
    """Return the image as large as a cell allows, in its proportions."""
    from PIL import Image

    side = CELL - 2 * FRAME
    scale = side / max(image.size)
    size = tuple(max(1, round(length * scale)) for length in image.size)
    return image.convert("RGB").resize((size[0], size[1]), Image.Resampling.LANCZOS)


def _lines(draw: ImageDraw, font: FreeTypeFont, lines: Sequence[str], place: tuple[int, int], color: str) -> None:
    for row, line in enumerate(lines):
        draw.text((place[0], place[1] + row * LINE), line, font=font, fill=color)


def _wrapped(text: str, font: FreeTypeFont, width: int, most: int) -> list[str]:
    """Return at most `most` lines, the last with an ellipsis if there is more; words longer than a line are cut."""
    lines, line = [], ""
    for word in plain(text, MOST_CHARACTERS).split():
        for piece in _pieces(word, font, width):
            if line and font.getlength(f"{line} {piece}") > width:
                lines.append(line)
                line = piece
            else:
                line = f"{line} {piece}".strip()
    lines.append(line)
    if len(lines) <= most:
        return lines
    last = lines[most - 1]
    while last and font.getlength(last + "…") > width:
        last = last[:-1]
    return [*lines[: most - 1], last + "…"]


def _pieces(word: str, font: FreeTypeFont, width: int) -> list[str]:
    pieces = [""]
    for letter in word:
        if pieces[-1] and font.getlength(pieces[-1] + letter) > width:
            pieces.append("")
        pieces[-1] += letter
    return pieces


def _font() -> FreeTypeFont:
    """Return DejaVu Sans, which comes with matplotlib; a character that it lacks is drawn as a box."""
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), LETTERS)
