"""Command lines, alone or in shell scripts: variables and arrays that the script sets are expanded, nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

# Values of an edit for a flag without a value: add the flag, or remove it.
PRESENT, ABSENT = object(), object()
# Shell operators that end a command on a line.
SEPARATORS = ("|", "||", "&", "&&", ";")
LARGEST_SCRIPT = 2**17
# Variables that are made of others are followed so far.
DEEPEST = 3
# NAME=value or NAME=( words ), at the beginning of a line.
_ASSIGNMENT = re.compile(
    r"""^[ \t]*(?:export[ \t]+|readonly[ \t]+|local[ \t]+)?(?P<name>[A-Za-z_]\w*)=
    (?:\((?P<array>[^()]*)\)|"(?P<double>[^"`]*)"|'(?P<single>[^']*)'|(?P<bare>[^\s"'`$();&|]+)(?=[ \t]*(?:[;#\n]|\Z)))""",
    re.MULTILINE | re.VERBOSE,
)
_REFERENCE = re.compile(r"""\$(?:\{(?P<braced>[A-Za-z_]\w*)(?P<all>\[[@*]\])?\}|(?P<plain>[A-Za-z_]\w*))""")
# A comment or a line; a backslash at the end continues a line, but not a comment.
_LOGICAL_LINE = re.compile(r"[ \t]*#[^\n]*\n?|(?:[^\n]*\\\n)*[^\n]*\n?")


@dataclass(frozen=True)
class Command:
    """A command in a script.

    text: the whole script. start, end: of the command in it. pattern: finds the program in the command. arrays: where the words of
    arrays, and flags that are kept in variables, stand in the script.
    """

    text: str
    start: int
    end: int
    pattern: str
    variables: Mapping[str, str]
    arrays: tuple[tuple[int, int], ...]

    @property
    def body(self) -> str:
        return self.text[self.start : self.end]

    @property
    def head(self) -> str:
        """The command up to its program: launcher, environment and their options, with variables expanded."""
        match = re.search(self.pattern, self.body)
        assert match is not None
        return self._expanded(self.body[: match.start()])

    def words(self) -> list[str]:
        """Return the words after the program as a shell splits them, up to the next command on the line."""
        match = re.search(rf"(?:{self.pattern})\S*", self.body)
        assert match is not None
        text = self._expanded(self.body[match.end() :].replace("\\\n", " ")).rstrip()
        try:
            words = _split(text)
        except ValueError:
            # The command may be in quotes, to be run by `eval` or `bash -c`.
            try:
                words = _split(text.rstrip("\"'"))
            except ValueError as error:
                raise ValueError(f"{self.body.strip()[:80]!r}: is not valid shell syntax ({error})") from None
        return list(words[: next((place for place, word in enumerate(words) if word in SEPARATORS), len(words))])

    def _expanded(self, text: str) -> str:
        text = re.sub(r'"(\$\{[A-Za-z_]\w*\[[@*]\]\})"', r"\1", text)
        # A variable may be made of others, which may be made of others.
        for _ in range(DEEPEST):
            if len(text) > LARGEST_SCRIPT:
                raise ValueError(f"the variables of the command make more than {LARGEST_SCRIPT:,} characters")
            text = _REFERENCE.sub(lambda match: self.variables.get(match["braced"] or match["plain"], match[0]), text)
        return text.replace("\\\n", " ")


@lru_cache(maxsize=16)
def _split(text: str) -> tuple[str, ...]:
    """Split as a shell does. Every reader asks for the same words, and shlex takes long for long words."""
    return tuple(shlex.split(text, comments=True))


def _any_command(command: Command) -> bool:
    return True


def find_command(text: str, pattern: str, accepts: Callable[[Command], bool] = _any_command) -> Command | None:
    """Return the first accepted command whose program matches; a backslash at the end of a line continues it."""
    if len(text) > LARGEST_SCRIPT:
        raise ValueError(f"the script is larger than {LARGEST_SCRIPT:,} characters, the limit of a script")
    variables, spans = _assignments(text)
    for match in _LOGICAL_LINE.finditer(text):
        if not re.search(pattern, match[0]) or match[0].lstrip().startswith("#"):
            continue
        used = {reference["braced"] or reference["plain"] for reference in _REFERENCE.finditer(match[0])}
        arrays = tuple(spans[name] for name in variables if name in used and name in spans)
        command = Command(text, match.start(), match.end(), pattern, variables, arrays)
        if accepts(command):
            return command
    return None


def _assignments(text: str) -> tuple[dict[str, str], dict[str, tuple[int, int]]]:
    """Return the variables that a script sets once, and where the words of its arrays stand."""
    values: dict[str, list[str]] = {}
    spans: dict[str, tuple[int, int]] = {}
    for match in _ASSIGNMENT.finditer(text):
        value = next(value for value in (match["array"], match["double"], match["single"], match["bare"]) if value is not None)
        if match["array"] is not None:
            value = re.sub(r"(^|\s)#[^\n]*|\\\n|\n", " ", value)
            spans[match["name"]] = match.span("array")
        elif "--" in value:
            spans[match["name"]] = match.span("double" if match["double"] is not None else "single")
        values.setdefault(match["name"], []).append(value)
    # A variable that is set twice depends on the way through the script.
    return {name: given[0] for name, given in values.items() if len(given) == 1}, spans


def parse_flags(words: list[str]) -> dict[str, list[str]]:
    """Return the words after each flag, as "--flag value", "--flag=value" or "--flag" alone (an empty list).

    >>> parse_flags(["--lr", "-1e-3", "--bf16", "--wd=0.1"])
    {'--lr': ['-1e-3'], '--bf16': [], '--wd': ['0.1']}
    """
    flags: dict[str, list[str]] = {}
    last: list[str] = []
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            flag, equals, value = word.partition("=")
            last = flags[flag] = [value] if equals else []
        else:
            last.append(word)
    return flags


def edit_flags(text: str, edits: Mapping[str, Any], pattern: str, accepts: Callable[[Command], bool] = _any_command) -> str:
    """Return the text with flags of the command that `find_command` finds set, removed, or added after its name."""
    added = ""
    for flag, value in edits.items():
        command = find_command(text, pattern, accepts)
        assert command is not None
        present = rf"(?<!\S){_either(flag)}(?![\w-])"
        with_value = rf"({present}(?:=|[ \t]+|[ \t]*\\?\n[ \t]*))(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s-]\S*)"
        for start, end in ((command.start, command.end), *command.arrays):
            body = text[start:end]
            if not re.search(present, body):
                continue
            if value is PRESENT:
                body = re.sub(rf"({present}[= \t]+)[Ff]alse(?!\S)", r"\1True", body)
            elif value is ABSENT:
                body = re.sub(rf"(?<![ \t])[ \t]*{present}(?:=\S+|[ \t]+(?:[Tt]rue|[Ff]alse)(?!\S))?", "", body)
            elif re.search(with_value, body):
                body = re.sub(with_value, lambda match, value=value: f"{match[1]}{value}", body)  # type: ignore[misc]
            else:
                body = re.sub(present, lambda match, value=value: f"{match[0]} {value}", body)  # type: ignore[misc]
            text = text[:start] + body + text[end:]
            break
        else:
            added += "" if value is ABSENT else f" {flag}" if value is PRESENT else f" {flag} {value}"
    command = find_command(text, pattern, accepts)
    assert command is not None
    body = re.sub(rf"((?:{pattern})\S*)", lambda match: match[1] + added, command.body, count=1)
    return text[: command.start] + body + text[command.end :]


def _either(flag: str) -> str:
    """Return a pattern of a flag; tools that take underscores take hyphens too."""
    return "--" + re.escape(flag[2:]).replace("_", "[-_]") if "_" in flag else re.escape(flag)
