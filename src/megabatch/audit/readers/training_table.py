"""Read a `[training]` table of facts, which describes a custom training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..documents import Document, Reading, edit_toml
from ..facts import TrainingFacts, with_facts
from .run import literal

NAMES = [entry.name for entry in dataclasses.fields(TrainingFacts)]


def read(name: str, text: str, table: Mapping[str, Any]) -> Reading:
    facts = table["training"]
    if not isinstance(facts, dict):
        raise ValueError(f"{name}: training is {facts!r}: must be a table")
    others = [key for key in table if key != "training"]
    if others:
        raise ValueError(f"{name}: has {others[0]!r} beside [training]: must be a megabatch run or a table of facts, not both")
    try:
        training = with_facts(TrainingFacts(), facts)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    keys = {fact: f"training.{fact}" for fact in NAMES}
    return Reading(training, Document(name, text, keys, _translate, edit_toml))


def _translate(changes: Mapping[str, Any], training: TrainingFacts) -> dict[str, str]:
    changes = dict(changes)
    if "batch" in changes and training.batch is None:
        changes["micro"] = training.changed({"batch": changes.pop("batch")}).micro
    elif "batch" in changes and training.micro is not None:
        changes["micro"] = training.changed(changes).micro
    return {f"training.{fact}": literal(value) for fact, value in changes.items()}
