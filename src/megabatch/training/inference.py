"""Uses of a trained run: evaluate it again, embed files, search for the nearest images or texts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .. import config, packages, trust
from ..data.decoding import decode_image
from ..data.source import BadSample
from ..files import check_file, replacing
from ..objectives import PAIR_LOSSES
from ..reporting.format import plural
from . import checkpoint
from .build import Assembly, assemble
from .distributed import ranks
from .evaluate import Embedded, class_embeddings, embed_source, evaluate_held_out, nearest, zero_shot
from .objective import Contrastive

Side = Literal["x", "y"]
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"}


class Answer(NamedTuple):
    """One search result: its similarity, its text, its image if it has one, and the key of its sample."""

    score: float
    text: str
    image: Any | None
    key: str


@contextmanager
def opened(folder: str | Path, device: str | None = None, *, trust_code: bool = False) -> Iterator[Assembly]:
    """Yield the parts of a run in evaluation mode, with the weights of its newest checkpoint, the averaged ones if it has them.

    trust_code: whether code that the run names (`trust.callables`) may be imported and called.
    """
    run, path = _stored(Path(folder), trust_code)
    # The checkpoint has the weights, and the files that the towers started from may be gone. Hard negatives are not used here.
    run = dataclasses.replace(
        run,
        data=dataclasses.replace(run.data, negatives=run.data.negatives or False),
        x=dataclasses.replace(run.x, weights=None),
        y=dataclasses.replace(run.y, weights=None),
        compute=dataclasses.replace(run.compute, sharding="ddp", compile=False, device=device or run.compute.device),
    )
    with ranks(run.compute) as here:
        parts = assemble(run, here)
        tensors = dict(parts.model.state_dict())
        if run.optimizer.ema is not None:
            trainable = {name for name, p in parts.model.named_parameters() if p.requires_grad}
            tensors = {f"average.{name}" if name in trainable else name: tensor for name, tensor in tensors.items()}
        checkpoint.load(path, tensors, whole=False)
        parts.model.eval()
        yield parts


def _stored(folder: Path, trust_code: bool) -> tuple[config.Run, Path]:
    """Return the run of a folder and its newest checkpoint."""
    if not (folder / "run.toml").exists():
        raise ValueError(f"{folder}: is not the folder of a run (it has no run.toml); name the folder that `megabatch train` wrote")
    path = checkpoint.newest(folder / "checkpoints")
    if path is None:
        raise ValueError(f"{folder}: has no checkpoint yet; train it first: megabatch train {folder / 'run.toml'}")
    run = config.read(folder / "run.toml")
    trust.require_trust(run, trust_code)
    return run, path


def evaluate(folder: str | Path, *, classes: bool = False, device: str | None = None, trust_code: bool = False) -> dict[str, Any]:
    """Return the held-out quality of a run; with `classes` also zero-shot accuracy over the labels of its data.

    "bad" is the number of held-out samples that could not be read, "unreadable" lists them with the reasons, and "damage" lists
    damaged files. The last two are present only if they are not empty.
    """
    with opened(folder, device, trust_code=trust_code) as parts:
        quality, _ = evaluate_held_out(parts, None)
        unreadable = [{"key": sample.key, "reason": sample.reason} for sample in quality.pop("unreadable")]
        damage = [str(damage) for damage in parts.held_out.damage]
        quality |= ({"unreadable": unreadable} if unreadable else {}) | ({"damage": damage} if damage else {})
        if classes:
            quality["zero_shot"] = _zero_shot(parts)
        return quality


def embed(
    folder: str | Path,
    files: Sequence[str | Path],
    out: str | Path,
    device: str | None = None,
    *,
    side: Side | None = None,
    trust_code: bool = False,
) -> int:
    """Write the embeddings of images and of the lines of text files as safetensors; return how many.

    The file holds "embeddings" (rows, dim), and in its metadata "keys": a JSON list with the name of each row. side: the tower
    that embeds all files, "x" (queries) or "y" (documents); None chooses the tower that takes such a file, and raises if both do.
    """
    packages.require(packages.EMBEDDINGS_FILE)
    _stored(Path(folder), trust_code)
    # Checked before anything is computed.
    check_file(out, "out")
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with opened(folder, device, trust_code=trust_code) as parts:
        rows, keys = [], []
        for tower, raws, names in _read(parts, _with_sides(parts, files, side)):
            rows.append(_embed(parts, raws, tower).cpu())
            keys += names
        if not rows:
            raise ValueError(f"{', '.join(map(str, files))}: no image and no line of text; nothing was written")
        with replacing(Path(out).resolve()) as temporary:
            try:
                save_file({"embeddings": torch.cat(rows)}, str(temporary), metadata={"keys": json.dumps(keys)})
            except SafetensorError as error:
                # safetensors has one error for a full disk, a missing permission and everything else.
                raise OSError(f"{out}: the embeddings could not be written: {error}") from None
        return len(keys)


def search(
    folder: str | Path,
    query: str,
    k: int = 5,
    device: str | None = None,
    *,
    side: Side | None = None,
    trust_code: bool = False,
) -> list[Answer]:
    """Return the k held-out samples nearest to a query, a text or the path of an image file.

    side: the tower that embeds the query; results come from the other side. None chooses the tower that takes such a query, and "x"
    where both do: queries find documents.
    """
    with opened(folder, device, trust_code=trust_code) as parts:
        _check_pairs(parts)
        if "image" in (parts.x.kind, parts.y.kind):
            # `megabatch search` draws the results; check for its package before the held-out pairs are embedded.
            packages.require(packages.CONTACT_SHEET)
        side = _side_of_query(parts, query) if side is None else side
        kind = _kinds(parts)[side]
        if kind == "image" and not Path(query).is_file():
            raise ValueError(f"{query!r} is not an image file, and tower {side} takes images; name one, or choose the other side")
        raw = decode_image(Path(query), query, parts.run.data.max_pixels) if kind == "image" else query
        held_out = embed_source(parts, parts.held_out, parts.run.evaluate.limit)
        answering = held_out.y if side == "x" else held_out.x
        scores, places = nearest(_embed(parts, [raw], side).cpu(), answering, min(k, len(answering)))
        return [
            _answer(parts, held_out, place, score, side)
            for place, score in zip(places[0].tolist(), scores[0].tolist(), strict=True)
        ]


def _kinds(parts: Assembly) -> dict[Side, str]:
    """Return the kind of input of each side's tower."""
    return {"x": parts.x.kind, "y": parts.y.kind}


