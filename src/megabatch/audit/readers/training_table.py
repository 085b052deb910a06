"""Read a `[training]` table of facts, which describes a custom training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..documents import Document, Reading
from ..facts import TrainingFacts, with_facts
from ..formats.toml_text import edit_toml, parse_toml
from .run import literal

NAMES = [entry.name for entry in dataclasses.fields(TrainingFacts)]


def read(name: str, text: str, table: Mapping[str, Any]) -> Reading:
    keys = {fact: f"training.{fact}" for fact in NAMES}
    document = Document(name, text, keys, _translate, edit_toml, lambda after: _facts(name, parse_toml(after, name)))
    return Reading(_facts(name, table), document)


def _facts(name: str, table: Mapping[str, Any]) -> TrainingFacts:
    facts = table["training"]
    if not isinstance(facts, dict):
        raise ValueError(f"{name}: training is {facts!r}: must be a table")
    others = [key for key in table if key != "training"]
    if others:
        raise ValueError(f"{name}: has {others[0]!r} beside [training]: must be a megabatch run or a table of facts, not both")
    try:
        return with_facts(TrainingFacts(), facts)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _translate(changes: Mapping[str, Any], training: TrainingFacts) -> dict[str, str]:
    changes = dict(changes)
    if "batch" in changes and training.batch is None:
        changes["micro"] = training.changed({"batch": changes.pop("batch")}).micro
    elif "batch" in changes and training.micro is not None:
        changes["micro"] = training.changed(changes).micro
    return {f"training.{fact}": literal(value) for fact, value in changes.items()}
