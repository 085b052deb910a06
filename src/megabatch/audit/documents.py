"""A file or a command line that was read, and the diff that changes facts of its training."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .facts import TrainingFacts

# Translates changed facts to the keys of a file and their new values, or to None if the file has no key for one of them.
Translate = Callable[[Mapping[str, Any], TrainingFacts], Mapping[Any, Any] | None]


class Document(NamedTuple):
    """A file or a command line.

    keys: the key of each fact. translate: from facts to edits. edit: applies edits to the text. read: reads a text of this kind.
    """

    name: str
    text: str
    keys: Mapping[str, str]
    translate: Translate
    edit: Callable[[str, Mapping[Any, Any]], str]
    read: Callable[[str], TrainingFacts]

    def where(self, fact: str) -> str:
        return self.keys.get(fact, fact)

    def edited(self, changes: Mapping[str, Any], training: TrainingFacts) -> str | None:
        """Return the text with facts of the training changed, or None if the document has no keys for them."""
        try:
            edits = self.translate(changes, training) if changes else None
            after = self.edit(self.text, edits) if edits else self.text
        except (ValueError, RecursionError):
            return None
        if after.rstrip() == self.text.rstrip():
            return None
        # Keep the end of the last line.
        return after.rstrip("\n") + ("\n" if self.text.endswith("\n") else "")

    def diff(self, after: str) -> str:
        """Return a unified diff from the text to another one."""
        a, b = self.text.splitlines(keepends=True), after.splitlines(keepends=True)
        lines = difflib.unified_diff(a, b, self.name, self.name)
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


class Reading(NamedTuple):
    """A document and the facts that were read from it."""

    training: TrainingFacts
    document: Document
