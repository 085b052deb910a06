"""Graphed losses without a GPU: a function in place of the CUDA graph shows which graphs there are and when they are replayed."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import threading
from contextlib import contextmanager

import pytest
import torch
from cases import embeddings
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import megabatch
from megabatch.losses.autograd import LossModule

# The package shows the function of that name.
graphs = sys.modules["megabatch.losses.graphed"]

SCALARS = {"clip_loss": (20.0,), "siglip_loss": (20.0, -5.0), "infonce_loss": (20.0,)}
names = pytest.mark.parametrize("name", SCALARS)


class Recorder:
    """What takes the place of CUDA: `replays` counts, and `stream` is the current one."""

    def __init__(self) -> None:
        self.replays, self.captures, self.stream = 0, 0, 0

    def capture(self, call: graphs.LossCall) -> graphs.LossGraph:
        self.captures += 1
        with graphs._own_state():
            static, leaves = graphs.static_inputs(call.tensors)
            graphs.check_leaves(call, leaves)
            grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
            fused_inputs = graphs.graph_inputs(static)
            result = graphs.evaluate(call, leaves, fused_inputs)

        def replay() -> None:
            self.replays += 1
            with (
                torch.inference_mode(False),
                torch.set_grad_enabled(grad),
                torch.autocast("cpu", enabled=autocast),
                graphs.without_graphs(),
            ):
                new = graphs.evaluate(call, leaves, fused_inputs)
            for old, t in zip((result.value, *result.gradients), (new.value, *new.gradients), strict=True):
                if old is not None:
                    old.copy_(t)

        return graphs.LossGraph(static, result.value, result.gradients, functools.partial(in_a_thread, replay), fused_inputs)


def in_a_thread(function) -> None:
    """Run a function with the layers of autograd, which are disabled where a graph is replayed."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    new = Recorder()
    monkeypatch.setattr(graphs, "DEVICE", "cpu")
    monkeypatch.setattr(graphs, "stream_of", lambda t: new.stream)
    monkeypatch.setattr(graphs, "capture", new.capture)
    return new


