"""The end of a run: its evaluation, single steps at large batches, the contact sheet, curves, the report, and a few sentences."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..config import Run
from ..data.source import Sample
from ..files import replacing, write_text
from ..recall import chance
from ..reporting.contact import contact_sheet, read_contact
from ..reporting.figures import save
from ..reporting.format import bytes_text, percent_text, plural, seconds_text
from ..reporting.history import number, read_history
from ..reporting.limits import limit_of, limit_sentence
from ..reporting.run_report import curves_figure, write_run_report
from .build import Assembly
from .evaluate import Embedded, evaluate_and_log, nearest
from .memory import peak, peak_of_tensors, reset_peak
from .objective import Contrastive
from .optimizer import Average, count
from .run_logger import RunLogger, memory_text

if TYPE_CHECKING:
    from PIL.Image import Image

QUERIES, ANSWERS = 8, 5
# Batches of the single steps that evaluate.large = "auto" takes. On two CPU cores 16,384 pairs of the embedded default take
# seconds, 65,536 take minutes.
LARGE_ON_CPU = (4_096, 16_384)
LARGE_ON_GPU = (*LARGE_ON_CPU, 65_536)


def finish(
    parts: Assembly, folder: Path, logger: RunLogger, average: Average | None, metadata: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Evaluate, and write result.json, the contact sheet, curves and report.html.

    metadata: of the last checkpoint. tensors: everything that the run holds between two steps.
    """
    run_peak = peak(parts.ranks.device)
    step_peak = planned_peak(parts, tensors) if parts.run.planned.peak_bytes else None
    quality: dict[str, Any] = {}
    embedded = None
    if sum(parts.held_out.lengths):
        quality, embedded = evaluate_and_log(parts, average, logger, step=metadata["step"], samples=metadata["samples"])
    large = (
        [large_step(parts, pairs, logger) for pairs in large_batches(parts.run, parts.ranks.device)] if not parts.classes else []
    )
    large = [step for step in large if step is not None]
    if not parts.ranks.first:
        return
    steps = read_history(folder / "log.jsonl").steps
    waiting, idle = (mean_share(steps, name) for name in ("waiting_for_data", "device_idle"))
    result = {
        "steps": metadata["step"],
        "samples": metadata["samples"],
        "seconds": metadata["seconds"],
        "pairs_per_s": metadata["samples"] / metadata["seconds"] if metadata["seconds"] else None,
        "waiting_for_data": waiting,
        "device_idle": idle,
        "limit": limit_of(waiting, idle),
        "peak_bytes": run_peak,
        "step_bytes": step_peak,
        "planned": {"peak_bytes": parts.run.planned.peak_bytes, "seconds_per_step": parts.run.planned.seconds_per_step},
        "parameters": count(parts.model.parameters()),
        "bad": metadata["bad"],
        "damage": [str(damage) for damage in parts.damage],
        "evaluation": quality or None,
        "flat": large,
    }
    if "accuracy" in quality:
        result["chance"] = {"accuracy": 1 / len(parts.classes)}
    if embedded is not None:
        result["chance"] = {str(k): recall for k, recall in chance(quality["different"]).items()}
    write_text(folder / "result.json", json.dumps(result, indent=2))
    if not parts.run.watch.report:
        return
    if embedded is not None:
        _write_contact(parts, embedded, folder)
        contact_sheet(read_contact(folder), folder / "contact.png")
    save(curves_figure(folder / "log.jsonl"), folder / "curves.png")
    write_run_report(folder)


def sentences(result: Mapping[str, Any]) -> list[str]:
    """Return what a run learnt, what it took, and what its large steps took, from the content of result.json.

    >>> sentences({"steps": 2, "samples": 64, "seconds": 4.0, "peak_bytes": None, "evaluation": {"pairs": 10, "accuracy": 0.5},
    ...     "chance": {"accuracy": 0.25}})
    ['50.0 % of 10 held-out samples are classified correctly; chance is 25.0 %.', 'Training on 64 samples in 2 steps took 4 s.']
    """
    quality, luck, lines = result.get("evaluation") or {}, result.get("chance") or {}, []
    if "accuracy" in quality:
        lines.append(
            f"{percent_text(quality['accuracy'])} of {quality['pairs']:,} held-out samples are classified correctly; chance is"
            f" {percent_text(luck['accuracy'])}."
        )
    elif quality:
        x, y = quality["sides"]
        lines.append(
            f"{percent_text(quality['y_to_x']['1'])} of {quality['pairs']:,} held-out {plural(y)} find their own {x} first, and"
            f" {percent_text(quality['x_to_y']['1'])} of the {plural(x)} their {y}; chance is {percent_text(luck['1'])}."
        )
    memory = "" if result.get("peak_bytes") is None else f" and at most {bytes_text(result['peak_bytes'])} of memory"
    samples, steps = f"{result['samples']:,} samples", f"{result['steps']:,} steps"
    lines.append(f"Training on {samples} in {steps} took {seconds_text(result['seconds'])}{memory}.")
    limit = limit_sentence(result.get("waiting_for_data"), result.get("device_idle"))
    lines += [limit] if limit else []
    if result.get("flat"):
        step = result["flat"][-1]
        memory = "" if step["peak_bytes"] is None else f" and {bytes_text(step['peak_bytes'])} at its peak"
        lines.append(
            f"One step at a batch of {step['pairs']:,} took {seconds_text(step['seconds'])}{memory}, with the same chunk of"
            f" {step['chunk']:,} rows: memory limits the chunk, not the batch."
        )
    return lines


