"""Configuration files as text (TOML, JSON, command lines), edited so that everything else stays as it was."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megabatch import config

from .facts import TrainingFacts

# Values of an edit for a flag without a value: add the flag, or remove it.
PRESENT, ABSENT = object(), object()
# Shell operators that end a command on a line.
SEPARATORS = ("|", "||", "&", "&&", ";")
# Translates changed facts to the keys of a file and their new values, or to None if the file has no key for one of them.
Translate = Callable[[Mapping[str, Any], TrainingFacts], Mapping[str, Any] | None]


class Document(NamedTuple):
    """A file or a command line.

    keys: the key of each fact. translate: from facts to edits. edit: applies edits to the text.
    """

    name: str
    text: str
    keys: Mapping[str, str]
    translate: Translate
    edit: Callable[[str, Mapping[str, Any]], str]

    def where(self, fact: str) -> str:
        return self.keys.get(fact, fact)

    def diff(self, changes: Mapping[str, Any], training: TrainingFacts) -> str | None:
        """Return a unified diff that changes facts of the training, or None if the document has no keys for them."""
        edits = self.translate(changes, training) if changes else None
        if not edits:
            return None
        after = self.edit(self.text, edits)
        # Keep the end of the last line.
        after = after.rstrip("\n") + ("\n" if self.text.endswith("\n") else "")
        a, b = self.text.splitlines(keepends=True), after.splitlines(keepends=True)
        lines = difflib.unified_diff(a, b, self.name, self.name)
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines) or None


class Reading(NamedTuple):
    """A document and the facts that were read from it."""

    training: TrainingFacts
    document: Document


def edit_toml(text: str, edits: Mapping[str, str]) -> str:
    """Return the text with "section.key" set to values in TOML syntax; comments and order stay."""
    lines = text.splitlines()
    for path, value in edits.items():
        section, _, key = path.rpartition(".")
        _set_line(lines, section, key, value)
    return "\n".join(lines) + "\n"


def table_of(text: str, name: str) -> dict[str, Any]:
    """Return the table of a TOML text."""
    return config.parse_toml(text.removeprefix("\ufeff"), name)


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


def edit_json(text: str, edits: Mapping[str, Any]) -> str:
    """Return the JSON text with "key" or "section.key" set, with the same indentation."""
    table = json.loads(text)
    for path, value in edits.items():
        *sections, key = path.split(".")
        place = table
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        place[key] = value
    indent = re.search(r"\{\n([ \t]+)\"", text)
    return json.dumps(table, indent=indent[1] if indent else None, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class Command:
    """A command in a script, with the text before and after it."""

    before: str
    text: str
    after: str

    def words(self, pattern: str) -> list[str]:
        """Return the words of the command as a shell splits them, up to the next command on its line."""
        try:
            words = shlex.split(self.text.replace("\\\n", " "), comments=True)
        except ValueError as error:
            raise ValueError(f"{self.text.strip()[:80]!r}: is not valid shell syntax ({error})") from None
        begin = next((place for place, word in enumerate(words) if re.search(pattern, word)), 0)
        return words[: next((place for place in range(begin, len(words)) if words[place] in SEPARATORS), len(words))]

    @classmethod
    def find(cls, text: str, pattern: str) -> Command | None:
        """Return the first command that matches; a backslash at the end of a line continues it."""
        for match in re.finditer(r"(?:[^\n]*\\\n)*[^\n]*\n?", text):
            if re.search(pattern, match[0]) and not match[0].lstrip().startswith("#"):
                return cls(text[: match.start()], match[0], text[match.end() :])
        return None


def edit_flags(text: str, edits: Mapping[str, Any], pattern: str) -> str:
    """Return the text with flags of the command that matches `pattern` set, removed, or added after its name."""
    command = Command.find(text, pattern)
    assert command is not None
    body, added = command.text, ""
    for flag, value in edits.items():
        present = rf"(?<!\S){re.escape(flag)}(?![\w-])"
        with_value = rf"({present}(?:=|[ \t]+|[ \t]*\\\n[ \t]*))[^\s-]\S*"
        if value is ABSENT:
            body = re.sub(rf"[ \t]*{present}", "", body)
        elif value is PRESENT:
            added += "" if re.search(present, body) else f" {flag}"
        elif re.search(with_value, body):
            body = re.sub(with_value, rf"\g<1>{value}", body)
        else:
            added += f" {flag} {value}"
    return command.before + re.sub(rf"((?:{pattern})\S*)", rf"\g<1>{added}", body, count=1) + command.after
