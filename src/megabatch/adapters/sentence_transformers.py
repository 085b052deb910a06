"""Sentence Transformers' `CachedMultipleNegativesRankingLoss`: the same constructor and call, without the similarity matrix.

    from megabatch.adapters.sentence_transformers import MultipleNegativesRankingLoss

Works in Sentence Transformers' trainers, inside MatryoshkaLoss and SpladeLoss, and in a dict of losses. What differs from theirs:

- The encoder runs in chunks of texts of similar length, with the padding of each chunk cut off, and chunks whose graphs fit in
  memory are not run again in backward (`keep`). Dropout is replayed, gradients are exchanged once per step under DDP.
- The loss is computed in tiles. With `gather_across_devices`, no rank stores the embeddings of all ranks, and each rank reports the
  loss of the whole batch instead of its share of it.
- Evaluation runs without communication: ranks may have different numbers of batches.
- Models with a StaticEmbedding work, without mini-batches.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sentence_transformers.base.losses.gradcache import (
    _create_minibatch,
    _get_batch_size,
    _minibatch_ranges,
)
from sentence_transformers.util import cos_sim, dot_score, similarity_fct_name
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..chunks.cached import Cached, cached
from ..chunks.division import ByTokens
from ..chunks.keep import can_read_free_bytes
from ..losses.infonce import Guide, infonce_loss

# Sentence Transformers' names of the options, and ours.
DIRECTIONS = {"query_to_doc": "x_to_y", "doc_to_query": "y_to_x", "query_to_query": "x_to_x", "doc_to_doc": "y_to_y"}
PARTITIONS = {"joint": "joint", "per_direction": "separate"}
HARDNESS = {None: "all", "all_negatives": "all", "hard_negatives": "hard", "in_batch_negatives": "in_batch"}
# The similarities that are inner products, and whether of normalised embeddings.
SIMILARITIES: dict[Any, bool] = {cos_sim: True, dot_score: False}
# Inputs whose rows are images and not texts: Sentence Transformers' own function divides them.
IMAGES = (
    "image_grid_thw",
    "video_grid_thw",
    "num_images_per_sample",
    "num_videos_per_sample",
    "pixel_values",
    "pixel_values_videos",
)
EMBEDDING = "sentence_embedding"
_numbers = itertools.count()


class MultipleNegativesRankingLoss(nn.Module):
    """A drop-in for `sentence_transformers.losses.CachedMultipleNegativesRankingLoss`.

    model to hardness_strength: as in Sentence Transformers. `mini_batch_num_tokens` includes padding, so that it bounds the memory.
    similarity_fct: `cos_sim` or `dot_score`.
    keep: chunks that keep their graphs instead of being recomputed in backward; "auto" fills the free memory from the second step
        on. 0 needs least memory.
    duplicates: "mask": texts that occur several times in the batch, over all ranks, are no negatives of each other, nor are the
        partners of equal texts. Texts are compared by a 64-bit hash of their tokens. None: as in Sentence Transformers.
    drop_above: negatives that are more similar to the anchor than its positive by more than this are left out. None: no margin.
    guide: a model whose similarities decide which negatives are left out (GISTEmbed): those that it finds more similar to the
        anchor than its positive, minus the margin. With another tokenizer, texts are decoded and tokenised again.
    guide_margin, guide_margin_strategy: "absolute" or "relative" to the guide's similarity of the pair.
    learnable_scale: train the scale, through its logarithm, as a parameter of the loss without weight decay.
    """

    # MatryoshkaLoss then decorates `calculate_loss`.
    uses_gradient_cache = True

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        directions: Sequence[str] = ("query_to_doc",),
        partition_mode: Literal["joint", "per_direction"] = "joint",
        show_progress_bar: bool = False,
        hardness_mode: Literal["in_batch_negatives", "hard_negatives", "all_negatives"] | None = None,
        hardness_strength: float = 0.0,
        *,
        keep: int | Literal["auto"] = "auto",
        duplicates: Literal["mask"] | None = None,
        drop_above: float | None = None,
        guide: nn.Module | None = None,
        guide_margin: float = 0.0,
        guide_margin_strategy: Literal["absolute", "relative"] = "absolute",
        learnable_scale: bool = False,
    ) -> None:
        super().__init__()
        _check_model(model)
        if not scale > 0:
            raise ValueError(f"scale={scale!r}: must be positive; Scale must be a positive value.")
        self.model = model
        # The Trainer leaves parameters out of weight decay whose names contain "norm".
        self.norm = _LogScale(scale) if learnable_scale else None
        self._scale = float(scale)
        _normalises(similarity_fct)
        self.similarity_fct = similarity_fct
        self.mini_batch_size = _positive("mini_batch_size", mini_batch_size)
        self.mini_batch_num_tokens = None
        if mini_batch_num_tokens is not None:
            self.mini_batch_num_tokens = _positive("mini_batch_num_tokens", mini_batch_num_tokens)
        self.gather_across_devices = gather_across_devices
        self.directions = _known_directions(directions)
        self.partition_mode = _choice("partition_mode", partition_mode, PARTITIONS)
        if partition_mode == "per_direction" and set(self.directions) & {"query_to_query", "doc_to_doc"}:
            raise ValueError(
                f"partition_mode='per_direction' with directions={self.directions}: the candidates of 'query_to_query' and "
                "'doc_to_doc' do not contain the positive, so they have no softmax of their own; use partition_mode='joint'"
            )
        self.show_progress_bar = show_progress_bar
        self.hardness_mode = _choice("hardness_mode", hardness_mode, HARDNESS)
        if hardness_strength < 0:
            raise ValueError(f"hardness_strength={hardness_strength!r}: hardness_strength must be non-negative.")
        self.hardness_strength = hardness_strength
        self.keep = keep
        self.duplicates = _choice("duplicates", duplicates, (None, "mask"))
        self.drop_above = drop_above
        self.guide: Any = guide
        self.guide_margin, self.guide_margin_strategy = guide_margin, guide_margin_strategy
        self._retokenize = guide is not None and _tokenizes_differently(model, guide)
        # The losses of a process in the order of their creation, which is the same on all ranks.
        self._number = next(_numbers)
        # In a tuple, which does not make the model a submodule once more.
        self._cached: tuple[nn.Module, Cached] | None = None

    @property
    def scale(self) -> float:
        """The factor of the similarities, 1 / temperature; a learnable one is read from its device."""
        return self._scale if self.norm is None else float(self.norm().detach())

    @scale.setter
    def scale(self, scale: float) -> None:
        self._scale = float(scale)
        if self.norm is not None:
            with torch.no_grad():
                self.norm.log_scale.fill_(math.log(scale))

    @property
    def temperature(self) -> float:
        return 1.0 / self.scale

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        columns = [dict(features) for features in sentence_features]
        if len(columns) < 2:
            raise ValueError(f"Expected at least 2 inputs, got {len(columns)}: anchors, positives and optionally negatives")
        divided = [self._divide(features) for features in columns]
        recording = torch.is_grad_enabled()
        embeddings = self._embed(divided, recording)
        extra = self._extra(columns, divided, recording)
        if not recording:
            return self.calculate_loss([[column] for column in embeddings], labels, extra=extra)
        # The graph of the loss ends at these: MatryoshkaLoss goes backward through `calculate_loss` before the trainer does.
        leaves = [column.detach().requires_grad_() for column in embeddings]
        loss = self.calculate_loss([[leaf] for leaf in leaves], labels, with_backward=True, extra=extra)
        gradients = [leaf.grad for leaf in leaves]
        for index, gradient in enumerate(gradients):
            if gradient is None:
                raise ValueError(f"the loss did not use input column {index}: remove the column from the dataset")
        connected: Tensor = _Connected.apply(loss.detach(), gradients, *embeddings)
        # What is left of the loss's graph leads to the scale alone.
        return connected + (loss - loss.detach())

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False, extra: Extra | None = None
    ) -> Tensor:
        """Return the loss of embeddings, given as a list of parts for each column.

        with_backward: also adds to the gradients of the embeddings; the result then depends on the learnable scale only.
        """
        columns = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in reps]
        if not with_backward:
            return self._loss(columns, self._scale if self.norm is None else self.norm(), extra)
        if self.norm is None:
            loss = self._loss(columns, self._scale, extra)
            loss.backward()
            return loss.detach()
        scale = self.norm()
        leaf = scale.detach().requires_grad_()
        loss = self._loss(columns, leaf, extra)
        loss.backward()
        gradient = leaf.grad
        assert gradient is not None
        if _ranks() > 1 and not self.gather_across_devices:
            gradient = self._averaged(gradient)
        return loss.detach() + (scale - scale.detach()) * gradient

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        """Return the loss of embeddings, one tensor for each column: what SpladeLoss and CSRLoss call."""
        if len(embeddings) < 2:
            raise ValueError(f"Expected at least 2 embeddings, got {len(embeddings)}: anchors, positives and optionally negatives")
        if self.duplicates is not None or self.guide is not None:
            raise ValueError("duplicates and guide need the texts, and a loss around this one passes their embeddings only")
        return self.calculate_loss([[column] for column in embeddings], labels)

    def get_config_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "similarity_fct": similarity_fct_name(self.similarity_fct),
            "mini_batch_size": self.mini_batch_size,
            "mini_batch_num_tokens": self.mini_batch_num_tokens,
            "gather_across_devices": self.gather_across_devices,
            "directions": self.directions,
            "partition_mode": self.partition_mode,
            "hardness_mode": self.hardness_mode,
            "hardness_strength": self.hardness_strength,
            "keep": self.keep,
            "duplicates": self.duplicates,
            "drop_above": self.drop_above,
            "guide": None if self.guide is None else type(self.guide).__name__,
            "guide_margin": self.guide_margin,
            "guide_margin_strategy": self.guide_margin_strategy,
            "learnable_scale": self.norm is not None,
        }

    @property
    def citation(self) -> str:
        return """
