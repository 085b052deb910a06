"""What a run's folder holds, as far as it is there: the run may be interrupted, or someone else's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .. import config
from .contact import Question, read_contact
from .history import History, Row, read_history

SIDES = (("image", "text"), ("query", "document"))


class Folder(NamedTuple):
    """The parts of a run. run: None where run.toml, whose text is `toml`, is not there or not valid."""

    name: str
    toml: str
    run: config.Run | None
    environment: Row
    history: History
    result: Row
    questions: list[Question]

    def evaluation(self) -> Row:
        """The last evaluation: the final one, or the last of the log; empty if there is none."""
        final = self.result.get("evaluation")
        if isinstance(final, Mapping):
            return final
        return self.history.evaluations[-1] if self.history.evaluations else {}

    def sides(self) -> tuple[str, str]:
        """What x and y are called."""
        told = self.evaluation().get("sides")
        return next((sides for sides in SIDES if told == list(sides)), ("x", "y"))


def read_folder(run: Path) -> Folder:
    toml = run / "run.toml"
    try:
        settings = config.read(toml)
    except (ValueError, OSError):
        settings = None
    return Folder(
        name=run.resolve().name,
        toml=toml.read_text("utf-8", errors="replace") if toml.exists() else "",
        run=settings,
        environment=_table(run / "environment.json"),
        history=read_history(run / "log.jsonl"),
        result=_table(run / "result.json"),
        questions=read_contact(run),
    )


def _table(path: Path) -> Row:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
