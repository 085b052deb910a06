"""Late-interaction scores and their gradients in three kernels, with their launchers. Contract and legend: ../maxsim.py.

The tokens of all queries form one matrix q_MD of M rows. A query takes `per_query` of them: a whole number of pieces of a power of
two, so that a block of rows holds whole pieces; missing rows are padded. Documents are read in blocks of tokens, of which those
without a token that counts are left out: two small kernels list the others. No similarity of tokens leaves its program.

- Scores: a program holds a block of rows and walks over the blocks of a slice of the documents in one flattened loop. It keeps the
  maximum of each row and its place, and at the last block of a document writes one sum for each piece, and the places.
- Gradient of q: a row adds up the document tokens at its places: a gather, R·T·C·D products in fp32 without tensor cores.
- Gradient of d: a program holds a block of tokens of a document and walks over all rows. The rows whose place is a token are the
  entries of a matrix that is multiplied with q: as many FLOPs as the scores, and no atomics.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..contract import NeedsGrad
from .launch import cdiv, multiprocessors, on_device_of_input

# Scores and gradients of a pair outside of the kernels: six copies in fp32.
BYTES_BESIDE_PLACES = 24
# Programs that compute scores: as many for each multiprocessor, with no more documents each than this.
PROGRAMS, LONGEST_SLICE = 16, 64
# Entries of the width that are looked at together for numbers that are not finite, and blocks of documents that a program lists.
LOADED_WIDTH, LISTED_BLOCKS = 64, 1024


class MaxSimBlocks(NamedTuple):
    """Configuration of a kernel: m rows of its result, n rows that it reads at a time, k entries of the width in each product."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# For each kernel: products in 16 bits, and in fp32. In the gradient of q, n documents are gathered from at a time.
SCORES = MaxSimBlocks(128, 128, 128, 8, 3), MaxSimBlocks(64, 64, 16, 4, 3)
QUERY_GRADIENT = MaxSimBlocks(16, 4, 128, 4, 1), MaxSimBlocks(16, 4, 128, 4, 1)
DOCUMENT_GRADIENT = MaxSimBlocks(128, 32, 128, 8, 3), MaxSimBlocks(64, 16, 64, 4, 3)
# In Triton's interpreter: small, so that small inputs have edges and several blocks.
INTERPRETED = MaxSimBlocks(16, 16, 16, 4, 1)