@misc{oord2019representationlearningcontrastivepredictive,
    title={Representation Learning with Contrastive Predictive Coding},
    author={Aaron van den Oord and Yazhe Li and Oriol Vinyals},
    year={2019},
    eprint={1807.03748},
    archivePrefix={arXiv},
    primaryClass={cs.LG}
}
@misc{gao2021scaling,
    title={Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup},
    author={Luyu Gao and Yunyi Zhang and Jiawei Han and Jamie Callan},
    year={2021},
    eprint={2101.06983},
    archivePrefix={arXiv},
    primaryClass={cs.LG}
}
"""

    def _loss(self, columns: list[Tensor], scale: Tensor | float, extra: Extra | None) -> Tensor:
        normalises = _normalises(self.similarity_fct)
        x, y = columns[0], torch.cat(columns[1:]) if len(columns) > 2 else columns[1]
        if not x.dtype == y.dtype == torch.float64:
            x, y = x.float(), y.float()
        if normalises:
            x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
        negatives_of = torch.arange(len(x), device=x.device).repeat(len(columns) - 2) if len(columns) > 2 else None
        extra = extra or Extra(None, None)
        return infonce_loss(
            x,
            y,
            scale,
            directions=tuple(DIRECTIONS[direction] for direction in self.directions),
            partition=PARTITIONS[self.partition_mode],
            ids=extra.ids,
            drop_above=self.drop_above,
            hardness=self.hardness_strength if self.hardness_mode is not None else 0.0,
            hardness_on=HARDNESS[self.hardness_mode],
            guide=extra.guide,
            negatives_of=negatives_of,
            group=self._group(torch.is_grad_enabled()),
        )

    def _averaged(self, gradient: Tensor) -> Tensor:
        """Return the mean over ranks of the scale's gradient: DDP averages only those of the model."""
        reports = [gradient.new_zeros(2) for _ in range(_ranks())]
        dist.all_gather(reports, torch.stack([gradient, gradient.new_tensor(self._number)]))
        gradients, numbers = torch.stack(reports).unbind(1)
        if len(set(numbers.tolist())) > 1:
            raise ValueError(
                "ranks compute different losses in one step, as they may with a dict of losses, so their learnable scales would "
                "drift apart: use one loss for all datasets, or learnable_scale=False"
            )
        return gradients.mean()

    def _group(self, recording: bool) -> Any:
        """Return the ranks whose texts are negatives of each other: in evaluation, only this one."""
        return dist.group.WORLD if self.gather_across_devices and recording and _ranks() > 1 else None

    def _divide(self, features: dict[str, Any]) -> Divided:
        """Return the chunks of a column."""
        if "offsets" in features:
            # StaticEmbedding: an EmbeddingBag over all texts at once.
            return Divided([features], len(features["offsets"]), None)
        tokens = self.mini_batch_num_tokens
        if _is_padded_text(features):
            by_tokens = ByTokens(self.mini_batch_size if tokens is None else None)
            division = by_tokens(((), features), sys.maxsize if tokens is None else tokens, 1)
            return Divided([kwargs for _, kwargs in division.pieces], len(features["attention_mask"]), division.inverse)
        ranges = _minibatch_ranges(features, self.mini_batch_size, tokens)
        return Divided([_create_minibatch(features, begin, end) for begin, end in ranges], _get_batch_size(features), None)

    def _embed(self, divided: list[Divided], recording: bool) -> list[Tensor]:
        """Return the embeddings of each column, with their graph if `recording`."""
        model = self.model
        if not recording and isinstance(model, DistributedDataParallel):
            # DDP would broadcast buffers in each forward.
            model = model.module
        chunks = [chunk for column in divided for chunk in column.chunks]
        with _progress(model, len(chunks)) if self.show_progress_bar else nullcontext():
            embeddings = self._encoder(model)(chunks)[EMBEDDING]
        return _ordered(embeddings, divided)

    def _encoder(self, model: nn.Module) -> Cached:
        """Return the cached encoder of the model. Trainers wrap the model after the loss is created."""
        if not torch.is_grad_enabled():
            return cached(model, split=list, outputs=(EMBEDDING,), sync="none")
        if self._cached is None or self._cached[0] is not model:
            keep = self.keep
            device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
            if keep == "auto" and not can_read_free_bytes(device):
                keep = 0
            self._cached = model, cached(model, split=list, outputs=(EMBEDDING,), keep=keep)
        return self._cached[1]

    @torch.no_grad()
    def _extra(self, columns: list[dict[str, Any]], divided: list[Divided], recording: bool) -> Extra:
        ids = guide = None
        if self.duplicates is not None:
            ids = _classes([_hash(features) for features in columns], self._group(recording))
        if self.guide is not None:
            texts = self._guide_inputs(columns) if self._retokenize else divided
            embeddings = _ordered(torch.cat([self.guide(dict(chunk))[EMBEDDING] for each in texts for chunk in each.chunks]), texts)
            x, *y = (F.normalize(column.float(), dim=-1) for column in embeddings)
            guide = Guide(x, torch.cat(y), self.guide_margin, self.guide_margin_strategy)
        return Extra(ids, guide)

    def _guide_inputs(self, columns: list[dict[str, Any]]) -> list[Divided]:
        """Return the columns, tokenised for the guide."""
        model: Any = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        device = next(self.guide.parameters()).device
        divided = []
        for features in columns:
            texts = model.tokenizer.batch_decode(features["input_ids"], skip_special_tokens=True)
            inputs = self.guide.preprocess(texts)
            divided.append(self._divide({key: v.to(device) if isinstance(v, Tensor) else v for key, v in inputs.items()}))
        return divided


