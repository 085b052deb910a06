"""Targets that are settings: configuration files, tables, overrides, and the files that the audit reads."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import random
import typing
from pathlib import Path
from typing import Any

from megabatch import config, trust
from megabatch.audit import audit, audit_together, read_any
from megabatch.audit.readers import open_clip as command_line
from megabatch.audit.readers import transformers
from megabatch.training.schedules import step_schedule

from .harness import Target
from .mutations import mutated
from .values import as_json, as_toml, like, scalar, spoiled, text, value

VALID = config.as_table(config.build(config.EMBEDDED))
FIELDS = [
    (section.name, field.name, typing.get_type_hints(type(getattr(config.Run(), section.name)))[field.name])
    for section in dataclasses.fields(config.Run)
    if dataclasses.is_dataclass(getattr(config.Run(), section.name))
    for field in dataclasses.fields(getattr(config.Run(), section.name))
]
SECTIONS = [key for key in config.as_table(config.build(config.EMBEDDED)) if key not in ("out", "seed")]
KEYS = [
    f"{section}.{key}" if key else section
    for section in ("out", "seed", *SECTIONS)
    for key in (config.as_table(config.Run()).get(section, {}) if section in SECTIONS else ("",))
]
DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.999], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 100, "total_num_steps": 10000}},
    "fp16": {"enabled": True, "loss_scale": 0},
    "bf16": {"enabled": False},
    "zero_optimization": {"stage": 2},
    "autotuning": {"enabled": False},
}
ARGUMENTS = transformers.DEFAULTS | {
    "learning_rate": 5e-5,
    "eval_strategy": "no",
    "batch_sampler": "batch_sampler",
    "average_tokens_across_devices": True,
    "output_dir": "out",
}
# Sensible values of each fact, some of them mistakes that a rule finds.
FACTS: dict[str, tuple[Any, ...]] = {
    "objective": ("clip", "siglip", "supervised", "lm"),
    "batch": (1, 64, 4096, 10**6, 10**15),
    "micro": (1, 8, 512),
    "chunk": (1, 64, 10**5),
    "ranks": (1, 2, 8, 10**4),
    "accumulation": (1, 4, 10**4),
    "accumulates": ("plain", "features"),
    "gather": ("exact", "matrix", "whole", "no-gradient", "none"),
    "optimizer": ("adam", "sgd", "lars", "lamb"),
    "lr": (1e-3, 1e-30, 1e15, 1),
    "base_lr": (1e-3, 1e-30, 1e15),
    "base_batch": (1, 256, 10**15),
    "warmup": (0, 0.1, 1e-30, 2000, 1e15),
    "beta2": (0, 0.9, 0.999, 0.9999999999999999),
    "weight_decay": (0, 0.1, 1e15),
    "decays_gains": (True, False),
    "clip_norm": (0, 1.0, 1e15),
    "clip_at": ("step", "micro-batch"),
    "schedule_at": ("step", "micro-batch"),
    "ema": (0.5, 0.9999, 1e-30, 0.9999999999999999),
    "ema_at": ("step", "micro-batch"),
    "steps": (1, 1000, 10**15),
    "epochs": (0.1, 30, 1e-30, 1e15),
    "samples": (1, 10**6, 10**15),
    "data": (1, 10**6, 10**15),
    "unique": (1, 10**5, 10**15),
    "precision": ("fp32", "bf16", "fp16"),
    "loss_scaling": (True, False),
    "half_weights": (True, False),
    "batchnorm": (True, False),
    "sync_batchnorm": (True, False),
    "ragged": (True, False),
    "token_mean": ("total", "rank", "micro-batch"),
    "finetuning": (True, False),
    "duplicates": ("mask", "positive", "negative"),
    "max_scale": (1.0, 100.0, 1e15, math.inf),
    "rate_follows": (True, False),
    "batch_from_memory": (True, False),
    "held_out": (True, False),
    "tool": ("megabatch", "open_clip", "transformers", "sentence_transformers", "tevatron", "deepspeed"),
    "parameters": (1, 10**8, 7 * 10**9, 10**15),
    "length": (1, 2048, 10**15),
    "adapter": (True, False),
    "quantized": (True, False),
    "locked": (True, False),
    "negatives": (1, 7, 10**6),
    "warmup_share": (0, 0.5, 1, 10, 1e15),
    "schedule_lr": (1e-3, 1e-30, 1e15),
    "two_precisions": (True, False),
    "zero_stage": (0, 2, 3),
    "offloads_parameters": (True, False),
    "eval_every": (1, 5, 1000, 10**15),
    "split_batches": (True, False),
    "data_parallel": (True, False),
    "scale": (1e-30, 0.05, 20, 1e15),
    "cached_gradient_sum": (True, False),
    "scale_outside_ddp": (True, False),
    "random_tower": (True, False),
}
COMMANDS = (
    "torchrun --nproc_per_node 8 -m open_clip_train.main --train-data d.tar --batch-size 256 --lr 5e-4 --epochs 30 --warmup 2000"
    " --precision amp_bf16\n",
    "#!/bin/bash\nexport X=1\nsrun python -m training.main --train-data 'd{0..9}.tar' \\\n  --model ViT-B-32 \\\n"
    "  --train-num-samples 10000000 --local-loss \\\n  --accum-freq 4 --siglip --wd 0.2 --beta2 0.98\necho done\n",
)


def run_table(rng: random.Random) -> dict[str, Any]:
    """Return a run's table: parts of a valid one, some values replaced by others of the right type, and often a hostile one."""
    table = {key: dict(entry) if isinstance(entry, dict) else entry for key, entry in VALID.items() if rng.random() < 0.6}
    table["schedule"] = {rng.choice(config.LENGTHS): rng.choice((1, 10, 1000, 10**6))}
    for _ in range(rng.choice((0, 0, 1, 2, 4))):
        section, key, hint = rng.choice(FIELDS)
        if isinstance(table.setdefault(section, {}), dict):
            table[section][key] = like(hint, rng)
    return table if rng.random() < 0.35 else spoiled(table, rng)


