"""Read the files of several tools into facts: recognize the tool of a file, and call its reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..documents import Reading
from ..facts import with_facts
from ..formats.command_text import find_command
from ..formats.json_text import edit_json, parse_json
from ..formats.toml_text import parse_toml
from ..formats.yaml_text import edit_yaml, parse_yaml
from ..model_names import parameters_of
from . import (
    accelerate,
    axolotl,
    deepspeed,
    lightning,
    open_clip,
    python_script,
    run,
    trainer_command,
    training_table,
    transformers,
)

__all__ = ["read_any"]

LARGEST_FILE = 2**20
# Keys of TRL's and LLaMA-Factory's files beside the Trainer's arguments.
LANGUAGE_MODEL = {"stage", "cutoff_len", "max_seq_length", "chat_template", "packing", "dataset_text_field"}


class TableReader(NamedTuple):
    """A tool whose files are tables. marks: keys of which a file of this tool has at least one. read: from name, text and table."""

    title: str
    marks: set[str]
    read: Callable[[str, str, Mapping[str, Any]], Reading]


def _trainer(parse: Any, edit: Any) -> Callable[[str, str, Mapping[str, Any]], Reading]:
    return lambda name, text, table: transformers.read(name, text, lambda after: parse(after, name), edit, lambda _: _stated(table))


def _stated(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return what files of LLaMA-Factory and alike say beside the Trainer's arguments."""
    facts: dict[str, Any] = {}
    model = table.get("model_name_or_path")
    if isinstance(model, str):
        facts |= {"finetuning": True, "parameters": parameters_of(model)}
    if LANGUAGE_MODEL & table.keys():
        facts["objective"] = "lm"
    if table.get("finetuning_type") == "lora" or table.get("use_peft") is True:
        facts["adapter"] = True
    return facts


# In the order in which they are tried: DeepSpeed's settings may be part of the others' files.
JSON = (
    TableReader("Hugging Face's TrainingArguments", transformers.MARKS, _trainer(parse_json, edit_json)),
    TableReader("DeepSpeed", deepspeed.MARKS, deepspeed.read),
)
YAML = (
    TableReader("axolotl", axolotl.MARKS, lambda name, text, table: axolotl.read(name, text)),
    TableReader(
        "Lightning",
        lightning.MARKS,
        lambda name, text, table: lightning.read(name, text, lambda after: parse_yaml(after, name), edit_yaml),
    ),
    TableReader("Hugging Face's TrainingArguments", transformers.MARKS, _trainer(parse_yaml, edit_yaml)),
    TableReader("accelerate", accelerate.MARKS, lambda name, text, table: accelerate.read(name, text)),
)


def read_any(source: str | Path, **facts: Any) -> Reading:
    """Read a file or a command line. facts: what it does not state (ranks=8, data=10_000_000, …).

    source: a megabatch run or a `[training]` table of facts (.toml); Hugging Face TrainingArguments (.json, .yaml), also those of
        Sentence Transformers; DeepSpeed (.json); accelerate, Lightning's CLI or axolotl (.yaml); a Python script (.py), which is
        not executed; a shell script with a command of OpenCLIP or of a program with the Trainer's arguments, or such a command.
    """
    name, text = _text(source)
    if name.endswith(".toml"):
        table = parse_toml(text, name)
        reading = training_table.read(name, text, table) if "training" in table else run.read(name, text, table, facts)
    elif name.endswith(".json"):
        reading = _by_marks(JSON, name, text, parse_json(text, name))
    elif name.endswith((".yaml", ".yml")):
        reading = _by_marks(YAML, name, text, parse_yaml(text, name))
    elif name.endswith(".py"):
        reading = python_script.read(name, text)
    else:
        reading = _read_command(name, text)
    document = reading.document
    reading = Reading(reading.training, document._replace(read=lambda after: with_facts(document.read(after), facts)))
    return Reading(with_facts(reading.training, facts), reading.document)


def _read_command(name: str, text: str) -> Reading:
    if find_command(text, open_clip.MAIN) is not None:
        return open_clip.read(name, text)
    reading = trainer_command.read(name, text)
    if reading is None:
        raise ValueError(
            f"{name[:80]}: cannot be audited; give a .toml, .json, .yaml or .py file, or a script or command line of OpenCLIP"
            " (open_clip_train.main) or with arguments of Hugging Face's Trainer (--per_device_train_batch_size, …)"
        )
    return reading


def _text(source: str | Path) -> tuple[str, str]:
    """Return name and text of a source. A source with line breaks or flags is a command line, any other is a path."""
    if isinstance(source, str) and ("\n" in source or " --" in source):
        return "command", source
    try:
        with open(source, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ValueError(f"{source}: cannot be read ({error.strerror}); give the path of a file, or a whole command line") from None
    if len(content) > LARGEST_FILE:
        raise ValueError(f"{source}: is larger than {LARGEST_FILE:,} bytes, the limit of a configuration")
    try:
        # Lines end as the parsers count them, whatever the system that wrote them.
        return str(source), content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise ValueError(f"{source}: is not a text file") from None


def _by_marks(readers: tuple[TableReader, ...], name: str, text: str, table: Mapping[str, Any]) -> Reading:
    for reader in readers:
        if reader.marks & table.keys():
            return reader.read(name, text, table)
    marks = "; ".join(f"{reader.title} ({sorted(reader.marks)[0]}, …)" for reader in readers)
    raise ValueError(f"{name}: has no key of {marks}")
