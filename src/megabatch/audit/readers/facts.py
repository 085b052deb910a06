"""A training that no other reader knows, described by its facts: a `[training]` table, for a loop of one's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..documents import Document, Reading, edit_toml
from ..training import Training, with_known
from .ours import literal

NAMES = [entry.name for entry in dataclasses.fields(Training)]


def read(name: str, text: str, table: Mapping[str, Any]) -> Reading:
    facts = table["training"]
    if not isinstance(facts, dict):
        raise ValueError(f"{name}: training is {facts!r}: must be a table")
    others = [key for key in table if key != "training"]
    if others:
        raise ValueError(f"{name}: has {others[0]!r} beside [training]: a run of megabatch or a table of facts, not both")
    try:
        training = with_known(Training(), facts)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    keys = {fact: f"training.{fact}" for fact in NAMES}
    return Reading(training, Document(name, text, keys, _translate, edit_toml))


def _translate(changes: Mapping[str, Any], training: Training) -> dict[str, str]:
    changes = dict(changes)
    if "batch" in changes and training.batch is None:
        changes["micro"] = training.changed({"batch": changes.pop("batch")}).micro
    elif "batch" in changes and training.micro is not None:
        changes["micro"] = training.changed(changes).micro
    return {f"training.{fact}": literal(value) for fact, value in changes.items()}