class SparseMultipleNegativesRankingLoss(MultipleNegativesRankingLoss):
    """The loss with the defaults of a SparseEncoder, for use inside SpladeLoss or CSRLoss: scale 1, inner products."""

    def __init__(
        self, model: nn.Module, scale: float = 1.0, similarity_fct: Callable[[Tensor, Tensor], Tensor] = dot_score, **options: Any
    ) -> None:
        super().__init__(model, scale, similarity_fct, **options)


class Divided(NamedTuple):
    """The chunks of a column. rows: of all of them; inverse: where each row stands in their outputs, None if in order."""

    chunks: list[dict[str, Any]]
    rows: int
    inverse: Tensor | None


class Extra(NamedTuple):
    """What the loss of a batch needs besides the embeddings. ids: of all texts but the anchors, equal for no negatives."""

    ids: Tensor | None
    guide: Guide | None


class _LogScale(nn.Module):
    """A scale that is trained through its logarithm."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))

    def forward(self) -> Tensor:
        return self.log_scale.exp()


class _Connected(torch.autograd.Function):
    """Returns the loss, whose gradients in the embeddings are known already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *embeddings: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *(gradient * grads[0].to(gradient.dtype) for gradient in ctx.saved_tensors)


def _ordered(embeddings: Tensor, divided: list[Divided]) -> list[Tensor]:
    """Return the rows of each column, in the order of its texts."""
    columns = embeddings.split([column.rows for column in divided])
    return [
        rows if column.inverse is None else rows.index_select(0, column.inverse.to(rows.device))
        for rows, column in zip(columns, divided, strict=True)
    ]


