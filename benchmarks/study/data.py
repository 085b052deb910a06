"""Builds the sources of the study from packages of Debian and PyPI: `python -m benchmarks.study data --out build/study`.

A source is a set of pairs in which every x and every y occurs once: texts of at most 64 bytes, or images of a character with the
text that belongs to it. Pairs with equal or nearly equal content, and those of one entry, are kept on one side of the split into
training, validation and test. A source is one compressed file, and `study-sources.json` keeps its digest and its counts.
"""

from __future__ import annotations

import ast
import bz2
import gzip
import hashlib
import io
import itertools
import json
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import unicodedata
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# Bytes of a text that a tower reads.
WIDTH = 64
# Pairs of the validation and of the test part: this many, or this share of a small source.
HELD_OUT, HELD_OUT_SHARE = 4096, 0.1
# Components with more pairs than this always belong to training, so that a held-out part has many different ones.
LARGE_COMPONENT = 64
# Edge of a CJK character in pixels; the built-in glyphs have 32.
CJK_EDGE = 24

Text = str
Content = Text | bytes


class Entry(NamedTuple):
    """A pair, and the key of what it must share its part of the split with (an entry of a dictionary, a character)."""

    x: Content
    y: Text
    group: str


class SourceKind(NamedTuple):
    """How to build a source: its Debian packages and wheels, and the function that reads them.

    pixels: edge of the images of x; None: x is text.
    """

    title: str
    debian: tuple[str, ...]
    wheels: tuple[str, ...]
    entries: Callable[[Path], Iterable[Entry]]
    pixels: int | None = None


class Arrays(NamedTuple):
    """A source in memory: training pairs first, then validation, then test. Texts are rows of WIDTH bytes, padded with zeros."""

    x: np.ndarray
    y: np.ndarray
    train: int
    validation: int
    test: int


def wordnet(folder: Path) -> Iterator[Entry]:
    """Yield the definition and the words of every WordNet synset."""
    for file in sorted(folder.rglob("wordnet/data.*")):
        for line in file.read_text().splitlines():
            if line.startswith("  "):
                continue
            fields, gloss = line.split(" | ", 1)
            parts = fields.split()
            count = int(parts[3], 16)
            words = [parts[4 + 2 * i].replace("_", " ") for i in range(count)]
            yield Entry(gloss.split('; "')[0].strip(), ", ".join(words), "")


def packages(folder: Path) -> Iterator[Entry]:
    """Yield the short description and the name of every package that apt knows."""
    name = ""
    listing = subprocess.run(["apt-cache", "dumpavail"], check=True, capture_output=True, text=True).stdout
    for line in listing.splitlines():
        if line.startswith("Package: "):
            name = line[9:]
        elif line.startswith("Description: "):
            # libfoo1, libfoo-dev and libfoo-doc are one entry.
            stem = re.sub(r"[\d.]+|-(dev|doc|dbg|data|common|bin|tools|utils|dbgsym|perl|java|examples)\b", "", name)
            yield Entry(line[13:], name, stem)


def german(folder: Path) -> Iterator[Entry]:
    """Yield the German and English variants of every entry of the Ding dictionary."""
    (file,) = folder.rglob("trans/de-en")
    for number, line in enumerate(file.read_text().splitlines()):
        if line.startswith("#") or " :: " not in line:
            continue
        sides = [side.split(" | ") for side in line.split(" :: ", 1)]
        for x, y in zip(*sides, strict=False):
            yield Entry(_without_notes(x), _without_notes(y), str(number))


