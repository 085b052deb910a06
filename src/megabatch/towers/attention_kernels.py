"""Attention over short sequences in Triton, forward and backward. Tensors are (B, H, S, D) of any strides, dense in D.

A sequence is a tile of 64, 128 or 256 positions, and some have up to TAIL more: the 257 of ViT-L/14 are 256 and one, where blocks
of 128 make it 384. Forward has all keys of a head in one tile: one softmax, without a running maximum. Backward is one kernel with
five products and no atomics: a program has all queries of a head and goes over blocks of its keys, whose gradients it writes once.

P: probabilities, dP and dS: the derivatives in them and in the scaled similarities, delta: the sums over keys of P · dP, which are
those of O · dO. lse: the logarithm, to the base 2, of the sums of exponentials.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TRITON_VERSION: str = triton.__version__
LOG2_E = 1.4426950408889634
# Positions behind a tile: the smallest side of a product.
TAIL = 16
TILES = (64, 128, 256)
LONGEST = TILES[-1] + 1


class AttentionLaunch(NamedTuple):
    """block: queries of forward, keys of backward, that a program has at a time."""

    block: int
    warps: int
    stages: int


# By the positions of the tile. Of 64 and 256 the best of those in docs/log.md; others were not tried for 128.
FORWARD = {64: AttentionLaunch(64, 4, 1), 128: AttentionLaunch(64, 4, 2), 256: AttentionLaunch(64, 4, 2)}
BACKWARD = {64: AttentionLaunch(64, 4, 1), 128: AttentionLaunch(32, 8, 2), 256: AttentionLaunch(64, 8, 2)}


def divide(length: int, causal: bool) -> tuple[int, int]:
    """Return the positions of the tile of a sequence, and TAIL if it has more, otherwise 0.

    The kernels of 65 to 80 positions that are not causal, as Triton 3.6 compiled them, gave a wrong dv and illegal addresses on an
    H200: these sequences are padded to 128.

    >>> divide(50, False), divide(77, True), divide(77, False), divide(257, False)
    ((64, 0), (64, 16), (128, 0), (256, 16))
    """
    if causal and TILES[0] < length <= TILES[0] + TAIL:
        return TILES[0], TAIL
    if length == LONGEST:
        return TILES[-1], TAIL
    for tile in TILES:
        if length <= tile:
            return tile, 0
    raise ValueError(f"a sequence of {length} positions: must have at most {LONGEST}")


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output, (B, H, S, D) as a view of (B, S, H, D) memory, and lse (B, H, S).

    The first call of each compiled kernel raises a RuntimeError if the results of a small example are wrong.
    """
    variant = q.device, q.dtype, divide(q.shape[2], causal), q.shape[2] in TILES, causal
    if variant not in _checked and not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        check(q, causal)
        _checked.add(variant)
    return _forward(q, k, v, causal, scale)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = map(_aligned, (q, k, v))
    batch, heads, length, width = q.shape
    tile, tail = divide(length, causal)
    launch = FORWARD[tile]
    o, lse = new_like(q), q.new_empty((batch, heads, length), dtype=torch.float32)
    attention_kernel[(batch * heads,)](
        q, k, v, o, lse, *_strides(q, k, v, o), heads, length, scale * LOG2_E,
        KEYS=tile, BLOCK=launch.block, D=width, T=tail, FULL=tail > 0 or length == tile, CAUSAL=causal,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return o, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, laid out as the output is."""
    q, k, v, o, do = map(_aligned, (q, k, v, o, do))
    batch, heads, length, width = q.shape
    tile, tail = divide(length, causal)
    launch = BACKWARD[tile]
    dq, dk, dv = new_like(q), new_like(q), new_like(q)
    is_one = length == tile + 1
    # P and dS of the one query behind the tile.
    last = q.new_empty((batch * heads, 2, tile), dtype=torch.float32) if is_one else lse
    attention_backward_kernel[(batch * heads,)](
        q, k, v, o, do, lse, last, dq, dk, dv, *_strides(q, k, v, o, do, dq), heads, length, scale, scale * LOG2_E,
        QUERIES=tile, BLOCK=launch.block, D=width, T=tail, FULL=tail > 0 or length == tile, CAUSAL=causal,
        ONE=is_one, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return dq, dk, dv


# Device, dtype, tile and tail, whether the tile is full, and causal, of kernels whose results were compared with the formula.
_checked: set[tuple[Any, ...]] = set()
# Largest errors, as shares of the largest entry, that rounding explains.
TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-4}


def check(like: Tensor, causal: bool) -> None:
    """Raise a RuntimeError unless the kernels are right for random heads of this length. Triton has compiled some to wrong code."""
    length, width = like.shape[2:]
    # Not torch's own generator: a training draws the same numbers with and without this check.
    generator = torch.Generator(like.device).manual_seed(0)
    random = torch.randn((4, 2, length, 3, width), generator=generator, device=like.device)
    q, k, v, do = random.to(like.dtype).transpose(2, 3).unbind()
    scale = width**-0.5
    o, lse = _forward(q, k, v, causal, scale)
    found = o, *backward(q, k, v, o, lse, do, causal, scale)
    for name, a, b in zip(("output", "dq", "dk", "dv"), found, formula(q, k, v, do, causal, scale), strict=True):
        error = float((a.double() - b).abs().max() / b.abs().max().clamp(min=0.1))
        # NaN is wrong too.
        if not error <= TOLERANCES[like.dtype]:
            raise RuntimeError(
                f"the kernels for attention over {length} positions, as Triton {TRITON_VERSION} compiles them, are wrong: {name} "
                f"is off by {error:.0e}; do not call short_attention, and set compute.short_attention=false in a run"
            )


def formula(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output and the gradients of q, k and v in float64, without autograd."""
    q, k, v, do = (t.double() for t in (q, k, v, do))
    s = q @ k.mT * scale
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
    p = s.softmax(-1)
    dp = do @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    return p @ v, ds @ k, ds.mT @ q, p.mT @ do


def new_like(t: Tensor) -> Tensor:
    """Return a new (B, H, S, D) tensor, a view of (B, S, H, D) memory, as the next projection of a transformer reads it."""
    return torch.empty_like(t.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _aligned(t: Tensor) -> Tensor:
    """Return the tensor, or a copy of it if rows start elsewhere than at multiples of 16 elements, for which Triton would compile
    another kernel, or so far apart that 32 bits cannot address them."""
    is_aligned = t.stride(-1) == 1 and not t.data_ptr() % 16 and not any(stride % 16 for stride in t.stride()[:3])
    return t if is_aligned and t.shape[2] * t.stride(2) < 2**31 else new_like(t).copy_(t)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for t in tensors for stride in t.stride()[:3])


@triton.jit
def _load(base, stride, start, length, ROWS: tl.constexpr, D: tl.constexpr, FULL: tl.constexpr):
    """Load rows from start on; FULL says that all of them exist, and others are zero."""
    i = start + tl.arange(0, ROWS)
    at = base + i[:, None] * stride + tl.arange(0, D)[None, :]
    if FULL:
        return tl.load(at)
    else:
        return tl.load(at, mask=(i < length)[:, None], other=0.0)


@triton.jit
def _store(base, stride, start, values, length, ROWS: tl.constexpr, D: tl.constexpr, FULL: tl.constexpr):
    i = start + tl.arange(0, ROWS)
    at = base + i[:, None] * stride + tl.arange(0, D)[None, :]
    rounded = values.to(base.dtype.element_ty)
    if FULL:
        tl.store(at, rounded)
    else:
        tl.store(at, rounded, mask=(i < length)[:, None])


# One kernel for all numbers of heads and positions of a tile.
@triton.jit(do_not_specialize=["heads", "length"])
def attention_kernel(
    q, k, v, o, lse, qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os, heads, length, factor,
    KEYS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, T: tl.constexpr, FULL: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Write the output and lse of one head of one sample. factor: the scale times log2(e)."""
    head = tl.program_id(0)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    q += b * qb + h * qh
    k += b * kb + h * kh
    v += b * vb + h * vh
    o += b * ob + h * oh
    lse += head.to(tl.int64) * length
    keys = _load(k, ks, 0, length, KEYS, D, FULL)
    values = _load(v, vs, 0, length, KEYS, D, FULL)
    last_keys, last_values = keys, values
    if T > 0:
        last_keys = _load(k, ks, KEYS, length, T, D, False)
        last_values = _load(v, vs, KEYS, length, T, D, False)
        # The last queries, with keys as rows: few queries are the narrow side of a product.
        last_queries = _load(q, qs, KEYS, length, T, D, False)
        j = tl.arange(0, T)
        s = tl.dot(keys, tl.trans(last_queries))
        t = tl.dot(last_keys, tl.trans(last_queries))
        t = tl.where((KEYS + j)[:, None] < length, t, float("-inf"))
        if CAUSAL:
            t = tl.where(j[:, None] <= j[None, :], t, float("-inf"))
        peak = tl.maximum(tl.max(s, 0), tl.max(t, 0)) * factor
        s = tl.exp2(s * factor - peak[None, :])
        t = tl.exp2(t * factor - peak[None, :])
        total = tl.sum(s, 0) + tl.sum(t, 0)
        out = tl.dot(tl.trans(values), s.to(values.dtype))
        out = tl.dot(tl.trans(last_values), t.to(values.dtype), out)
        _store(o, os, KEYS, tl.trans(out * (1.0 / total)[None, :]), length, T, D, False)
        tl.store(lse + KEYS + j, peak + tl.log2(total), mask=KEYS + j < length)
    if KEYS == BLOCK:
        _attend(q, o, lse, keys, values, last_keys, last_values, qs, os, 0, length, factor, KEYS, BLOCK, D, T, FULL, CAUSAL)
    else:
        for start in range(0, KEYS, BLOCK):
            _attend(q, o, lse, keys, values, last_keys, last_values, qs, os, start, length, factor, KEYS, BLOCK, D, T, FULL, CAUSAL)


@triton.jit
def _attend(
    q, o, lse, keys, values, last_keys, last_values, qs, os, start, length, factor,
    KEYS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, T: tl.constexpr, FULL: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Write the output and lse of a block of queries of the tile."""
    i, j = start + tl.arange(0, BLOCK), tl.arange(0, KEYS)
    queries = _load(q, qs, start, length, BLOCK, D, FULL)
    s = tl.dot(queries, tl.trans(keys))
    if CAUSAL:
        s = tl.where(j[None, :] <= i[:, None], s, float("-inf"))
    if not FULL:
        s = tl.where(j[None, :] < length, s, float("-inf"))
    peak = tl.max(s, 1)
    # Causal queries of the tile come before the last keys.
    if T > 0 and not CAUSAL:
        t = tl.dot(queries, tl.trans(last_keys))
        t = tl.where((KEYS + tl.arange(0, T))[None, :] < length, t, float("-inf"))
        peak = tl.maximum(peak, tl.max(t, 1))
    peak = peak * factor
    p = tl.exp2(s * factor - peak[:, None])
    total = tl.sum(p, 1)
    out = tl.dot(p.to(values.dtype), values)
    if T > 0 and not CAUSAL:
        p_last = tl.exp2(t * factor - peak[:, None])
        total += tl.sum(p_last, 1)
        out = tl.dot(p_last.to(values.dtype), last_values, out)
    _store(o, os, start, out * (1.0 / total)[:, None], length, BLOCK, D, FULL)
    if FULL:
        tl.store(lse + i, peak + tl.log2(total))
    else:
        tl.store(lse + i, peak + tl.log2(total), mask=i < length)


@triton.jit(do_not_specialize=["heads", "length"])
def attention_backward_kernel(
    q, k, v, o, do, lse, last, dq, dk, dv,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os, db, dh, ds, gb, gh, gs, heads, length, scale, factor,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, T: tl.constexpr, FULL: tl.constexpr, CAUSAL: tl.constexpr,
    ONE: tl.constexpr,
):  # fmt: skip
    """Write dq, dk and dv of one head of one sample. last: memory for P and dS of the last query, if there is ONE."""
    head = tl.program_id(0)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    q += b * qb + h * qh
    k += b * kb + h * kh
    v += b * vb + h * vh
    o += b * ob + h * oh
    do += b * db + h * dh
    dq += b * gb + h * gh
    dk += b * gb + h * gh
    dv += b * gb + h * gh
    lse += head.to(tl.int64) * length
    i = tl.arange(0, QUERIES)
    queries = _load(q, qs, 0, length, QUERIES, D, FULL)
    dout = _load(do, ds, 0, length, QUERIES, D, FULL)
    if FULL:
        lse_tile = tl.load(lse + i)
    else:
        # P of rows that do not exist is zero.
        lse_tile = tl.load(lse + i, mask=i < length, other=float("inf"))
    if BLOCK == QUERIES and T == 0:
        # All keys at once: delta follows from P and dP, without the output. The products are transposed, (D, keys), so that their
        # left operands are what was loaded.
        keys = _load(k, ks, 0, length, BLOCK, D, FULL)
        values = _load(v, vs, 0, length, BLOCK, D, FULL)
        p, dp = _p_and_dp(queries, dout, keys, values, lse_tile, 0, length, factor, QUERIES, BLOCK, FULL, CAUSAL)
        ds_tile = (p * (dp - tl.sum(p * dp, 1)[:, None])).to(queries.dtype)
        _store(dv, gs, 0, tl.trans(tl.dot(tl.trans(dout), p.to(queries.dtype))), length, BLOCK, D, FULL)
        _store(dk, gs, 0, tl.trans(tl.dot(tl.trans(queries), ds_tile)) * scale, length, BLOCK, D, FULL)
        _store(dq, gs, 0, tl.dot(ds_tile, keys) * scale, length, QUERIES, D, FULL)
    else:
        out = _load(o, os, 0, length, QUERIES, D, FULL)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
        dq_tile = tl.zeros((QUERIES, D), tl.float32)
        if T > 0:
            last_keys = _load(k, ks, QUERIES, length, T, D, False)
            last_values = _load(v, vs, QUERIES, length, T, D, False)
            if ONE:
                # One query: sums over vectors instead of products of which it is a sixteenth. They are stored for the loop.
                d = tl.arange(0, D)
                last += head.to(tl.int64) * (2 * QUERIES)
                q_last = tl.load(q + QUERIES * qs + d).to(tl.float32)
                k_last = tl.load(k + QUERIES * ks + d).to(tl.float32)
                v_last = tl.load(v + QUERIES * vs + d).to(tl.float32)
                do_last = tl.load(do + QUERIES * ds + d).to(tl.float32)
                lse_last = tl.load(lse + QUERIES)
                delta_last = tl.sum(tl.load(o + QUERIES * os + d).to(tl.float32) * do_last, 0)
                all_keys = _load(k, ks, 0, length, QUERIES, D, True).to(tl.float32)
                p_last = tl.exp2(tl.sum(all_keys * q_last[None, :], 1) * factor - lse_last)
                all_values = _load(v, vs, 0, length, QUERIES, D, True).to(tl.float32)
                ds_last = p_last * (tl.sum(all_values * do_last[None, :], 1) - delta_last)
                tl.store(last + i, p_last)
                tl.store(last + QUERIES + i, ds_last)
                p_corner = tl.exp2(tl.sum(q_last * k_last, 0) * factor - lse_last)
                ds_corner = p_corner * (tl.sum(do_last * v_last, 0) - delta_last)
                dq_last = tl.sum(all_keys * ds_last[:, None], 0) + ds_corner * k_last
                tl.store(dq + QUERIES * gs + d, (dq_last * scale).to(dq.dtype.element_ty))
                first = tl.where(tl.arange(0, T) == 0, 1.0, 0.0)
                dv_last = (first * p_corner)[:, None] * do_last[None, :]
                dk_last = (first * ds_corner)[:, None] * q_last[None, :]
                # Other threads read what was stored.
                tl.debug_barrier()
            else:
                last_queries = _load(q, qs, QUERIES, length, T, D, False)
                last_dout = _load(do, ds, QUERIES, length, T, D, False)
                last_out = _load(o, os, QUERIES, length, T, D, False)
                i_last = QUERIES + tl.arange(0, T)
                last_lse = tl.load(lse + i_last, mask=i_last < length, other=float("inf"))
                last_delta = tl.sum(last_out.to(tl.float32) * last_dout.to(tl.float32), 1)
                p_corner, ds_corner = _last_queries(
                    last_queries, last_dout, last_keys, last_values, last_lse, last_delta, QUERIES, length, factor,
                    QUERIES, T, T, False, CAUSAL,
                )  # fmt: skip
                dq_last = tl.dot(tl.trans(last_keys), ds_corner)
                dv_last = tl.trans(tl.dot(tl.trans(last_dout), tl.trans(p_corner)))
                dk_last = tl.trans(tl.dot(tl.trans(last_queries), tl.trans(ds_corner)))
            # Causal queries of the tile come before the last keys.
            if not CAUSAL:
                p_edge, dp_edge = _p_and_dp(
                    queries, dout, last_keys, last_values, lse_tile, QUERIES, length, factor, QUERIES, T, False, False
                )
                ds_edge = (p_edge * (dp_edge - delta[:, None])).to(queries.dtype)
                dq_tile = tl.dot(ds_edge, last_keys, dq_tile)
                dv_last += tl.trans(tl.dot(tl.trans(dout), p_edge.to(queries.dtype)))
                dk_last += tl.trans(tl.dot(tl.trans(queries), ds_edge))
            _store(dv, gs, QUERIES, dv_last, length, T, D, False)
            _store(dk, gs, QUERIES, dk_last * scale, length, T, D, False)
        if FULL:
            end: tl.constexpr = QUERIES
        else:
            end = length
        for start in range(0, end, BLOCK):
            keys = _load(k, ks, start, length, BLOCK, D, FULL)
            values = _load(v, vs, start, length, BLOCK, D, FULL)
            p, dp = _p_and_dp(queries, dout, keys, values, lse_tile, start, length, factor, QUERIES, BLOCK, FULL, CAUSAL)
            ds_tile = (p * (dp - delta[:, None])).to(queries.dtype)
            dq_tile = tl.dot(ds_tile, keys, dq_tile)
            dv_tile = tl.trans(tl.dot(tl.trans(dout), p.to(queries.dtype)))
            dk_tile = tl.trans(tl.dot(tl.trans(queries), ds_tile))
            if ONE:
                j = start + tl.arange(0, BLOCK)
                dv_tile += tl.load(last + j)[:, None] * do_last[None, :]
                dk_tile += tl.load(last + QUERIES + j)[:, None] * q_last[None, :]
            elif T > 0:
                p_last, ds_last = _last_queries(
                    last_queries, last_dout, keys, values, last_lse, last_delta, start, length, factor,
                    QUERIES, BLOCK, T, True, False,
                )  # fmt: skip
                dq_last = tl.dot(tl.trans(keys), ds_last, dq_last)
                # Added afterwards: a product that starts from another one would share its layout, in which warps repeat work.
                dv_tile += tl.trans(tl.dot(tl.trans(last_dout), tl.trans(p_last)))
                dk_tile += tl.trans(tl.dot(tl.trans(last_queries), tl.trans(ds_last)))
            _store(dv, gs, start, dv_tile, length, BLOCK, D, FULL)
            _store(dk, gs, start, dk_tile * scale, length, BLOCK, D, FULL)
        if T > 0 and not ONE:
            _store(dq, gs, QUERIES, tl.trans(dq_last) * scale, length, T, D, False)
        _store(dq, gs, 0, dq_tile * scale, length, QUERIES, D, FULL)


@triton.jit
def _p_and_dp(
    queries, dout, keys, values, lse, start, length, factor,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return P and dP of the queries of the tile and a block of keys."""
    j = start + tl.arange(0, BLOCK)
    s = tl.dot(queries, tl.trans(keys)) * factor - lse[:, None]
    if CAUSAL:
        s = tl.where(j[None, :] <= tl.arange(0, QUERIES)[:, None], s, float("-inf"))
    if not FULL:
        s = tl.where(j[None, :] < length, s, float("-inf"))
    return tl.exp2(s), tl.dot(dout, tl.trans(values))


@triton.jit
def _last_queries(
    last_queries, last_dout, keys, values, lse, delta, start, length, factor,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr, FULL: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return P and dS of the last queries and a block of keys, with keys as rows."""
    j = start + tl.arange(0, BLOCK)
    s = tl.dot(keys, tl.trans(last_queries)) * factor - lse[None, :]
    if CAUSAL:
        s = tl.where(j[:, None] <= (QUERIES + tl.arange(0, T))[None, :], s, float("-inf"))
    if not FULL:
        s = tl.where(j[:, None] < length, s, float("-inf"))
    p = tl.exp2(s)
    ds = p * (tl.dot(values, tl.trans(last_dout)) - delta[None, :])
    return p.to(last_queries.dtype), ds.to(last_queries.dtype)