def _is_padded_text(features: Mapping[str, Any]) -> bool:
    mask = features.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or any(key in features for key in (*IMAGES, "cu_seq_lens_q")):
        return False
    return all(len(value) == len(mask) for value in features.values() if isinstance(value, Tensor) and value.ndim)


def _hash(features: Mapping[str, Any]) -> Tensor:
    """Return a 64-bit hash of the tokens of each text, whatever its padding."""
    ids = features.get("input_ids")
    if not isinstance(ids, Tensor):
        raise ValueError(f'duplicates="mask" compares token ids, but the inputs are {sorted(features)}; pass duplicates=None')
    starts = features.get("offsets")
    if "cu_seq_lens_q" in features:
        starts = features["cu_seq_lens_q"][:-1]
    if starts is None:
        mask = features.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask.ne(0)
        return (_mixed(ids, mask.cumsum(1)) * mask).sum(1)
    flat, starts = ids.flatten().long(), starts.long()
    lengths = torch.diff(starts, append=starts.new_tensor([len(flat)]))
    positions = torch.arange(len(flat), device=flat.device) - starts.repeat_interleave(lengths)
    sums = F.pad(_mixed(flat, positions + 1).cumsum(0), (1, 0))
    return sums[starts + lengths] - sums[starts]


def _mixed(tokens: Tensor, positions: Tensor) -> Tensor:
    """Return pseudo-random 64-bit integers of tokens and their positions; integer products wrap around."""
    mixed = tokens.long() * 0x1E3779B97F4A7C15 + positions.long() * 0x3F58476D1CE4E5B9
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed ^ (mixed >> 31)


