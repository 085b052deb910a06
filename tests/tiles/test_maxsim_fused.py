"""Late interaction with the Triton kernels, in Triton's interpreter, and compiled without a device."""

from __future__ import annotations

import pytest
import torch
from compiling import compiled_apart
from interpreted import IN_INTERPRETER
from maxsim_cases import CASES, maxsim_errors

import megabatch
from megabatch.tiles import maxsim as eager
from megabatch.tiles import maxsim_for
from megabatch.tiles.contract import NeedsGrad
from megabatch.tiles.fused import maxsim as fused
from megabatch.tiles.fused.launch import cdiv

pytestmark = IN_INTERPRETER
# Rounding of the gradients to fp16; all sums are in fp32.
ALLOWED = {torch.float32: 5e-6, torch.float16: 1e-3}


def test_masks_with_holes_and_documents_without_tokens_are_those_of_the_formula():
    errors = maxsim_errors({"masks": True}, (2, 4, 5, 18, 8), torch.float32, "cpu")
    assert max(errors.values()) <= ALLOWED[torch.float32], errors


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_kernels_are_as_exact_as_fp32_sums_allow(case, dtype):
    # A workspace of a few pairs: several tiles.
    errors = maxsim_errors(*case, dtype, "cpu", workspace=6 * fused.pair_bytes(*case[1][2:4], dtype))
    assert max(errors.values()) <= ALLOWED[dtype], errors


def tile(seed: int = 0, rows: int = 3, documents: int = 4, width: int = 8):
    g = torch.Generator().manual_seed(seed)
    q, d = torch.randn(rows, 3, width, generator=g), torch.randn(documents, 20, width, generator=g)
    return q, torch.rand(rows, 3, generator=g), d, torch.rand(documents, 20, generator=g) < 0.6


@pytest.mark.slow
def test_programs_that_walk_over_several_documents_write_each_of_them():
    q, weight, d, mask = tile(2, rows=24, documents=20)
    mask[[0, 7, 8, 19]] = False
    assert fused.slice_of(cdiv(24 * 3, fused.INTERPRETED.m), 20, q.device) > 2
    results = []
    for tiles in (fused, eager):
        z_RC, saved = tiles.maxsim_scores(q, weight, d, mask, save=True)
        results.append((z_RC, *tiles.maxsim_grads(q, weight, d, z_RC.sin(), saved, needs_grad=NeedsGrad(True, True))))
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_of_equal_tokens_the_lowest_that_counts_gets_the_gradient():
    q, weight, d, mask = tile()
    # Equal tokens in one block, and in another one; the first of them is masked.
    d[:] = d[:, :1]
    mask[:, :3], mask[:, 3:] = False, True
    z_RC, saved = fused.maxsim_scores(q, weight, d, mask, save=True)
    _, dd = fused.maxsim_grads(q, weight, d, torch.ones_like(z_RC), saved, needs_grad=NeedsGrad(False, True))
    assert dd[:, 3].abs().amin() > 0
    dd[:, 3] = 0
    assert dd.abs().max() == 0


def test_only_what_counts_may_be_a_number_or_not():
    q, weight, d, mask = tile(1)
    mask[3] = False
    d[~mask] = torch.nan
    z_RC, saved = fused.maxsim_scores(q, weight, d, mask, save=True)
    dq, _ = fused.maxsim_grads(q, weight, d, torch.ones_like(z_RC), saved, needs_grad=NeedsGrad(True, False))
    assert torch.isfinite(z_RC).all() and torch.isfinite(dq).all()
    # A maximum could miss these.
    d[2, mask[2].nonzero()[0]] = torch.nan
    q[1, 0, 0] = torch.inf
    found = fused.maxsim_scores(q, weight, d, mask, save=False)[0].isnan()
    # Whatever the query is, a document without tokens has the score 0.
    assert found.tolist() == [[False, False, True, False], [True, True, True, False], [False, False, True, False]]


