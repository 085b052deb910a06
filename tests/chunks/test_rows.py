"""Trees of inputs are split and joined along the batch only."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import megabatch
from megabatch.chunks import rows


class Pair(NamedTuple):
    left: Any
    right: Any


def trees(size: int) -> st.SearchStrategy[Any]:
    tensors = st.lists(st.integers(0, 3), max_size=2).map(
        lambda shape: torch.arange(size * 100.0)[:size].view(size, *[1] * len(shape))
    )
    leaves = st.one_of(
        tensors,
        st.just(torch.tensor(7.0)),
        st.just(3),
        st.none(),
        st.just("a text"),
        st.just([f"text {n}" for n in range(size)] if size else [1]),
        st.just([1, 2.5, True]),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).filter(lambda items: not rows._is_samples(items)),
            st.tuples(inner, inner),
            st.builds(Pair, inner, inner),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(OrderedDict),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(UserDict),
        ),
        max_leaves=8,
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, (dict, UserDict)):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def joined(pieces: list[Any]) -> Any:
    """Join the pieces, and concatenate lists of samples."""
    first = pieces[0]
    if rows._is_samples(first):
        return [item for piece in pieces for item in piece]
    if isinstance(first, (dict, UserDict)):
        return type(first)({key: joined([piece[key] for piece in pieces]) for key in first})
    if isinstance(first, Pair):
        return Pair(*(joined(list(parts)) for parts in zip(*pieces, strict=True)))
    if isinstance(first, (tuple, list)):
        return type(first)(joined(list(parts)) for parts in zip(*pieces, strict=True))
    return torch.cat(pieces) if isinstance(first, Tensor) and first.ndim else first


@given(st.data())
def test_pieces_together_are_the_tree(data):
    size, chunk = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 11))
    tree = (data.draw(trees(size)), torch.zeros(size, 2))
    pieces = rows.split(tree, chunk)
    assert len(pieces) == max(1, -(-size // chunk))
    assert [rows.rows_of(piece) for piece in pieces] == [min(chunk, size - start) for start in range(0, max(size, 1), chunk)]
    assert same(joined(pieces), tree)
    assert rows.rows_of(rows.empty(tree)) == 0


def test_other_mappings_than_dict_keep_their_type():
    from transformers import BatchEncoding
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    encoding = BatchEncoding({"input_ids": torch.arange(12).view(6, 2), "attention_mask": torch.ones(6, 2)})
    first, second = rows.split(encoding, 4)
    assert isinstance(first, BatchEncoding) and torch.equal(second.input_ids, encoding.input_ids[4:])
    assert len(encoding.input_ids) == 6, "the original is as it was"

    outputs = [BaseModelOutputWithPooling(pooler_output=piece.input_ids.float()) for piece in (first, second)]
    whole = rows.join(outputs, [4, 2])
    assert isinstance(whole, BaseModelOutputWithPooling)
    assert torch.equal(whole.pooler_output, encoding.input_ids.float()) and whole.last_hidden_state is None
    assert torch.equal(whole["pooler_output"], whole[0])


def test_a_hugging_face_model_by_its_own_batches():
    from transformers import BatchEncoding, BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
    model = BertModel(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    mask = (torch.arange(7) < torch.randint(1, 8, (10, 1))).long()
    batch = BatchEncoding({"input_ids": torch.randint(50, (10, 7)), "attention_mask": mask})

    def gradients(encode: Any) -> list[Tensor]:
        model.zero_grad()
        z = encode(**batch).pooler_output
        megabatch.clip_loss(z, z.roll(1, 0), 2.0).backward()
        return [z, *(p.grad for p in model.parameters())]

    for a, b in zip(gradients(model), gradients(megabatch.cached(model, chunk=3, keep=1)), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_the_backward_of_a_split_is_one_operation():
    x = torch.randn(6, 2, requires_grad=True)
    pieces = rows.split(x, 2)
    assert {piece.grad_fn for piece in pieces} == {pieces[0].grad_fn}
    assert "Split" in type(pieces[0].grad_fn).__name__


@pytest.mark.parametrize("pieces, whole", [([None, None], None), (["a", "a"], "a"), ([3, 3], 3)])
def test_what_is_equal_in_all_pieces_stays(pieces, whole):
    assert rows.join(pieces, [1, 1]) == whole


def test_a_number_that_is_not_a_number_in_all_pieces_stays():
    assert rows.join([torch.tensor(torch.nan)] * 2, [1, 1]).isnan()
