"""Read the YAML file of `accelerate config`: how a training is launched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ..documents import Document, Reading
from ..facts import TrainingFacts
from ..formats.yaml_text import edit_yaml, parse_yaml
from .deepspeed import at

MARKS = {"distributed_type", "compute_environment", "num_processes", "mixed_precision"}
KEYS = {
    "ranks": "num_processes",
    "accumulation": "deepspeed_config.gradient_accumulation_steps",
    "precision": "mixed_precision",
    "offloads_parameters": "deepspeed_config.offload_param_device",
    "zero_stage": "deepspeed_config.zero_stage",
    "disagreement": "distributed_type",
    "gather": "the loss",
}
PRECISIONS: dict[str, Literal["fp32", "bf16", "fp16"]] = {"no": "fp32", "false": "fp32", "fp16": "fp16", "bf16": "bf16"}
# Keys that a DeepSpeed file replaces; accelerate refuses to start if both are there.
IN_FILE = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device", "offload_param_device",
    "zero3_save_16bit_model", "mixed_precision",
)  # fmt: skip


def read(name: str, text: str) -> Reading:
    def reread(after: str) -> TrainingFacts:
        return _facts(parse_yaml(after, name))

    table = parse_yaml(text, name)
    return Reading(
        reread(text), Document(name, text, KEYS, lambda changes, training: _translate(changes, table), edit_yaml, reread)
    )


def _facts(table: Mapping[str, Any]) -> TrainingFacts:
    stage = at(table, "deepspeed_config.zero_stage")
    accumulation = at(table, "deepspeed_config.gradient_accumulation_steps")
    precision = PRECISIONS.get(str(table.get("mixed_precision")).lower())
    clip = at(table, "deepspeed_config.gradient_clipping")
    return TrainingFacts(
        tool="accelerate",
        ranks=_count(table.get("num_processes")),
        accumulation=_count(accumulation),
        accumulates="plain",
        clip_norm=clip if isinstance(clip, (int, float)) and not isinstance(clip, bool) and 0 <= clip < 1e15 else None,
        precision=precision,
        loss_scaling=True if precision == "fp16" else None,
        zero_stage=stage if isinstance(stage, int) and not isinstance(stage, bool) and 0 <= stage <= 3 else None,
        offloads_parameters=at(table, "deepspeed_config.offload_param_device") in ("cpu", "nvme"),
        split_batches=table.get("split_batches") is True,
        disagreement=" ".join(sentence for sentence, _ in _contradictions(table)) or None,
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**9 else None


def _contradictions(table: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return sentences about settings that contradict each other, each with the edits that make them agree."""
    found: list[tuple[str, dict[str, Any]]] = []
    processes, machines = _count(table.get("num_processes")), _count(table.get("num_machines"))
    # `NO` is a truth value of YAML 1.1.
    kind = table.get("distributed_type")
    if kind in (False, "NO") and processes is not None and processes > 1:
        sentence = f"distributed_type is NO, but num_processes is {processes}: one process is started."
        found.append((sentence, {"distributed_type": "MULTI_GPU"}))
    if processes is not None and machines is not None and processes % machines:
        sentence = f"num_processes is {processes}, which counts the processes of all machines, but num_machines is {machines}."
        found.append((sentence, {"num_processes": processes * machines}))
    config = at(table, "deepspeed_config.deepspeed_config_file")
    both = [key for key in IN_FILE if config and at(table, f"deepspeed_config.{key}") is not None]
    if both:
        sentence = (
            f"deepspeed_config has {', '.join(both)} beside a deepspeed_config_file, which states them: accelerate refuses to"
        )
        found.append((f"{sentence} start.", {}))
    if config is None and kind == "FSDP" and isinstance(table.get("deepspeed_config"), dict) and table["deepspeed_config"]:
        found.append(("distributed_type is FSDP, but deepspeed_config has settings: they are ignored.", {}))
    return found


def _translate(changes: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any] | None:
    edits: dict[str, Any] = {}
    for fact, value in changes.items():
        if fact == "disagreement":
            contradictions = _contradictions(table)
            if not all(settings for _, settings in contradictions):
                return None
            for _, settings in contradictions:
                edits |= settings
        elif fact == "offloads_parameters":
            edits[KEYS[fact]] = "none"
        elif fact == "accumulation":
            edits[KEYS[fact]] = value
        else:
            return None
    return edits
