"""Small batches on a CUDA device, with the whole matrix at once: as exact as the tiles, without a wait, and captured in a graph."""

from __future__ import annotations

import pytest
import torch
from cases import INPUTS_OF_ONE_PIECE as INPUTS
from cases import LOSSES_IN_ONE_PIECE as LOSSES
from cases import Case, embeddings

import megabatch
from megabatch import reference
from megabatch.losses import one_piece

pytestmark = [
    pytest.mark.filterwarnings("ignore:scale="),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Less than any matrix here needs, so that tiles compute it.
TILES = 1000


def leaves(rows: int, dtype: torch.dtype, loss: str, width: int = 64) -> list[torch.Tensor]:
    scalars = (20.0, -5.0)[: 1 + (loss == "siglip_loss")]
    tensors = [t.to("cuda", dtype) for t in embeddings(rows, width=width)] + [torch.tensor(s, device="cuda") for s in scalars]
    return [t.requires_grad_() for t in tensors]


def run(name: str, inputs: list[torch.Tensor], **options) -> list[torch.Tensor]:
    for t in inputs:
        t.grad = None
    loss = getattr(megabatch, name)(*inputs, **options)
    (2 * loss).backward()
    return [loss.detach(), *(t.grad for t in inputs)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("rows", [2, 300, 1024])
def test_errors_are_those_of_the_tiles(inputs, loss, dtype, rows):
    (name, options), (kind, scale) = loss, inputs
    x, y = (t.to("cuda", dtype).double() for t in embeddings(rows, width=64, **kind))
    scalars = (scale, -5.0)[: 1 + (name == "siglip_loss")]

    class Losses:
        """The losses, with their scalars on the device."""

        def __getattr__(self, name):
            return lambda x, y, *scalars, **options: getattr(megabatch, name)(x, y, *(s.cuda() for s in scalars), **options)

    case = Case(name, x, y, scalars, options)
    exact = case.run(reference)
    whole, tiled = case.run(Losses(), dtype), case.run(Losses(), dtype, workspace=TILES)
    largest = float((x @ y.T).abs().max())
    eps = torch.finfo(torch.float32).eps
    for key, value in exact.items():
        own = torch.finfo(dtype).eps if key in ("x", "y") else eps
        slack = (own + 4 * eps * (1 + min(abs(scale) * largest, 1e4))) * value.abs().max() + (
            eps * largest if key == "scale" else 0
        )
        error, allowed = ((each[key].to(value.device) - value).abs().max() for each in (whole, tiled))
        assert error <= 2 * allowed + slack, (key, error, allowed)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_accepted_calls_give_what_checked_ones_give_bit_for_bit(loss, monkeypatch):
    name, options = loss
    inputs = leaves(500, torch.bfloat16, name)
    run(name, inputs, **options)
    accepted = run(name, inputs, **options)
    assert one_piece.accept(*inputs[:2], tuple(inputs[2:]), ..., None, None) is not None
    again = run(name, inputs, **options)
    assert all(torch.equal(a, b) for a, b in zip(accepted, again, strict=True))
    for module in (megabatch.losses.clip, megabatch.losses.siglip):
        monkeypatch.setattr(module, "accept", lambda *_: None)
    assert all(torch.equal(a, b) for a, b in zip(accepted, run(name, inputs, **options), strict=True))


@pytest.mark.parametrize("name", ["clip_loss", "siglip_loss"])
def test_autocast_rounds_the_embeddings_only(name):
    inputs = leaves(300, torch.float32, name)
    rounded = [t.detach().bfloat16().requires_grad_() for t in inputs[:2]] + inputs[2:]
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            found = run(name, inputs)
    expected = run(name, rounded)
    assert torch.equal(found[0], expected[0]) and found[1].dtype == torch.float32
    assert torch.allclose(found[1], expected[1].float(), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("name", ["clip_loss", "siglip_loss"])
def test_no_synchronisation_after_the_first_call(name):
    inputs = leaves(256, torch.bfloat16, name)
    run(name, inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(name, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["clip_loss", "siglip_loss"])
def test_a_step_can_be_captured_and_replayed(name):
    inputs = leaves(256, torch.bfloat16, name)
    expected = run(name, inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(name, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(name, inputs)
    with torch.no_grad():
        inputs[0].copy_(inputs[0].roll(1, 0))
    graph.replay()
    other = [t.clone() for t in found]
    with torch.no_grad():
        inputs[0].copy_(inputs[0].roll(-1, 0))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and not torch.equal(other[0], expected[0])


def test_rows_with_a_stride_and_unaligned_scalars():
    wide = [torch.cat((t, t), 1)[:, :64] for t in (t.to("cuda", torch.bfloat16) for t in embeddings(300, width=64))]
    scale = torch.full((3,), 20.0, device="cuda")[1].requires_grad_()
    inputs = [t.requires_grad_() for t in wide] + [scale]
    plain = leaves(300, torch.bfloat16, "clip_loss")
    for _ in range(2):
        found, expected = run("clip_loss", inputs), run("clip_loss", plain)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_calls_of_every_kind_in_any_order_give_what_the_tiles_give():
    def gradient_of_scale(name: str, **options) -> torch.Tensor:
        inputs = leaves(256, torch.bfloat16, name)
        return torch.autograd.grad(getattr(megabatch, name)(*inputs, **options), inputs[2])[0]

    for _ in range(2):
        with torch.no_grad():
            for name, options in LOSSES.values():
                getattr(megabatch, name)(*leaves(256, torch.bfloat16, name), **options)
        for name, options in LOSSES.values():
            expected = gradient_of_scale(name, workspace=TILES, **options)
            assert torch.allclose(gradient_of_scale(name, **options), expected, rtol=1e-2, atol=1e-5)