def test_places_take_a_byte_for_documents_of_up_to_256_tokens():
    q, weight, d, mask = tile()
    for tokens, dtype in ((256, torch.uint8), (257, torch.int16)):
        d = torch.zeros(2, tokens, 8)
        # The last token wins.
        d[:, -1] = q.sum((0, 1)).sign()
        mask = torch.zeros(2, tokens, dtype=torch.bool)
        mask[:, -1] = True
        _, saved = fused.maxsim_scores(q, weight, d, mask, save=True)
        assert saved.place_CM.dtype == dtype and (saved.place_CM == tokens - 1).all()


def test_a_piece_pads_a_query_by_an_eighth_at_most():
    for longest in (16, 64, 128):
        for tokens in range(1, 400):
            piece = fused.piece_of(tokens, longest)
            assert longest % piece == 0 and -(-tokens // piece) * piece <= 9 * tokens / 8


def test_the_kernels_are_the_default_on_cuda_and_elsewhere_used_on_request():
    x, y = torch.randn(2, 2, 3), torch.randn(2, 4, 3)
    cuda = torch.device("cuda")
    assert maxsim_for(x.device, x.dtype) is eager and maxsim_for(x.device, x.dtype, "fused") is fused
    assert maxsim_for(cuda, x.dtype) is fused and maxsim_for(cuda, x.dtype, "eager") is eager
    assert maxsim_for(cuda, torch.float64) is eager
    for dtype, backend, message in ((torch.float64, "fused", "float64"), (torch.float32, "quick", "backend='quick'")):
        with pytest.raises(ValueError, match=message):
            megabatch.maxsim_loss(x.to(dtype), y.to(dtype), 1.0, backend=backend)


COMPILE = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megabatch.tiles.fused import maxsim

def compiled(capability, kernel, blocks, embedding, **constants):
    m, n, k, warps, stages = blocks
    constants = {name: value for name, value in ({"M": m, "N": n, "K": k} | constants).items() if name in kernel.arg_names}
    kinds = dict.fromkeys(("q", "d", "gradient"), embedding) | {"places": "*u8"}
    kinds |= dict.fromkeys(("rows", "documents", "tokens", "across", "slice_length", "queries", "per_query"), "i32")
    kinds |= dict.fromkeys(("blocks", "ends", "used", "lengths"), "*i32") | {"mask": "*u8", "length": "i32"}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "*fp32") for name in kernel.arg_names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": warps, "num_stages": stages}
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    # The least that a multiprocessor of these capabilities has.
    assert found.metadata.shared <= 99 * 1024, (kernel, found.metadata.shared)

for capability in (80, 90):
    for dtype, name in ((torch.bfloat16, "*bf16"), (torch.float16, "*fp16"), (torch.float32, "*fp32")):
        precision = "ieee" if dtype == torch.float32 else "tf32"
        for width, piece, places in ((128, 32, True), (128, 128, False), (768, 1, True)):
            blocks = maxsim.compiled_blocks(maxsim.SCORES, dtype, width)
            options = {"PIECE": min(piece, blocks.m), "PLACES": places, "WIDTH": width, "PRECISION": precision}
            compiled(capability, maxsim.scores_kernel, blocks, name, **options, **({} if places else {"places": None}))
        compiled(capability, maxsim.documents_kernel, blocks._replace(k=maxsim.LOADED_WIDTH), name, WIDTH=128)
        blocks = maxsim.compiled_blocks(maxsim.QUERY_GRADIENT, dtype, 128)
        compiled(capability, maxsim.query_gradient_kernel, blocks, name, WIDTH=128)
        blocks = maxsim.compiled_blocks(maxsim.DOCUMENT_GRADIENT, dtype, 128)
        options = {"WIDTH": 128, "PRECISION": precision, "WIDE": dtype != torch.bfloat16}
        compiled(capability, maxsim.document_gradient_kernel, blocks, name, **options)
print("compiled")
"""


@pytest.mark.slow
def test_the_kernels_compile_and_fit_into_shared_memory():
    assert compiled_apart(COMPILE) == ["compiled"]