def _side_of_query(parts: Assembly, query: str) -> Side:
    """Return the side whose tower takes a query, x where both do."""
    kinds = _kinds(parts)
    image = Path(query).suffix.lower() in IMAGE_SUFFIXES and "image" in kinds.values()
    if image and not Path(query).is_file():
        remedy = f"; to search for this text, choose the side of texts: --side {'x' if kinds['x'] == 'text' else 'y'}"
        raise ValueError(f"{query!r}: there is no such image file{remedy if 'text' in kinds.values() else ''}")
    kind = "image" if image else "text"
    sides: list[Side] = [side for side in ("x", "y") if kinds[side] == kind]
    if not sides:
        raise ValueError(f"{query!r} is a text, and this run has towers for images only; name an image file")
    return sides[0]


def _answer(parts: Assembly, held_out: Embedded, place: int, score: float, asked: Side) -> Answer:
    sample = parts.held_out.read(*held_out.at[place])
    shown, other = (sample.y, sample.x) if asked == "x" else (sample.x, sample.y)
    if isinstance(shown, str):
        return Answer(score, shown, None, sample.key)
    return Answer(score, other if isinstance(other, str) else "", shown, sample.key)


def _zero_shot(parts: Assembly) -> dict[str, float]:
    """Return accuracy at 1 and 5 of the label's name, inserted into the templates, among the names of all labels."""
    _check_pairs(parts)
    held_out = embed_source(parts, parts.held_out, parts.run.evaluate.limit)
    labels = [parts.held_out.label(*place) for place in held_out.at]
    names = sorted({label for label in labels if label is not None})
    if None in labels or len(names) < 2:
        raise ValueError("the held-out data has no classes; name the column of the class (data.label=…)")
    classes = class_embeddings(lambda texts: _embed(parts, texts, "y"), names, parts.run.evaluate.templates)
    numbers = torch.tensor([names.index(label) for label in labels if label is not None])
    device = parts.ranks.device
    accuracy = zero_shot(held_out.x.to(device), classes.to(device), numbers.to(device), k=(1, min(5, len(names))))
    return {str(k): value for k, value in accuracy.items()}


def _embed(parts: Assembly, raws: Sequence[Any], side: Side) -> Tensor:
    prepare = parts.x.prepare if side == "x" else parts.y.prepare
    return _check_pairs(parts).embed(_stacked([prepare(raw, None) for raw in raws]), side)


def _stacked(samples: Sequence[Any]) -> Any:
    if isinstance(samples[0], Tensor):
        return torch.stack(list(samples))
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def _with_sides(parts: Assembly, files: Sequence[str | Path], side: Side | None) -> list[tuple[Path, Side]]:
    """Return each file with the side of the tower that embeds it. All files are checked before the first is embedded."""
    _check_pairs(parts)
    if not files:
        raise ValueError("no files are given; name images, or text files with one text per line")
    kinds = _kinds(parts)
    chosen: list[tuple[Path, Side]] = []
    for path in map(Path, files):
        kind = "image" if path.suffix.lower() in IMAGE_SUFFIXES else "text"
        name = "an image" if kind == "image" else "a text file"
        sides: list[Side] = [each for each in ("x", "y") if kinds[each] == kind]
        if side is not None and side not in sides:
            raise ValueError(f"{path}: is {name}, and tower {side} of this run takes {plural(kinds[side])}; choose the other side")
        if not sides:
            raise ValueError(f"{path}: is {name}, and this run has towers for {plural(kinds['x'])} only")
        if side is None and len(sides) == 2 and parts.x.module is not parts.y.module:
            raise ValueError(
                f"{path}: both towers of this run take {plural(kind)}; choose one: --side x for queries, --side y for documents"
                f" ({parts.run.x.name} and {parts.run.y.name})"
            )
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file; name images, or text files with one text per line")
        chosen.append((path, side or sides[0]))
    return chosen


def _read(parts: Assembly, files: Sequence[tuple[Path, Side]]) -> Iterator[tuple[Side, list[Any], list[str]]]:
    """Yield the side, the samples and their names, file by file."""
    for path, side in files:
        try:
            if path.suffix.lower() in IMAGE_SUFFIXES:
                yield side, [decode_image(path, str(path), parts.run.data.max_pixels)], [str(path)]
            else:
                lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
                if lines:
                    yield side, lines, lines
        except (OSError, UnicodeDecodeError, BadSample) as error:
            raise ValueError(f"{path}: cannot be read ({error}); name images or UTF-8 text files") from None


def _check_pairs(parts: Assembly) -> Contrastive:
    if not isinstance(parts.objective, Contrastive):
        raise ValueError(
            f"{parts.run.out}: is a run that classifies; only runs with the loss {' or '.join(PAIR_LOSSES)} embed both sides"
        )
    return parts.objective
