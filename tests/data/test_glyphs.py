"""The built-in pairs: their number, their images, and that styles of a character are held out together."""

import pickle
import time
import unicodedata
from collections import Counter

import pytest
from PIL import Image, ImageDraw, ImageFont

from megabatch.config import Data
from megabatch.data import open_source
from megabatch.data.glyphs import STYLES


@pytest.fixture(scope="module")
def glyphs():
    return open_source(Data())


def find(glyphs, character, style):
    shard = list(STYLES).index(style)
    index = next(i for i in range(glyphs.lengths[shard]) if glyphs.group(shard, i) == character)
    return glyphs.read(shard, index)


def ink(sample):
    """Return (left, top, right, bottom) of the pixels that are not white."""
    return sample.x.point(lambda value: 255 - value).getbbox()


def test_every_style_has_its_thousands_of_characters(glyphs):
    assert len(glyphs.lengths) == 12
    assert min(glyphs.lengths) > 2500
    characters = {glyphs.group(shard, i) for shard, length in enumerate(glyphs.lengths) for i in range(length)}
    # The numbers of DejaVu 2.37; other versions of the fonts may differ a little.
    assert 46_000 < sum(glyphs.lengths) < 48_000
    assert 6_500 < len(characters) < 6_900
    assert all(unicodedata.name(character) for character in characters)


def test_a_sample_is_a_character_with_its_name_and_style(glyphs):
    sample = find(glyphs, "α", "serif bold italic")
    assert sample.y == "greek small letter alpha, serif bold italic"
    assert sample.key == "U+03B1 serif bold italic"
    assert (sample.x.mode, sample.x.size) == ("L", (32, 32))
    assert sample.label == "GREEK"


def test_a_caption_belongs_to_one_image_only(glyphs):
    captions = Counter(glyphs.read(shard, i).y for shard in range(12) for i in range(0, glyphs.lengths[shard], 40))
    assert max(captions.values()) == 1


def test_no_image_is_blank_and_none_is_cut_off(glyphs):
    # The widest, tallest and deepest characters, and a sample of all others.
    special = {"ᙱ", "҉", "Ẳ", "Ổ", "ຸ", "\u031e", "ﷲ", "j", "🀶"}
    for shard, length in enumerate(glyphs.lengths):
        characters = [glyphs.group(shard, index) for index in range(length)]
        for index in {characters.index(c) for c in special & set(characters)} | set(range(0, length, 97)):
            left, top, right, bottom = ink(glyphs.read(shard, index))
            # On a larger canvas, the whole character has the same extent at some font size.
            sizes = (extent(glyphs._fonts[shard], characters[index], size) for size in range(24, 11, -1))
            assert (right - left, bottom - top) in sizes, glyphs.read(shard, index).key


def extent(path, character, size):
    page = Image.new("L", (128, 128), 0)
    font = ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)
    ImageDraw.Draw(page).text((64, 64), character, fill=255, font=font, anchor="ls")
    left, top, right, bottom = page.getbbox()
    return right - left, bottom - top


def test_characters_that_differ_in_size_or_height_have_different_images(glyphs):
    small, capital = ink(find(glyphs, "c", "sans")), ink(find(glyphs, "C", "sans"))
    assert small[3] - small[1] < capital[3] - capital[1]
    assert ink(find(glyphs, ",", "sans"))[1] > ink(find(glyphs, "'", "sans"))[3]


def test_styles_of_a_character_are_held_out_together(glyphs):
    places = [(shard, i) for shard in range(12) for i in range(glyphs.lengths[shard]) if glyphs.group(shard, i) == "Ж"]
    assert {glyphs.read(*place).y for place in places} == {f"cyrillic capital letter zhe, {style}" for style in STYLES}


def test_scripts_are_few_and_stable(glyphs):
    labels = Counter(glyphs.label(shard, i) for shard in range(12) for i in range(glyphs.lengths[shard]))
    assert {"LATIN", "GREEK", "CYRILLIC", "ARABIC", "OTHER"} <= set(labels)
    assert None not in labels
    assert len(labels) == 25
    assert min(labels.values()) > 50
    assert find(glyphs, "→", "sans").label == "OTHER"


def test_glyphs_can_be_pickled_and_draw_the_same(glyphs):
    copy = pickle.loads(pickle.dumps(glyphs))
    assert copy.lengths == glyphs.lengths
    assert copy.read(3, 1000).x.tobytes() == glyphs.read(3, 1000).x.tobytes()


def test_opening_takes_less_than_a_second():
    start = time.process_time()
    open_source(Data())
    assert time.process_time() - start < 1


def test_towers_of_another_kind_are_refused():
    with pytest.raises(ValueError, match=r"'glyphs': x is an image and y a text, but the towers take text and text"):
        open_source(Data(), x="text")
