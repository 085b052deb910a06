"""A trial restores everything bit for bit: weights, gradients, optimizer, generators, modes, position in the data."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from megabatch.measuring.fit.snapshot import Snapshot


class Counting(nn.Module):
    """A layer that changes a buffer in place, replaces a second one, fills a third and adds a fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("later", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.last = x.detach()[0, :3].clone()
        self.later = torch.ones(2)
        self.register_buffer("added", torch.ones(1))
        return x


class Loader:
    """Rows in order, with a position that can be saved."""

    def __init__(self) -> None:
        self.at = 0

    def take(self, rows: int) -> Tensor:
        self.at += rows
        return torch.arange(self.at - rows, self.at).float()[:, None].expand(-1, 6) / 100

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "adamw with its rate in a tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1), foreach=False),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, max_iter=2),
}


class Loop:
    """A training with everything in it that a step can change."""

    def __init__(self, optimizer: str, begun: bool) -> None:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(6)
        self.model = nn.Sequential(norm, Counting(), nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 2))
        self.model[4].weight.requires_grad_(False)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.loader, self.generator = Loader(), torch.Generator().manual_seed(3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        self.model[3].eval()
        if begun:
            self.step(4)
            # The next step finds gradients, as in the middle of an accumulation.
            self.loss(3).backward()

    @property
    def state(self) -> list[Any]:
        return [self.model, self.optimizer, self.schedule, self.loader, self.generator, self.scaler]

    def loss(self, rows: int) -> Tensor:
        x = (
            self.loader.take(rows)
            + torch.rand(rows, 6)
            + random.random()
            + np.random.rand()
            + torch.rand(1, generator=self.generator)
        )
        return self.model(x).square().mean()

    def step(self, rows: int, stop: str | None = None) -> None:
        self.model.train()

        def closure() -> Tensor:
            loss = self.loss(rows)
            self.scaler.scale(loss).backward()
            return loss

        closure()
        if stop == "before unscaling":
            raise torch.OutOfMemoryError("out of memory")
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(closure)
        else:
            self.scaler.unscale_(self.optimizer)
            if stop == "after unscaling":
                raise torch.OutOfMemoryError("out of memory")
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.schedule.step()
        if stop != "keeping gradients":
            self.optimizer.zero_grad()

    def look(self) -> list[Any]:
        """Return a copy of the whole state."""
        modules = [(m.training, copy.deepcopy(m._buffers)) for m in self.model.modules()]
        parameters = [(p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in self.model.parameters()]
        state = copy.deepcopy(self.optimizer.state_dict())
        generators = [torch.get_rng_state(), self.generator.get_state(), random.getstate(), np.random.get_state()[1].copy()]
        return [modules, parameters, state, generators, self.schedule.state_dict(), self.loader.at, self.scaler.state_dict()]


def leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        yield sorted(map(str, tree))
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (list, tuple)):
        yield len(tree)
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def same(a: Any, b: Any) -> bool:
    first, second = list(leaves(a)), list(leaves(b))
    return len(first) == len(second) and all(_equal(x, y) for x, y in zip(first, second, strict=True))


def _equal(x: Any, y: Any) -> bool:
    arrays = isinstance(x, (Tensor, np.ndarray))
    return type(x) is type(y) and (np.array_equal(x, y) if arrays else x == y)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("begun", [False, True], ids=["fresh", "begun"])
@pytest.mark.parametrize("stop", [None, "keeping gradients", "before unscaling", "after unscaling"])
def test_a_step_leaves_no_trace(optimizer, begun, stop):
    loop = Loop(optimizer, begun)
    snapshot, before = Snapshot(loop.state), loop.look()
    held = [id(t) for t in loop.model.parameters()] + [id(t) for t in loop.model.buffers()]
    for _ in range(2):
        with contextlib.suppress(torch.OutOfMemoryError):
            loop.step(5, stop)
        assert not same(before, loop.look()), "the step changes something, so that there is something to put back"
        snapshot.restore()
        assert same(before, loop.look())
    assert held == [id(t) for t in loop.model.parameters()] + [id(t) for t in loop.model.buffers()]


@pytest.mark.parametrize("begun", [False, True])
def test_training_continues_as_if_there_had_been_no_trial(begun):
    plain = Loop("adamw", begun)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    for _ in range(3):
        plain.step(4)
    expected = plain.look()
    tried = Loop("adamw", begun)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    for stop in ("after unscaling", None, "before unscaling"):
        snapshot = Snapshot(tried.state)
        with contextlib.suppress(torch.OutOfMemoryError):
            tried.step(9, stop)
        snapshot.restore()
        tried.step(4)
    assert same(expected[:3], tried.look()[:3]) and same(expected[4:], tried.look()[4:])


def test_state_that_a_trial_created_is_dropped():
    loop = Loop("adamw", begun=False)
    snapshot = Snapshot(loop.state)
    loop.step(5, "keeping gradients")
    created = [TensorWeakRef(value) for state in loop.optimizer.state.values() for value in state.values()]
    created += [TensorWeakRef(p.grad) for p in loop.model.parameters() if p.grad is not None]
    assert created and all(reference() is not None for reference in created)
    snapshot.restore()
    gc.collect()
    assert all(reference() is None for reference in created), "they would take memory of the next trial"
    assert not loop.optimizer.state


def test_gradients_stay_the_same_tensors_and_are_not_kept_alive_when_a_step_frees_them():
    layer = nn.Linear(3, 3)
    layer(torch.ones(2, 3)).sum().backward()
    grad, values = layer.weight.grad, layer.weight.grad.clone()
    snapshot = Snapshot([layer])
    layer(torch.ones(5, 3)).sum().backward()
    snapshot.restore()
    assert layer.weight.grad is grad and torch.equal(grad, values)
    there = TensorWeakRef(grad)
    del grad
    layer.zero_grad()
    assert there() is None, "a copy on the host is enough"
    snapshot.restore()
    assert torch.equal(layer.weight.grad, values)


def test_the_copies_are_counted():
    layer = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    assert Snapshot([layer]).bytes == 400
    layer(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    # The weight once, although two parts share it; its gradient; its momentum.
    assert Snapshot([layer, optimizer]).bytes == 1200


@pytest.mark.parametrize(
    "part, words",
    [
        (object(), r"state\[0\] is a object: must be a module, an optimizer"),
        (nn.LazyLinear(3), "run one forward pass first"),
        (iter([1]), r"state_dict\(\)"),
    ],
)
def test_state_that_cannot_be_restored_is_refused(part, words):
    with pytest.raises(ValueError, match=words):
        Snapshot([part])
