"""A chunk that runs again in backward gives the outputs of forward, or backward raises."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from small_encoders import CHUNK, Wrap, batch, gradients, in_chunks, same, tower
from torch import Tensor, nn

import megabatch
from megabatch.chunks import rng_state

MODEL = tower(dropout=0.0)
GLOBAL = torch.Generator()


class Noisy(nn.Module):
    """Has a generator as an attribute, directly or inside another object."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.model, self.held = MODEL, held

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x * _draw(self.held))


class Holder:
    def __init__(self, generator: Any) -> None:
        self.inner = generator


class Slotted:
    """Hides a generator from the search."""

    __slots__ = ("inner",)

    def __init__(self, generator: Any) -> None:
        self.inner = generator


def _draw(held: Any) -> float:
    """Return one number from a generator, or from the one inside a container or object."""
    if isinstance(held, torch.Generator):
        return float(torch.rand((), generator=held))
    if hasattr(held, "random"):
        return float(held.random())
    if hasattr(held, "random_raw"):
        return held.random_raw() / 2**64
    return _draw(held[0] if isinstance(held, list) else held.inner)


def _global(x: Tensor) -> Tensor:
    return MODEL(x * _draw(GLOBAL))


def attribute(generator: Any) -> Callable[[Tensor], Tensor]:
    return Noisy(generator)


def inside_an_object(generator: Any) -> Callable[[Tensor], Tensor]:
    return Noisy(Holder([generator])).forward


def closure(generator: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: MODEL(x * _draw(generator))


def partial_argument(generator: Any) -> Callable[[Tensor], Tensor]:
    return functools.partial(lambda x, held: MODEL(x * _draw(held)), held=generator)


def inside_a_comprehension(generator: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: MODEL(torch.stack([row * _draw(generator) for row in x]))


def run(encoder: Callable[[Tensor], Tensor], wrap: Wrap) -> list[Tensor]:
    """Return embeddings, gradients, and the next numbers of the host's generators."""
    MODEL.zero_grad()
    torch.manual_seed(0)
    random.seed(1)
    numpy.random.seed(2)
    z = wrap(encoder)(batch())
    drawn = random.random(), numpy.random.randn()
    (z**3).sum().backward()
    after = random.random(), numpy.random.randn()
    return [z.detach(), *(grad.clone() for grad in gradients(MODEL)), torch.tensor([*drawn, *after])]


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: random.gauss(1, 1),
        lambda: numpy.random.rand(),
        # Normal numbers are drawn in pairs; the second is cached for the next draw.
        lambda: float(numpy.random.randn()),
        lambda: float(numpy.random.randn(3).sum()),
    ],
)
@pytest.mark.parametrize("keep", [0, 1])
def test_draws_from_the_generators_of_python_and_numpy_are_replayed(draw, keep):
    def encoder(x: Tensor) -> Tensor:
        return MODEL(x * draw())

    assert same(run(encoder, in_chunks), run(encoder, functools.partial(megabatch.cached, chunk=CHUNK, keep=keep)))


@pytest.mark.parametrize("place", [attribute, inside_an_object, closure, partial_argument, inside_a_comprehension])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.Generator().manual_seed(3),
        lambda: random.Random(3),
        lambda: numpy.random.default_rng(3),
        lambda: numpy.random.RandomState(3),
        lambda: numpy.random.Philox(3),
    ],
    ids=["torch", "random", "default_rng", "RandomState", "Philox"],
)
def test_generators_that_the_encoder_refers_to_are_replayed(place, make):
    first, second = make(), make()
    wrap = functools.partial(megabatch.cached, chunk=CHUNK)
    assert same(run(place(first), in_chunks), run(place(second), wrap))
    assert _draw(first) == _draw(second), "the recomputation leaves no trace"


def test_a_generator_among_the_globals_of_a_function_is_replayed():
    GLOBAL.manual_seed(1)
    expected = run(_global, in_chunks)
    GLOBAL.manual_seed(1)
    assert same(expected, run(lambda x: _global(x), functools.partial(megabatch.cached, chunk=CHUNK)))


