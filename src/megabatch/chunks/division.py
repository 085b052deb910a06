"""How the inputs of a call are divided into chunks: by rows, by a budget of tokens, or by a function of the user.

A budget of tokens sorts the rows by length, cuts off the padding that all rows of a chunk share, and fills each chunk up to the
budget. Outputs come back in the order of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from . import rows

# The argument or key that says which tokens are padding.
MASK = "attention_mask"
# With explicit positions, padding in front of a row can be cut off too: the positions of its tokens do not change.
POSITIONS = "position_ids"
# Floating-point inputs with a token dimension. Other ones (pixels, features) are never cut, whatever their second dimension.
EMBEDDED = "inputs_embeds"


class Division(NamedTuple):
    """The chunks of one call.

    pieces: the inputs of each chunk, as (args, kwargs). sizes: the rows of each chunk; None if only its outputs tell.
    costs: a number for each chunk that its memory is proportional to. extra: the inputs of an additional chunk, whose outputs are
    discarded, for a rank that must run as many chunks as another one. inverse: where each row of the call stands in the joined
    outputs; None if they are in order.
    """

    pieces: list[Any]
    sizes: list[int | None]
    costs: list[int]
    extra: Any
    inverse: Tensor | None = None


class Divide(Protocol):
    """Divides inputs, given as (args, kwargs). limit: the most rows or tokens of a chunk; least: the fewest rows."""

    def __call__(self, inputs: Any, limit: int, least: int) -> Division: ...


def by_rows(inputs: Any, limit: int, least: int) -> Division:
    """Return chunks of `limit` rows, in order."""
    pieces = rows.split(inputs, limit, least)
    sizes = [rows.rows_of(piece) for piece in pieces]
    return Division(pieces, list(sizes), sizes, rows.empty(inputs))


class ByTokens:
    """Chunks of rows of similar length with at most `limit` tokens each, padding included, and at most `most_rows` rows."""

    def __init__(self, most_rows: int | None) -> None:
        self.most_rows = most_rows

    def __call__(self, inputs: Any, limit: int, least: int) -> Division:
        total, mask = rows.rows_of(inputs), _mask_of(inputs)
        width = mask.shape[1]
        if not total or not width:
            return by_rows(inputs, max(1, total), least)
        begins, ends = _spans(mask, any(name.endswith(f"[{POSITIONS!r}]") for name, _ in rows.named_tensors(*inputs)))
        order = sorted(range(total), key=lambda row: ends[row] - begins[row])
        sizes = _fill([ends[row] - begins[row] for row in order], limit, self.most_rows, least)
        index = torch.tensor(order)
        pieces, costs, start = [], [], 0
        for size, piece in zip(sizes, rows.split_sizes(rows.select(inputs, index), sizes), strict=True):
            chosen = order[start : start + size]
            begin, end = min(begins[row] for row in chosen), max(ends[row] for row in chosen)
            pieces.append(_trimmed(piece, width, begin, end))
            costs.append(size * (end - begin))
            start += size
        # One row and not none: many text encoders cannot take an empty batch.
        extra = rows.split_sizes(pieces[0], [1, sizes[0] - 1])[0]
        return Division(pieces, list(sizes), costs, extra, torch.argsort(index))


class ByFunction:
    """The chunks that a function of the user returns. It is called with the arguments of the encoder."""

    def __init__(self, function: Callable[..., Iterable[Any]]) -> None:
        self.function = function

    def __call__(self, inputs: Any, limit: int, least: int) -> Division:
        args, kwargs = inputs
        pieces = [_as_call(piece, args, kwargs) for piece in self.function(*args, **kwargs)]
        if not pieces:
            raise ValueError("split returned no chunk: must return a list with the inputs of at least one chunk")
        costs = [sum(tensor.numel() for tensor in rows.tensors_of(piece)) for piece in pieces]
        return Division(pieces, [None] * len(pieces), costs, pieces[-1])


def _as_call(piece: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a chunk of the user's function as (args, kwargs), in the form of the whole call."""
    if args and kwargs:
        right = isinstance(piece, tuple) and len(piece) == 2 and isinstance(piece[0], tuple) and isinstance(piece[1], dict)
        form, call = "a pair (args, kwargs)", piece
    elif kwargs:
        right, form, call = isinstance(piece, Mapping), "a dict of keyword arguments", ((), piece)
    elif len(args) == 1:
        right, form, call = True, "", ((piece,), {})
    else:
        right, form, call = isinstance(piece, tuple) and len(piece) == len(args), f"a tuple of {len(args)} arguments", (piece, {})
    if not right:
        raise ValueError(f"split returned a chunk of type {type(piece).__name__}: must be {form}, as the encoder was called with")
    return call


def _mask_of(inputs: Any) -> Tensor:
    """Return the one attention mask among the inputs, of shape (rows, tokens)."""
    named = [(name, t) for name, t in rows.named_tensors(*inputs) if name.endswith(f"[{MASK!r}]")]
    masks = list({id(t): t for _, t in named}.values())
    if len(masks) != 1 or masks[0].ndim != 2:
        described = ", ".join(f"{name} of shape {tuple(t.shape)}" for name, t in named) or "none"
        raise ValueError(
            f"tokens=… needs one {MASK} of shape (rows, tokens) among the inputs, by that name, to know their lengths; found "
            f"{described}. Pass chunk=… to divide by rows, or split=… to divide in your own way"
        )
    return masks[0]


def _spans(mask: Tensor, from_front: bool) -> tuple[list[int], list[int]]:
    """Return the first column of each row that has to stay, and the one after the last.

    from_front: whether padding in front of the rows may be cut off.
    """
    width = mask.shape[1]
    positions = torch.arange(1, width + 1, device=mask.device)
    used = mask.ne(0)
    # A row without tokens keeps one column.
    begins, ends = (width - (used * positions.flip(0)).amax(1)).clamp(max=width - 1), (used * positions).amax(1).clamp(min=1)
    first, last = torch.stack([begins, ends]).tolist()
    # Rows that begin and end at different columns have padding on both sides: then only that at the end is cut off.
    if not from_front or len(set(last)) > 1:
        first = [0] * len(first)
    return first, last


def _fill(lengths: list[int], tokens: int, most_rows: int | None, least: int) -> list[int]:
    """Return the rows of each chunk, for lengths in ascending order.

    The longest rows are taken first, so that what is left over is the first chunk, of the shortest rows. Backward begins with the
    last chunk.
    """
    sizes, remaining = list[int](), len(lengths)
    while remaining:
        size = max(1, tokens // lengths[remaining - 1])
        if most_rows is not None:
            size = min(size, most_rows)
        sizes.append(min(remaining, size))
        remaining -= sizes[-1]
    missing = least - sizes[-1]
    if len(sizes) > 1 and missing > 0 and sizes[-2] - missing >= least:
        sizes[-2:] = [sizes[-2] - missing, least]
    return sizes[::-1]


def _trimmed(piece: Any, width: int, begin: int, end: int) -> Any:
    """Return the chunk with columns begin to end of every tensor that has a token dimension."""

    def trim(name: str, leaf: Tensor) -> Tensor:
        per_token = leaf.ndim >= 2 and leaf.shape[1] == width
        if per_token and (not leaf.is_floating_point() or name in (EMBEDDED, MASK)):
            return leaf[:, begin:end]
        return leaf

    return rows.map_named(piece, trim)
