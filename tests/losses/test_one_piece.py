"""Small batches on a CPU: the whole matrix in the workspace gives the results and the errors of the tiles, with fewer products."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from cases import Case, embeddings

import megabatch
from megabatch import reference
from megabatch.losses import clip, one_piece, siglip
from megabatch.tiles import one_piece as whole_matrix
from megabatch.tiles import products, softplus
from megabatch.tiles.one_piece import SAFE_RANGE

SCALARS = {"clip_loss": (20.0,), "siglip_loss": (20.0, -5.0)}
names = pytest.mark.parametrize("name", SCALARS)
# Less than any matrix here needs, so that tiles compute it.
TILES = 1000


def arguments(name: str, rows: int = 16, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    scalars = [torch.tensor(value, dtype=torch.promote_types(dtype, torch.float32)) for value in SCALARS[name]]
    return [t.to(dtype).requires_grad_() for t in embeddings(rows)] + [t.requires_grad_() for t in scalars]


def shifted(rows: int, offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return embeddings whose similarities are all close to offset."""
    x, y = embeddings(rows)
    return torch.cat((x, torch.ones(rows, 1)), 1), torch.cat((y, torch.full((rows, 1), offset)), 1)


INPUTS = {
    "small logits": (embeddings(24), 20.0),
    "wider than the matrix": (embeddings(24, width=40), 20.0),
    "easy pairs": (embeddings(24, kind="clustered"), 50.0),
    "far from zero": (shifted(24, 64.0), 30.0),
    "negative scale": (embeddings(24, norm=2.0), -5.0),
    "near the largest exponential": (shifted(24, 92.0), 1.0),
    "no common exponent": (embeddings(24), 500.0),
    "odds near the largest number": (embeddings(24, kind="opposite"), 42.3),
    "odds beyond the largest number": (embeddings(24, kind="opposite"), 48.0),
    "huge and equal": (embeddings(24, kind="opposite", norm=100.0), 1e4),
    "huge": (embeddings(24, norm=100.0), 1e4),
}


@pytest.fixture
def blocks_of_five_rows(monkeypatch):
    """Blocks of five rows, in panels of eleven."""
    monkeypatch.setattr(products, "SMALL_CELLS", 1)
    monkeypatch.setattr(products, "FEWEST_BLOCKS", 1)
    monkeypatch.setattr(products, "BLOCK_CELLS", 5 * 24 // torch.get_num_threads())
    monkeypatch.setattr(whole_matrix, "PANEL_CELLS", 11 * 24)
    monkeypatch.setattr(softplus, "FEW_CELLS", 8)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"symmetric": False}, None], ids=["clip", "rows only", "siglip"])
@pytest.mark.parametrize("blocks", [1, 5])
def test_errors_are_those_of_the_tiles(inputs, dtype, options, blocks, request):
    if blocks > 1:
        request.getfixturevalue("blocks_of_five_rows")
    (x, y), scale = inputs
    loss, scalars = ("siglip_loss", (scale, -5.0)) if options is None else ("clip_loss", (scale,))
    case = Case(loss, x.to(dtype).double(), y.to(dtype).double(), scalars, options or {})
    exact = case.run(reference)
    whole, tiled = case.run(megabatch, dtype), case.run(megabatch, dtype, workspace=TILES)
    largest = float((case.x @ case.y.T).abs().max())
    range_of_logits = min(abs(scale) * largest, 2 * SAFE_RANGE)
    # Logits are rounded to the dtype of sums, and so are logarithms of totals of exponentials; gradients also to their own dtype.
    # The derivative in the scale is a sum of similarities that may cancel.
    sums = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    for name, value in exact.items():
        own = torch.finfo(dtype).eps if name in ("x", "y") else sums
        slack = (own + 2 * sums * (1 + range_of_logits)) * value.abs().max() + (sums * largest if name == "scale" else 0)
        error, allowed = ((each[name] - value).abs().max() for each in (whole, tiled))
        assert error <= 2 * allowed + slack, (name, error, allowed)


