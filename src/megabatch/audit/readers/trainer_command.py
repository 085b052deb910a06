"""Read command lines of Hugging Face's Trainer: its example scripts, Tevatron, FlagEmbedding, ms-swift and scripts of one's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...objectives import DEFAULT
from ..documents import Reading
from ..formats.command_text import ABSENT, PRESENT, Command, edit_flags, find_command, parse_flags
from ..model_names import parameters_of
from . import transformers
from .launcher import launch_of

# A script, a module (but not the launcher's), or a command of ms-swift or LLaMA-Factory. A script is looked for only where a word
# begins: from every character of a long word, the search would take a time that is quadratic in its length.
MAIN = (
    r"(?<![\w./-])[\w./-]+\.py\b|(?:(?<=-m )|(?<=--module ))(?!torch\.distributed|accelerate)[\w.]+"
    r"|\b(?:swift\s+(?:sft|pt)|llamafactory-cli\s+train)\b"
)
# Characters of a path that Linux accepts.
LONGEST_PATH = 4096
# Arguments of the Trainer that are no keys of DEFAULTS, with the type of their values.
OTHERS: dict[str, type] = {
    "eval_strategy": str,
    "evaluation_strategy": str,
    "deepspeed": str,
    "accelerator_config": str,
    "average_tokens_across_devices": bool,
    "batch_sampler": str,
    "use_cache": bool,
}
Flags = Mapping[str, list[str]]


class Program(NamedTuple):
    """A program that takes the Trainer's arguments.

    pattern: of its name. facts: what its own flags and defaults say. chunk: its flags for chunks of a batch. keys: where it states
    facts that other programs do not.
    """

    pattern: str
    facts: Callable[[Flags], dict[str, Any]]
    chunk: tuple[str, ...] = ()
    keys: Mapping[str, str] = {}
    switches: tuple[str, ...] = ()

    def edits(self, fact: str, value: Any) -> dict[str, Any] | None:
        """Return the flags of its own that change a fact."""
        if fact == "chunk" and self.chunk:
            return dict.fromkeys(self.switches, True) | dict.fromkeys(self.chunk, value)
        if fact == "scale" and "scale" in self.keys:
            return {"temperature": float(f"{1 / value:.3g}")}
        if fact == "gather" and "gather" in self.keys:
            return {self.keys["gather"][2:]: True}
        return None


def read(name: str, text: str) -> Reading | None:
    """Return the reading of the first command with arguments of the Trainer, or None if there is none."""
    command = find(text)
    if command is None:
        return None
    program = _program(command)

    def parse(after: str) -> dict[str, Any]:
        found = find(after)
        if found is None:
            raise ValueError(f"{name}: has no command with arguments of the Trainer")
        return table_of(parse_flags(found.words()))

    def edit(before: str, edits: Mapping[str, Any]) -> str:
        values = {f"--{key}": _written(value) for key, value in edits.items()}
        if any("." in key for key in edits):
            raise ValueError("a command line has no flag for a nested key")
        return edit_flags(before, values, MAIN, _has_arguments)

    def extra(after: str) -> dict[str, Any]:
        found = find(after)
        return {} if found is None else _extra(found, program)

    training, document = transformers.read(name, text, parse, edit, extra, lambda fact, value: program.edits(fact, value))
    keys = {fact: f"--{key}" if re.fullmatch(r"\w+", key) else key for fact, key in document.keys.items()}
    return Reading(training, document._replace(keys={**keys, **program.keys}))


def _extra(command: Command, program: Program) -> dict[str, Any]:
    launch = launch_of(command)
    facts = {"ranks": launch.ranks} | program.facts(parse_flags(command.words()))
    if launch.ranks == 1 and (launch.visible or 1) > 1:
        # The Trainer wraps the model in DataParallel, and a loss outside of the model sees the batch of all GPUs.
        facts |= {"data_parallel": True, "visible": launch.visible, "ranks": launch.visible}
    return facts


def find(text: str) -> Command | None:
    """Return the first command with arguments of the Trainer."""
    return find_command(text, MAIN, _has_arguments)


def _has_arguments(command: Command) -> bool:
    return any(f"--{key}" in flag.replace("-", "_").replace("__", "--", 1) for flag in parse_flags(command.words())
               for key in transformers.MARKS)  # fmt: skip


def table_of(flags: Flags) -> dict[str, Any]:
    """Return the Trainer's arguments in flags. A value with a shell variable is unknown (None)."""
    table: dict[str, Any] = {}
    for flag, words in flags.items():
        key = flag[2:].replace("-", "_")
        default = 500 if key == "eval_steps" else transformers.DEFAULTS.get(key)
        kind = OTHERS.get(key) or (type(default) if default is not None else None)
        if kind is not None:
            table[key] = _value(flag, words, kind)
    return table


def _value(flag: str, words: list[str], kind: type) -> Any:
    if kind is bool:
        return not words or words[0].lower() in ("true", "1", "yes", "t", "y")
    if not words:
        raise ValueError(f"{flag} has no value")
    if "$" in words[0]:
        return None
    if kind is str:
        return words[0]
    try:
        number = float(words[0])
    except ValueError:
        raise ValueError(f"{flag} is {words[0]!r}: must be a number") from None
    return int(number) if kind is int and abs(number) < 1e18 and number == int(number) else number


