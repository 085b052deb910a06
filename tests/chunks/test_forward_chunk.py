"""forward_chunk: the values and gradients of the encoder, with larger chunks in forward than in backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heap import measured
from small_encoders import batch, gradients, same, tower
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from world import Collectives

import megabatch


def encoder() -> nn.Sequential:
    return tower(dropout=0.0).double()


def outcome(encode: Any, model: nn.Module, rows: int = 23) -> list[Tensor]:
    """Return the embeddings and the gradients of a loss that depends on all of them."""
    model.zero_grad()
    z = encode(batch(rows).double())
    (z**3).sum().backward()
    return [z.detach(), *gradients(model)]


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 23])
@pytest.mark.parametrize(
    "chunk, forward_chunk, keep", [(1, 2, 0), (2, 4, 0), (2, 8, 0), (3, 10, 2), (2, 64, 0), (2, 8, 64), (4, 5, 0)]
)
def test_values_and_gradients_are_those_of_the_encoder(chunk, forward_chunk, keep, rows):
    model = encoder()
    expected = outcome(model, model, rows)
    encode = megabatch.cached(model, chunk, forward_chunk=forward_chunk, keep=keep)
    for found, true in zip(outcome(encode, model, rows), expected, strict=True):
        assert torch.allclose(found, true, rtol=0, atol=1e-12)


def test_forward_takes_larger_chunks_and_backward_does_not():
    model, seen = encoder(), list[tuple[int, bool]]()
    model.register_forward_pre_hook(lambda module, args: seen.append((len(args[0]), torch.is_grad_enabled())))
    z = megabatch.cached(model, 2, forward_chunk=6, keep=1)(batch(15).double())
    # The first chunk shows what the encoder depends on, and the last is kept.
    assert seen == [(2, True), (6, False), (6, False), (1, True)]
    seen.clear()
    z.sum().backward()
    assert seen == [(2, True)] * 7


def test_without_larger_chunks_nothing_changes_to_the_bit():
    model = encoder().float()
    results = []
    for options in ({}, {"forward_chunk": 2}, {"forward_chunk": 3}):
        model.zero_grad()
        megabatch.cached(model, 2, **options)(batch(9)).square().sum().backward()
        results.append(gradients(model))
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_autocast_gives_the_gradients_of_equal_chunks_up_to_its_rounding():
    model, enabled = encoder().float(), list[bool]()
    model.register_forward_pre_hook(lambda module, args: enabled.append(torch.is_autocast_enabled("cpu")))

    def result(**options: Any) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            z = megabatch.cached(model, 2, **options)(batch(16))
            # The weights are used again in the same context: copies of forward, which have no gradient, must not be.
            direct = model(batch(3, seed=5))
        (z.float().square().sum() + direct.float().sum()).backward()
        assert all(enabled)
        return [z, *gradients(model)]

    for found, true in zip(result(forward_chunk=8), result(), strict=True):
        assert found.dtype == true.dtype
        # Products of other shapes may round their sums another way.
        assert (found - true).norm() <= 2 * torch.finfo(torch.bfloat16).eps * true.norm()


def test_two_backwards_through_one_forward_add_up():
    model = encoder()
    z = model(batch(9).double())
    (z**2).sum().backward(retain_graph=True)
    (z**3).sum().backward()
    expected = gradients(model)
    model.zero_grad(set_to_none=True)
    z = megabatch.cached(model, 2, forward_chunk=4)(batch(9).double())
    (z**2).sum().backward(retain_graph=True)
    (z**3).sum().backward()
    for found, true in zip(gradients(model), expected, strict=True):
        assert torch.allclose(found, true, rtol=0, atol=1e-12)


def test_several_outputs_keep_their_structure_and_only_some_have_gradients():
    model, frozen = encoder(), tower(dropout=0.0, seed=2).double().requires_grad_(False)
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def encode(x: Tensor) -> dict[str, Any]:
        return {"z": model(x) * scale, "frozen": frozen(x), "sign": x[:, 0].sign().long(), "x": x, "scale": scale}

    def run(call: Any) -> list[Tensor]:
        model.zero_grad()
        scale.grad = None
        x = batch(9).double()
        outputs = call(x)
        assert not outputs["frozen"].requires_grad and not outputs["x"].requires_grad and not x.requires_grad
        ((outputs["z"] * outputs["frozen"]).sum() * outputs["scale"]).backward()
        return [outputs["z"], outputs["frozen"], outputs["sign"], outputs["x"], scale.grad, *gradients(model)]

    for found, true in zip(run(megabatch.cached(encode, 2, forward_chunk=4)), run(encode), strict=True):
        assert found.shape == true.shape and torch.allclose(found, true, rtol=0, atol=1e-12)


def test_parameters_with_one_gradient_have_it_once():
    a, b = (torch.zeros(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    # Autograd returns the gradient of the sum for both.
    megabatch.cached(lambda x: x + (a + b), 2, forward_chunk=4)(torch.zeros(9, 5, dtype=torch.float64)).sum().backward()
    assert torch.equal(a.grad, torch.full_like(a, 9)) and torch.equal(b.grad, a.grad)


def test_a_frozen_encoder_has_no_gradient():
    model = encoder().requires_grad_(False)
    x = batch(9).double()
    z = megabatch.cached(model, 2, forward_chunk=4)(x)
    assert not z.requires_grad and torch.allclose(z, model(x), rtol=0, atol=1e-12)


class Experts(nn.Module):
    """A chunk of positive numbers takes one parameter, any other the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(())) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.a if bool((x > 0).all()) else self.b)