def settled(valid: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a copy of a valid table with hostile values at zero to three of its keys, at any depth."""
    table = copy.deepcopy({key: entry for key, entry in valid.items() if rng.random() < 0.8})
    return table if rng.random() < 0.3 else spoiled(table, rng)


def _toml(rng: random.Random) -> bytes:
    data = as_toml(run_table(rng), rng)
    return data if rng.random() < 0.4 else mutated(data, rng)


def _overrides(rng: random.Random) -> list[str]:
    found = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        key = rng.choice(KEYS) if rng.random() < 0.9 else text(rng)
        given = rng.choice((scalar, scalar, value))(rng)
        said = given if isinstance(given, str) else as_json(given, rng).decode("utf-8", "replace")
        if rng.random() < 0.1:
            said = mutated(said.encode("utf-8", "replace"), rng).decode("utf-8", "replace")
        found.append(f"{key}={said}" if rng.random() < 0.97 else key + said)
    return found


def _check_run(run: config.Run) -> None:
    """Check what holds for every accepted run: written and read back it is equal, and the code that it names can be listed."""
    trust.callables(run)
    # Texts are compared, because NaN is not equal to itself.
    again = config.build(_loads(config.as_toml(run)))
    assert config.as_toml(again) == config.as_toml(run), "a run that was written is read back as another one"


def _loads(written: str) -> dict[str, Any]:
    return config.tomllib.loads(written)


def _read_toml(data: bytes, folder: Path) -> None:
    path = folder / "run.toml"
    path.write_bytes(data)
    _check_run(config.read(path))


def _hf(rng: random.Random) -> bytes:
    data = as_json(settled(ARGUMENTS, rng), rng)
    return data if rng.random() < 0.6 else mutated(data, rng)


def _deepspeed(rng: random.Random) -> bytes:
    table = settled(DEEPSPEED, rng)
    optimizer, scheduler = table.get("optimizer"), table.get("scheduler")
    for section in (optimizer, scheduler):
        if isinstance(section, dict) and isinstance(section.get("params"), dict) and rng.random() < 0.3:
            spoiled(section["params"], rng)
    data = as_json(table, rng)
    return data if rng.random() < 0.6 else mutated(data, rng)


def _facts(rng: random.Random) -> bytes:
    facts = {key: rng.choice(choices) for key, choices in FACTS.items() if rng.random() < 0.6}
    for _ in range(rng.choice((0, 0, 1, 2))):
        facts[rng.choice(list(facts) or ["batch"])] = value(rng)
    data = as_toml({"training": facts}, rng)
    return data if rng.random() < 0.7 else mutated(data, rng)


def _command(rng: random.Random) -> bytes:
    flags = [*command_line.VALUES, *command_line.SWITCHES, "--nproc_per_node", "--nnodes", "-n", "--unknown"]
    words = []
    for _ in range(rng.choice((0, 1, 2, 4, 8))):
        flag = rng.choice(flags)
        given = (
            str(rng.choice((1, 8, 64, 1024, 5e-4, "amp", "ViT-B-32", "adamw", "$X"))) if rng.random() < 0.8 else str(scalar(rng))
        )
        words.append(rng.choice((f"{flag} {given}", f"{flag}={given}", flag, f"{flag} '{given}'", f"{flag} \\\n {given}")))
    line = rng.choice(COMMANDS).rstrip("\n") + " " + " ".join(words) + "\n"
    data = line.encode("utf-8", "surrogatepass")
    return data if rng.random() < 0.6 else mutated(data, rng, [command.encode() for command in COMMANDS])


def _known(rng: random.Random) -> dict[str, Any]:
    """Return facts that the command line adds, which it has parsed to numbers."""
    known: dict[str, Any] = {}
    if rng.random() < 0.5:
        known["data"] = rng.choice((1, 100, 10**6, 10**15))
    if rng.random() < 0.5:
        known["ranks"] = rng.choice((1, 2, 8, 64, 1000, 10**6)) if rng.random() < 0.95 else rng.choice((0, -1, 10**400))
    if rng.random() < 0.3:
        known |= {"base_lr": rng.choice((1e-3, 5e-4, 1e-9)), "base_batch": rng.choice((1, 256, 10**15))}
        if rng.random() < 0.1:
            known["base_lr"] = rng.choice((1e300, 1e-320, 0.0, math.inf))
    if rng.random() < 0.3:
        known["objective"] = rng.choice(("clip", "siglip", "supervised", "lm"))
    if rng.random() < 0.2:
        known["finetuning"] = True
    return known


def _with_known(make: Any) -> Any:
    return lambda rng: (make(rng), _known(rng))


def _audit_as(name: str) -> Any:
    def run(case: tuple[bytes, dict[str, Any]], folder: Path) -> None:
        data, known = case
        path = folder / name
        path.write_bytes(data)
        reading = read_any(path, **known)
        audit(reading, **known)
        other = read_any(COMMANDS[0], **known)
        audit_together([reading, other])

    return run


def _build_overrides(overrides: list[str], folder: Path) -> None:
    _check_run(config.build(config.EMBEDDED, overrides))


def _schedule(case: tuple[dict[str, Any], int], folder: Path) -> None:
    """The steps of a run can be computed before it starts, whatever their number."""
    table, samples = case
    steps = step_schedule(config.build(table), samples)
    first, last = steps[0], steps[-1]
    assert first.first == 0 and first.pairs >= 1 and last.pairs >= 1 and len(steps) >= 1
    assert last.first >= first.first and 0 <= last.rate < math.inf


def _schedules(rng: random.Random) -> tuple[dict[str, Any], int]:
    table = run_table(rng)
    schedule = {rng.choice(config.LENGTHS): rng.choice((1, 7, 10**6, 10**11, 10**15, 1e-9, 0.5, 2.5))}
    schedule |= {"warmup": rng.choice((0, 0.05, 1, 2000, 1e9)), "shape": rng.choice(("cosine", "linear", "constant"))}
    batch = {"size": rng.choice((1, 64, 1000, 2**31 - 1)), "schedule": rng.choice(("constant", "linear", "exponential", "steps"))}
    growth = {"start": 1, "ramp": rng.choice((1e-9, 0.5, 1.0))}
    return table | {"schedule": schedule, "batch": batch | growth}, rng.choice((1, 100, 10**9))


@functools.cache
def _corpus(suffixes: tuple[str, ...]) -> tuple[tuple[str, bytes], ...]:
    """Return name and text of the files of the audit's corpus, published and with mistakes."""
    folder = Path(__file__).parents[1] / "audit" / "corpus"
    cases = [case for path in sorted(folder.glob("*.toml")) for case in _loads(path.read_text("utf-8"))["case"]]
    return tuple((case["file"], case["text"].encode()) for case in cases if case.get("file", "").endswith(suffixes))


def _from_corpus(*suffixes: str) -> Any:
    """Return a generator of damaged files of the corpus, also joined with others and under the names of others."""

    def make(rng: random.Random) -> tuple[str, bytes]:
        files = _corpus(suffixes)
        name, data = rng.choice(files)
        if rng.random() < 0.9:
            data = mutated(data, rng, [other for _, other in files])
        return name, data

    return _with_known(make)


def _audit_file(case: tuple[tuple[str, bytes], dict[str, Any]], folder: Path) -> None:
    (name, data), known = case
    _audit_as(name)((data, known), folder)


TARGETS = (
    Target("schedule", _schedules, _schedule, 3),
    Target("configuration: TOML", _toml, _read_toml, 10, (ValueError, OSError)),
    Target("configuration: table", run_table, lambda table, folder: _check_run(config.build(table)), 20),
    Target("overrides", _overrides, _build_overrides, 20),
    Target("audit: run.toml", _with_known(_toml), _audit_as("run.toml"), 5, (ValueError, OSError)),
    Target("audit: [training]", _with_known(_facts), _audit_as("facts.toml"), 6, (ValueError, OSError)),
    Target("audit: TrainingArguments", _with_known(_hf), _audit_as("arguments.json"), 6, (ValueError, OSError)),
    Target("audit: DeepSpeed", _with_known(_deepspeed), _audit_as("deepspeed.json"), 6, (ValueError, OSError)),
    Target("audit: OpenCLIP", _with_known(_command), _audit_as("train.sh"), 6, (ValueError, OSError)),
    Target("audit: YAML", _from_corpus(".yaml", ".yml"), _audit_file, 6, (ValueError, OSError)),
    Target("audit: Python", _from_corpus(".py"), _audit_file, 6, (ValueError, OSError)),
    Target("audit: command lines", _from_corpus(".sh", ".sbatch"), _audit_file, 6, (ValueError, OSError)),
    Target("audit: JSON", _from_corpus(".json"), _audit_file, 3, (ValueError, OSError)),
)
