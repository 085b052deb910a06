"""Split and join trees of inputs and outputs along the batch, which is the first dimension of every tensor in them."""

from __future__ import annotations

import copy
import itertools
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def rows_of(tree: Any) -> int:
    """Return the number of rows of all tensors in the tree; raise a ValueError if they differ or if there are none."""
    sizes = {name: len(leaf) for name, leaf in _leaves(tree, "the inputs") if _is_batched(leaf)}
    if not sizes:
        raise ValueError("the inputs contain no tensor with a batch dimension and no list of samples: there is nothing to split")
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ValueError(
            f"the inputs differ in rows: {listed}; every tensor is split along its first dimension, so bind what belongs to the "
            "whole batch to the encoder, for example with functools.partial"
        )
    return next(iter(sizes.values()))


def split(tree: Any, rows: int, least: int = 1) -> list[Any]:
    """Return the tree in pieces of `rows` rows, the last one smaller if necessary; one empty piece if there are no rows.

    Tuples, lists, dicts and other mappings are structure; tensors are split, and so are lists of samples (texts, images);
    numbers, tensors without dimensions and all other objects go to every piece.

    least: rows that the last piece should have; the one before gives it some if it keeps as many itself.
    """
    return split_sizes(tree, _sizes(rows_of(tree), rows, least))


def select(tree: Any, order: Tensor) -> Any:
    """Return the tree with its rows in another order. order: the row that comes to each place, on the host."""
    places: list[int] = order.tolist()

    def reorder(leaf: Any) -> Any:
        if not _is_batched(leaf):
            return leaf
        return leaf.index_select(0, order.to(leaf.device)) if isinstance(leaf, Tensor) else [leaf[place] for place in places]

    return _map(tree, reorder)


def empty(tree: Any) -> Any:
    """Return the tree with 0 rows."""
    return _map(tree, lambda leaf: leaf[:0] if _is_batched(leaf) else leaf)


def join(pieces: Sequence[Any], rows: Sequence[int]) -> Any:
    """Return the tree that the pieces are parts of. rows: those of each piece, which all of its tensors must have."""
    first = pieces[0]
    if isinstance(first, Tensor):
        return _join_tensors(pieces, rows)
    if isinstance(first, Mapping):
        return _rebuild(first, [join([piece[key] for piece in pieces], rows) for key in first])
    if isinstance(first, (tuple, list)):
        return _rebuild(first, [join(parts, rows) for parts in zip(*pieces, strict=True)])
    if all(type(piece) is type(first) and piece == first for piece in pieces):
        return first
    raise ValueError(
        f"the encoder returned a {type(first).__name__} that differs between chunks: it cannot be joined; return tensors with a "
        "row for each sample, in tuples, lists or dicts"
    )


def named_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Return all tensors among the arguments of a call, with their names: args[0], kwargs['ids'], args[1]['mask']."""
    leaves = (*_leaves(args, "args"), *_leaves(kwargs, "kwargs"))
    return [(name, leaf) for name, leaf in leaves if isinstance(leaf, Tensor)]


def tensors_of(tree: Any) -> list[Tensor]:
    """Return all tensors in the tree."""
    return [leaf for _, leaf in _leaves(tree, "") if isinstance(leaf, Tensor)]


def map_tensors(tree: Any, f: Callable[[Tensor], Tensor]) -> Any:
    """Return the tree with f applied to its tensors."""
    return _map(tree, lambda leaf: f(leaf) if isinstance(leaf, Tensor) else leaf)


def map_named(tree: Any, f: Callable[[str, Tensor], Tensor], name: str = "") -> Any:
    """Return the tree with f(key, tensor) in place of its tensors. key: that of the innermost mapping around the tensor, or ""."""
    if isinstance(tree, Mapping):
        return _rebuild(tree, [map_named(tree[key], f, str(key)) for key in tree])
    if isinstance(tree, (tuple, list)) and not _is_samples(tree):
        return _rebuild(tree, [map_named(branch, f, name) for branch in tree])
    return f(name, tree) if isinstance(tree, Tensor) else tree


def _map(tree: Any, f: Callable[[Any], Any]) -> Any:
    if isinstance(tree, Mapping):
        return _rebuild(tree, [_map(tree[key], f) for key in tree])
    if isinstance(tree, (tuple, list)) and not _is_samples(tree):
        return _rebuild(tree, [_map(branch, f) for branch in tree])
    return f(tree)


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key in tree:
            yield from _leaves(tree[key], f"{name}[{key!r}]")
    elif isinstance(tree, (tuple, list)) and not _is_samples(tree):
        for index, branch in enumerate(tree):
            yield from _leaves(branch, f"{name}[{index}]")
    else:
        yield name, tree


def _is_samples(node: Any) -> bool:
    """Return whether the list contains samples: texts, images, any objects except numbers, tensors and containers."""
    structure = (Tensor, Mapping, tuple, list, numbers.Number, type(None))
    return isinstance(node, list) and bool(node) and not any(isinstance(item, structure) for item in node)


def _is_batched(leaf: Any) -> bool:
    return leaf.ndim > 0 if isinstance(leaf, Tensor) else _is_samples(leaf)


def _sizes(total: int, rows: int, least: int) -> list[int]:
    """Return the rows of each piece."""
    full, rest = divmod(total, rows)
    sizes = [rows] * full + ([rest] if rest or not full else [])
    missing = least - sizes[-1]
    if len(sizes) > 1 and missing > 0 and sizes[-2] - missing >= least:
        sizes[-2:] = [sizes[-2] - missing, least]
    return sizes


def split_sizes(tree: Any, sizes: list[int]) -> list[Any]:
    """Return the tree in pieces with these numbers of rows."""
    if isinstance(tree, Tensor) and tree.ndim:
        # One split rather than slices: its backward joins the pieces' gradients in one operation.
        return list(tree.split(sizes))
    if _is_samples(tree):
        ends = list(itertools.accumulate(sizes))
        return [tree[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    if isinstance(tree, (Mapping, tuple, list)) and len(tree):
        branches = [tree[key] for key in tree] if isinstance(tree, Mapping) else tree
        return [_rebuild(tree, parts) for parts in zip(*(split_sizes(branch, sizes) for branch in branches), strict=True)]
    return [tree] * len(sizes)


def _rebuild(like: Any, branches: Sequence[Any]) -> Any:
    """Return a container of the same type with other branches, in the same order."""
    if isinstance(like, Mapping):
        new = copy.copy(like)
        for key, branch in zip(like, branches, strict=True):
            new[key] = branch  # type: ignore[index]
        return new
    return like._make(branches) if hasattr(like, "_make") else type(like)(branches)


def _join_tensors(pieces: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    if pieces[0].ndim == 0:
        same = torch.stack([piece.detach() for piece in pieces])
        if not torch.equal(same.nan_to_num(), same[:1].expand_as(same).nan_to_num()):
            raise ValueError(
                "the encoder returned a number that differs between chunks (a loss, a mean over the batch?): return embeddings, "
                "one row for each sample, and compute what concerns the whole batch outside"
            )
        return pieces[0]
    for piece, expected in zip(pieces, rows, strict=True):
        if len(piece) != expected:
            raise ValueError(
                f"the encoder returned a tensor of shape {tuple(piece.shape)} for a chunk of {expected} rows: the first "
                "dimension of every output must be the batch"
            )
    if len({piece.shape[1:] for piece in pieces}) > 1:
        raise ValueError(
            f"the encoder returned shapes {sorted({tuple(piece.shape) for piece in pieces})}: only the first dimension may "
            "differ between chunks; pad to one length, or return pooled embeddings"
        )
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
