"""Values at the boundaries of types, tables of a schema that contain some of them, and such tables as TOML."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union

INTEGERS = (0, 1, -1, 2, 3, 7, 64, 255, 1000, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**15, 10**18)
HUGE = (10**30, 10**400, -(10**400), 10**308, 10**309)
FLOATS = (
    0.0,
    -0.0,
    0.5,
    0.1,
    1.5,
    1e-9,
    5e-324,
    1e-30,
    1e15,
    1e30,
    1e38,
    1e308,
    -1e308,
    math.inf,
    -math.inf,
    math.nan,
    0.999999999,
)
TEXTS = (
    *(
        "",
        " ",
        "none",
        "auto",
        "x",
        "y",
        "true",
        "nan",
        "NaN",
        "Infinity",
        "-inf",
        "1e999",
        "0x10",
        "1_000",
        "10M",
        "1e-3@256",
        "80GiB",
    ),
    *(
        "\0",
        "a\0b",
        "\ud800",
        "\udcff",
        "\u202eabc",
        "é",
        "ﷺ" * 20,
        "😀",
        "\u0301",
        "\ufeff",
        "\u2028",
        "\x85",
        "\x7f",
        "\r\n",
        "\t",
    ),
    *(
        "\\",
        "'",
        '"',
        '"""',
        "[",
        "]",
        "[/b]",
        "\\[/b]",
        "{",
        "{}",
        "{0.__class__}",
        "{x!r:>9}",
        "{:>99999999999}",
        "%s%n%d",
        "$\\frac{",
        "#",
    ),
    *(
        "..",
        "../..",
        "/",
        "~",
        "~nobody/x",
        "*",
        "**",
        "{0..3}",
        "{0..99999999}",
        "a,b",
        "file://x",
        "https://example.org",
        "C:\\x",
    ),
    *(
        "os:system",
        "timm:",
        "timm:vit",
        "open_clip:ViT-B-32",
        "transformers:.",
        ":",
        "a:b",
        "adamw",
        "sgd",
        "torch.optim:NAdam",
        "vit",
    ),
    *("cpu", "cuda", "cuda:99", "mps", "meta", "xpu:0", "cpu:-1", "fp32", "bf16", "clip", "siglip", "classify", "glyphs", "linear"),
)


def integer(rng: random.Random) -> int:
    return rng.choice(HUGE) if rng.random() < 0.1 else rng.choice(INTEGERS)


