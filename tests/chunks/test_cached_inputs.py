"""cached() for texts of different lengths, packed inputs and models with many outputs: the encoder's own values and gradients."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import megabatch
from megabatch.chunks import division

WORDS = 50


class TextEncoder(nn.Module):
    """Self-attention over tokens with absolute positions, and the mean over the tokens that are not padding."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Embedding(64, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, 4)
        self.double()
        self.shapes: list[tuple[int, int]] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None) -> Tensor:
        self.shapes.append(tuple(input_ids.shape))
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids) if position_ids is None else position_ids
        hidden = self.layer(self.words(input_ids) + self.places(places), src_key_padding_mask=attention_mask == 0)
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * weights).sum(1) / weights.sum(1).clamp(min=1))


def texts(lengths: list[int], *, left: bool = False, seed: int = 1) -> dict[str, Tensor]:
    """Return token ids and mask of texts with these lengths; `left` puts the padding in front, with positions that leave it out."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths) + 2
    ids = torch.randint(1, WORDS, (len(lengths), width), generator=generator)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    if left:
        mask = mask.flip(1)
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    return {**batch, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if left else batch


def values_and_gradients(encoder: Any, model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    model.zero_grad()
    z = encoder(**batch)
    # Each row has another weight: rows that come back in the wrong order give another gradient.
    (z**3 * torch.arange(1, len(z) + 1)[:, None]).sum().backward()
    return [z.detach(), *(p.grad for p in model.parameters())]


def close(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-9, atol=1e-11) for x, y in zip(a, b, strict=True))


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=17),
    tokens=st.integers(1, 120),
    chunk=st.one_of(st.none(), st.integers(1, 6)),
    keep=st.sampled_from([0, 2, "auto"]),
    left=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_a_token_budget_bounds_the_chunks_and_changes_nothing(lengths, tokens, chunk, keep, left):
    model, batch = TextEncoder(), texts(lengths, left=left)
    want = values_and_gradients(model, model, batch)
    model.shapes.clear()
    encode = megabatch.cached(model, chunk, tokens=tokens, keep=keep)
    assert close(values_and_gradients(encode, model, batch), want)
    # A row longer than the budget is a chunk of its own.
    assert all(rows * width <= tokens or rows == 1 for rows, width in model.shapes)
    assert chunk is None or all(rows <= chunk for rows, _ in model.shapes)
    assert max(width for _, width in model.shapes) == max(lengths), "padding that no row needs is cut off"
    forward = model.shapes[: encode.chunks]
    assert sum(rows for rows, _ in forward) == len(lengths)
    # Chunks are as full as the next longer row allows: no two neighbours would fit into one.
    merged = [(a[0] + b[0], b[1]) for a, b in itertools.pairwise(forward)]
    assert all(rows * width > tokens or (chunk is not None and rows > chunk) for rows, width in merged)


def test_padding_in_front_is_kept_unless_positions_are_given():
    model, batch = TextEncoder(), texts([3, 9, 5], left=True)
    del batch["position_ids"]
    want = values_and_gradients(model, model, batch)
    model.shapes.clear()
    assert close(values_and_gradients(megabatch.cached(model, tokens=22), model, batch), want)
    assert {width for _, width in model.shapes} == {11}


def test_dropout_is_replayed_in_chunks_of_tokens():
    model, batch = TextEncoder(dropout=0.3), texts([3, 9, 5, 7, 7, 2])
    found = []
    for keep in (0, 10):
        torch.manual_seed(3)
        found.append(values_and_gradients(megabatch.cached(model, tokens=20, keep=keep), model, batch))
    assert close(*found)


def test_memory_is_measured_in_tokens(monkeypatch):
    """All chunks are kept where their graphs fit, whatever their numbers of rows."""
    model, batch = TextEncoder(), texts([2] * 30 + [20] * 3)
    encode = megabatch.cached(model, tokens=20, keep="auto")
    kept = []
    for _ in range(3):
        values_and_gradients(encode, model, batch)
        kept.append(encode.kept)
        monkeypatch.setattr("megabatch.chunks.keep.free_bytes", lambda device: int(2 * 20 * encode._keep.unit_bytes))
    assert encode.chunks == 6 and kept == [1, 3, 3]


def test_an_out_of_memory_error_lowers_the_token_budget():
    class Limited(TextEncoder):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None) -> Tensor:
            if input_ids.numel() > 30:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(input_ids, attention_mask)

    model, batch = Limited(), texts([3, 9, 5, 7, 7, 2])
    encode = megabatch.cached(model, tokens=100)
    with pytest.warns(UserWarning, match="tokens 25 instead of 100"):
        found = values_and_gradients(encode, model, batch)
    unlimited = TextEncoder()
    assert close(found, values_and_gradients(unlimited, unlimited, batch)) and encode.chunk == 25


class Packed(nn.Module):
    """Rows packed one after the other, with the position of each row's first token and of the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 6)
        self.head = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
        self.double()

    def forward(self, packed: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = self.head(self.words(packed["input_ids"]))
        starts = packed["starts"].tolist()
        return {"embedding": torch.stack([hidden[a:b].mean(0) for a, b in itertools.pairwise(starts)])}


def packed(lengths: list[int]) -> dict[str, Tensor]:
    ids = torch.randint(0, WORDS, (sum(lengths),), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "starts": torch.tensor([0, *lengths]).cumsum(0)}


def unpacked(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return chunks of at most two texts."""
    ends = batch["starts"].tolist()
    chunks = []
    for first in range(0, len(ends) - 1, 2):
        last = min(first + 2, len(ends) - 1)
        ids = batch["input_ids"][ends[first] : ends[last]]
        chunks.append({"input_ids": ids, "starts": batch["starts"][first : last + 1] - ends[first]})
    return chunks


@pytest.mark.parametrize("keep", [0, 1, "auto"])
def test_a_split_function_divides_packed_inputs(keep):
    model, batch = Packed(), packed([3, 1, 4, 1, 5])
    encode = megabatch.cached(model, split=unpacked, keep=keep)
    results = []
    for call in (model, encode):
        model.zero_grad()
        (call(batch)["embedding"] ** 3).sum().backward()
        results.append([p.grad for p in model.parameters()])
    assert close(*results) and encode.chunks == 3


def test_chunks_of_a_split_function_have_the_form_of_the_call():
    add = nn.Linear(2, 2)
    x, y = torch.randn(4, 2), torch.randn(4, 2)
    two = megabatch.cached(lambda a, b: add(a) + b, split=lambda a, b: list(zip(a.split(3), b.split(3), strict=True)))
    assert torch.allclose(two(x, y), add(x) + y)
    named = megabatch.cached(lambda a, b: add(a) + b, split=lambda a, b: [{"a": a[:1], "b": b[:1]}, {"a": a[1:], "b": b[1:]}])
    assert torch.allclose(named(a=x, b=y), add(x) + y)
    with pytest.raises(ValueError, match="tuple of 2 arguments"):
        megabatch.cached(lambda a, b: add(a) + b, split=lambda a, b: [a])(x, y)
    with pytest.raises(ValueError, match="no chunk"):
        megabatch.cached(add, split=lambda a: [])(x)


class Output(collections.OrderedDict):
    """A mapping with a constructor of keyword arguments, like Hugging Face's outputs."""


class TwoTowers(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.x, self.y, self.kind = nn.Linear(6, 4).double(), nn.Linear(5, 4).double(), kind

    def forward(self, x: Tensor, y: Tensor) -> Any:
        left, right = self.x(x), self.y(y)
        logits = left @ right.T
        return self.kind(logits=logits, image_embeds=left, text_embeds=right, loss=logits.mean(), states=None)


@pytest.mark.parametrize("kind", [dict, Output, collections.namedtuple("Fields", "logits image_embeds text_embeds loss states")])
def test_only_the_named_outputs_are_joined(kind):
    model, x, y = TwoTowers(kind), torch.randn(7, 6).double(), torch.randn(7, 5).double()
    encode = megabatch.cached(model, chunk=3, outputs=("image_embeds", "text_embeds"))
    out = encode(x, y)
    assert set(out) == {"image_embeds", "text_embeds"} and isinstance(out, kind if issubclass(kind, dict) else dict)
    megabatch.clip_loss(out["image_embeds"], out["text_embeds"], 3.0).backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    megabatch.reference.clip_loss(model.x(x), model.y(y), 3.0).backward()
    assert close(found, [p.grad for p in model.parameters()])
    with pytest.raises(ValueError, match="no states and no pooled"):
        megabatch.cached(model, chunk=3, outputs=("image_embeds", "states", "pooled"))(x, y)


@pytest.mark.parametrize(
    "options, fragment",
    [
        ({}, "chunk=None"),
        ({"tokens": 0}, "tokens=0"),
        ({"tokens": 2.5}, "tokens=2.5"),
        ({"chunk": 0, "tokens": 8}, "chunk=0"),
        ({"chunk": 4, "split": unpacked}, "no effect"),
        ({"split": "rows"}, "split='rows'"),
        ({"chunk": 4, "outputs": "embeds"}, "outputs='embeds'"),
        ({"chunk": 4, "outputs": ()}, r"outputs=\(\)"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, fragment):
    with pytest.raises(ValueError, match=fragment):
        megabatch.cached(nn.Linear(2, 2), **options)


def test_lengths_need_one_attention_mask():
    encode = megabatch.cached(lambda **batch: batch["x"], tokens=8)
    with pytest.raises(ValueError, match="found none"):
        encode(x=torch.randn(4, 2))
    with pytest.raises(ValueError, match=r"shape \(4, 1, 2, 2\)"):
        encode(x=torch.randn(4, 2), attention_mask=torch.ones(4, 1, 2, 2))


LENGTHS = [3, 9, 5, 7, 7, 2, 1, 8, 4, 4, 6]


def shard(batch: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """Return a rank's rows: the last rank has all but one for each of the others."""
    return {key: value[rank : rank + 1] if rank < size - 1 else value[rank:] for key, value in batch.items()}


def text_step(rank: int, size: int, wrapper: str) -> list[Tensor]:
    model = TextEncoder()
    if wrapper == "ddp":
        encode = megabatch.cached(DDP(model), tokens=18, keep=1)
    else:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")) if wrapper == "hsdp" else None
        fully_shard(model.layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        encode = megabatch.cached(model, tokens=18, keep=1)
    x, y = (encode(**shard(texts(LENGTHS, seed=seed), rank, size)) for seed in (1, 2))
    megabatch.clip_loss(x, y, 2.0, group=dist.group.WORLD).backward()
    return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]


def text_gradients() -> list[Tensor]:
    model = TextEncoder()
    x, y = (model(**texts(LENGTHS, seed=seed)) for seed in (1, 2))
    megabatch.reference.clip_loss(x, y, 2.0).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("wrapper, size", [("ddp", 2), ("fsdp", 2), pytest.param("hsdp", 4, marks=pytest.mark.slow)])
def test_ranks_with_different_numbers_of_tokens_give_the_gradient_of_one_process(world, wrapper, size):
    want = text_gradients()
    for found in world.run(size, text_step, wrapper):
        assert close(found, want)


def packed_step(rank: int, size: int) -> list[Tensor]:
    model = Packed()
    fully_shard(model)
    encode = megabatch.cached(model, split=unpacked)
    z = encode(packed([3, 1, 4, 1, 5, 2][: 2 + 4 * rank]))["embedding"]
    (z**3).sum().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def test_split_functions_with_different_numbers_of_chunks_meet(world):
    model = Packed()
    for lengths in ([3, 1], [3, 1, 4, 1, 5, 2]):
        ((model(packed(lengths))["embedding"] ** 3).sum() / 2).backward()
    for found in world.run(2, packed_step):
        assert close(found, [p.grad for p in model.parameters()])


def divided(mask: Tensor, limit: int, least: int = 1, **more: Tensor) -> division.Division:
    inputs = {"input_ids": torch.ones_like(mask), "attention_mask": mask, **more}
    return division.ByTokens(None)(((), inputs), limit, least)


def test_a_chunk_has_the_fewest_rows_that_are_asked_for():
    """A batch normalisation needs two rows."""
    mask = torch.ones(9, 2, dtype=torch.long)
    assert (divided(mask, 8).sizes, divided(mask, 8, least=2).sizes) == ([1, 4, 4], [2, 3, 4])


def test_padding_on_both_sides_stays_within_the_budget():
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]] * 3)
    chunks = divided(mask, 12, position_ids=torch.arange(6).expand(6, 6))
    assert sum(chunks.sizes) == 6 and max(chunks.costs) <= 12
    assert all(piece["input_ids"].numel() == cost for (_, piece), cost in zip(chunks.pieces, chunks.costs, strict=True))


def test_floating_point_inputs_are_cut_only_where_they_are_embeddings():
    mask = (torch.arange(6) < torch.tensor([[2], [3]])).long()
    [(_, piece)] = divided(mask, 100, inputs_embeds=torch.ones(2, 6, 4), pixel_values=torch.ones(2, 6, 4)).pieces
    assert (piece["inputs_embeds"].shape, piece["pixel_values"].shape) == ((2, 3, 4), (2, 6, 4))
