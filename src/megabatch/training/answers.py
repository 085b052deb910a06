"""A trained run at work: evaluated again, embedding files, finding the nearest pictures or texts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import config
from . import checkpoint
from .assembly import Assembly, assemble
from .data.pictures import decode
from .data.source import BadSample
from .evaluate import class_embeddings, nearest, zero_shot
from .held_out import Embedded, embed_source, measure
from .launch import ranks
from .objective import Contrastive

PICTURES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"}


class Answer(NamedTuple):
    """One of the nearest: its similarity, its text, its picture if it is one, and where it is from."""

    score: float
    text: str
    picture: Any | None
    key: str


@contextmanager
def opened(folder: str | Path, device: str | None = None) -> Iterator[Assembly]:
    """A run's parts with the weights of its newest checkpoint, the averaged ones if it has them; ready to evaluate."""
    folder = Path(folder)
    if not (folder / "run.toml").exists():
        raise ValueError(f"{folder}: holds no run (no run.toml); name the folder that `megabatch train` wrote to")
    path = checkpoint.newest(folder / "checkpoints")
    if path is None:
        raise ValueError(f"{folder}: has no checkpoint yet; train it first: megabatch train {folder / 'run.toml'}")
    run = config.read(folder / "run.toml")
    # What the towers start from is in the checkpoint already, and may be gone by now.
    run = dataclasses.replace(
        run,
        x=dataclasses.replace(run.x, weights=None),
        y=dataclasses.replace(run.y, weights=None),
        compute=dataclasses.replace(run.compute, sharding="ddp", compile=False, device=device or run.compute.device),
    )
    with ranks(run.compute) as here:
        parts = assemble(run, here)
        tensors = dict(parts.model.state_dict())
        if run.optimizer.ema is not None:
            learning = {name for name, p in parts.model.named_parameters() if p.requires_grad}
            tensors = {f"average.{name}" if name in learning else name: tensor for name, tensor in tensors.items()}
        checkpoint.load(path, tensors, whole=False)
        parts.model.eval()
        yield parts


def evaluate(folder: str | Path, *, classes: bool = False, device: str | None = None) -> dict[str, Any]:
    """Held-out quality of a run; with `classes` also zero-shot classification into the labels of its data."""
    with opened(folder, device) as parts:
        found, _ = measure(parts, None)
        if classes:
            found["zero_shot"] = _zero_shot(parts)
        return found


def embed(folder: str | Path, files: Sequence[str | Path], out: str | Path, device: str | None = None) -> int:
    """Writes the embeddings of pictures and of the lines of text files as safetensors; returns how many.

    The file holds "embeddings" (rows, dim), and in its metadata "keys": a JSON list of what each row is.
    """
    with opened(folder, device) as parts:
        rows, keys = [], []
        for side, raws, names in _read(parts, files):
            rows.append(_embed(parts, raws, side).cpu())
            keys += names
        try:
            from safetensors.torch import save_file
        except ModuleNotFoundError:
            raise ValueError("embed needs safetensors: pip install 'megabatch[train]'") from None
        save_file({"embeddings": torch.cat(rows)}, str(out), metadata={"keys": json.dumps(keys)})
        return len(keys)


def search(folder: str | Path, query: str, k: int = 5, device: str | None = None) -> list[Answer]:
    """The k held-out pictures (or documents) nearest to a text; for a picture file, the k nearest texts."""
    with opened(folder, device) as parts:
        _check_pairs(parts)
        side = "x" if Path(query).suffix.lower() in PICTURES and Path(query).exists() and parts.x.kind == "picture" else "y"
        raw = decode(Path(query), query, parts.run.data.max_pixels) if side == "x" else query
        held_out = embed_source(parts, parts.held_out, parts.run.evaluate.limit)
        answering = held_out.y if side == "x" else held_out.x
        scores, places = nearest(_embed(parts, [raw], side).cpu(), answering, min(k, len(answering)))
        return [
            _answer(parts, held_out, place, score, side)
            for place, score in zip(places[0].tolist(), scores[0].tolist(), strict=True)
        ]


def _answer(parts: Assembly, held_out: Embedded, place: int, score: float, asked: str) -> Answer:
    sample = parts.held_out.read(*held_out.at[place])
    shown, other = (sample.y, sample.x) if asked == "x" else (sample.x, sample.y)
    if isinstance(shown, str):
        return Answer(score, shown, None, sample.key)
    return Answer(score, other if isinstance(other, str) else "", shown, sample.key)


def _zero_shot(parts: Assembly) -> dict[str, float]:
    """Recall at 1 and 5 of the label's name, put into the templates, among the names of all labels."""
    _check_pairs(parts)
    held_out = embed_source(parts, parts.held_out, parts.run.evaluate.limit)
    labels = [parts.held_out.label(*place) for place in held_out.at]
    names = sorted({label for label in labels if label is not None})
    if None in labels or len(names) < 2:
        raise ValueError("the held-out data has no classes: name the column of the class (data.label=…)")
    classes = class_embeddings(lambda texts: _embed(parts, texts, "y"), names, parts.run.evaluate.templates)
    numbers = torch.tensor([names.index(label) for label in labels if label is not None])
    device = parts.ranks.device
    found = zero_shot(held_out.x.to(device), classes.to(device), numbers.to(device), k=(1, min(5, len(names))))
    return {str(k): share for k, share in found.items()}


def _embed(parts: Assembly, raws: Sequence[Any], side: str) -> Tensor:
    prepare = parts.x.prepare if side == "x" else parts.y.prepare
    return _check_pairs(parts).embed(_stacked([prepare(raw, None) for raw in raws]), side)


def _stacked(samples: Sequence[Any]) -> Any:
    if isinstance(samples[0], Tensor):
        return torch.stack(list(samples))
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def _read(parts: Assembly, files: Sequence[str | Path]) -> Iterator[tuple[str, list[Any], list[str]]]:
    """The side, the samples and their names, file by file."""
    if not files:
        raise ValueError("no files are given: name pictures, or text files with a text in each line")
    for path in map(Path, files):
        try:
            if path.suffix.lower() in PICTURES:
                if parts.x.kind != "picture":
                    raise ValueError(f"{path}: is a picture, and this run has towers for texts only")
                yield "x", [decode(path, str(path), parts.run.data.max_pixels)], [str(path)]
            else:
                lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
                if lines:
                    yield "y", lines, lines
        except (OSError, UnicodeDecodeError, BadSample) as error:
            raise ValueError(f"{path}: cannot be read ({error}); pictures and UTF-8 texts can") from None


def _check_pairs(parts: Assembly) -> Contrastive:
    if not isinstance(parts.objective, Contrastive):
        raise ValueError(f"{parts.run.out}: is a run that classifies; embeddings of both sides come from clip or siglip")
    return parts.objective