class Own:
    """A user-defined generator."""

    def __init__(self) -> None:
        self.state = 1

    def get_state(self) -> int:
        return self.state

    def set_state(self, state: int) -> None:
        self.state = state

    def random(self) -> float:
        self.state = self.state * 16807 % (2**31 - 1)
        return self.state / 2**31


@pytest.mark.parametrize("make", [lambda: torch.Generator().manual_seed(3), Own], ids=["torch", "own"])
def test_generators_that_are_not_found_can_be_passed_or_raise(make):
    hidden, named = make(), make()
    expected = run(closure(Slotted(make())), in_chunks)
    assert same(expected, run(closure(Slotted(named)), functools.partial(megabatch.cached, chunk=CHUNK, generators=(named,))))
    with pytest.raises(RuntimeError, match=r"not repeatable.*generators=\(g,\)"):
        run(closure(Slotted(hidden)), functools.partial(megabatch.cached, chunk=CHUNK))


@pytest.mark.parametrize(
    "given, words",
    [
        ((torch.Generator(), 7), r"generators\[1\] is a int"),
        ((random.SystemRandom(),), r"generators\[0\] is a SystemRandom: .*whose state can be set"),
        (torch.Generator(), "must be a sequence of generators"),
        (7, "must be a sequence of generators"),
    ],
)
def test_other_objects_than_generators_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        megabatch.cached(MODEL, chunk=4, generators=given)


def test_generators_of_the_host_that_the_encoder_does_not_draw_from_are_left_alone(monkeypatch):
    """Other threads may draw from them while backward runs."""
    monkeypatch.setattr(rng_state._PYTHON, "set", lambda state: pytest.fail("Python's generator was set"))
    monkeypatch.setattr(rng_state.NumpyGlobal, "set", lambda self, state: pytest.fail("NumPy's generator was set"))
    megabatch.cached(tower(), chunk=4)(batch()).sum().backward()


def test_equal_states_share_one_object():
    random.seed(1)
    first = [source.get() for source in rng_state.host_sources()]
    assert all(source.get() is state for source, state in zip(rng_state.host_sources(), first, strict=True))
    random.random(), numpy.random.rand()
    assert not any(source.get() is state for source, state in zip(rng_state.host_sources(), first, strict=True))


def counting(change: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor], Tensor]:
    """An encoder whose result changes with every call."""
    calls: list[int] = []

    def encoder(x: Tensor) -> Tensor:
        calls.append(1)
        return change(MODEL(x), len(calls))

    return encoder


def one_row(z: Tensor, call: int) -> Tensor:
    return z * torch.where(torch.arange(len(z)) == 0, float(call), 1.0)[:, None]


@pytest.mark.parametrize(
    "change",
    [
        lambda z, call: z * call,
        one_row,
        lambda z, call: z + 0.01 * call,
        lambda z, call: z[:, None, :].expand(-1, 40, -1) * call,
        lambda z, call: {"z": z, "parts": (z.detach() * call, z.sum(1) * call)},
    ],
    ids=["all", "one row", "little", "hidden states", "nested"],
)
def test_an_encoder_that_is_not_repeatable_raises(change):
    def loss(z: Any) -> Tensor:
        return (z if isinstance(z, Tensor) else z["parts"][1]).square().sum()

    with pytest.raises(RuntimeError, match="the encoder is not repeatable"):
        loss(megabatch.cached(counting(change), chunk=4)(batch())).backward()
    loss(megabatch.cached(counting(change), chunk=4, check=False)(batch())).backward()


def test_outputs_without_gradients_may_differ():
    encode = megabatch.cached(counting(lambda z, call: (z, torch.full((len(z),), float(call)))), chunk=4)
    encode(batch())[0].sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounding_differences_are_accepted(dtype):
    """Perturb every value by a few ulp, as sums in another order do."""
    noise = torch.Generator().manual_seed(0)

    def change(z: Tensor, call: int) -> Tensor:
        return z + (4 * torch.finfo(dtype).eps * z.double() * torch.randn(z.shape, generator=noise)).to(dtype)

    MODEL.to(dtype)
    try:
        # Hidden, so that the noise is not replayed.
        encode = megabatch.cached(counting(functools.partial(_call, Slotted(change))), chunk=4)
        encode(batch(56).to(dtype)).sum().backward()
    finally:
        MODEL.float()


