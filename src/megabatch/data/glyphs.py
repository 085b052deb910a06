"""The embedded pairs: every character that the DejaVu fonts inside matplotlib can draw, with its Unicode name and style."""

from __future__ import annotations

import functools
import importlib.util
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont

from .source import Damage, Sample

STYLES = {
    "sans": "DejaVuSans",
    "sans bold": "DejaVuSans-Bold",
    "sans oblique": "DejaVuSans-Oblique",
    "sans bold oblique": "DejaVuSans-BoldOblique",
    "mono": "DejaVuSansMono",
    "mono bold": "DejaVuSansMono-Bold",
    "mono oblique": "DejaVuSansMono-Oblique",
    "mono bold oblique": "DejaVuSansMono-BoldOblique",
    "serif": "DejaVuSerif",
    "serif bold": "DejaVuSerif-Bold",
    "serif italic": "DejaVuSerif-Italic",
    "serif bold italic": "DejaVuSerif-BoldItalic",
}
# First words of names that say what a character belongs to, with at least 20 characters each. Any other word, and there are some
# four hundred, belongs to OTHER: arrows, signs, operators, faces.
SCRIPTS = (
    "LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "HEBREW", "ARABIC", "NKO", "LAO", "GEORGIAN", "CANADIAN", "OGHAM", "TIFINAGH", "LISU",
    "OLD", "BRAILLE", "MATHEMATICAL", "MODIFIER", "COMBINING", "BOX", "DOMINO", "PLAYING", "TETRAGRAM", "HEXAGRAM", "APL",
)  # fmt: skip
OTHER = "OTHER"
# Pixels of an image's edge, of the font, and the row of the baseline: nearly every character fits, and small letters still differ
# from capitals, commas from apostrophes.
EDGE, SIZE, BASELINE = 32, 24, 24


class Glyphs:
    """Every character of every style that has a Unicode name and does not come out blank; a shard for each style.

    x: 32 × 32 grey pixels, black on white. y: "greek small letter alpha, serif bold italic": in small letters, as one types, and so
    that the "bold" of a name and of a style are the same bytes. label: the script. Characters are held out in all their styles.
    """

    def __init__(self) -> None:
        found = importlib.util.find_spec("matplotlib")
        if found is None or found.origin is None:
            raise ModuleNotFoundError("there is no matplotlib, whose fonts are drawn", name="matplotlib")
        folder = Path(found.origin).parent / "mpl-data" / "fonts" / "ttf"
        self._fonts = [str(folder / f"{name}.ttf") for name in STYLES.values()]
        self._characters = [_characters(font) for font in self._fonts]

    @property
    def lengths(self) -> Sequence[int]:
        return [len(characters) for characters in self._characters]

    @property
    def damage(self) -> Sequence[Damage]:
        return ()

    def read(self, shard: int, index: int) -> Sample:
        character, style = self._characters[shard][index], list(STYLES)[shard]
        return Sample(
            key=f"U+{ord(character):04X} {style}",
            x=_draw(self._fonts[shard], character),
            y=f"{unicodedata.name(character).lower()}, {style}",
            label=_script(character),
        )

    def group(self, shard: int, index: int) -> str:
        return self._characters[shard][index]

    def label(self, shard: int, index: int) -> str | None:
        return _script(self._characters[shard][index])


def _characters(path: str) -> str:
    """The characters of a font, in the order of their code points."""
    with TTFont(path, lazy=True) as font:
        numbers, starts = font.getReverseGlyphMap(), font["loca"]
        drawn = (
            chr(code) for code, glyph in font.getBestCmap().items() if starts[numbers[glyph]] != starts[numbers[glyph] + 1]
        )  # fmt: skip
        return "".join(sorted(character for character in drawn if unicodedata.name(character, "")))


def _script(character: str) -> str:
    first = unicodedata.name(character).split(" ", 1)[0]
    return first if first in SCRIPTS else OTHER


def _draw(path: str, character: str) -> Image.Image:
    """The character in the middle, on the baseline; moved or made smaller only where it would be cut off."""
    size = SIZE
    while True:
        font = _font(path, size)
        left, top, right, bottom = font.getbbox(character, anchor="ls")
        if max(right - left, bottom - top) <= EDGE:
            break
        size -= 1
    image = Image.new("L", (EDGE, EDGE), 255)
    x = (EDGE - (right - left)) // 2 - left
    y = min(max(BASELINE, -top), EDGE - bottom)
    ImageDraw.Draw(image).text((x, y), character, fill=0, font=font, anchor="ls")
    return image


@functools.cache
def _font(path: str, size: int) -> ImageFont.FreeTypeFont:
    # The plain layout, so that images do not depend on whether this Pillow can shape text.
    return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)
