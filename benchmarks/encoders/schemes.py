"""Whole training steps of a CLIP by several schemes.

A scheme runs a batch of any size through the towers, `chunk` pairs at a time: ours and others, each implemented from its
description. Inputs stay in host memory, so that all schemes move the same data.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import ClassVar

import torch
from torch import Tensor, nn

import megabatch
from benchmarks.encoders.model import Batch, Clip
from benchmarks.peers import Unavailable, declare_torchvision_schemas


class Scheme:
    """A method for one step: forward, loss and backward of a batch, with gradients added to those of the weights.

    scale_is_trained: whether the gradient of the scale is meant to be right. repeats: steps until the scheme works in its final
    state. recomputes: whether chunks run forward twice.
    """

    package = "torch"
    scale_is_trained: ClassVar[bool] = True
    repeats = 1
    recomputes: ClassVar[bool] = True

    def __init__(self, clip: Clip, chunk: int, keep: int | str = 0) -> None:
        self.clip, self.chunk = clip, chunk

    def step(self, batch: Batch) -> Tensor:
        raise NotImplementedError

    def kept(self) -> dict[str, int] | None:
        """Return how many chunks of each tower the last step kept instead of recomputing; None if the scheme cannot keep any."""
        return None

    def chunk_done(self) -> int | None:
        """Return the pairs per chunk in the last step; None if it ran without chunks."""
        return self.chunk

    def move(self, rows: Tensor) -> Tensor:
        return rows.to(self.clip.device, non_blocking=True)


class Uncached(Scheme):
    """The whole batch at once, with the full matrix: plain PyTorch."""

    recomputes = False

    def chunk_done(self) -> int | None:
        return None

    def step(self, batch: Batch) -> Tensor:
        loss = self.clip.plain_loss(self.clip.image(self.move(batch.images)), self.clip.text(self.move(batch.texts)))
        loss.backward()
        return loss.detach()


class Megabatch(Scheme):
    """Each tower through `megabatch.cached`, then `megabatch.clip_loss`; `keep`, if a number, counts image chunks."""

    package = "megabatch"

    def __init__(self, clip: Clip, chunk: int, keep: int | str = 0, forward_chunk: int | None = None) -> None:
        super().__init__(clip, chunk)
        # "auto" keeps more chunks from the second step on.
        self.repeats = 3 if keep == "auto" else 1
        keeps = {"image": keep, "text": "auto" if keep == "auto" else 0}
        options = {"chunk": chunk, "forward_chunk": forward_chunk, "device": clip.device}
        self.encode = {name: megabatch.cached(getattr(clip, name), keep=keep, **options) for name, keep in keeps.items()}

    def step(self, batch: Batch) -> Tensor:
        # The larger tower last: backward begins with it, before the gradients and graphs of the other exist.
        texts = self.encode["text"](batch.texts)
        images = self.encode["image"](batch.images)
        loss = megabatch.clip_loss(images, texts, self.clip.log_scale.exp())
        loss.backward()
        return loss.detach()

    def kept(self) -> dict[str, int] | None:
        return {name: encode.kept for name, encode in self.encode.items()}

    def chunk_done(self) -> int | None:
        # Smaller than requested if memory ran out.
        return self.encode["image"].chunk


class TwoPass(Scheme):
    """GradCache as published: embeddings without graphs, their gradients, then each chunk again with a graph."""

    def step(self, batch: Batch) -> Tensor:
        sides = [(self.clip.image, batch.images.split(self.chunk)), (self.clip.text, batch.texts.split(self.chunk))]
        with torch.no_grad():
            embeddings = [torch.cat([tower(self.move(rows)) for rows in chunks]) for tower, chunks in sides]
        leaves = [embedding.requires_grad_() for embedding in embeddings]
        loss = megabatch.clip_loss(*leaves, self.clip.log_scale.exp())
        loss.backward()
        for (tower, chunks), leaf in zip(sides, leaves, strict=True):
            for rows, gradient in zip(chunks, leaf.grad.split(self.chunk), strict=True):
                (tower(self.move(rows)) * gradient).sum().backward()
        return loss.detach()


class Accumulation(Scheme):
    """OpenCLIP's --accum-freq: each chunk runs again among the features of the others, with the whole loss each time.

    The scale is part of each of these losses, so its gradient is too large by a factor of the number of chunks.
    """

    scale_is_trained = False

    def step(self, batch: Batch) -> Tensor:
        chunks = list(zip(batch.images.split(self.chunk), batch.texts.split(self.chunk), strict=True))
        with torch.no_grad():
            features = [self._features(*chunk) for chunk in chunks]
        for place, chunk in enumerate(chunks):
            among = [*features[:place], self._features(*chunk), *features[place + 1 :]]
            loss = self.clip.plain_loss(*(torch.cat(side) for side in zip(*among, strict=True)))
            loss.backward()
        return loss.detach()

    def _features(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return self.clip.image(self.move(images)), self.clip.text(self.move(texts))


class SentenceTransformers(Scheme):
    """CachedMultipleNegativesRankingLoss of that library, both directions; its scale is a number and is not trained."""

    package = "sentence_transformers"
    scale_is_trained = False

    def __init__(self, clip: Clip, chunk: int, keep: int | str = 0) -> None:
        super().__init__(clip, chunk)
        declare_torchvision_schemas()
        from sentence_transformers import SentenceTransformer, __version__
        from sentence_transformers.util import dot_score

        try:
            from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss as Loss
        except ImportError:
            from sentence_transformers.losses import CachedMultipleNegativesRankingLoss as Loss
        if not {"directions", "partition_mode"} <= set(inspect.signature(Loss.__init__).parameters):
            raise Unavailable(f"CachedMultipleNegativesRankingLoss of sentence-transformers {__version__} has one direction only")
        model = SentenceTransformer(modules=[_ByName(self)], device=str(clip.device))
        both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
        scale = clip.log_scale.exp().item()
        self.loss = Loss(model, scale=scale, similarity_fct=dot_score, mini_batch_size=chunk, **both)

    def step(self, batch: Batch) -> Tensor:
        loss = self.loss([{"pixel_values": batch.images}, {"input_ids": batch.texts}], None)
        loss.backward()
        return loss.detach()


class _ByName(nn.Module):
    """The module of a SentenceTransformer with both towers: the name of a feature selects the tower."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({"pixel_values": scheme.clip.image, "input_ids": scheme.clip.text})
        self.move = scheme.move

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        (name,) = features.keys() & self.towers.keys()
        return {**features, "sentence_embedding": self.towers[name](self.move(features[name]))}


SCHEMES: dict[str, type[Scheme]] = {
    "megabatch": Megabatch,
    "two-pass": TwoPass,
    "OpenCLIP accumulation": Accumulation,
    "sentence-transformers": SentenceTransformers,
    "uncached": Uncached,
}


def unavailable(name: str) -> str | None:
    """Return why the scheme cannot run here, or None, without importing its package or transformers."""
    if name not in SCHEMES:
        raise ValueError(f"no contestant {name!r}: must be one of {', '.join(SCHEMES)}")
    for package in (SCHEMES[name].package, "transformers"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return None