def _written(value: Any) -> Any:
    if isinstance(value, bool):
        return PRESENT if value else ABSENT
    return value


def number_of(flags: Flags, flag: str, default: float | None = None) -> float | None:
    """Return the number after a flag; None if it is a shell variable."""
    if flag not in flags:
        return default
    value: float | None = _value(flag, flags[flag], float)
    return value


def _count(flags: Flags, flag: str, default: int | None = None) -> int | None:
    number = number_of(flags, flag, default)
    return None if number is None or not 1 <= number < 1e9 else int(number)


def _mined(flags: Flags) -> int | None:
    """Return the negatives in a group of passages, which has one positive."""
    group = _count(flags, "--train_group_size", 8)
    return None if group is None or group == 1 else group - 1


def _started(flags: Flags) -> dict[str, Any]:
    """Return what the flags of the example scripts say about the model."""
    model = (flags.get("--model_name_or_path") or flags.get("--model") or [""])[0]
    scratch = not model and ("--config_name" in flags or "--model_type" in flags)
    return {"finetuning": True if model else False if scratch else None, "parameters": parameters_of(model)}


def _tevatron(flags: Flags) -> dict[str, Any]:
    cached = "--grad_cache" in flags
    temperature = number_of(flags, "--temperature", 1.0)
    return _started(flags) | {
        "tool": "tevatron",
        "objective": DEFAULT,
        "gather": "exact",
        "adapter": True if "--lora" in flags else None,
        "negatives": _mined(flags),
        "chunk": _count(flags, "--gc_q_chunk_size", 4) if cached else None,
        "scale": 1 / temperature if temperature and "--normalize" in flags and not cached else None,
        "temperature_ignored": cached and temperature not in (None, 1.0),
        # Retrieval is evaluated by other commands.
        "held_out": True,
    }


def _flag_embedding(flags: Flags) -> dict[str, Any]:
    temperature = number_of(flags, "--temperature", 0.02)
    return _started(flags) | {
        "tool": "flag_embedding",
        "objective": DEFAULT,
        "gather": "exact" if "--negatives_cross_device" in flags else "none",
        "adapter": True if "--use_lora" in flags else None,
        "negatives": _mined(flags),
        "chunk": _count(flags, "--sub_batch_size") if "--sub_batch_size" in flags else None,
        "scale": 1 / temperature if temperature and flags.get("--normalize_embeddings", ["True"]) != ["False"] else None,
        "held_out": True,
    }


def _swift(flags: Flags) -> dict[str, Any]:
    embeds = "embedding" in flags.get("--task_type", [])
    lora = (flags.get("--train_type") or flags.get("--tuner_type") or ["lora"])[0] == "lora"
    given = {} if "--learning_rate" in flags else {"lr": 1e-4 if lora else 1e-5}
    return _started(flags) | given | {
        "tool": "swift",
        "objective": DEFAULT if embeds and "infonce" in flags.get("--loss_type", ["infonce"]) else None if embeds else "lm",
        "adapter": lora,
        "held_out": True,
    }  # fmt: skip


def _language_model(flags: Flags) -> dict[str, Any]:
    return _started(flags) | {"objective": "lm"}


def _supervised(flags: Flags) -> dict[str, Any]:
    return _started(flags) | {"objective": "supervised"}


def _clip(flags: Flags) -> dict[str, Any]:
    # CLIPModel computes the loss of a rank's own pairs (transformers issue 22252).
    return _started(flags) | {"objective": DEFAULT, "gather": "none"}


PROGRAMS = (
    Program(
        r"\btevatron\b",
        _tevatron,
        ("gc_q_chunk_size", "gc_p_chunk_size"),
        {"temperature_ignored": "--temperature", "scale": "--temperature", "chunk": "--gc_q_chunk_size"},
        ("grad_cache",),
    ),
    Program(r"\bFlagEmbedding\b.*\breranker\b", lambda flags: _started(flags) | {"objective": "supervised", "held_out": True}),
    Program(
        r"\bFlagEmbedding\b",
        _flag_embedding,
        ("sub_batch_size",),
        {"scale": "--temperature", "chunk": "--sub_batch_size", "gather": "--negatives_cross_device"},
    ),
    Program(r"\bswift\s+(sft|pt)\b|swift/cli/", _swift),
    Program(r"run_clip\w*\.py", _clip),
    Program(r"run_(clm|mlm|plm|t5_mlm|speech_recognition|summarization|translation)\w*\.py|\bsft\.py", _language_model),
    Program(r"run_(glue|xnli|ner|qa|squad|image_classification|swag|classification|audio_classification)\w*\.py", _supervised),
    Program(r"", _started),
)


def _program(command: Command) -> Program:
    match = re.search(MAIN, command.body)
    assert match is not None
    name = match[0][-LONGEST_PATH:]
    return next(program for program in PROGRAMS if re.search(program.pattern, name))
