"""The end of a run: held-out quality, steps at large batches, a contact sheet, curves, the report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .assembly import Assembly
from .data.loader import once
from .data.order import Order
from .data.source import Sample, Source
from .evaluate import chance, nearest, retrieval
from .memory import peak, reset_peak
from .objective import Classification, Contrastive
from .optimizers import Average, count
from .report import write_report
from .report.contact import contact_sheet, read_contact
from .report.figures import curves
from .watch import Watch

if TYPE_CHECKING:
    from PIL.Image import Image

# Held-out pairs that are embedded between two exchanges.
AT_ONCE = 8192
QUERIES, ANSWERS = 8, 5


def finish(parts: Assembly, folder: Path, watch: Watch, average: Average | None, facts: dict[str, Any]) -> None:
    """Evaluates, writes result.json, contact sheet, curves and report.html."""
    run_peak = peak(parts.ranks.device)
    found: dict[str, Any] = {}
    embedded = None
    if sum(parts.held_out.lengths):
        found, embedded = _test(parts, average)
        watch.event("evaluation", step=facts["step"], samples=facts["samples"], **found)
    large = [large_step(parts, pairs, watch) for pairs in parts.run.evaluate.large] if not parts.classes else []
    if not parts.ranks.first:
        return
    result = {
        "steps": facts["step"],
        "samples": facts["samples"],
        "seconds": facts["seconds"],
        "pairs_per_s": facts["samples"] / facts["seconds"] if facts["seconds"] else None,
        "peak_bytes": run_peak,
        "planned": {"peak_bytes": parts.run.planned.peak_bytes, "seconds_a_step": parts.run.planned.seconds_a_step},
        "parameters": count(parts.model.parameters()),
        "bad": facts["bad"],
        "evaluation": found or None,
        "flat": large,
    }
    if "accuracy" in found:
        result["chance"] = {"accuracy": 1 / len(parts.classes)}
    if embedded is not None:
        result["chance"] = {str(k): share for k, share in chance(found["pairs"]).items()}
    (folder / "result.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
    if not parts.run.watch.report:
        return
    if embedded is not None:
        _contact(parts, embedded, folder)
        contact_sheet(read_contact(folder), folder / "contact.png")
    curves(folder / "log.jsonl", folder / "curves.png")
    write_report(folder)


def test(parts: Assembly, average: Average | None) -> dict[str, Any]:
    """Held-out quality: what an evaluation event of the log holds. All ranks take part."""
    return _test(parts, average)[0]


class Embedded:
    """Held-out pairs and their embeddings; `at` says where in the source each of them is."""

    def __init__(self, x: Tensor, y: Tensor, ids: Tensor, at: list[tuple[int, int]]) -> None:
        self.x, self.y, self.ids, self.at = x, y, ids, at


def _test(parts: Assembly, average: Average | None) -> tuple[dict[str, Any], Embedded | None]:
    if average is not None:
        average.swap()
    parts.model.eval()
    try:
        if isinstance(parts.objective, Classification):
            return _accuracy(parts, parts.objective), None
        embedded = embed_source(parts, parts.held_out, parts.run.evaluate.limit)
    finally:
        parts.model.train()
        if average is not None:
            average.swap()
    device = parts.ranks.device
    found = retrieval(embedded.x.to(device), embedded.y.to(device), ids=embedded.ids.to(device), tile=parts.run.compute.tile)
    return {"sides": _sides(parts), **found.facts()}, embedded


def _sides(parts: Assembly) -> list[str]:
    """What the two sides are called in front of people."""
    names = {("text", "text"): ["query", "document"], ("picture", "text"): ["picture", "text"]}
    return names.get((parts.x.kind, parts.y.kind), ["x", "y"])


def embed_source(parts: Assembly, source: Source, limit: int) -> Embedded:
    """Embeddings of both sides of at most `limit` pairs of a source, chosen once and for all, on the host of every rank."""
    assert isinstance(parts.objective, Contrastive)
    order = Order(source.lengths, max(1, sum(source.lengths)), 0)
    loader = parts.loader(source, order, augment=False)
    x, y, ids = [], [], []
    at: list[tuple[int, int]] = []
    for batch in loader.batches(once(min(limit, sum(source.lengths)), AT_ONCE)):
        assert batch.ids is not None
        rows = len(batch.keys)
        x.append(parts.ranks.gather_rows(parts.objective.embed(batch.x, "x")))
        y.append(parts.ranks.gather_rows(parts.objective.embed(batch.y, "y")))
        ids.append(parts.ranks.gather_rows(batch.ids[:rows]))
        places = [order.at(position) for position in batch.positions]
        at += [place for rank in parts.ranks.gather(places) for place in rank]
    if not at:
        raise ValueError("none of the held-out samples could be read")
    return Embedded(torch.cat(x), torch.cat(y), torch.cat(ids), at)


def large_step(parts: Assembly, pairs: int, watch: Watch) -> dict[str, Any]:
    """Time and peak memory of forward and backward at a batch of `pairs`, with the run's chunk and no graph kept."""
    objective = parts.objective
    assert isinstance(objective, Contrastive)
    watch.say(f"taking one step at {pairs:,} pairs …")
    (batch,) = parts.shuffled().batches([(0, pairs)])
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
    peaked = f"{found['peak_bytes'] / 2**20:,.0f} MiB"
    watch.note(f"one step at {pairs:,} pairs, chunk {found['chunk']:,}: {seconds:.1f} s, peak {peaked}, loss {loss:.3f}")
    return found


def _accuracy(parts: Assembly, objective: Classification) -> dict[str, Any]:
    right = rows = 0.0
    order = Order(parts.held_out.lengths, max(1, sum(parts.held_out.lengths)), 0)
    loader = parts.loader(parts.held_out, order, augment=False)
    for batch in loader.batches(once(min(parts.run.evaluate.limit, sum(parts.held_out.lengths)), AT_ONCE)):
        assert batch.labels is not None
        logits = objective.classify(batch.x).cpu()
        here = float((logits.argmax(1) == batch.labels).sum())
        right, rows = (a + b for a, b in zip((right, rows), parts.ranks.sum(here, len(batch.keys)), strict=True))
    return {"pairs": int(rows), "accuracy": right / rows}


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
    (folder / "contact.json").write_text(json.dumps({"queries": queries}, indent=1), encoding="utf-8")


def _shown(samples: dict[int, Sample], place: int, side: str, folder: Path) -> dict[str, Any]:
    """One side of a sample: its text, or a picture file and the caption that belongs to it."""
    sample = samples[place]
    shown = sample.x if side == "x" else sample.y
    if isinstance(shown, str):
        return {"text": shown, "picture": None}
    path = folder / "contact" / f"{place}-{side}.png"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        _small(shown).save(path)
    caption = sample.y if side == "x" else sample.x
    return {"text": caption if isinstance(caption, str) else "", "picture": path.relative_to(folder).as_posix()}


def _small(picture: Image) -> Image:
    picture = picture.convert("RGB")
    picture.thumbnail((256, 256))
    return picture
