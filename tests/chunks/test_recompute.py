"""A chunk that runs again in backward: what autograd may do with it, and what must not change in between."""

from __future__ import annotations

import pytest
import torch
from small_encoders import CHUNK, Wrap, batch, gradients, in_chunks, same, tower
from torch import Tensor

import megabatch
from megabatch.chunks import rng_state
from megabatch.chunks.rng_state import ForwardState


def test_weights_that_change_before_backward_raise():
    model = tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    z = megabatch.cached(model, chunk=4)(batch())
    (model(batch()) ** 2).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="weights were changed between forward and backward"):
        z.sum().backward()


def test_an_optimizer_may_step_inside_backward():
    """Update each weight as soon as its gradient is complete: then no chunk needs it any more."""
    found = []
    updates: list[Tensor] = []

    def update(p: Tensor) -> None:
        updates.append(p)
        with torch.no_grad():
            p.sub_(0.1 * p.grad)

    for chunk in (3, 100):
        model = tower(dropout=0.0)
        updates.clear()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        (megabatch.cached(model, chunk=chunk)(batch()) ** 2).sum().backward()
        assert len(updates) == 6
        found.append(list(model.parameters()))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))


def test_an_encoder_that_does_something_else_in_the_recomputation_raises():
    model, calls = tower(), []

    def fickle(x: Tensor) -> Tensor:
        calls.append(1)
        return model(x) if len(calls) < 4 else model[0](x)[:, :5]

    z = megabatch.cached(fickle, chunk=4)(batch())
    with pytest.raises(RuntimeError, match="did something else when it was run again"):
        z.sum().backward()


class AsksTwice(torch.autograd.Function):
    """Reads a saved tensor twice in backward, as a Function may."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x * 2)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0]
        return grad * x.cos() + 0 * ctx.saved_tensors[1]


def test_a_function_may_read_what_it_saved_more_than_once():
    model = tower()

    def go(wrap: Wrap) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(0)
        z = wrap(lambda x: AsksTwice.apply(model(AsksTwice.apply(x * 2))))(batch())
        z.sum().backward()
        return [z, *gradients(model)]

    assert same(go(in_chunks), go(lambda f: megabatch.cached(f, chunk=CHUNK)))


def test_gradients_of_gradients_go_through():
    model = tower().double()

    def go(wrap: Wrap) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(0)
        x = batch().double().requires_grad_()
        (slope,) = torch.autograd.grad((wrap(model)(x) ** 3).sum(), x, create_graph=True)
        (slope**2).sum().backward()
        return [slope.detach(), *gradients(model)]

    for a, b in zip(go(in_chunks), go(lambda f: megabatch.cached(f, chunk=CHUNK)), strict=True):
        assert torch.allclose(a, b, rtol=1e-10)


def test_the_default_device_of_forward_is_that_of_the_recomputation():
    model, x = tower(), batch()

    def encoder(x: Tensor) -> Tensor:
        return model(x) if torch.get_default_device().type == "meta" else x[:, :5]

    with torch.device("meta"):
        z = megabatch.cached(encoder, chunk=4)(x)
    z.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_generators_of_other_devices_are_read_and_set_by_their_modules(kind, monkeypatch):
    class Module:
        state = torch.tensor([1])

        @classmethod
        def get_rng_state(cls, *device: torch.device) -> Tensor:
            assert len(device) == (kind != "mps")
            return cls.state

        @classmethod
        def set_rng_state(cls, state: Tensor, *device: torch.device) -> None:
            assert len(device) == (kind != "mps")
            cls.state = state

    monkeypatch.setattr(rng_state.torch, "get_device_module", lambda device: Module)
    start = ForwardState([torch.device(kind, 0)], [])
    Module.state = torch.tensor([2])
    with start.replayed():
        assert Module.state == 1
    assert Module.state == 2
    start.restore()
    assert Module.state == 1