@names
def test_a_step_takes_three_products(name, monkeypatch):
    counted, mm = [], torch.mm
    inputs = arguments(name)
    expected = getattr(megabatch, name)(*inputs, workspace=TILES).detach()
    monkeypatch.setattr(torch, "mm", lambda *args, **kw: counted.append(1) or mm(*args, **kw))
    value = getattr(megabatch, name)(*inputs)
    assert torch.allclose(value, expected, rtol=1e-6)
    value.backward(retain_graph=True)
    assert len(counted) == 3
    # The first backward has overwritten the gradients.
    once = [t.grad.clone() for t in inputs]
    value.backward()
    assert len(counted) == 6 and all(torch.equal(t.grad, 2 * each) for t, each in zip(inputs, once, strict=True))
    counted.clear()
    inputs[1].requires_grad_(False)
    getattr(megabatch, name)(*inputs).backward()
    assert len(counted) == 2
    with torch.no_grad():
        getattr(megabatch, name)(*inputs)
    assert len(counted) == 3


DIRECTIONS = {"one": ("x_to_y",), "both": ("x_to_y", "y_to_x")}


@pytest.mark.parametrize("directions", DIRECTIONS.values(), ids=DIRECTIONS)
@pytest.mark.parametrize("hard", [0, 2])
def test_directions_without_options_take_three_products_where_they_are_a_plain_softmax(directions, hard, monkeypatch):
    x, y = embeddings(12 * (1 + hard))
    x, owners = x[:12].requires_grad_(), torch.arange(12).repeat(hard) if hard else None
    y.requires_grad_()
    options = {"directions": directions, "partition": "separate", "negatives_of": owners}

    def run(**more):
        loss = megabatch.infonce_loss(x, y, 20.0, **options, **more)
        return [loss.detach(), *torch.autograd.grad(loss, (x, y))]

    expected = run(workspace=TILES)
    counted, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **kw: counted.append(1) or mm(*args, **kw))
    found = run()
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(found, expected, strict=True))
    # Hard negatives are no anchors, so with both directions the matrix of columns is smaller than that of rows.
    assert (len(counted) == 3) == (not hard or len(directions) == 1)
    counted.clear()
    for more in ({"label_smoothing": 0.1}, {"hardness": 0.5}, {"drop_above": 0.1}, {"ids": torch.arange(len(y))}):
        run(**more)
        assert len(counted) != 3
        counted.clear()


@names
def test_a_loss_without_backward_frees_its_gradients(name):
    inputs = arguments(name)
    value = getattr(megabatch, name)(*inputs)
    freed = weakref.ref(value.grad_fn)
    gc.disable()
    try:
        del value
        assert freed() is None
    finally:
        gc.enable()


@names
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_accepted_calls_give_what_checked_ones_give(name, dtype, monkeypatch):
    def run() -> list[torch.Tensor]:
        inputs = arguments(name, dtype=dtype)
        value = getattr(megabatch, name)(*inputs)
        value.backward()
        return [value, *(t.grad for t in inputs)]

    inputs = arguments(name, dtype=dtype)
    assert one_piece.accept(*inputs[:2], tuple(inputs[2:]), ..., None, None) is not None
    accepted = run()
    for module in (clip, siglip):
        monkeypatch.setattr(module, "accept", lambda *_: None)
    assert all(torch.equal(a, b) for a, b in zip(accepted, run(), strict=True))