def test_parameters_that_the_first_chunk_does_not_show_are_detected():
    z = megabatch.cached(Experts(), 2, forward_chunk=4)(torch.tensor([[1.0]] * 4 + [[-1.0]] * 4))
    with pytest.raises(RuntimeError, match="mixture of experts"):
        z.sum().backward()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)


@pytest.mark.filterwarnings("ignore:the encoder contains batch normalisation")
@pytest.mark.parametrize(
    "model, words",
    [
        (tower(dropout=0.3), "random numbers"),
        (nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)), "batch normalisation"),
        (Counting(), "changes buffers"),
    ],
    ids=["dropout", "batch normalisation", "buffers"],
)
def test_what_depends_on_the_chunk_is_refused_and_leaves_no_trace(model, words):
    state, before = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    encode = megabatch.cached(model, 2, forward_chunk=4)
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            encode(batch(9))
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.eval()
    if words != "changes buffers":
        encode(batch(9)).sum().backward()


def test_hooks_and_inputs_with_gradients_are_refused():
    model = tower(dropout=0.0)
    with pytest.raises(ValueError, match="inputs that need a gradient"):
        megabatch.cached(model, 2, forward_chunk=4)(batch(9).requires_grad_())
    model[0].weight.register_hook(lambda grad: 2 * grad)
    with pytest.raises(ValueError, match="hook"):
        megabatch.cached(model, 2, forward_chunk=4)(batch(9))


@pytest.mark.parametrize("options", [{"tokens": 8}, {"split": lambda x: [x]}, {"chunk": 8}, {"chunk": 2, "forward_chunk": 0}])
def test_options_that_do_not_go_together_are_refused(options):
    with pytest.raises(ValueError, match="forward_chunk"):
        megabatch.cached(encoder(), **{"forward_chunk": 4} | options)


def test_weights_changed_before_backward_raise():
    model = encoder()
    z = megabatch.cached(model, 2, forward_chunk=4)(batch(9).double())
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="weights were changed"):
        z.sum().backward()


def test_an_encoder_that_is_not_repeatable_is_detected():
    model, calls = encoder(), [0]

    def encode(x: Tensor) -> Tensor:
        calls[0] += 1
        return model(x) * (1 + calls[0] % 3)

    z = megabatch.cached(encode, 2, forward_chunk=4)(batch(9).double())
    with pytest.raises(RuntimeError, match="not repeatable"):
        z.sum().backward()


def test_running_out_of_memory_in_forward_falls_back_to_the_chunk_with_a_warning():
    model = encoder()
    expected = outcome(model, model)

    def limited(x: Tensor) -> Tensor:
        if len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(x)

    encode = megabatch.cached(limited, 2, forward_chunk=8)
    with pytest.warns(UserWarning, match="forward_chunk=8"):
        results = outcome(encode, model)
    assert encode.chunk == 2
    for found, true in zip(results, expected, strict=True):
        assert torch.allclose(found, true, rtol=0, atol=1e-12)
    outcome(encode, model)


def on_two_ranks(rank: int, size: int) -> tuple[float, int, str]:
    """Return the error of DDP's gradients, the exchanges of a step, and what is said about fully_shard."""
    rows = batch(18).double()
    plain = encoder()
    (plain(rows) ** 3).sum(1).mean().backward()
    ddp = DistributedDataParallel(encoder())
    with Collectives() as collectives:
        (megabatch.cached(ddp, 2, forward_chunk=4)(rows.chunk(size)[rank]) ** 3).sum(1).mean().backward()
    error = max((a - b).abs().max().item() for a, b in zip(gradients(ddp), gradients(plain), strict=True))
    sharded = fully_shard(encoder(), mesh=torch.distributed.init_device_mesh("cpu", (size,)))
    try:
        megabatch.cached(sharded, 2, forward_chunk=4)(rows.chunk(size)[rank])
    except ValueError as refused:
        return error, collectives.counts["allreduce_"], str(refused)
    return error, collectives.counts["allreduce_"], ""


@pytest.mark.slow
def test_ddp_exchanges_once_and_fsdp_is_refused(world):
    for error, exchanges, refused in world.run(2, on_two_ranks):
        assert error < 1e-12 and exchanges == 1 and "fully_shard" in refused


def step(chunk: int, forward_chunk: int | None, chunks: int) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(12)]
    encode = megabatch.cached(nn.Sequential(*blocks, nn.Linear(64, 4)), chunk, forward_chunk=forward_chunk)
    encode(torch.randn(chunks * chunk, 64)).square().sum().backward()


@pytest.mark.slow
def test_four_chunks_at_once_in_forward_do_not_raise_the_peak_of_twelve_layers():
    rows = 2048
    equal, larger = (measured(step, (64, forward_chunk, 2), (rows, forward_chunk, 9)) for forward_chunk in (None, 4 * rows))
    # What backward keeps of a layer: 576 numbers for each row.
    layer = rows * 4 * 576
    assert equal > 8 * layer
    assert larger < equal + layer
