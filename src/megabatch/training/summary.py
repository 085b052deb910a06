"""The end of a run: its result, steps at large batches, a contact sheet, curves, the report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..data.source import Sample
from ..files import replacing, write_text
from ..recall import chance
from ..reporting.contact import contact_sheet, read_contact
from ..reporting.figures import save
from ..reporting.run_report import curves_figure, write_run_report
from .build import Assembly
from .evaluate import nearest
from .held_out import Embedded, evaluated
from .memory import peak, peak_of_tensors, reset_peak
from .objective import Contrastive
from .optimizer import Average, count
from .run_logger import Watch, memory_text

if TYPE_CHECKING:
    from PIL.Image import Image

QUERIES, ANSWERS = 8, 5


def finish(
    parts: Assembly, folder: Path, watch: Watch, average: Average | None, facts: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Evaluates, writes result.json, contact sheet, curves and report.html. `tensors`: all that the run holds between two steps."""
    run_peak = peak(parts.ranks.device)
    step_peak = planned_peak(parts, tensors) if parts.run.planned.peak_bytes else None
    found: dict[str, Any] = {}
    embedded = None
    if sum(parts.held_out.lengths):
        found, embedded = evaluated(parts, average, watch, step=facts["step"], samples=facts["samples"])
    large = [large_step(parts, pairs, watch) for pairs in parts.run.evaluate.large] if not parts.classes else []
    large = [step for step in large if step is not None]
    if not parts.ranks.first:
        return
    result = {
        "steps": facts["step"],
        "samples": facts["samples"],
        "seconds": facts["seconds"],
        "pairs_per_s": facts["samples"] / facts["seconds"] if facts["seconds"] else None,
        "peak_bytes": run_peak,
        "step_bytes": step_peak,
        "planned": {"peak_bytes": parts.run.planned.peak_bytes, "seconds_per_step": parts.run.planned.seconds_per_step},
        "parameters": count(parts.model.parameters()),
        "bad": facts["bad"],
        "damage": [str(damage) for damage in parts.damage],
        "evaluation": found or None,
        "flat": large,
    }
    if "accuracy" in found:
        result["chance"] = {"accuracy": 1 / len(parts.classes)}
    if embedded is not None:
        result["chance"] = {str(k): share for k, share in chance(found["pairs"]).items()}
    write_text(folder / "result.json", json.dumps(result, indent=2))
    if not parts.run.watch.report:
        return
    if embedded is not None:
        _contact(parts, embedded, folder)
        contact_sheet(read_contact(folder), folder / "contact.png")
    save(curves_figure(folder / "log.jsonl"), folder / "curves.png")
    write_run_report(folder)


def planned_peak(parts: Assembly, tensors: dict[str, Tensor]) -> int | None:
    """What the tensors of one more step take on a CPU: the process's own peak holds interpreter, libraries and data too, of which
    no plan knows. None where a device counts its tensors, or where none of the step's samples can be read."""
    if parts.ranks.device.type != "cpu":
        return None
    (batch,) = parts.shuffled().batches([(0, parts.run.batch.size)])
    if not parts.ranks.sum(len(batch.keys))[0]:
        return None
    found = peak_of_tensors(lambda: parts.objective.step(batch), tensors.values())
    parts.model.zero_grad()
    return found


def large_step(parts: Assembly, pairs: int, watch: Watch) -> dict[str, Any] | None:
    """Time and peak memory of forward and backward at a batch of `pairs`, with the run's chunk and no graph kept.

    None where none of its samples can be read.
    """
    objective = parts.objective
    assert isinstance(objective, Contrastive)
    watch.say(f"taking one step at {pairs:,} pairs …")
    (batch,) = parts.shuffled().batches([(0, pairs)])
    if not parts.ranks.sum(len(batch.keys))[0]:
        watch.note(f"the step at {pairs:,} pairs is left out: none of its samples can be read")
        return None
    for encode in (objective.encode_x, objective.encode_y):
        encode.stop_keeping()
    parts.model.zero_grad()
    reset_peak(parts.ranks.device)
    began = time.perf_counter()
    outcome = objective.step(batch)
    loss = float(outcome.loss)
    seconds = time.perf_counter() - began
    parts.model.zero_grad()
    found = {"pairs": pairs, "chunk": objective.encode_x.chunk, "seconds": seconds, "peak_bytes": peak(parts.ranks.device)}
    peaked = memory_text(found["peak_bytes"])
    watch.note(f"one step at {pairs:,} pairs, chunk {found['chunk']:,}: {seconds:.1f} s, peak {peaked}, loss {loss:.3f}")
    return found


def _contact(parts: Assembly, embedded: Embedded, folder: Path) -> None:
    """contact.json and its pictures: some queries of both directions with their best answers."""
    chosen = torch.randperm(len(embedded.at), generator=torch.Generator().manual_seed(0))[:QUERIES]
    answers = min(ANSWERS, len(embedded.at))
    samples: dict[int, Sample] = {}
    queries = []
    for asking, answering, side in ((embedded.y, embedded.x, "x"), (embedded.x, embedded.y, "y")):
        scores, indices = nearest(asking[chosen], answering, answers)
        for query, row, score in zip(chosen.tolist(), indices.tolist(), scores.tolist(), strict=True):
            for place in (query, *row):
                samples.setdefault(place, parts.held_out.read(*embedded.at[place]))
            queries.append(
                _shown(samples, query, "y" if side == "x" else "x", folder)
                | {
                    "answers": [
                        _shown(samples, place, side, folder)
                        | {"right": bool(embedded.ids[place] == embedded.ids[query]), "score": value}
                        for place, value in zip(row, score, strict=True)
                    ]
                }
            )
    write_text(folder / "contact.json", json.dumps({"queries": queries}, indent=1))


def _shown(samples: dict[int, Sample], place: int, side: str, folder: Path) -> dict[str, Any]:
    """One side of a sample: its text, or a picture file and the caption that belongs to it."""
    sample = samples[place]
    shown = sample.x if side == "x" else sample.y
    if isinstance(shown, str):
        return {"text": shown, "image": None}
    path = folder / "contact" / f"{place}-{side}.png"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as temporary:
            _small(shown).save(temporary, "PNG")
    caption = sample.y if side == "x" else sample.x
    return {"text": caption if isinstance(caption, str) else "", "image": path.relative_to(folder).as_posix()}


def _small(image: Image) -> Image:
    image = image.convert("RGB")
    image.thumbnail((256, 256))
    return image
