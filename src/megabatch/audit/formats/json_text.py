"""JSON texts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

# Configurations of the supported tools have four levels. Much deeper nesting could be read, but not written again.
MAX_DEPTH = 50
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def parse_json(text: str, name: str) -> dict[str, Any]:
    """Return the object of a JSON text."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: is not valid JSON ({error})") from None
    if is_deep(table):
        raise ValueError(f"{name}: is nested more than {MAX_DEPTH} levels deep; no supported tool writes such a file")
    if not isinstance(table, dict):
        raise ValueError(f"{name}: holds a {type(table).__name__}: must be an object of keys and values")
    return table


def is_deep(value: Any) -> bool:
    """Return whether lists and tables are nested more than MAX_DEPTH levels deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [entry.values() if isinstance(entry, dict) else entry for entry in level if isinstance(entry, (dict, list))]
        level = [each for entries in inner for each in entries]
    return any(isinstance(entry, (dict, list)) for entry in level)


def edit_json(text: str, edits: Mapping[str, Any]) -> str:
    """Return the JSON text with "key" or "section.key" set; every other line stays as it is."""
    for path, value in edits.items():
        text = _set(text, _SPACE.match(text).end(), path.split("."), value)  # type: ignore[union-attr]
    return text


def _set(text: str, start: int, keys: list[str], value: Any) -> str:
    """Return the text with a value set in the object that starts at a position."""
    key, *inner = keys
    spans = _values(text, start)
    if key in spans:
        begin, end = spans[key]
        if inner and text[begin] == "{":
            return _set(text, begin, inner, value)
        return text[:begin] + _dumps(_nested(inner, value)) + text[end:]
    entry = f"{json.dumps(key, ensure_ascii=False)}: {_dumps(_nested(inner, value))}"
    space = _SPACE.match(text, start + 1)
    assert space is not None
    if not spans:
        return f"{text[: start + 1]}{entry}{text[space.end() :]}"
    # A new key comes first, on a line of its own if the others have one.
    return f"{text[: space.end()]}{entry},{space[0] or ' '}{text[space.end() :]}"


def _values(text: str, start: int) -> dict[str, tuple[int, int]]:
    """Return where the value of each key begins and ends, in the object that starts at a position of a valid text."""
    spans, at = {}, _after(text, start + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        begin = _after(text, _after(text, at) + 1)
        _, end = _DECODER.raw_decode(text, begin)
        spans[key] = (begin, end)
        at = _after(text, end)
        if text[at] == ",":
            at = _after(text, at + 1)
    return spans


def _after(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


def _nested(keys: list[str], value: Any) -> Any:
    for key in reversed(keys):
        value = {key: value}
    return value


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
