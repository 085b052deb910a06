"""Read the files of several tools into facts: recognize the tool of a file, and call its reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..documents import Command, Reading, table_of
from ..facts import with_facts
from . import deepspeed, run, training_table, transformers
from . import open_clip as command_line

__all__ = ["read_any"]

# Configurations of these tools have four levels. Much deeper nesting could be read, but not written again.
MAX_DEPTH = 50


def read_any(source: str | Path, **facts: Any) -> Reading:
    """Read a file or a command line. facts: what it does not state (ranks=8, data=10_000_000, …).

    source: a run of megabatch (.toml), a `[training]` table of facts (.toml), Hugging Face TrainingArguments or a DeepSpeed
        configuration (.json), a script with an OpenCLIP command, or such a command itself.
    """
    name, text = _text(source)
    if name.endswith(".toml"):
        table = table_of(text, name)
        reading = training_table.read(name, text, table) if "training" in table else run.read(name, text, table, facts)
    elif name.endswith(".json"):
        reading = _read_json(name, text)
    elif Command.find(text, command_line.MAIN) is not None:
        reading = command_line.read(name, text)
    else:
        raise ValueError(
            f"{name[:80]}: cannot be audited; give a .toml file, a .json file of Hugging Face or DeepSpeed, or a script or command"
            " line with open_clip_train.main"
        )
    return Reading(with_facts(reading.training, facts), reading.document)


def _text(source: str | Path) -> tuple[str, str]:
    """Return name and text of a source. A source with line breaks or flags is a command line, any other is a path."""
    if isinstance(source, str) and ("\n" in source or " --" in source):
        return "command", source
    try:
        return str(source), Path(source).read_text("utf-8")
    except OSError as error:
        raise ValueError(f"{source}: cannot be read ({error.strerror}); give the path of a file, or a whole command line") from None
    except UnicodeDecodeError:
        raise ValueError(f"{source}: is not a text file") from None


def _is_deep(value: Any) -> bool:
    """Return whether lists and tables are nested more than MAX_DEPTH levels deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [entry.values() if isinstance(entry, dict) else entry for entry in level if isinstance(entry, (dict, list))]
        level = [each for entries in inner for each in entries]
    return any(isinstance(entry, (dict, list)) for entry in level)


def _read_json(name: str, text: str) -> Reading:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: is not valid JSON ({error})") from None
    if _is_deep(table):
        raise ValueError(f"{name}: is nested more than {MAX_DEPTH} levels deep; no supported tool writes such a file")
    if not isinstance(table, dict):
        raise ValueError(f"{name}: holds a {type(table).__name__}: must be an object of keys and values")
    for reader in (transformers, deepspeed):
        if reader.MARKS & table.keys():
            return reader.read(name, text, table)
    raise ValueError(
        f"{name}: has no key of Hugging Face's TrainingArguments ({sorted(transformers.MARKS)[0]}, …) or of DeepSpeed"
        f" ({sorted(deepspeed.MARKS)[0]}, …)"
    )