def text(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.8:
        return rng.choice(TEXTS)
    if kind < 0.97:
        return "".join(
            chr(rng.choice((rng.randrange(128), rng.randrange(0x2000), rng.randrange(0x110000)))) for _ in range(rng.randrange(20))
        )
    return rng.choice(TEXTS) * rng.choice((100, 5000)) or "a" * 5000


def scalar(rng: random.Random) -> Any:
    """Return a number, a text, a boolean or None."""
    return rng.choice((integer, integer, text, text, lambda r: r.choice(FLOATS), lambda r: r.random() < 0.5, lambda r: None))(rng)


def value(rng: random.Random, depth: int = 2) -> Any:
    """Return any value that JSON can express, rarely a very deep one."""
    kind = rng.random()
    if kind < 0.7 or depth == 0:
        return scalar(rng)
    if kind < 0.84:
        return [value(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind < 0.995:
        return {text(rng)[:40]: value(rng, depth - 1) for _ in range(rng.randrange(4))}
    return nested(rng)


def nested(rng: random.Random) -> Any:
    """Return lists and tables nested hundreds of times."""
    found: Any = scalar(rng)
    for _ in range(rng.choice((50, 200, 600))):
        found = [found] if rng.random() < 0.5 else {"a": found}
    return found


def like(hint: Any, rng: random.Random) -> Any:
    """Return a value that an annotation allows, mostly a sensible one."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return table_of(hint, rng)
    if origin in (Union, types.UnionType):
        return like(rng.choice(choices), rng)
    if origin is Literal:
        return rng.choice(choices)
    if origin is tuple:
        count = rng.randrange(4) if choices[-1] is Ellipsis else len(choices)
        return [like(choices[0], rng) for _ in range(count)]
    if hint is bool:
        return rng.random() < 0.5
    if hint is int:
        return rng.choice((1, 2, 8, 64, 100, 1024, 4096, 10**6, 10**9))
    if hint is float:
        return rng.choice((0.01, 0.1, 0.5, 0.9, 0.98, 1.0, 1e-3, 5e-4, 100.0, 3))
    if hint is str:
        return rng.choice(TEXTS[-40:])
    if hint is type(None):
        return "none"
    return {
        rng.choice(("width", "depth", "size", "length", "channels", "pool", "foo")): scalar(rng) for _ in range(rng.randrange(3))
    }


@functools.cache
def hints_of(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def table_of(kind: type, rng: random.Random, share: float = 0.4) -> dict[str, Any]:
    """Return some keys of a dataclass with valid values."""
    hints = hints_of(kind)
    return {key: like(hint, rng) for key, hint in hints.items() if rng.random() < share}


def spoiled(table: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return the table with hostile values at one to three places, or with an extra key."""
    places = [(table, key) for key in table]
    for entry in table.values():
        if isinstance(entry, dict):
            places += [(entry, key) for key in entry]
    for _ in range(rng.choice((1, 1, 2, 3))):
        if places and rng.random() < 0.85:
            at, key = rng.choice(places)
            at[key] = value(rng)
        else:
            at = rng.choice([table, *(entry for entry in table.values() if isinstance(entry, dict))])
            at[text(rng)[:40]] = value(rng)
    return table


def as_toml(table: Mapping[str, Any], rng: random.Random) -> bytes:
    """Return the table as TOML, sometimes with duplicate keys, dotted keys, or arrays of tables."""
    lines = [f"{_key(key)} = {_literal(entry)}" for key, entry in table.items() if not isinstance(entry, dict)]
    for name, section in table.items():
        if not isinstance(section, dict):
            continue
        style = rng.random()
        pairs = [(_key(key), _literal(entry)) for key, entry in section.items()]
        if style < 0.85:
            lines += ["", f"[{_key(name)}]", *(f"{key} = {entry}" for key, entry in pairs)]
        elif style < 0.92:
            lines = [f"{_key(name)}.{key} = {entry}" for key, entry in pairs] + lines
        elif style < 0.96:
            lines += ["", f"[[{_key(name)}]]", *(f"{key} = {entry}" for key, entry in pairs)]
        else:
            lines = [f"{_key(name)} = {_literal(section)}", *lines]
    if rng.random() < 0.05 and lines:
        lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    return "\n".join(lines).encode("utf-8", "surrogatepass") + b"\n"


def as_json(table: Any, rng: random.Random) -> bytes:
    """Return the value as JSON, indented or not, with NaN and Infinity as Python writes them."""
    try:
        return json.dumps(table, indent=rng.choice((None, 1, 4)), ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    except RecursionError:
        return b"[" * 5000


def _key(key: str) -> str:
    return key if key.isidentifier() and key.isascii() else json.dumps(key, ensure_ascii=False)


def _literal(entry: Any) -> str:
    # Deep values are written without recursion, which would fail here: the test is for the reader.
    if isinstance(entry, (Mapping, list, tuple)) and _depth(entry) > 100:
        return "[" * 300 + "]" * 300
    if isinstance(entry, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_literal(each)}" for key, each in entry.items()) + "}"
    if isinstance(entry, Sequence) and not isinstance(entry, str):
        return "[" + ", ".join(_literal(each) for each in entry) + "]"
    if isinstance(entry, (bool, str)):
        return json.dumps(entry, ensure_ascii=False)
    if entry is None:
        return '"none"'
    return repr(entry)


def _depth(entry: Any) -> int:
    depth = 0
    while isinstance(entry, (Mapping, list, tuple)) and entry and depth < 101:
        entry = next(iter(entry.values())) if isinstance(entry, Mapping) else entry[0]
        depth += 1
    return depth