def _classes(hashes: list[Tensor], group: Any) -> Tensor:
    """Return a class for each text but the anchors: equal texts have one, and so have texts whose partners are equal.

    These are the connected components of a graph of texts whose edges are the pairs. hashes: of each column on this rank.
    """
    local = torch.stack(hashes)
    every, mine = _gathered(local, group)
    distinct, texts = torch.unique(every, return_inverse=True)
    labels = torch.arange(len(distinct), device=every.device)
    anchors, positives = texts[0], texts[1]
    while True:
        lowest = torch.minimum(labels[anchors], labels[positives])
        joined = labels.scatter_reduce(0, anchors, lowest, "amin").scatter_reduce(0, positives, lowest, "amin")
        if torch.equal(joined, labels):
            return labels[texts[1:, mine]].flatten()
        labels = joined


def _gathered(columns: Tensor, group: Any) -> tuple[Tensor, slice]:
    """Return the columns of all ranks side by side, and where those of this rank are."""
    if group is None:
        return columns, slice(None)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    counts = [columns.new_zeros(1) for _ in range(size)]
    dist.all_gather(counts, columns.new_tensor([columns.shape[1]]), group=group)
    rows = [int(count) for count in counts]
    padded = [columns.new_zeros(len(columns), max(rows)) for _ in range(size)]
    dist.all_gather(padded, F.pad(columns, (0, max(rows) - columns.shape[1])), group=group)
    begin = sum(rows[:rank])
    return torch.cat([part[:, :count] for part, count in zip(padded, rows, strict=True)], 1), slice(begin, begin + rows[rank])


@contextmanager
def _progress(model: nn.Module, chunks: int) -> Any:
    """Context that shows a bar of the chunks embedded inside."""
    import tqdm

    with tqdm.tqdm(total=chunks, desc="Embed mini-batches") as bar:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        handle = inner.register_forward_hook(lambda *_: bar.update() and None)
        try:
            yield
        finally:
            handle.remove()


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _normalises(similarity_fct: Any) -> bool:
    """Return whether a similarity is that of normalised embeddings; raise a ValueError if it is not an inner product."""
    if similarity_fct not in SIMILARITIES:
        raise ValueError(
            f"similarity_fct={similarity_fct!r}: must be cos_sim or dot_score of sentence_transformers.util, since the tiles of "
            "the loss compute inner products; use Sentence Transformers' own loss for another similarity"
        )
    return SIMILARITIES[similarity_fct]


def _check_model(model: Any) -> None:
    names = {kind.__name__ for kind in type(model).__mro__}
    if "MultiVectorEncoder" in names:
        raise ValueError(
            "the model is a MultiVectorEncoder, whose similarity is a sum of maxima over tokens (MaxSim) and not an inner product: "
            "use CachedMultipleNegativesRankingLoss of sentence_transformers.multi_vector_encoder"
        )
    if "CrossEncoder" in names:
        raise ValueError("the model is a CrossEncoder, which scores pairs and has no embeddings: use the losses for cross-encoders")


def _tokenizes_differently(model: Any, guide: Any) -> bool:
    mine, other = getattr(model, "tokenizer", None), getattr(guide, "tokenizer", None)
    if mine is None or other is None:
        raise ValueError("guide=… needs a tokenizer in both models, to know whether they read the same tokens")
    return bool(mine.get_vocab() != other.get_vocab() or guide.max_seq_length < model.max_seq_length)


def _known_directions(directions: Sequence[str]) -> tuple[str, ...]:
    unknown = set(directions) - set(DIRECTIONS)
    if isinstance(directions, str) or unknown or "query_to_doc" not in directions:
        raise ValueError(
            f"directions={directions!r}: must be some of {', '.join(DIRECTIONS)}, and 'query_to_doc' is required, since it "
            "contains the positive pair"
        )
    return tuple(directions)


def _choice(name: str, value: Any, choices: Iterable[Any]) -> Any:
    if value not in (choices := tuple(choices)):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}")
    return value


def _positive(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: must be a positive integer")
    return value