@pytest.fixture(params=["copied by PyTorch", "copied by kernels"])
def copies(request, recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests with both ways to copy to and from a graph; the kernels run in Triton's interpreter."""
    if request.param == "copied by PyTorch":
        return
    pytest.importorskip("triton")
    from megabatch.tiles.fused import architectures, graph_memory

    if not architectures.INTERPRETED:
        pytest.skip("kernels are compiled here, and tests on the GPU run them")
    monkeypatch.setattr(graphs, "graph_inputs", graph_memory.CopiedInputs)
    monkeypatch.setattr(graphs, "graph_gradients", lambda own: graph_memory.ScaledGradients(own) if own else None)


def arguments(name: str = "clip_loss", rows: int = 12, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    scalars = [torch.tensor(value + seed, dtype=torch.promote_types(dtype, torch.float32)) for value in SCALARS[name]]
    return [t.to(dtype).requires_grad_() for t in embeddings(rows, seed=seed)] + [t.requires_grad_() for t in scalars]


def step(loss, inputs: list[Tensor], g: float = 1.0, **options) -> list[Tensor]:
    value = loss(*inputs, **options)
    return [value.detach(), *torch.autograd.grad(value, inputs, torch.tensor(g))]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def value_and_grad(criterion: graphs.GraphedLoss, inputs: list[Tensor], **options) -> list[Tensor]:
    value, gradients = criterion.value_and_grad(*inputs, **options)
    assert not value.requires_grad and not any(t.requires_grad for t in gradients)
    return [value, *gradients]


@names
def test_on_a_cpu_it_is_the_loss_itself(name):
    loss = getattr(megabatch, name)
    criterion = megabatch.graphed(loss)
    for seed in range(3):
        expected = step(loss, arguments(name, seed=seed))
        assert same(step(criterion, arguments(name, seed=seed)), expected)
        assert same(value_and_grad(criterion, arguments(name, seed=seed)), expected)
    assert not criterion._graphs and not criterion._seen
    assert repr(criterion) == f"graphed({name}, max_graphs=8)"


@names
@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_results_are_those_of_the_loss_and_the_second_call_captures(name, dtype, recorder):
    loss = getattr(megabatch, name)
    criterion = megabatch.graphed(loss)
    for seed in range(4):
        inputs = arguments(name, dtype=dtype, seed=seed)
        assert same(step(criterion, inputs, 2.0), step(loss, inputs, 2.0))
        assert recorder.captures == (seed > 0) and recorder.replays == seed


@names
@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_value_and_grad_is_a_call_and_its_backward(name, dtype, recorder):
    loss = getattr(megabatch, name)
    criterion = megabatch.graphed(loss)
    inputs = [arguments(name, dtype=dtype, seed=seed) for seed in range(4)]
    expected = [step(loss, each) for each in inputs]
    found = [value_and_grad(criterion, each) for each in inputs]
    # No later call overwrites what an earlier one returned.
    assert all(same(*each) for each in zip(found, expected, strict=True))
    assert recorder.captures == 1 and recorder.replays == 3
    # A call uses the same graph, and its backward is right after another replay.
    value = criterion(*inputs[0])
    assert same(value_and_grad(criterion, inputs[1]), expected[1])
    assert same(list(torch.autograd.grad(value, inputs[0])), expected[0][1:])
    assert recorder.captures == 1 and recorder.replays == 6
    assert all(t.grad is None for each in inputs for t in each)


def test_value_and_grad_without_a_gradient_is_none(recorder):
    criterion = megabatch.graphed(megabatch.clip_loss)
    x, y, _ = arguments()
    ids = torch.arange(12) // 2
    expected = step(lambda x: megabatch.clip_loss(x, y, 20.0, ids=ids), [x])
    for _ in range(3):
        value, gradients = criterion.value_and_grad(x, y.detach(), 20.0, ids=ids)
        assert gradients[1:] == (None, None) and same([value, gradients[0]], expected)
        value, gradients = criterion.value_and_grad(x.detach(), y.detach(), 20.0, ids=ids)
        assert gradients == (None, None, None) and torch.equal(value, expected[0])
    assert recorder.captures == 2 and recorder.replays == 4


@contextmanager
def inference_mode_with_gradients():
    with torch.inference_mode(), torch.enable_grad():
        yield


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, inference_mode_with_gradients])
def test_value_and_grad_where_autograd_is_off(context, recorder):
    criterion = megabatch.graphed(megabatch.clip_loss)
    inputs = arguments()
    expected = step(megabatch.clip_loss, inputs)
    with context():
        found = [value_and_grad(criterion, inputs) for _ in range(3)]
    assert all(same(each, expected) for each in found) and not any(t.is_inference() for each in found for t in each)
    assert recorder.captures == 1


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("loss", [megabatch.clip_loss, lambda x, y, scale: (x.detach() * y.detach() * scale.detach()).sum()])
def test_value_and_grad_does_not_keep_what_the_inputs_were_computed_from(loss, recorder):
    criterion = megabatch.graphed(loss)
    for use in (criterion, criterion.value_and_grad):
        for seed in range(3):
            use(*(2 * t for t in arguments(seed=seed)))
    [graph] = criterion._graphs.values()
    assert not any(t.requires_grad for t in (*graph.inputs, *graph.gradients, graph.value))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_value_and_grad_refuses_what_the_loss_refuses(recorder):
    criterion = captured(recorder)
    x, y, scale = arguments()
    with pytest.raises(ValueError, match=r"inside a transform of torch\.func"):
        torch.func.grad(lambda x: criterion.value_and_grad(x, y, scale)[0])(x.detach())
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="dual tensor"):
        criterion.value_and_grad(torch.autograd.forward_ad.make_dual(x, x.detach()), y, scale)
    recorder.stream = None
    with torch.inference_mode():
        inference = torch.ones(12, 8, requires_grad=True)
    with pytest.raises(ValueError, match="inference"):
        criterion.value_and_grad(inference, y, scale)


