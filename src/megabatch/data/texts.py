"""Texts from outside: valid, not empty, and otherwise as they were stored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .source import BadSample

# A text longer than this is some other file; what a tower cannot take of a long text, its tokenizer cuts off.
LONGEST = 1 << 20


def text(value: Any, key: str, side: str) -> str:
    """The text of a stored value (str, or UTF-8 bytes), without white space around it. BadSample where it is none.

    Markup is text like any other. `side` says in messages which value it was.
    """
    if isinstance(value, bytes):
        if len(value) > LONGEST:
            raise BadSample(key, f"{side} has {len(value)} bytes, a text at most {LONGEST}")
        value = value.decode("utf-8-sig", "surrogateescape")
    if value is None:
        raise BadSample(key, f"{side} is missing")
    if not isinstance(value, str):
        raise BadSample(key, f"{side} is of type {type(value).__name__}, a text is wanted")
    try:
        # Bytes that are no UTF-8 became halves of surrogate pairs, and JSON can hold such halves itself.
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadSample(key, f"{side} is not valid UTF-8 at character {error.start}") from None
    if "\0" in value:
        raise BadSample(key, f"{side} holds a NUL character: is it UTF-16, or no text at all?")
    if not value.strip():
        raise BadSample(key, f"{side} is empty")
    return value.strip()


def texts(value: Any, key: str, side: str) -> tuple[str, ...]:
    """The texts of a list, of one text, or of nothing at all."""
    if value is None or value == "":
        return ()
    values = value if isinstance(value, (list, tuple)) else [value]
    return tuple(text(entry, key, side) for entry in values)


def label(value: Any, key: str) -> str:
    """The name of a class: a text, or a number's digits."""
    return text(str(value) if isinstance(value, int) else value, key, "label")


def text_of(path: Path, key: str, side: str) -> str:
    """The text that a file holds."""
    if not os.path.isfile(path):
        raise BadSample(key, f"{side}: there is no file {path.name!r}")
    try:
        with path.open("rb") as file:
            return text(file.read(LONGEST + 1), key, side)
    except OSError as error:
        raise BadSample(key, f"{side}: {path.name!r} cannot be read ({error.strerror})") from None