def _call(hidden: Any, *args: Any) -> Any:
    return hidden.inner(*args)


def test_under_autocast_the_digits_of_its_dtype_count():
    def change(z: Tensor, call: int) -> Tensor:
        return z.float() * (1 + 0.01 * (call % 2))

    def step(enabled: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            z = megabatch.cached(counting(change), chunk=CHUNK, keep=0)(batch(3))
        z.sum().backward()

    step(True)
    with pytest.raises(RuntimeError, match="not repeatable"):
        step(False)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_outputs_that_are_not_finite_are_not_compared(value):
    z = megabatch.cached(lambda x: MODEL(x) * torch.where(torch.arange(len(x)) == 1, value, 1.0)[:, None], chunk=4)(batch())
    z.sum().backward()


def test_a_failed_backward_does_not_affect_the_next_one():
    fail = True

    def stop(grad: Tensor) -> None:
        if fail:
            raise ArithmeticError

    z = megabatch.cached(MODEL, chunk=4)(batch().requires_grad_())
    probe = z * 1
    z.register_hook(stop)
    with pytest.raises(ArithmeticError):
        probe.sum().backward(retain_graph=True)
    fail = False
    probe.sum().backward()


def set_weights(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data * 2


def replace_weights(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)


@pytest.mark.parametrize("change", [set_weights, replace_weights])
def test_weights_that_change_without_a_version_are_detected_by_their_effect(change):
    model = tower(dropout=0.0)
    z = megabatch.cached(model, chunk=4)(batch())
    change(model)
    with pytest.raises(RuntimeError, match="not repeatable"):
        z.sum().backward()


def whole(x: Tensor) -> Any:
    return (x,), {}


def view(x: Tensor) -> Any:
    return (x[2:],), {}


def in_a_dict(x: Tensor) -> Any:
    return ({"a": torch.zeros(len(x), 6), "b": x},), {}


def by_name(x: Tensor) -> Any:
    return (), {"x": x}


def read(x: Any) -> Tensor:
    return MODEL(x if isinstance(x, Tensor) else x["a"] + x["b"])


@pytest.mark.parametrize(
    "arguments, name", [(whole, r"args\[0\]"), (view, r"args\[0\]"), (in_a_dict, r"args\[0\]\['b'\]"), (by_name, r"kwargs\['x'\]")]
)
@pytest.mark.parametrize("device", [None, "cpu"])
def test_an_input_that_is_overwritten_before_backward_is_an_error_as_in_autograd(arguments, name, device):
    buffer = batch()
    args, kwargs = arguments(buffer)
    encode = megabatch.cached(read, chunk=4, device=device, check=False)
    z = encode(*args, **kwargs)
    buffer.copy_(batch(seed=7))
    with pytest.raises(RuntimeError, match=rf"the input {name} of a cached encoder was modified in place.*clone"):
        z.sum().backward()
    encode(*args, **kwargs).sum().backward()


def test_chunks_that_are_not_recomputed_need_no_input():
    x = torch.randint(9, (10, 2))
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten())
    z = megabatch.cached(lambda ids: model(ids.clone()), chunk=4, keep=3)(x)
    x.zero_()
    z.sum().backward()


def test_memory_that_numpy_changes_is_detected_by_its_effect():
    array = batch().numpy()
    z = megabatch.cached(MODEL, chunk=4)(torch.from_numpy(array))
    array[:] = 1
    with pytest.raises(RuntimeError, match="not repeatable"):
        z.sum().backward()


def test_inputs_made_under_inference_mode_have_no_version_and_work():
    with torch.inference_mode():
        x = batch()
    megabatch.cached(lambda x: MODEL(x.clone()), chunk=4)(x).sum().backward()


class Hungry(nn.Module):
    """Runs out of memory when it recomputes more than two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tower(dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2 and torch._C._current_graph_task_id() != -1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.model(x)


def repeated(encoder: Hungry, change: Callable[[Tensor], Any]) -> list[Any]:
    encode = megabatch.cached(encoder, chunk=4)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    drawn = []

    def step(x: Tensor) -> None:
        change(x)
        drawn.append((random.random(), numpy.random.rand()))
        encode(x).sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        megabatch.retry_on_oom(step, optimizer)(batch())
    return drawn


@pytest.mark.parametrize("what, words", [("input", r"its input args\[0\]"), ("weights", "a weight")])
def test_a_step_that_has_changed_what_it_starts_from_is_not_repeated(what, words):
    encoder = Hungry()

    def change(x: Tensor) -> None:
        with torch.no_grad():
            (x if what == "input" else encoder.model[0].weight).mul_(2)

    with pytest.raises(RuntimeError, match=f"has changed {words} in place, so it cannot be repeated"):
        repeated(encoder, change)


def test_a_repeated_step_draws_from_python_and_numpy_what_it_drew_before():
    first, second = repeated(Hungry(), lambda x: None)
    assert first == second


def test_the_check_of_accumulate_does_not_advance_the_generators_of_the_host():
    drawn = []
    for check in (True, False):
        model = nn.Linear(6, 1)
        random.seed(0)
        numpy.random.seed(0)

        def loss(x: Tensor, model: nn.Module = model) -> Tensor:
            return (model(x) * (1 + 1e-6 * (random.random() + numpy.random.rand()))).mean()

        megabatch.accumulate(loss, model, chunk=4, check=check)(batch())
        drawn.append((random.random(), numpy.random.rand()))
    assert drawn[0] == drawn[1]


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def by_hand(model: nn.Module, sizes: list[int]) -> list[Tensor]:
    z = torch.cat([model(piece) for piece in batch(sum(sizes)).split(sizes)])
    (z**2).sum().backward()
    return [z, *gradients(model), *model.buffers()]


@pytest.mark.filterwarnings("ignore:the encoder contains batch normalisation:UserWarning")
@pytest.mark.parametrize("chunk, sizes", [(4, [4, 3, 2]), (3, [3, 2, 2]), (8, [7, 2]), (9, [9])])
@pytest.mark.parametrize("keep", [0, "auto"])
def test_batch_norm_gets_no_chunk_of_one_row(chunk, sizes, keep):
    model = normed()
    encode = megabatch.cached(model, chunk=chunk, keep=keep)
    z = encode(batch(sum(sizes)))
    (z**2).sum().backward()
    assert same([z, *gradients(model), *model.buffers()], by_hand(normed(), sizes))
    assert keep == 0 or encode._keep.unit_bytes > 0, "a whole chunk was measured"


def test_accumulate_gives_batch_norm_no_chunk_of_one_row():
    seen = []
    model = normed()

    def loss(x: Tensor) -> Tensor:
        seen.append(len(x))
        return model(x).square().mean()

    mean = megabatch.accumulate(loss, model, chunk=4, check=False)(batch(9))
    assert seen == [4, 3, 2]
    assert torch.isfinite(mean)


@pytest.mark.filterwarnings("ignore:the encoder contains batch normalisation:UserWarning")
@pytest.mark.parametrize(
    "rows, chunk, words",
    [(5, 2, "1 of the 5 rows.*at least 3 rows"), (2, 1, "1 of the 2 rows.*at least 3"), (1, 4, "1 of the 1 rows.*drop_last")],
)
def test_a_single_row_for_batch_norm_is_refused_with_the_remedy(rows, chunk, words):
    model = normed()
    for call in (
        megabatch.cached(model, chunk=chunk),
        megabatch.accumulate(lambda x: model(x).mean(), model, chunk=chunk, check=False),
    ):
        with pytest.raises(ValueError, match=words):
            call(batch(rows))


@pytest.mark.filterwarnings("ignore:the encoder contains batch normalisation:UserWarning")
def test_single_images_have_a_variance():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten())
    megabatch.cached(model, chunk=1)(torch.randn(3, 1, 4, 4)).sum().backward()


def test_chunks_without_batch_norm_stay_as_they_are():
    seen = []
    encoder: Callable[[Tensor], Tensor] = lambda x: (seen.append(len(x)), MODEL(x))[1]  # noqa: E731
    megabatch.cached(encoder, chunk=4)(batch(9))
    assert seen == [4, 4, 1]