def compiled_blocks(kinds: tuple[MaxSimBlocks, MaxSimBlocks], dtype: torch.dtype, width: int) -> MaxSimBlocks:
    """Return the configuration of a kernel on a GPU, with no larger k than the embeddings need."""
    blocks = kinds[dtype == torch.float32]
    if kinds is SCORES and blocks.k < width:
        # The rows of q are then read again for every block of tokens: all stages of both must fit into shared memory.
        return blocks._replace(k=min(blocks.k, 128 // dtype.itemsize))
    return blocks._replace(k=min(blocks.k, max(16, triton.next_power_of_2(width))))


def _blocks(kinds: tuple[MaxSimBlocks, MaxSimBlocks], t: Tensor) -> MaxSimBlocks:
    return INTERPRETED if t.device.type == "cpu" else compiled_blocks(kinds, t.dtype, t.shape[-1])


@triton.jit
def _load_rows(matrix, row, inside, first, WIDTH: tl.constexpr, K: tl.constexpr):
    """Return K entries of rows of a matrix from the entry `first` on; zero outside."""
    k = first + tl.arange(0, K)
    at = matrix + row.to(tl.int64)[:, None] * WIDTH + k[None, :]
    if WIDTH % K == 0:
        return tl.load(at, mask=inside[:, None], other=0.0)
    return tl.load(at, mask=inside[:, None] & (k < WIDTH)[None, :], other=0.0)


@triton.jit(do_not_specialize=["tokens", "across"])
def documents_kernel(
    d, mask, bias, used, factor, lengths, tokens, across, WIDTH: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Write what the other kernels need of a document: the bias of each token, which blocks have tokens, factor and length."""
    c = tl.program_id(0).to(tl.int64)
    total_N = tl.zeros((N,), tl.float32)
    end_N = tl.zeros((N,), tl.int32)
    for b in range(0, across):
        u = b * N + tl.arange(0, N)
        counts = tl.load(mask + c * tokens + u, mask=u < tokens, other=0) != 0
        tl.store(bias + (c * across + b) * N + tl.arange(0, N), tl.where(counts, 0.0, -float("inf")))
        tl.store(used + c * across + b, tl.max(counts.to(tl.int32), 0))
        end_N = tl.where(counts, u + 1, end_N)
        for first in range(0, WIDTH, K):
            total_N += tl.sum(_load_rows(d, c * tokens + u, counts, first, WIDTH, K).to(tl.float32), 1)
    length = tl.max(end_N, 0)
    tl.store(lengths + c, length)
    # Plus zero, or NaN for tokens that are not finite, which no maximum shows.
    tl.store(factor + c, (length > 0).to(tl.float32) + tl.sum(0.0 * total_N, 0))


@triton.jit(do_not_specialize=["length"])
def blocks_kernel(used, ends, blocks, length, N: tl.constexpr):
    """Write the used blocks one after the other. ends: for each block, how many there are up to it."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    is_used = tl.load(used + i, mask=i < length, other=0) != 0
    tl.store(blocks + tl.load(ends + i, mask=is_used, other=1) - 1, i, mask=is_used)


@triton.jit(do_not_specialize=["rows", "documents", "tokens", "across", "slice_length"])
def scores_kernel(
    q, d, weight, factor, bias, blocks, ends, scores, places, rows, documents, tokens, across, slice_length,
    PIECE: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write the weighted sums of the maxima of each piece (piece, document) and, if PLACES, their places (document, row).

    blocks: the blocks with document tokens, out of `across` of each document; `ends`: how many there are up to each block.
    bias: for each token of each block, 0 or, if it is masked, -inf: the compiler has a sum cost less than a selection.
    """
    row = tl.program_id(0) * M + tl.arange(0, M)
    inside = row < rows
    weight_M = tl.load(weight + row, mask=inside, other=0.0)
    piece = tl.program_id(0) * (M // PIECE) + tl.arange(0, M // PIECE)
    document = tl.program_id(1) * slice_length
    begin = tl.load(ends + document * across - 1, mask=document > 0, other=0)
    end = tl.load(ends + tl.minimum(document + slice_length, documents) * across - 1)
    # Zero, or NaN for tokens that are not finite, which no maximum shows.
    weight_M += 0.0 * _row_sums(q, row, inside, WIDTH, M, K)
    best_M = tl.full((M,), -float("inf"), tl.float32)
    place_M = tl.zeros((M,), tl.int32)
    if WIDTH <= K:
        q_MK = _load_rows(q, row, inside, 0, WIDTH, K)
    for i in range(begin, end):
        block = tl.load(blocks + i)
        c = block // across
        u = (block % across) * N + tl.arange(0, N)
        bias_N = tl.load(bias + block.to(tl.int64) * N + tl.arange(0, N))
        token = c.to(tl.int64) * tokens + u
        if WIDTH <= K:
            z_MN = tl.dot(q_MK, tl.trans(_load_rows(d, token, u < tokens, 0, WIDTH, K)), input_precision=PRECISION)
        else:
            z_MN = tl.zeros((M, N), tl.float32)
            for first in range(0, WIDTH, K):
                d_NK = _load_rows(d, token, u < tokens, first, WIDTH, K)
                z_MN = tl.dot(_load_rows(q, row, inside, first, WIDTH, K), tl.trans(d_NK), z_MN, input_precision=PRECISION)
        z_MN += bias_N[None, :]
        peak_M = tl.max(z_MN, 1)
        if PLACES:
            # The lowest of equal ones, in a block and over blocks.
            first_M = tl.min(tl.where(z_MN == peak_M[:, None], u[None, :], 2147483647), 1)
            place_M = tl.where(peak_M > best_M, first_M, place_M)
        best_M = tl.where(peak_M > best_M, peak_M, best_M)
        if i + 1 == tl.load(ends + (c + 1) * across - 1):
            total = tl.sum(tl.reshape(best_M * weight_M, (M // PIECE, PIECE)), 1) * tl.load(factor + c)
            tl.store(scores + piece.to(tl.int64) * documents + c, total, mask=piece * PIECE < rows)
            if PLACES:
                tl.store(places + c.to(tl.int64) * rows + row, place_M.to(places.dtype.element_ty), mask=inside)
            # The first block of the next document has a token, which overwrites the place.
            best_M = tl.full((M,), -float("inf"), tl.float32)


@triton.jit
def _row_sums(matrix, row, inside, WIDTH: tl.constexpr, M: tl.constexpr, K: tl.constexpr):
    total_M = tl.zeros((M,), tl.float32)
    for first in range(0, WIDTH, K):
        total_M += tl.sum(_load_rows(matrix, row, inside, first, WIDTH, K).to(tl.float32), 1)
    return total_M


@triton.jit(do_not_specialize=["rows", "documents", "tokens", "queries", "per_query"])
def query_gradient_kernel(
    g, d, weight, places, gradient, rows, documents, tokens, queries, per_query,
    WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write Σ_c g·d[c, place] of a block of rows, times their weights. g: (document, query)."""
    row = tl.program_id(0) * M + tl.arange(0, M)
    inside = row < rows
    query = row // per_query
    all_rows, all_queries, all_tokens = rows.to(tl.int64), queries.to(tl.int64), tokens.to(tl.int64)
    total_MK = tl.zeros((M, K), tl.float32)
    for first in range(0, documents, N):
        # Several documents at once, so that their loads are in flight together.
        for j in tl.static_range(N):
            c = first + j
            valid = inside & (c < documents)
            place_M = tl.load(places + c * all_rows + row, mask=valid, other=0)
            g_M = tl.load(g + c * all_queries + query, mask=valid, other=0.0)
            d_MK = _load_rows(d, c * all_tokens + place_M, g_M != 0, tl.program_id(1) * K, WIDTH, K)
            total_MK += g_M[:, None] * d_MK.to(tl.float32)
    total_MK *= tl.load(weight + row, mask=inside, other=0.0)[:, None]
    _store_rows(gradient, row, inside, total_MK, tl.program_id(1) * K, WIDTH, K)


@triton.jit(do_not_specialize=["rows", "tokens", "across", "queries", "per_query"])
def document_gradient_kernel(
    g, q, weight, places, lengths, gradient, rows, tokens, across, queries, per_query,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write Σ g·weight·q over the rows whose place is a token, for a block of tokens of a document. g: (document, query).

    WIDE: multiply in fp32, because the dtype of q does not have the range of a gradient.
    """
    c = (tl.program_id(0) // across).to(tl.int64)
    u = (tl.program_id(0) % across) * M + tl.arange(0, M)
    total_MK = tl.zeros((M, K), tl.float32)
    # A block that begins beyond the last token of its document has no rows to add.
    end = tl.where((tl.program_id(0) % across) * M < tl.load(lengths + c), rows, 0)
    for first in range(0, end, N):
        row = first + tl.arange(0, N)
        inside = row < rows
        place_N = tl.load(places + c * rows + row, mask=inside, other=0).to(tl.int32)
        g_N = tl.load(g + c * queries + row // per_query, mask=inside, other=0.0) * tl.load(weight + row, mask=inside, other=0.0)
        g_MN = tl.where(place_N[None, :] == u[:, None], g_N[None, :], 0.0)
        q_NK = _load_rows(q, row, inside, tl.program_id(1) * K, WIDTH, K)
        if WIDE:
            total_MK = tl.dot(g_MN, q_NK.to(tl.float32), total_MK, input_precision=PRECISION)
        else:
            total_MK = tl.dot(g_MN.to(q_NK.dtype), q_NK, total_MK)
    _store_rows(gradient, c * tokens + u, u < tokens, total_MK, tl.program_id(1) * K, WIDTH, K)


@triton.jit
def _store_rows(matrix, row, inside, values, first, WIDTH: tl.constexpr, K: tl.constexpr):
    k = first + tl.arange(0, K)
    at = matrix + row.to(tl.int64)[:, None] * WIDTH + k[None, :]
    tl.store(at, values.to(matrix.dtype.element_ty), mask=inside[:, None] & (k < WIDTH)[None, :])


class SavedPlaces(NamedTuple):
    """What the gradients need from forward.

    q_MD, weight_M: the queries' tokens, padded. place_CM: the document token with the largest similarity to each.
    factor_C: 0 for a document without tokens, otherwise 1. lengths_C: tokens up to the last one.
    """

    q_MD: Tensor
    weight_M: Tensor
    place_CM: Tensor
    factor_C: Tensor
    lengths_C: Tensor


def pair_bytes(query_tokens: int, document_tokens: int, dtype: torch.dtype) -> int:
    piece = piece_of(query_tokens, SCORES[dtype == torch.float32].m)
    pieces = cdiv(query_tokens, piece)
    return pieces * piece * _place_dtype(document_tokens).itemsize + 4 * pieces + BYTES_BESIDE_PLACES


@on_device_of_input
def maxsim_scores(
    q_RTD: Tensor, weight_RT: Tensor, d_CUD: Tensor, mask_CU: Tensor, *, save: bool
) -> tuple[Tensor, SavedPlaces | None]:
    m, n, k, warps, stages = _blocks(SCORES, q_RTD)
    (R, T, D), (C, U) = q_RTD.shape, d_CUD.shape[:2]
    piece = piece_of(T, m)
    pieces = cdiv(T, piece)
    missing = pieces * piece - T
    if missing:
        q_RTD, weight_RT = F.pad(q_RTD, (0, 0, 0, missing)), F.pad(weight_RT, (0, missing))
    q_MD, weight_M = q_RTD.view(-1, D), weight_RT.view(-1)
    M = len(q_MD)
    across = cdiv(U, n)
    bias, factor_C = weight_M.new_empty(C * across * n), weight_M.new_empty(C)
    used, blocks = weight_M.new_empty(2, C * across, dtype=torch.int32)
    lengths_C = used.new_empty(C)
    documents_kernel[(C,)](
        d_CUD, mask_CU.view(torch.uint8), bias, used, factor_C, lengths_C, U, across, WIDTH=D, N=n, K=min(k, LOADED_WIDTH)
    )
    # The host does not know how many blocks are used.
    ends = used.cumsum(0, dtype=torch.int32)
    blocks_kernel[(cdiv(C * across, LISTED_BLOCKS),)](used, ends, blocks, C * across, N=LISTED_BLOCKS)
    # A document without tokens has no block, and keeps these zeros.
    scores = d_CUD.new_zeros(R * pieces, C, dtype=torch.float32)
    place_CM = d_CUD.new_zeros(C, M, dtype=_place_dtype(U)) if save else None
    down = cdiv(M, m)
    slice_length = slice_of(down, C, q_RTD.device)
    scores_kernel[down, cdiv(C, slice_length)](
        q_MD, d_CUD, weight_M, factor_C, bias, blocks, ends, scores, place_CM, M, C, U, across, slice_length,
        PIECE=piece, PLACES=save, WIDTH=D, PRECISION=_precision(q_RTD), M=m, N=n, K=k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    z_RC = scores if pieces == 1 else scores.view(R, pieces, C).sum(1)
    if place_CM is None:
        return z_RC, None
    return z_RC, SavedPlaces(q_MD, weight_M, place_CM, factor_C, lengths_C)


@on_device_of_input
def maxsim_grads(
    q_RTD: Tensor, weight_RT: Tensor, d_CUD: Tensor, g_RC: Tensor, saved: SavedPlaces, *, needs_grad: NeedsGrad
) -> tuple[Tensor | None, Tensor | None]:
    q_MD, weight_M, place_CM, factor_C, lengths_C = saved
    (R, T, D), (C, U), M = q_RTD.shape, d_CUD.shape[:2], len(q_MD)
    g_CR = (g_RC * factor_C).T.contiguous()
    dq = dd = None
    if needs_grad.x:
        m, n, k, warps, stages = _blocks(QUERY_GRADIENT, q_RTD)
        dq_MD = torch.empty_like(q_MD)
        query_gradient_kernel[cdiv(M, m), cdiv(D, k)](
            g_CR, d_CUD, weight_M, place_CM, dq_MD, M, C, U, R, M // R,
            WIDTH=D, M=m, N=n, K=k, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        dq = dq_MD.view(R, -1, D)[:, :T]
    if needs_grad.y:
        m, n, k, warps, stages = _blocks(DOCUMENT_GRADIENT, q_RTD)
        dd = torch.empty_like(d_CUD)
        across = cdiv(U, m)
        document_gradient_kernel[C * across, cdiv(D, k)](
            g_CR, q_MD, weight_M, place_CM, lengths_C, dd, M, U, across, R, M // R,
            WIDTH=D, PRECISION=_precision(q_RTD), WIDE=q_RTD.dtype != torch.bfloat16, M=m, N=n, K=k,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return dq, dd


@functools.cache
def piece_of(tokens: int, longest: int) -> int:
    """Return the largest power of two of which a query's tokens are multiples with at most an eighth of padding.

    >>> [piece_of(tokens, 128) for tokens in (1, 3, 24, 31, 32, 300)]
    [1, 1, 8, 32, 32, 64]
    """
    piece = longest
    while cdiv(tokens, piece) * piece * 8 > tokens * 9:
        piece //= 2
    return piece


def slice_of(down: int, documents: int, device: torch.device) -> int:
    """Return how many documents a program takes. down: the number of blocks of rows."""
    return max(1, min(LONGEST_SLICE, down * documents // (PROGRAMS * multiprocessors(device))))


def _place_dtype(tokens: int) -> torch.dtype:
    return torch.uint8 if tokens <= 2**8 else torch.int16 if tokens <= 2**15 else torch.int32


def _precision(t: Tensor) -> str:
    """Return that of fp32 operands: those of fp16 embeddings are exact in tf32, apart from the gradient, which is rounded to it."""
    return "ieee" if t.dtype == torch.float32 else "tf32"