def _without_notes(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", text)).strip(" ;")


def japanese(folder: Path) -> Iterator[Entry]:
    """Yield the words of EDICT with their reading, and the English meanings."""
    for file in sorted(folder.rglob("share/edict/edict")):
        for line in file.read_bytes().decode("euc-jp", "replace").splitlines()[1:]:
            word, _, meanings = line.partition(" /")
            text = re.sub(r"\((?:[a-z0-9,:\- ]+|P)\)|\{[^}]*\}|/EntL\w+", "", meanings)
            yield Entry(re.sub(r"\([^)]*\)", "", word), text.replace("/", "; ").strip("; "), word.partition(" [")[0])


def japanese_names(folder: Path) -> Iterator[Entry]:
    """Yield the proper names of ENAMDICT in Japanese script, and their readings in Latin letters."""
    (file,) = folder.rglob("share/edict/enamdict")
    for line in file.read_bytes().decode("euc-jp", "replace").splitlines()[1:]:
        word, _, meanings = line.partition(" /")
        written, _, _ = word.partition(" [")
        yield Entry(written, re.sub(r"^\([^)]*\) *", "", meanings).strip("/"), "")


def dictionaries(folder: Path) -> Iterator[Entry]:
    """Yield the headwords and the translations and explanations of the FreeDict dictionaries."""
    for file in sorted(folder.rglob("*.dict.dz")):
        text = gzip.decompress(file.read_bytes())
        for line in file.with_name(file.name.removesuffix(".dict.dz") + ".index").read_text().splitlines():
            word, offset, length = line.split("\t")
            if word.startswith("00database"):
                continue
            start = _base64(offset)
            first, _, rest = text[start : start + _base64(length)].decode("utf-8", "replace").partition("\n")
            # The first line has the word, its pronunciation between slashes and its grammar in angle brackets.
            yield Entry(re.split(r" [/<\[(]", first)[0], rest, "")


def _base64(digits: str) -> int:
    """Return the number that an index of dictd holds."""
    value = 0
    for digit in digits:
        value = value * 64 + "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/".index(digit)
    return value


def pronunciations(folder: Path) -> Iterator[Entry]:
    """Yield the spelling and the phonemes of the words of the CMU dictionary."""
    (file,) = folder.rglob("cmu/cmudict-*.out")
    for line in file.read_text().splitlines():
        match = re.match(r'\("([^"]+)" \S+ (.*)\)$', line)
        if match:
            yield Entry(match[1], " ".join(re.findall(r"[a-z]+|\d", match[2])), "")


def code(folder: Path) -> Iterator[Entry]:
    """Yield the first sentence of the docstring and the code of every documented function of the wheels."""
    with ProcessPoolExecutor() as pool:
        for entries in pool.map(_functions, sorted(folder.glob("*.whl"))):
            yield from entries


def _functions(wheel: Path) -> list[Entry]:
    entries = []
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if not name.endswith(".py") or archive.getinfo(name).file_size > 1_000_000:
                continue
            try:
                text = archive.read(name).decode()
                tree = ast.parse(text)
            except (SyntaxError, ValueError, RecursionError):
                continue
            lines = text.splitlines()
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    entries += _function(node, lines)
    return entries


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> list[Entry]:
    document = ast.get_docstring(node)
    if not document or len(node.body) < 2:
        return []
    # The code without the name, which often is the docstring in other words: arguments and body.
    arguments = ",".join(a.arg for a in node.args.args)
    body = " ".join(lines[node.body[1].lineno - 1 : node.end_lineno]).split()
    return [Entry(" ".join(document.split("\n\n")[0].split()), " ".join([f"({arguments})", *body]), "")]


def glyphs(folder: Path) -> Iterator[Entry]:
    """Yield the characters of the fonts inside matplotlib, in twelve styles, and their Unicode names and styles."""
    from PIL import Image

    from megabatch.data.glyphs import Glyphs

    source = Glyphs()
    for shard, length in enumerate(source.lengths):
        for index in range(length):
            sample = source.read(shard, index)
            assert isinstance(sample.x, Image.Image) and isinstance(sample.y, str)
            ink = 255 - np.frombuffer(sample.x.convert("L").tobytes(), np.uint8)
            yield Entry(ink.tobytes(), sample.y, source.group(shard, index))


def cjk(folder: Path) -> Iterator[Entry]:
    """Yield the CJK characters of a font, with their readings and meaning from Unihan."""
    from PIL import Image, ImageDraw, ImageFont

    (readings,) = folder.rglob("Unihan_Readings.txt.bz2")
    fields: dict[str, dict[str, str]] = {}
    for line in bz2.decompress(readings.read_bytes()).decode().splitlines():
        if line.startswith("U+"):
            point, field, value = line.split("\t")
            fields.setdefault(chr(int(point[2:], 16)), {})[field] = value
    (file,) = folder.rglob("wqy-zenhei.ttc")
    font = ImageFont.truetype(str(file), CJK_EDGE - 2)
    missing = font.getmask("\uffff").getbbox()
    for character, known in sorted(fields.items()):
        reading = known.get("kMandarin", "").split(" ")[0]
        if not reading or font.getmask(character).getbbox() in (None, missing):
            continue
        image = Image.new("L", (CJK_EDGE, CJK_EDGE), 0)
        ImageDraw.Draw(image).text((1, CJK_EDGE // 2), character, fill=255, font=font, anchor="lm")
        plain = unicodedata.normalize("NFD", reading)
        text = f"{plain} {known.get('kCantonese', '').split(' ')[0]} {known.get('kDefinition', '')}"
        # Sixteen grey levels, for the size of the file.
        yield Entry((np.frombuffer(image.tobytes(), np.uint8) // 16 * 17).tobytes(), text, character)


def functions(folder: Path) -> Iterator[Entry]:
    """Yield the names and the bodies of the C functions of Linux, GCC, the binutils and the C library."""
    for file in sorted(folder.rglob("*.tar.xz")):
        with tarfile.open(file) as archive:
            for member in archive:
                # Links would be read by going back in the compressed file.
                wanted = member.isfile() and member.name.endswith((".c", ".h", ".cc"))
                content = archive.extractfile(member) if wanted else None
                if content is not None:
                    yield from _c_functions(content.read().decode(errors="replace"))


def _c_functions(text: str) -> Iterator[Entry]:
    """Yield the functions of a C file: what stands before a brace in the first column, and what stands up to the next."""
    pieces = text.split("\n{\n")
    for before, after in itertools.pairwise(pieces):
        head = re.split(r"\n\s*\n|[;}]\s*\n|\*/\n|^#.*\n", before[-1000:], flags=re.MULTILINE)[-1]
        name = re.search(r"(\w+) ?\(", head)
        body, end, _ = after.partition("\n}")
        if name and end:
            yield Entry(name[1], body, "")


def fields(folder: Path) -> Iterator[Entry]:
    """Yield the descriptions and the names of the fields of the web services that botocore and Google's client know."""
    (aws,), (google,) = (folder.glob(f"{name}-*.whl") for name in ("botocore", "google_api_python_client"))
    with zipfile.ZipFile(aws) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith("/service-2.json.gz"):
                for shape, value in json.loads(gzip.decompress(archive.read(name)))["shapes"].items():
                    for field, member in value.get("members", {}).items():
                        yield Entry(re.sub(r"<[^>]+>", " ", member.get("documentation", "")), f"{shape}.{field}", "")
    with zipfile.ZipFile(google) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".json") and "/documents/" in name:
                for shape, value in json.loads(archive.read(name)).get("schemas", {}).items():
                    for field, member in value.get("properties", {}).items():
                        yield Entry(member.get("description", ""), f"{shape}.{field}", "")


def synonyms(folder: Path) -> Iterator[Entry]:
    """Yield the words of thesauri of several languages, and their synonyms."""
    for language in THESAURI:
        # The same thesaurus stands there once for each country; the first line is its encoding.
        file = min((folder / f"mythes-{language}").rglob("th_*.dat"))
        encoding, _, content = file.read_bytes().partition(b"\n")
        lines = iter(content.decode(encoding.decode().strip().replace("ISO8859", "ISO-8859"), "replace").splitlines())
        for line in lines:
            # The word and its number of senses, of which each is a line: (part of speech)|synonym|synonym (note).
            word, _, senses = line.partition("|")
            if senses.strip().isdigit():
                found = [text for _, sense in zip(range(int(senses)), lines, strict=False) for text in sense.split("|")[1:]]
                others = (re.sub(r"\([^)]*\)", "", text).strip() for text in found)
                yield Entry(word, "; ".join(dict.fromkeys(text for text in others if text not in ("", word))), "")


def messages(folder: Path) -> Iterator[Entry]:
    """Yield the messages of programs in pairs of languages. All pairs of an English message are one entry."""
    catalogs: dict[tuple[Path, str], dict[str, Path]] = {}
    for file in sorted(folder.rglob("LC_MESSAGES/*.mo")):
        if file.is_file():
            catalogs.setdefault((file.parents[2], file.name), {})[file.parents[1].name] = file
    for files in catalogs.values():
        for pair in LANGUAGES.split():
            x, y = pair.split("-")
            if x in files and y in files:
                xs, ys = (_catalog(files[language].read_bytes()) for language in (x, y))
                for key in xs:
                    yield from _translations(key, xs[key], ys.get(key, ""))


def _translations(key: str, x: Text, y: Text) -> list[Entry]:
    """Return the pair of a message, none if one side is missing, not translated, equal to the other or not in UTF-8."""
    # A context stands before the message.
    message = key.rpartition("\4")[2]
    wanted = message and x and y and x != y and message not in (x, y) and "\ufffd" not in x + y
    return [Entry(x, y, near(clean(message)).decode())] if wanted else []


def _catalog(content: bytes) -> dict[str, Text]:
    """Return the messages of a compiled gettext catalog and their translations, the first form of those with a plural."""
    order = "<" if content[:4] == b"\xde\x12\x04\x95" else ">"
    count, *tables = struct.unpack_from(f"{order}3I", content, 8)

    def texts(table: int) -> list[str]:
        numbers = struct.unpack_from(f"{order}{2 * count}I", content, table)
        spans = zip(numbers[::2], numbers[1::2], strict=True)
        return [content[start : start + length].split(b"\0")[0].decode(errors="replace") for length, start in spans]

    return dict(zip(*map(texts, tables), strict=True))


# The same wheels on every machine, which only reads the Python files in them.
WHEEL_PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_28_x86_64")
WHEEL_TAGS = ["--python-version", "3.11", *(word for platform in WHEEL_PLATFORMS for word in ("--platform", platform))]
# Wheels of the source `code`; the project uses none of their functions for anything else in this study.
CODE_WHEELS = """
    angr ansible ansible-core apache-beam ase astropy biopython breezy celery certbot cinder cirq-core cvxpy dask deepchem dgl
    dipy django django-cms esphome espnet gammapy gensim haystack-ai heat homeassistant hyperspy ibis-framework ironic keras
    keystone lalsuite langchain-community litellm llama-index-core manila mdanalysis mercurial mlflow mne music21 nemo-toolkit
    netket networkx neutron nilearn nltk nova obspy openfermion openmm openstacksdk ortools paddlepaddle panda3d pandas
    pennylane plotly polars psychopy pycbc pygame pyglet pymatgen pyomo pyscf python-pptx pyvista qiskit qutip ray reportlab
    scapy
"""
DICTIONARIES = """
    hun-eng epo-eng eng-fin deu-fra deu-swe pol-eng hrv-eng eng-tur deu-spa eng-ces eng-bul deu-rus pol-rus eng-ara fra-ita eng-jpn
    eng-hin pol-spa fra-spa nld-spa ell-eng swe-deu jpn-deu eng-hun eng-hrv fin-eng ara-eng pol-deu fra-deu deu-pol pol-fra pol-ita
    fra-bre fin-ell fin-bul pol-fin pol-nor
"""
THESAURI = ("cs", "da", "fr", "it", "pl", "bg", "ro")
# Packages with the most messages that the others do not have, for their size.
MESSAGE_PACKAGES = """
    amule-common anjuta-common apper-data aptitude-common ardour-data audacious-plugins-data audacity-data balsa-data
    blender-data bluefish-data brasero-common cairo-dock-plug-in-data caja-common calligra-data calligrasheets-data
    cataclysm-dda-data cinnamon-l10n claws-mail-i18n dia-common digikam-data dnf-data dolphin-emu-data e2fsprogs-l10n
    epiphany-browser-data evolution-common evolution-data-server-common exfalso filezilla-common fontforge-common
    freeciv-data gajim gcc-12-locales gconf2-common geany-common genius-common gftp-common gimp-data gnome-commander-data
    gnome-control-center-data gnome-packagekit-common gnome-settings-daemon-common gnome-shell-common gnome-software-common
    gnome-terminal-data gnucash-common gnumeric-common gnupg-l10n gparted-common gramps gsettings-desktop-schemas gthumb-data
    gvfs-common hexchat-common homebank-data iso-codes k3b-i18n kate5-data kdenlive-data kdeplasma-addons-data kdevelop-l10n
    kexi-data kf5-messagelib-data kgeography-data kile-l10n kmymoney-common konversation-data krita-l10n ktexteditor-data
    ktorrent-data kwin-data libc-l10n libclutter-1.0-common libgda-5.0-common libgegl-common libgeonames-common
    libgladeui-common libglib2.0-data libgoffice-0.10-10-common libgtk-3-common libgtk2.0-common libgweather-4-common
    libkf5kdelibs4support-data libkf5sysguard-data libkf5unitconversion-data libvirt-l10n lyx-common manaplus-data
    marco-common mate-control-center-common mate-panel-common mate-utils-common mc-data minetest-data mypaint-data
    nautilus-data orage-data orca php-horde-imp phpmyadmin pidgin-data planner-data plasma-desktop-data
    plasma-discover-common plasma-workspace-data pluma-common poedit-common python3-django python3-django-horizon
    remmina-common rhythmbox-data rkward-data rpm-i18n sawfish-data shotwell-common shutter skrooge-common sylpheed-i18n
    system-config-printer-common tellico-data thunar-data tortoisehg ufoai-misc umbrello-data util-linux-locales vim-runtime
    virtinst vlc-l10n wx3.2-i18n xkb-data zypper-common
"""
# Languages of x and of y. Each language has one side, so that no text is both.
LANGUAGES = """
    de-fr ru-es zh_CN-pl it-sv uk-ja pt_BR-cs nl-tr ca-zh_TW hu-pt da-fi sk-ko sl-el gl-eu nb-id sr-vi et-lt ar-ro bg-hr lv-he be-nn
"""
SOURCES = {
    "wordnet": SourceKind("definitions and words of WordNet", ("wordnet-base",), (), wordnet),
    "packages": SourceKind("descriptions and names of Debian packages", (), (), packages),
    "german": SourceKind("German and English entries of a dictionary", ("trans-de-en",), (), german),
    "japanese": SourceKind("Japanese words and English meanings", ("edict",), (), japanese),
    "names": SourceKind("Japanese names and their Latin readings", ("enamdict",), (), japanese_names),
    "dictionaries": SourceKind(
        "headwords and entries of dictionaries of many languages",
        tuple(f"dict-freedict-{pair}" for pair in DICTIONARIES.split()),
        (),
        dictionaries,
    ),
    "sounds": SourceKind("English spellings and phonemes", ("festlex-cmu",), (), pronunciations),
    "code": SourceKind("docstrings and code of Python functions", (), tuple(CODE_WHEELS.split()), code),
    "glyphs": SourceKind("images and names of characters", (), (), glyphs, pixels=32),
    "cjk": SourceKind(
        "images, readings and meanings of CJK characters", ("unicode-data", "fonts-wqy-zenhei"), (), cjk, pixels=CJK_EDGE
    ),
    "functions": SourceKind(
        "names and bodies of C functions",
        ("linux-source-6.1", "gcc-12-source", "binutils-source", "glibc-source"),
        (),
        functions,
    ),
    "fields": SourceKind("descriptions and names of fields of web services", (), ("botocore", "google-api-python-client"), fields),
    "synonyms": SourceKind(
        "words and synonyms of thesauri of seven languages", tuple(f"mythes-{language}" for language in THESAURI), (), synonyms
    ),
    "messages": SourceKind("messages of programs in two languages each", tuple(MESSAGE_PACKAGES.split()), (), messages),
}


def clean(text: Text) -> bytes:
    """Return the first WIDTH bytes of a text in UTF-8, without control characters and without half a character at the end.

    >>> clean("  a\\nb ")
    b'a b'
    """
    flat = " ".join(text.replace("\0", " ").split())
    return flat.encode()[:WIDTH].decode("utf-8", "ignore").strip().encode()


def near(content: bytes) -> bytes:
    """Return what nearly equal texts share: letters in lower case, digits as 0, nothing else.

    >>> near(b"Foo-bar 2.1") == near(b"foo bar 35")
    True
    """
    text = re.sub(r"\d+", "0", re.sub(r"[^\w]|_", " ", content.decode().lower()))
    return re.sub(r"(0\s*)+", "0", "".join(text.split())).encode()


def distinct(entries: Iterable[Entry]) -> tuple[list[tuple[bytes, bytes, str]], dict[str, int]]:
    """Return the first pair with each x and each y, and how many were left out for which reason."""
    seen_x: set[bytes] = set()
    seen_y: set[bytes] = set()
    kept: list[tuple[bytes, bytes, str]] = []
    counts = {"read": 0, "empty": 0, "equal_pair": 0, "equal_x": 0, "equal_y": 0}
    pairs: set[tuple[bytes, bytes]] = set()
    for entry in entries:
        counts["read"] += 1
        x = entry.x if isinstance(entry.x, bytes) else clean(entry.x)
        y = clean(entry.y)
        if len(x) < 2 or len(y) < 2:
            counts["empty"] += 1
        elif (x, y) in pairs:
            counts["equal_pair"] += 1
        elif x in seen_x or y in seen_y:
            counts["equal_x" if x in seen_x else "equal_y"] += 1
        else:
            kept.append((x, y, entry.group))
        seen_x.add(x)
        seen_y.add(y)
        pairs.add((x, y))
    return kept, counts


def components(pairs: list[tuple[bytes, bytes, str]], text_x: bool) -> np.ndarray:
    """Return a number for each pair, equal for pairs joined by chains of near-equal x, near-equal y or equal groups."""
    parent = list(range(len(pairs)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[tuple[str, bytes | str], int] = {}
    for i, (x, y, group) in enumerate(pairs):
        keys: list[tuple[str, bytes | str]] = [("y", near(y)), ("x", near(x) if text_x else x)]
        if group:
            keys.append(("group", group))
        for key in keys:
            if len(key[1]) > 1:
                other = root(first.setdefault(key, i))
                parent[max(other, root(i))] = min(other, root(i))
    return np.array([root(i) for i in range(len(pairs))])


def split(component: np.ndarray, held_out: int) -> np.ndarray:
    """Return the part of each pair: 0 training, 1 validation, 2 test. All pairs of a component have one part.

    Components are drawn at random until the validation part has at least `held_out` pairs, then for the test part.
    """
    roots, inverse, sizes = np.unique(component, return_inverse=True, return_counts=True)
    order = np.random.default_rng(0).permutation(len(roots))
    order = order[sizes[order] <= LARGE_COMPONENT]
    total = np.cumsum(sizes[order])
    if not len(total) or total[-1] < 4 * held_out:
        raise ValueError(f"the small components have fewer pairs than 4 × {held_out}; hold out fewer pairs")
    part = np.zeros(len(roots), np.int8)
    validation = int(np.searchsorted(total, held_out)) + 1
    test = int(np.searchsorted(total, total[validation - 1] + held_out)) + 1
    part[order[:validation]], part[order[validation:test]] = 1, 2
    return part[inverse]


def build(name: str, folder: Path) -> tuple[Arrays, dict[str, Any]]:
    """Return a source from the packages in a folder, and its record."""
    kind = SOURCES[name]
    pairs, counts = distinct(kind.entries(folder))
    component = components(pairs, kind.pixels is None)
    held_out = min(HELD_OUT, int(HELD_OUT_SHARE * len(pairs)))
    part = split(component, held_out)
    shuffled = np.random.default_rng(1).permutation(len(pairs))
    order = np.concatenate([shuffled[part[shuffled] == p] for p in (0, 1, 2)])
    x, y = (rows([pairs[i][side] for i in order], WIDTH if side or kind.pixels is None else kind.pixels**2) for side in (0, 1))
    sizes = np.unique(component, return_counts=True)[1]
    counts |= {"near_equal": len(pairs) - len(sizes), "largest_component": int(sizes.max())}
    arrays = Arrays(x, y, *(int((part == p).sum()) for p in (0, 1, 2)))
    return arrays, {
        "title": kind.title,
        "pixels": kind.pixels,
        **{k: getattr(arrays, k) for k in ("train", "validation", "test")},
        **counts,
    }


def rows(contents: list[bytes], width: int) -> np.ndarray:
    """Return contents as rows of bytes, padded with zeros."""
    return np.frombuffer(b"".join(c.ljust(width, b"\0") for c in contents), np.uint8).reshape(len(contents), width)


def write(arrays: Arrays, file: Path) -> str:
    """Write a source and return the SHA-256 of the file."""
    buffer = io.BytesIO()
    sides = {}
    for side in ("x", "y"):
        values = getattr(arrays, side)
        # Texts without their padding, one after the other, compress to half the size.
        sides[side] = (
            np.frombuffer(b"\0".join(r.tobytes().rstrip(b"\0") for r in values), np.uint8) if values.shape[1] == WIDTH else values
        )
    np.savez(buffer, **sides, parts=np.array([arrays.train, arrays.validation, arrays.test]))
    packed = lzma.compress(buffer.getvalue(), preset=9)
    file.write_bytes(packed)
    return hashlib.sha256(packed).hexdigest()


def read(file: Path) -> Arrays:
    """Return the source that `write` wrote."""
    with np.load(io.BytesIO(lzma.decompress(file.read_bytes()))) as stored:
        x, y = (stored[s] if stored[s].ndim == 2 else rows(stored[s].tobytes().split(b"\0"), WIDTH) for s in ("x", "y"))
        return Arrays(x, y, *(int(n) for n in stored["parts"]))


def fetch(kind: SourceKind, folder: Path) -> dict[str, str]:
    """Download the packages of a source into a folder, unpack Debian's, and return the SHA-256 of each. Skips what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in kind.debian:
        if not list(folder.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", "-q", package], cwd=folder, check=True, capture_output=True)
        (file,) = folder.glob(f"{package}_*.deb")
        subprocess.run(["dpkg-deb", "-x", file, folder / package], check=True)
    for wheel in kind.wheels:
        if not list(folder.glob(f"[{wheel[0]}{wheel[0].upper()}]{re.sub('[-.]', '_', wheel[1:])}-*.whl")):
            options = ["-q", "--no-deps", "--only-binary", ":all:", *WHEEL_TAGS, "-d", str(folder), wheel]
            subprocess.run([sys.executable, "-m", "pip", "download", *options], check=True, capture_output=True)
    files = sorted([*folder.glob("*.deb"), *folder.glob("*.whl")])
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def main(out: Path, names: list[str], record: Path) -> None:
    """Build the named sources into a folder and write their record."""
    out.mkdir(parents=True, exist_ok=True)
    records = json.loads(record.read_text()) if record.exists() else {}
    for name in names:
        folder = out.parent / "fetch" / name
        packages_used = fetch(SOURCES[name], folder)
        arrays, found = build(name, folder)
        file = out / f"{name}.npz.xz"
        digest = write(arrays, file)
        records[name] = {**found, "sha256": digest, "bytes": file.stat().st_size, "packages": packages_used}
        print(name, {k: v for k, v in records[name].items() if k != "packages"}, flush=True)
        record.write_text(json.dumps(dict(sorted(records.items())), indent=1) + "\n")
