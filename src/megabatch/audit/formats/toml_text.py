"""TOML texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megabatch import config


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """Return the table of a TOML text."""
    return config.parse_toml(text.removeprefix("\ufeff"), name)


def edit_toml(text: str, edits: Mapping[str, str]) -> str:
    """Return the text with "section.key" set to values in TOML syntax; comments and order stay."""
    lines = text.splitlines()
    for path, value in edits.items():
        section, _, key = path.rpartition(".")
        _set_line(lines, section, key, value)
    return "\n".join(lines) + "\n"


def _set_line(lines: list[str], section: str, key: str, value: str) -> None:
    begin, end = _section(lines, section)
    if begin is None:
        lines += ["", f"[{section}]", f"{key} = {value}"]
        return
    assignment = re.compile(rf"(\s*{re.escape(key)}\s*=\s*)(.*?)(\s+#[^\"']*)?$")
    for number in range(begin, end):
        match = assignment.match(lines[number])
        if match:
            lines[number] = match[1] + value + (match[3] or "")
            return
    lines.insert(begin, f"{key} = {value}")


def _section(lines: list[str], section: str) -> tuple[int | None, int]:
    """Return the range of lines of a section without its header; the top of the file has none."""
    headers = [(number, line.split("#")[0].strip()) for number, line in enumerate(lines) if line.lstrip().startswith("[")]
    begin = 0 if not section else next((n + 1 for n, header in headers if header == f"[{section}]"), None)
    return begin, next((n for n, _ in headers if begin is not None and n >= begin), len(lines))