def mean_share(steps: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return a share of the time of logged steps over all of them; None if no step has it.

    >>> mean_share([{"seconds": 1.0, "waiting_for_data": 0.5}, {"seconds": 3.0, "waiting_for_data": 0.1}], "waiting_for_data")
    0.2
    """
    times = [(number(step, "seconds"), number(step, name)) for step in steps]
    known = [(seconds, share) for seconds, share in times if seconds is not None and share is not None]
    total = sum(seconds for seconds, _ in known)
    return sum(seconds * share for seconds, share in known) / total if total else None


def planned_peak(parts: Assembly, tensors: dict[str, Tensor]) -> int | None:
    """Return the bytes of the tensors of one more step on a CPU, for comparison with the plan.

    The peak of the process also includes the interpreter, libraries and data, which no plan predicts. None on a device that counts
    its tensors itself, or where none of the step's samples can be read.
    """
    if parts.ranks.device.type != "cpu":
        return None
    (batch,) = parts.shuffled().batches([(0, parts.run.batch.size)])
    if not parts.ranks.sum(len(batch.keys))[0]:
        return None
    size = peak_of_tensors(lambda: parts.objective.step(batch), tensors.values())
    parts.model.zero_grad()
    return size


def large_batches(run: Run, device: torch.device) -> tuple[int, ...]:
    """Return the batches of evaluate.large; "auto" takes 65,536 pairs only on a GPU."""
    if run.evaluate.large == "auto":
        return LARGE_ON_CPU if device.type == "cpu" else LARGE_ON_GPU
    return run.evaluate.large


def large_step(parts: Assembly, pairs: int, logger: RunLogger) -> dict[str, Any] | None:
    """Return time and peak memory of forward and backward at a batch of `pairs`, with the run's chunk and no graph kept.

    None where none of its samples can be read.
    """
    objective = parts.objective
    assert isinstance(objective, Contrastive)
    logger.say(f"one step at {pairs:,} pairs: reading the samples …")
    with logger.heartbeat(lambda: "reading the samples"):
        (batch,) = parts.shuffled().batches([(0, pairs)])
    if not parts.ranks.sum(len(batch.keys))[0]:
        logger.note(f"the step at {pairs:,} pairs is left out: none of its samples can be read")
        return None
    for encode in (objective.encode_x, objective.encode_y):
        encode.stop_keeping()
    parts.model.zero_grad()
    reset_peak(parts.ranks.device)
    with _chunk_status(objective, len(batch.keys)) as status, logger.heartbeat(status):
        began = time.perf_counter()
        outcome = objective.step(batch)
        loss = float(outcome.loss)
        seconds = time.perf_counter() - began
    parts.model.zero_grad()
    measured = {"pairs": pairs, "chunk": objective.encode_x.chunk, "seconds": seconds, "peak_bytes": peak(parts.ranks.device)}
    memory = memory_text(measured["peak_bytes"])
    logger.note(f"one step at {pairs:,} pairs, chunk {measured['chunk']:,}: {seconds:.1f} s, peak {memory}, loss {loss:.3f}")
    return measured


@contextmanager
def _chunk_status(objective: Contrastive, rows: int) -> Iterator[Callable[[], str]]:
    """Yield a function that says how far a step without kept graphs is: it encodes every chunk in forward and again in backward."""
    encoders = [encoder for encoder in (objective.model.x, objective.model.y) if encoder is not None]
    # One encoder for both sides takes the rows of both in one sequence of chunks.
    chunk = objective.encode_x.chunk
    chunks = 2 * -(-rows // chunk) if len(encoders) == 2 else -(-2 * rows // chunk)
    encoded = 0

    def add_one(*_: Any) -> None:
        nonlocal encoded
        encoded += 1

    def status() -> str:
        if encoded < chunks:
            return f"encoding, chunk {encoded + 1:,} of {chunks:,}"
        return "computing the loss" if encoded == chunks else f"backward, chunk {min(encoded - chunks, chunks):,} of {chunks:,}"

    hooks = [encoder.register_forward_hook(add_one) for encoder in encoders]
    try:
        yield status
    finally:
        for hook in hooks:
            hook.remove()


def _write_contact(parts: Assembly, embedded: Embedded, folder: Path) -> None:
    """Write contact.json and its images: some queries of both directions with their best answers."""
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
    """Return one side of a sample: its text, or an image file and its caption."""
    sample = samples[place]
    shown = sample.x if side == "x" else sample.y
    if isinstance(shown, str):
        return {"text": shown, "image": None}
    image = cast("Image", shown)
    path = folder / "contact" / f"{place}-{side}.png"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as temporary:
            _small(image).save(temporary, "PNG")
    caption = sample.y if side == "x" else sample.x
    return {"text": caption if isinstance(caption, str) else "", "image": path.relative_to(folder).as_posix()}


def _small(image: Image) -> Image:
    image = image.convert("RGB")
    image.thumbnail((256, 256))
    return image
