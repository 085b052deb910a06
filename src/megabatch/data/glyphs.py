"""The built-in pairs: every character that the DejaVu fonts inside matplotlib can draw, with its Unicode name and style."""

from __future__ import annotations

import functools
import importlib.util
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megabatch import packages
from megabatch.config import Data

from .source import ALL_PIXELS, Damage, DataFormat, ImageRequests, Sample, Sides

if TYPE_CHECKING:
    from PIL import Image, ImageFont

NAME = "glyphs"

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
# First words of Unicode names that name a script or family of at least 20 characters. Characters with any other first word, of
# which there are about four hundred, belong to OTHER: arrows, signs, operators, faces.
SCRIPTS = (
    "LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "HEBREW", "ARABIC", "NKO", "LAO", "GEORGIAN", "CANADIAN", "OGHAM", "TIFINAGH", "LISU",
    "OLD", "BRAILLE", "MATHEMATICAL", "MODIFIER", "COMBINING", "BOX", "DOMINO", "PLAYING", "TETRAGRAM", "HEXAGRAM", "APL",
)  # fmt: skip
OTHER = "OTHER"
# In pixels: the edge of an image, the font size and the row of the baseline. Nearly every character fits, and small letters still
# differ from capitals, commas from apostrophes.
EDGE, SIZE, BASELINE = 32, 24, 24


class Glyphs:
    """Every character of every style that has a Unicode name and is not blank; one shard per style.

    x: 32 × 32 grey pixels, black on white. y: "greek small letter alpha, serif bold italic", in lower case as users type it, and so
    that "bold" is the same bytes in a name and in a style. label: the script. A character is held out in all its styles.
    """

    def __init__(self) -> None:
        matplotlib = importlib.util.find_spec("matplotlib")
        assert matplotlib is not None and matplotlib.origin is not None
        folder = Path(matplotlib.origin).parent / "mpl-data" / "fonts" / "ttf"
        self._fonts = [str(folder / f"{name}.ttf") for name in STYLES.values()]
        self._characters = [_characters(font) for font in self._fonts]

    @property
    def lengths(self) -> Sequence[int]:
        return [len(characters) for characters in self._characters]

    @property
    def damage(self) -> Sequence[Damage]:
        return ()

    def read(self, shard: int, index: int, requests: ImageRequests = ALL_PIXELS) -> Sample:
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
    """Return the characters of a font, ordered by code point."""
    from fontTools.ttLib import TTFont

    with TTFont(path, lazy=True) as font:
        glyph_ids, offsets = font.getReverseGlyphMap(), font["loca"]
        drawn = (
            chr(code) for code, glyph in font.getBestCmap().items() if offsets[glyph_ids[glyph]] != offsets[glyph_ids[glyph] + 1]
        )  # fmt: skip
        return "".join(sorted(character for character in drawn if unicodedata.name(character, "")))


def _script(character: str) -> str:
    first = unicodedata.name(character).split(" ", 1)[0]
    return first if first in SCRIPTS else OTHER


def _draw(path: str, character: str) -> Image.Image:
    """Return an image of the character, centred on the baseline; moved or shrunk only if it would be cut off."""
    from PIL import Image, ImageDraw

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
    from PIL import ImageFont

    # The basic layout, so that images do not depend on whether this Pillow can shape text.
    return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)


def _open(data: Data, source: str, sides: Sides) -> Glyphs:
    if sides != Sides("image", "text"):
        raise ValueError(f"data.source is {NAME!r}: x is an image and y a text, but the towers take {sides.x} and {sides.y}")
    return Glyphs()


GLYPHS = DataFormat(form=repr(NAME), open=_open, recognizes=lambda source: source == NAME, needs=packages.GLYPHS)
