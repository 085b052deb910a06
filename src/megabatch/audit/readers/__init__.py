"""Files of several tools, read into facts: which tool a file belongs to, and its reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..documents import Command, Reading, table_of
from ..training import with_known
from . import deepspeed, facts, ours, transformers
from . import open_clip as command_line

__all__ = ["read_any"]

# Settings of these tools have four levels; what is much deeper could be read but not written again.
DEEPEST = 50


def read_any(source: str | Path, **known: Any) -> Reading:
    """What can be audited of a file or a command line, with facts that it does not tell (ranks=8, data=10_000_000, …).

    source: a run of megabatch (.toml), a `[training]` table of facts (.toml), Hugging Face TrainingArguments or a DeepSpeed
        configuration (.json), a script with an OpenCLIP command, or such a command itself.
    """
    name, text = _text(source)
    if name.endswith(".toml"):
        table = table_of(text, name)
        read = facts.read(name, text, table) if "training" in table else ours.read(name, text, table, known)
    elif name.endswith(".json"):
        read = _json(name, text)
    elif Command.find(text, command_line.MAIN) is not None:
        read = command_line.read(name, text)
    else:
        raise ValueError(
            f"{name[:80]}: is nothing that can be audited; name a .toml file, a .json file of Hugging Face or DeepSpeed, or a"
            f" script or"
            " command line with open_clip_train.main"
        )
    return Reading(with_known(read.training, known), read.document)


def _text(source: str | Path) -> tuple[str, str]:
    """Name and text. What has line breaks or flags is a command line, the rest is a path."""
    if isinstance(source, str) and ("\n" in source or " --" in source):
        return "command", source
    try:
        return str(source), Path(source).read_text("utf-8")
    except OSError as error:
        raise ValueError(f"{source}: cannot be read ({error.strerror}); name a file, or give a whole command line") from None
    except UnicodeDecodeError:
        raise ValueError(f"{source}: is not a text file") from None


def _is_deep(value: Any) -> bool:
    """Return whether lists and tables are nested more than DEEPEST levels deep."""
    level = [value]
    for _ in range(DEEPEST):
        inner = [entry.values() if isinstance(entry, dict) else entry for entry in level if isinstance(entry, (dict, list))]
        level = [each for entries in inner for each in entries]
    return any(isinstance(entry, (dict, list)) for entry in level)


def _json(name: str, text: str) -> Reading:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: is not valid JSON ({error})") from None
    if _is_deep(table):
        raise ValueError(f"{name}: is nested more than {DEEPEST} levels deep; no tool's settings are")
    if not isinstance(table, dict):
        raise ValueError(f"{name}: holds a {type(table).__name__}, must be an object with settings")
    for reader in (transformers, deepspeed):
        if reader.MARKS & table.keys():
            return reader.read(name, text, table)
    raise ValueError(
        f"{name}: has no key of Hugging Face's TrainingArguments ({sorted(transformers.MARKS)[0]}, …) or of DeepSpeed"
        f" ({sorted(deepspeed.MARKS)[0]}, …)"
    )
