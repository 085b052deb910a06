"""YAML texts. Values are read as YAML 1.2 reads them, so that 1e-4 is a number; tags construct nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from megabatch import packages

from .json_text import MAX_DEPTH

# PyYAML reads about 100 KB a second, and configurations have a few. Aliases can repeat a part of a text any number of times.
LARGEST_YAML = 2**15
MOST_VALUES = 20_000
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
# Words that YAML 1.1, which PyYAML and so all of these tools read, takes for truth values.
_WORDS: dict[str, Any] = {
    "": None,
    "~": None,
    "null": None,
    "true": True,
    "yes": True,
    "on": True,
    "false": False,
    "no": False,
    "off": False,
}
_WORDS |= {".inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}


def parse_yaml(text: str, name: str) -> dict[str, Any]:
    """Return the mapping of a YAML text."""
    node = _compose(text, name)
    try:
        table = _value(node, iter(range(MOST_VALUES)), 0)
    except StopIteration:
        raise ValueError(f"{name}: has more than {MOST_VALUES:,} values; aliases may repeat them") from None
    if not isinstance(table, dict):
        raise ValueError(f"{name}: holds a {type(table).__name__}: must be a mapping of keys to values")
    return table


def _compose(text: str, name: str) -> Any:
    packages.require(packages.YAML)
    import yaml

    if len(text) > LARGEST_YAML:
        raise ValueError(f"{name}: is larger than {LARGEST_YAML:,} characters, the limit of a YAML configuration")
    try:
        return _nodes(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{name}: is not valid YAML ({' '.join(str(error).split())[:200]})") from None
    except RecursionError:
        raise ValueError(f"{name}: is nested too deeply") from None


@lru_cache(maxsize=16)
def _nodes(text: str) -> Any:
    """Return the tree of a YAML text. Readers and edits ask for the same text many times."""
    import yaml

    return yaml.compose(text, Loader=yaml.SafeLoader)


def _value(node: Any, budget: Iterator[int], depth: int) -> Any:
    next(budget)
    if depth > MAX_DEPTH:
        raise ValueError(f"a value is nested more than {MAX_DEPTH} levels deep; no supported tool writes such a file")
    if node is None:
        return None
    if node.id == "mapping":
        return {str(_value(key, budget, depth + 1)): _value(value, budget, depth + 1) for key, value in node.value}
    if node.id == "sequence":
        return [_value(entry, budget, depth + 1) for entry in node.value]
    return node.value if node.style else _scalar(node.value)


def _scalar(text: str) -> Any:
    """Return the value of a scalar without quotes."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        # Python refuses integers of more than 4300 digits.
        return int(text) if len(text) < 400 else math.inf
    return float(text) if _FLOAT.fullmatch(text) else text


def edit_yaml(text: str, edits: Mapping[str, Any]) -> str:
    """Return the YAML text with "key" or "section.key" set; comments and all other lines stay as they are."""
    for path, value in edits.items():
        text = _set(text, _compose(text, "the edited text"), path.split("."), value)
    return text


def _set(text: str, node: Any, keys: list[str], value: Any) -> str:
    key, *inner = keys
    entries = {str(entry.value): (entry, content) for entry, content in node.value}
    if key in entries:
        begin, content = entries[key]
        if inner and content.id == "mapping":
            return _set(text, content, inner, value)
        start, end = content.start_mark.index, content.end_mark.index
        if content.id != "scalar" and not content.flow_style:
            # The end of a block is where the next key begins: leave the white space and comments between.
            end = start + len(text[start:end].rstrip())
        written = _written(inner, value)
        return text[:start] + (f" {written}" if start == begin.end_mark.index + 1 and start == end else written) + text[end:]
    if node.flow_style:
        place = node.start_mark.index + 1
        comma = ", " if entries else ""
        return f"{text[:place]}{key}: {_written(inner, value)}{comma}{text[place:]}"
    first = node.value[0][0]
    line = f"{' ' * first.start_mark.column}{key}: {_written(inner, value)}\n"
    # After the last key that has its value on the same line, so that no block and no comment is split.
    whole = [content.end_mark for entry, content in node.value if content.end_mark.line == entry.start_mark.line]
    if not whole:
        place = text.rfind("\n", 0, first.start_mark.index) + 1
        return text[:place] + line + text[place:]
    newline = text.find("\n", whole[-1].index)
    return f"{text}\n{line}" if newline < 0 else f"{text[: newline + 1]}{line}{text[newline + 1 :]}"


def _written(keys: list[str], value: Any) -> str:
    """Return a value in YAML's flow style. JSON is YAML, with true, null and quoted texts."""
    for key in reversed(keys):
        value = {key: value}
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w-]*", value) and value.lower() not in _WORDS:
        return value
    if isinstance(value, float):
        return repr(value) if "." in repr(value) or "e" not in repr(value) else repr(value).replace("e", ".0e")
    return json.dumps(value, ensure_ascii=False)