def test_value_and_grad_of_a_loss_with_leaves_of_its_own(recorder):
    criterion = megabatch.graphed(lambda x: (x * torch.ones(3, requires_grad=True)).sum())
    for _ in range(3):
        value, gradients = criterion.value_and_grad(torch.arange(3.0))
        assert value == 3 and gradients == (None,)
    assert recorder.captures == 1


def test_value_and_grad_of_a_tensor_that_is_passed_twice(recorder):
    criterion = megabatch.graphed(megabatch.infonce_loss)
    x, _, scale = arguments()
    expected = step(megabatch.infonce_loss, [x, x.detach().clone().requires_grad_(), scale])
    for _ in range(3):
        assert same(value_and_grad(criterion, [x, x, scale]), expected)
    assert recorder.captures == 1


OPTIONS = {
    "one direction": ("clip_loss", {"symmetric": False}, {}),
    "ids": ("clip_loss", {"duplicates": "positive"}, {"ids": torch.arange(12) // 2}),
    "weights": ("siglip_loss", {}, {"weights": torch.arange(1.0, 13.0)}),
    "margins": ("infonce_loss", {"drop_above": {"x_to_y": 0.2}, "directions": ["x_to_y", "y_to_x"]}, {}),
}


@pytest.mark.parametrize("name, fixed, with_call", OPTIONS.values(), ids=OPTIONS)
def test_options_and_tensors_without_a_gradient(name, fixed, with_call, recorder):
    loss = getattr(megabatch, name)
    criterion = megabatch.graphed(loss, **fixed)
    for seed in range(3):
        inputs, tensors = arguments(name, seed=seed), {key: t.roll(seed) for key, t in with_call.items()}
        expected = step(loss, inputs, **fixed, **tensors)
        assert same(step(criterion, inputs, **tensors), expected)
        value, gradients = criterion.value_and_grad(*inputs, **tensors)
        assert same([value, *gradients[: len(inputs)]], expected) and not any(t is not None for t in gradients[len(inputs) :])
    assert recorder.replays == 5


def test_modules_without_parameters_and_losses_of_losses(recorder):
    for loss in (megabatch.ClipLoss(label_smoothing=0.1), megabatch.matryoshka(megabatch.clip_loss, dims=(8, 4))):
        criterion = megabatch.graphed(loss)
        for seed in range(3):
            inputs = arguments(seed=seed)
            assert same(step(criterion, inputs), step(loss, inputs))
    assert recorder.replays == 4


def test_a_graphed_loss_inside_of_another_one(recorder):
    inner = megabatch.graphed(megabatch.clip_loss)
    criterion = megabatch.graphed(lambda x, y, scale: inner(x, y, scale) + inner(y, x, scale))
    for seed in range(4):
        inputs = arguments(seed=seed)
        expected = step(lambda x, y, scale: megabatch.clip_loss(x, y, scale) + megabatch.clip_loss(y, x, scale), inputs)
        assert same(step(criterion, inputs), expected)
    assert len(criterion._graphs) == 1
    # It is part of that graph; its own is from the first call, which computed the sum without one.
    assert len(inner._graphs) == 1 and recorder.captures == 2


@pytest.mark.parametrize(("first", "second"), [(1, True), (1, 1.0), (0.0, -0.0), ((1,), (True,))])
def test_values_that_are_equal_but_not_alike_have_graphs_of_their_own(first, second, recorder):
    criterion = megabatch.graphed(lambda x, value: x.sum() * len(repr(value)))
    x = torch.ones(3)
    for value in (first, first, second, second):
        assert criterion(x, value) == 3 * len(repr(value))
    assert recorder.captures == 2


def test_clearing_while_a_graph_is_captured(recorder, monkeypatch):
    def capture(call):
        criterion.clear()
        return recorder.capture(call)

    monkeypatch.setattr(graphs, "capture", capture)
    criterion = megabatch.graphed(megabatch.clip_loss)
    for _ in range(2):
        criterion(*arguments())
    assert len(criterion._graphs) == 1


def test_anomaly_detection_sees_the_loss_itself(recorder):
    criterion = captured(recorder)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        criterion(*arguments()).backward()
    assert recorder.replays == 0


def captured(recorder: Recorder, loss=megabatch.clip_loss, **options) -> graphs.GraphedLoss:
    criterion = megabatch.graphed(loss, **options)
    for _ in range(2):
        criterion(*arguments())
    recorder.replays = 0
    return criterion


@pytest.mark.usefixtures("copies")
def test_two_losses_before_one_backward(recorder):
    criterion = captured(recorder)
    first, second = arguments(seed=1), arguments(seed=2)
    values = [criterion(*first), criterion(*second)]
    expected = [step(megabatch.clip_loss, inputs) for inputs in (first, second)]
    # A value is not overwritten by the next call.
    assert [value.item() for value in values] == [each[0].item() for each in expected]
    torch.stack(values).sum().backward()
    for inputs, each in zip((first, second), expected, strict=True):
        assert same([t.grad for t in inputs], each[1:])
    # One of both was overwritten.
    assert recorder.replays == 3


def test_backward_again_through_a_retained_graph(recorder):
    criterion = captured(recorder)
    first, second = arguments(seed=1), arguments(seed=2)
    expected = step(megabatch.clip_loss, first)[1:]
    value = criterion(*first)
    gradients = [list(torch.autograd.grad(value, first, retain_graph=True)) for _ in range(2)]
    assert recorder.replays == 1
    # Each has memory of its own.
    gradients[1][0].zero_()
    assert same(gradients[0], expected)
    assert same(gradients[1][1:], expected[1:])
    other = criterion(*second)
    for replays in (3, 3):
        assert same(list(torch.autograd.grad(value, first, retain_graph=True)), expected) and recorder.replays == replays
    assert same(list(torch.autograd.grad(other, second)), step(megabatch.clip_loss, second)[1:])
    assert same(list(torch.autograd.grad(value, first)), expected)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(value, first)


def test_gradients_are_new_tensors(recorder):
    criterion = captured(recorder)
    inputs = arguments(seed=1)
    criterion(*inputs).backward()
    expected = [t.grad.clone() for t in inputs]
    criterion(*arguments(seed=2)).backward()
    assert same([t.grad for t in inputs], expected)


@pytest.mark.parametrize("place", range(3))
def test_a_change_in_place_before_backward_raises(place, recorder):
    criterion = captured(recorder)
    inputs = arguments(seed=1)
    value = criterion(*inputs)
    with torch.no_grad():
        inputs[place].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_a_second_derivative_raises_and_create_graph_alone_does_not(recorder):
    criterion = captured(recorder)
    inputs = arguments(seed=1)
    gradients = torch.autograd.grad(criterion(*inputs), inputs, create_graph=True)
    assert same([t.detach() for t in gradients], step(megabatch.clip_loss, inputs)[1:])
    with pytest.raises(RuntimeError, match="first derivatives only"):
        gradients[0].sum().backward()


@pytest.mark.parametrize("g", [0.3, -2.0, 0.0])
def test_an_incoming_gradient_is_not_rounded_before_the_product(g, recorder):
    criterion = megabatch.graphed(megabatch.clip_loss)
    inputs = [*arguments(dtype=torch.bfloat16)[:2], torch.tensor(20.0, dtype=torch.bfloat16, requires_grad=True)]
    expected = [(t.float() * torch.tensor(g)).to(t.dtype) for t in step(megabatch.clip_loss, inputs)[1:]]
    for _ in range(2):
        found = step(criterion, inputs, g)[1:]
    assert same(found, expected)


def test_inputs_that_are_not_contiguous_or_passed_twice(recorder):
    criterion = captured(recorder)
    wide = [torch.cat((t, t), 1).detach().t().contiguous().t()[:, 8:].requires_grad_() for t in arguments(seed=1)[:2]]
    scale = torch.full((3,), 20.0)[1].requires_grad_()
    assert same(step(criterion, [*wide, scale]), step(megabatch.clip_loss, [*wide, scale])) and recorder.captures == 1
    x = arguments(seed=2)[0]
    found, expected = (torch.autograd.grad(loss(x, x, scale), x) for loss in (criterion, megabatch.clip_loss))
    assert recorder.captures == 1 and torch.equal(found[0], expected[0])


def test_an_input_that_the_loss_does_not_use_has_no_gradient(recorder):
    criterion = megabatch.graphed(lambda x, y, scale, bias: megabatch.clip_loss(x, y, scale))
    for _ in range(3):
        x, y, scale, bias = arguments("siglip_loss")
        criterion(x, y, scale, bias).backward()
        assert bias.grad is None and scale.grad is not None
    # Nothing to differentiate.
    constant = megabatch.graphed(lambda x: x.detach().sum())
    assert not any([constant(x).requires_grad for _ in range(3)])


def test_every_signature_has_its_own_graph(recorder):
    criterion = captured(recorder, max_graphs=20)
    x, y, scale = arguments()
    autocast = torch.autocast("cpu", torch.bfloat16)

    def on_stream(stream):
        recorder.stream = stream
        try:
            return criterion(x, y, scale)
        finally:
            recorder.stream = 0

    calls = [
        lambda: criterion(x[:6].detach().requires_grad_(), y[:6].detach().requires_grad_(), scale),
        lambda: criterion(x.double(), y.double(), scale.double()),
        lambda: criterion(x.detach(), y, scale),
        lambda: criterion(x, y, scale.detach()),
        lambda: criterion(x, y, 20.0),
        lambda: criterion(x, y, 21.0),
        lambda: criterion(x, y, scale, symmetric=False),
        lambda: criterion(x, y, scale=scale),
        lambda: on_stream(7),
        lambda: torch.no_grad()(criterion)(x, y, scale),
        lambda: autocast(criterion)(x, y, scale),
    ]
    plain = megabatch.clip_loss
    expected = [plain(x[:6], y[:6], scale), *[plain(x.double(), y.double(), 20.0)], *[plain(x, y, scale)] * 3, plain(x, y, 21.0)]
    expected += [plain(x, y, scale, symmetric=False), *[plain(x, y, scale)] * 3, autocast(plain)(x, y, scale)]
    for count, (call, value) in enumerate(zip(calls, expected, strict=True), start=1):
        for captures in (count, count + 1, count + 1):
            result = call()
            assert torch.allclose(result.double(), value.double(), rtol=1e-6, atol=0) and recorder.captures == captures
    assert torch.equal(calls[-1](), expected[-1]) and not torch.equal(expected[-1], plain(x, y, scale))
    assert len(criterion._graphs) == 12
    criterion.clear()
    assert not criterion._graphs


def test_grad_mode_and_inference_mode(recorder):
    criterion = megabatch.graphed(megabatch.clip_loss)
    inputs = arguments()
    expected = megabatch.clip_loss(*inputs).detach()
    with torch.inference_mode():
        results = [criterion(*inputs) for _ in range(3)]
        made_here = inputs[1].clone()
    with torch.no_grad():
        results += [criterion(*inputs) for _ in range(3)]
    assert recorder.captures == 1 and all(torch.equal(t, expected) and not t.requires_grad for t in results)
    assert results[0].is_inference() and not results[-1].is_inference()
    assert all(criterion(*inputs).requires_grad for _ in range(3))
    with pytest.raises(ValueError, match="y was made in inference mode"):
        criterion(inputs[0], made_here, inputs[2])


def test_ids_that_were_made_in_inference_mode(recorder):
    criterion = megabatch.graphed(megabatch.clip_loss)
    with torch.inference_mode():
        made_here = torch.arange(12) // 2
    expected = step(megabatch.clip_loss, arguments(), ids=made_here)
    for ids in (made_here, made_here.clone(), made_here):
        assert same(step(criterion, arguments(), ids=ids), expected)


def test_the_graph_that_was_not_used_for_the_longest_time_is_removed(recorder):
    criterion = megabatch.graphed(megabatch.clip_loss, max_graphs=2)

    def call(rows: int) -> Tensor:
        return criterion(*arguments(rows=rows))

    for rows in (4, 4, 5, 5, 4, 6):
        call(rows)
    pending = arguments(rows=5, seed=3)
    value = criterion(*pending)
    call(4)
    call(6)
    assert recorder.captures == 3 and {len(graph.inputs[0]) for graph in criterion._graphs.values()} == {4, 6}
    # Its graph still computes backward.
    criterion(*arguments(rows=4))
    assert same(list(torch.autograd.grad(value, pending)), step(megabatch.clip_loss, pending)[1:])
    call(5)
    with pytest.warns(UserWarning, match="has captured 4 graphs and keeps 2"):
        call(5)
    for rows in (7, 7, 8, 8):
        call(rows)
    assert len(criterion._graphs) == 2 and recorder.captures == 6


def test_shapes_that_occur_once_are_forgotten(recorder, monkeypatch):
    monkeypatch.setattr(graphs, "SEEN", 3)
    criterion = megabatch.graphed(megabatch.clip_loss)
    for rows in (4, 5, 6, 7, 8):
        criterion(*arguments(rows=rows))
    assert len(criterion._seen) == 3
    criterion(*arguments(rows=4))
    assert recorder.captures == 0
    criterion(*arguments(rows=8))
    assert recorder.captures == 1


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return megabatch.clip_loss(x, y, self.log_scale.exp())


NOT_CREATED = {
    "no function": (lambda: megabatch.graphed(3), "loss is a int: must be a function"),
    "no graphs": (lambda: megabatch.graphed(megabatch.clip_loss, max_graphs=0), "max_graphs=0: must be a positive"),
    "a parameter": (lambda: megabatch.graphed(Scaled()), "holds log_scale"),
    "a tensor": (lambda: megabatch.graphed(megabatch.clip_loss, scale=torch.tensor(2.0)), "scale is a tensor"),
    "a function": (lambda: megabatch.graphed(megabatch.similarity_loss, similarity=torch.mm), "similarity is a builtin"),
    "a stored function": (lambda: megabatch.graphed(megabatch.SimilarityLoss(similarity=torch.mm)), "similarity is a builtin"),
}


@pytest.mark.parametrize("create, message", NOT_CREATED.values(), ids=NOT_CREATED)
def test_what_a_graph_cannot_contain_is_refused(create, message):
    with pytest.raises(ValueError, match=message):
        create()


NOT_CALLED = {
    "diagnostics": ({"diagnostics": True}, "returned a tuple"),
    "a list": ({"directions": ["x_to_y"]}, r"directions is \['x_to_y'\]: .* must be hashable; pass a tuple"),
    "a guide": ({"guide": megabatch.Guide(*embeddings(12))}, "guide is a Guide|guide.* is a tensor"),
    "a group": ({"group": torch.Generator()}, "group is a Generator"),
    "another device": ({"ids": torch.arange(12, device="meta")}, "ids is on meta and the first tensor on cpu"),
}


@pytest.mark.parametrize("options, message", NOT_CALLED.values(), ids=NOT_CALLED)
def test_what_a_graph_cannot_take_is_refused_in_the_first_call(options, message, recorder):
    criterion = megabatch.graphed(megabatch.infonce_loss)
    with pytest.raises(ValueError, match=message):
        criterion(*arguments(), **options)


def test_float16_is_refused_if_it_needs_a_gradient(recorder):
    criterion = megabatch.graphed(megabatch.clip_loss)
    x, y, scale = arguments(dtype=torch.float16)
    with pytest.raises(ValueError, match="argument 1 is float16 and requires a gradient"):
        criterion(x, y, scale)
    with torch.no_grad():
        assert all(torch.equal(criterion(x, y, scale), megabatch.clip_loss(x, y, scale)) for _ in range(3))
    assert recorder.captures == 1


def test_a_parameter_that_is_no_argument_is_refused(recorder):
    log_scale = torch.tensor(3.0, requires_grad=True)
    criterion = megabatch.graphed(lambda x, y: megabatch.clip_loss(x, y, log_scale.exp()))
    x, y, _ = arguments()
    criterion(x, y)
    for use in (criterion, criterion.value_and_grad, megabatch.graphed(criterion.function).value_and_grad):
        with pytest.raises(ValueError, match=r"a tensor of shape .* is no argument"):
            use(x, y)
    # Without a graph it has all gradients, and value_and_grad would leave this one out.
    recorder.stream = None
    assert criterion(x, y).requires_grad
    with pytest.raises(ValueError, match=r"a tensor of shape .* is no argument"):
        criterion.value_and_grad(x, y)
    recorder.stream = 0
    with torch.no_grad():
        for _ in range(3):
            criterion(x.detach(), y.detach())
    assert len(criterion._graphs) == 1 and criterion(x.detach(), y.detach()).requires_grad
    vector = megabatch.graphed(lambda x, y: (x * y).sum(1))
    with pytest.raises(ValueError, match=r"returned a tensor of shape \(12,\)"):
        vector(x, y)
    with pytest.raises(ValueError, match=r"returned a tensor of shape \(12,\)"):
        vector.value_and_grad(x, y)


class Operations(TorchDispatchMode):
    """Records which operations are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.called.add(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_elsewhere_the_loss_itself_is_called(recorder):
    criterion = captured(recorder)
    x, y, scale = inputs = arguments(seed=1)
    expected = megabatch.clip_loss(*inputs)
    recorder.stream = None
    assert torch.equal(criterion(*inputs), expected)
    assert same(value_and_grad(criterion, inputs), step(megabatch.clip_loss, inputs))
    recorder.stream = 0
    with Operations() as operations:
        value = criterion(*inputs)
    assert torch.equal(value, expected) and torch.ops.aten.mm.default in operations.called
    with pytest.raises(ValueError, match=r"inside a transform of torch\.func"):
        torch.func.grad(lambda x: criterion(x, y, scale))(x.detach())
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="dual tensor"):
        criterion(torch.autograd.forward_ad.make_dual(x, x.detach()), y, scale)
    with megabatch.losses.batch.refused_while_accumulating(), pytest.raises(ValueError, match="inside accumulate"):
        criterion(*inputs)
    with pytest.raises(ValueError, match="layout"):
        criterion(x.to_sparse(), y, scale)
    assert recorder.replays == 0


@pytest.mark.slow
def test_torch_compile_sees_the_operator(recorder):
    criterion = captured(recorder)
    inputs = arguments(seed=1)
    compiled = torch.compile(lambda *inputs: criterion(*inputs), fullgraph=True, backend="aot_eager")
    found, expected = step(compiled, inputs), step(megabatch.clip_loss, inputs)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(found, expected, strict=True))
    assert recorder.replays == 0


@pytest.mark.slow
# The compiler looks at .grad of tensors that are not leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:`torch.jit.script` is deprecated")
def test_torch_compile_breaks_its_graph_for_value_and_grad(recorder):
    criterion = captured(recorder)
    inputs = arguments(seed=1)
    compiled = torch.compile(lambda *inputs: criterion.value_and_grad(*(2 * t for t in inputs)), backend="aot_eager")
    value, gradients = compiled(*inputs)
    expected = step(megabatch.clip_loss, [(2 * t).detach().requires_grad_() for t in inputs])
    assert same([value, *gradients], expected) and recorder.replays == 1


def test_saved_tensor_hooks_of_the_caller_see_the_inputs_alone(recorder):
    criterion = megabatch.graphed(megabatch.clip_loss)
    inputs = arguments(seed=1)
    criterion(*inputs)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        value = criterion(*inputs)
    assert recorder.captures == 1 and [t.shape for t in packed] == [t.shape for t in inputs]
    assert same(list(torch.autograd.grad(value, inputs)), step(megabatch.clip_loss, inputs)[1:])


def test_copies_start_without_graphs(recorder):
    criterion = captured(recorder, symmetric=False, max_graphs=3)
    for other in (copy.deepcopy(criterion), copy.copy(criterion), pickle.loads(pickle.dumps(criterion))):
        assert repr(other) == repr(criterion) == "graphed(clip_loss, max_graphs=3, symmetric=False)" and not other._graphs
        assert torch.equal(other(*arguments()), megabatch.clip_loss(*arguments(), symmetric=False))
    assert isinstance(megabatch.ClipLoss(), LossModule) and "ClipLoss" in repr(megabatch.graphed(megabatch.ClipLoss()))


def test_threads_do_not_mix_their_inputs(recorder):
    criterion = captured(recorder)
    wrong: list[int] = []

    def work(seed: int) -> None:
        inputs = arguments(seed=seed)
        expected = step(megabatch.clip_loss, inputs)
        wrong.extend(seed for _ in range(30) if not same(step(criterion, inputs), expected))
        wrong.extend(seed for _ in range(30) if not same(value_and_grad(criterion, inputs), expected))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_threads_capture_a_signature_once(recorder, monkeypatch):
    criterion = megabatch.graphed(megabatch.clip_loss)
    inputs = arguments()
    criterion(*inputs)
    started = threading.Barrier(2)
    monkeypatch.setattr(graphs, "stream_of", lambda t: started.wait() and 0)
    threads = [threading.Thread(target=criterion, args=inputs) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.captures == 1 and recorder.replays == 2


class Products(torch.autograd.Function):
    """The sum of x @ y.T, with products in float32 whose dtype autocast would change."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        with torch.autocast("cpu", enabled=False):
            return (x @ y.T).sum()

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        ones = torch.ones(len(x), len(y))
        return g * (ones @ y), g * (ones.T @ x)


def test_backward_runs_outside_of_autocast(recorder):
    criterion = megabatch.graphed(Products.apply)
    inputs = arguments()[:2]
    expected = torch.autograd.grad(Products.apply(*inputs), inputs)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            value = criterion(*inputs)
            found = criterion.value_and_grad(*inputs)[1]
        assert same(list(torch.autograd.grad(value, inputs)), list(expected)) and same(list(found), list(expected))


def test_a_training_is_the_plain_one_bit_for_bit(recorder):
    def train(backward) -> list[Tensor]:
        torch.manual_seed(0)
        encoder, log_scale = nn.Linear(8, 6), nn.Parameter(torch.tensor(2.0))
        optimizer = torch.optim.AdamW([*encoder.parameters(), log_scale], lr=0.01)
        for number in range(12):
            x, y = (t.float() for t in embeddings(12 if number % 4 < 3 else 5, seed=number))
            optimizer.zero_grad()
            backward(encoder(x), encoder(y), log_scale.exp())
            optimizer.step()
        return [*encoder.parameters(), log_scale]

    def from_gradients(*inputs: Tensor) -> None:
        _, gradients = criterion.value_and_grad(*inputs)
        torch.autograd.backward(inputs, [gradient / 2 for gradient in gradients])

    criterion = megabatch.graphed(megabatch.clip_loss)
    plain = train(lambda *inputs: (megabatch.clip_loss(*inputs) / 2).backward())
    assert same(train(lambda *inputs: (criterion(*inputs) / 2).backward()), plain) and recorder.captures == 2
    assert same(train(from_gradients), plain) and recorder.captures == 2