@names
def test_batches_in_tiles_are_accepted_once_one_like_them_was_checked(name, monkeypatch):
    monkeypatch.setattr(one_piece, "_checked_batches", {})
    prepared = []
    for module in (clip, siglip):
        monkeypatch.setattr(module, "prepare", lambda *args, call=module.prepare: prepared.append(1) or call(*args))

    def run(*needs: bool) -> list[torch.Tensor]:
        inputs = [t.detach().requires_grad_(need) for t, need in zip(arguments(name), (*needs, True, True), strict=False)]
        value = getattr(megabatch, name)(*inputs, workspace=TILES)
        value.backward()
        return [value, *(t.grad for t in inputs if t.requires_grad)]

    first, again = run(True, True), run(True, True)
    assert len(prepared) == 1
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    # Another set of gradients is another batch.
    assert torch.equal(run(False, True)[1], first[2]) and len(prepared) == 2
    with torch.no_grad():
        assert torch.equal(getattr(megabatch, name)(*arguments(name), workspace=TILES), first[0]) and len(prepared) == 3
    # So is another workspace, and a number as scale is always checked.
    x, y, scale, *bias = arguments(name)
    getattr(megabatch, name)(x, y, scale, *bias, workspace=TILES - 1)
    for _ in range(2):
        getattr(megabatch, name)(x, y, 20.0, *bias, workspace=TILES)
    assert len(prepared) == 6
    with pytest.raises(ValueError, match="scale"):
        getattr(megabatch, name)(x, y, scale.expand(2), *bias, workspace=TILES)


@names
def test_the_known_batches_are_few(name, monkeypatch):
    monkeypatch.setattr(one_piece, "_checked_batches", {})
    monkeypatch.setattr(one_piece, "MAX_CHECKED_BATCHES", 3)
    for rows in range(2, 9):
        getattr(megabatch, name)(*arguments(name, rows), workspace=10)
    assert 1 <= len(one_piece._checked_batches) <= 3


def doubtful(x, y, scale):
    """Yield calls that need a closer look, by what is special about them."""
    yield "not a tensor", (x.tolist(), y, (scale,), ..., None, None)
    yield "sparse", (x.detach().to_sparse(), y, (scale,), ..., None, None)
    yield "meta", (x.to("meta"), y, (scale,), ..., None, None)
    yield "one dimension", (x[0], y[0], (scale,), ..., None, None)
    yield "no width", (x[:, :0], y[:, :0], (scale,), ..., None, None)
    yield "integers", (x.long(), y.long(), (scale,), ..., None, None)
    yield "two dtypes", (x, y.double(), (scale,), ..., None, None)
    yield "two shapes", (x, y[:5], (scale,), ..., None, None)
    yield "one row", (x[:1], y[:1], (scale,), ..., None, None)
    yield "no rows", (x[:0], y[:0], (scale,), ..., None, None)
    yield "a number as scale", (x, y, (20.0,), ..., None, None)
    yield "scale of another dtype", (x, y, (scale.double(),), ..., None, None)
    yield "scale of two elements", (x, y, (scale.expand(2),), ..., None, None)
    yield "scale below one", (x, y, (scale / 40,), ..., None, None)
    yield "scale that is no number", (x, y, (scale * torch.nan,), ..., None, None)
    yield "a group", (x, y, (scale,), "world", None, None)
    yield "a backend", (x, y, (scale,), ..., "fused", None)
    yield "a workspace that is no int", (x, y, (scale,), ..., None, True)
    yield "no workspace", (x, y, (scale,), ..., None, 0)
    yield "a small workspace", (x, y, (scale,), ..., None, len(x) ** 2 * 4 - 1)


def test_what_is_not_certain_goes_through_all_checks(monkeypatch):
    monkeypatch.setattr(one_piece, "_checked_batches", {})
    x, y, scale = arguments("clip_loss")
    call = (x, y, (scale,), ..., None, len(x) ** 2 * 4)
    assert one_piece.accept(*call) is not None
    accepted = [reason for reason, other in doubtful(x, y, scale) if one_piece.accept(*other) is not None]
    assert accepted == []
    with torch.autocast("cpu", torch.bfloat16):
        assert one_piece.accept(*call) is None
    with torch.inference_mode():
        made_here = y.clone()
        # Nothing needs a gradient here.
        assert one_piece.accept(*call) is not None
    assert one_piece.accept(x, made_here, *call[2:]) is None
    with torch.autograd.forward_ad.dual_level():
        assert one_piece.accept(*call) is None
    torch.func.vmap(lambda row: row.sum() if one_piece.accept(*call) is None else pytest.fail("inside a transform"))(x.detach())
