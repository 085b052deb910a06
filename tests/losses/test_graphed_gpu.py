"""Graphed losses on a CUDA device: bit for bit those of the loss itself, whatever the order of calls."""

from __future__ import annotations

import functools

import pytest
import torch
from cases import embeddings
from torch import Tensor, nn

import megabatch
from megabatch.losses.graphed import GraphedLoss

pytestmark = [
    pytest.mark.filterwarnings("ignore:scale="),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCALARS = {"clip_loss": (20.0,), "siglip_loss": (20.0, -5.0), "infonce_loss": (20.0,)}
names = pytest.mark.parametrize("name", SCALARS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def arguments(
    name: str = "clip_loss", rows: int = 256, dtype: torch.dtype = torch.bfloat16, seed: int = 0, width: int = 64
) -> list[Tensor]:
    scalars = [torch.tensor(value + seed, device="cuda") for value in SCALARS[name]]
    return [t.to("cuda", dtype).requires_grad_() for t in embeddings(rows, width=width, seed=seed)] + [
        t.requires_grad_() for t in scalars
    ]


def step(loss, inputs: list[Tensor], g: float = 1.0, **options) -> list[Tensor]:
    value = loss(*inputs, **options)
    return [value.detach(), *torch.autograd.grad(value, inputs, torch.tensor(g, device="cuda"))]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def captured(loss=megabatch.clip_loss, inputs: list[Tensor] | None = None, **options) -> GraphedLoss:
    """Return a graphed loss that has a graph for the inputs."""
    criterion = megabatch.graphed(loss, **options)
    for _ in range(2):
        criterion(*(arguments() if inputs is None else inputs))
    assert len(criterion._graphs) == 1
    return criterion


@names
@dtypes
@pytest.mark.parametrize("rows", [2, 64, 300, 1024, 4096])
def test_results_are_those_of_the_loss_bit_for_bit(name, dtype, rows):
    loss = getattr(megabatch, name)
    criterion = megabatch.graphed(loss)
    for seed in range(4):
        inputs = arguments(name, rows, dtype, seed)
        found = step(criterion, inputs, 2.0)
        assert same(found, step(loss, inputs, 2.0)) and all(t.isfinite().all() for t in found)
    assert len(criterion._graphs) == 1


@names
@dtypes
@pytest.mark.parametrize("rows", [2, 300, 4096])
def test_value_and_grad_is_a_call_and_its_backward(name, dtype, rows):
    loss = getattr(megabatch, name)
    criterion = megabatch.graphed(loss)
    inputs = [arguments(name, rows, dtype, seed) for seed in range(4)]
    expected = [step(loss, each) for each in inputs]
    found = []
    for each in inputs:
        value, gradients = criterion.value_and_grad(*each)
        found.append([value, *gradients])
    # No later call overwrites what an earlier one returned.
    assert all(same(*each) for each in zip(found, expected, strict=True))
    value = criterion(*inputs[0])
    assert torch.equal(criterion.value_and_grad(*inputs[1])[0], expected[1][0])
    assert same(list(torch.autograd.grad(value, inputs[0])), expected[0][1:]) and len(criterion._graphs) == 1


def test_value_and_grad_of_more_tensors_than_one_launch_copies():
    criterion = megabatch.graphed(megabatch.clip_loss)
    further = {"ids": torch.arange(256, device="cuda") // 2, "weights": torch.linspace(0.5, 2.0, 256, device="cuda")}
    for seed in range(4):
        inputs = arguments(seed=seed)
        value, gradients = criterion.value_and_grad(*inputs, **further)
        assert same([value, *gradients[:3]], step(megabatch.clip_loss, inputs, **further)) and gradients[3:] == (None, None)
    [graph] = criterion._graphs.values()
    assert graph.fused_inputs is None and not any(t.requires_grad for t in graph.inputs)


@names
@pytest.mark.parametrize("symmetric", [True, False])
def test_from_4097_pairs_on_a_graph_computes_in_tiles(name, symmetric, request):
    options = {"symmetric": symmetric} if name == "clip_loss" else {}
    loss = functools.partial(getattr(megabatch, name), **options)
    criterion = megabatch.graphed(loss)
    inputs = [arguments(name, 4100, seed=seed, width=768) for seed in range(3)]
    found, in_one_piece = ([step(each, one) for one in inputs] for each in (criterion, loss))
    assert len(criterion._graphs) == 1
    request.getfixturevalue("tiles_only")
    # The first call of a signature is computed without a graph.
    assert same(found[0], in_one_piece[0]) and not same(found[1], in_one_piece[1])
    for one, in_graph, other in zip(inputs[1:], found[1:], in_one_piece[1:], strict=True):
        assert same(in_graph, step(loss, one))
        assert all((a.float() - b.float()).norm() <= 1e-2 * b.float().norm() for a, b in zip(in_graph, other, strict=True))


def test_a_batch_that_tiles_compute():
    loss = megabatch.clip_loss
    criterion = megabatch.graphed(loss, workspace=2**26)
    for seed in range(3):
        inputs = arguments(rows=9000, seed=seed)
        assert same(step(criterion, inputs), step(loss, inputs, workspace=2**26))


def ids_of(rows: int, seed: int) -> Tensor:
    return torch.randint(rows // 4, (rows,), generator=torch.Generator().manual_seed(seed)).cuda()


OTHERS = {
    "one direction": lambda call, x, y, scale, seed: call(megabatch.clip_loss, x, y, scale, symmetric=False),
    "ids": lambda call, x, y, scale, seed: call(megabatch.clip_loss, x, y, scale, ids=ids_of(len(x), seed)),
    "positives": lambda call, x, y, scale, seed: call(
        megabatch.clip_loss, x, y, scale, ids=ids_of(len(x), seed), duplicates="positive"
    ),
    "weights": lambda call, x, y, scale, seed: call(
        megabatch.clip_loss, x, y, scale, weights=torch.arange(1.0, 1 + len(x), device="cuda").roll(seed)
    ),
    "smoothing": lambda call, x, y, scale, seed: call(megabatch.clip_loss, x, y, scale, label_smoothing=0.1),
    "margin": lambda call, x, y, scale, seed: call(megabatch.clip_loss, x, y, scale, drop_above=0.1),
    "module": lambda call, x, y, scale, seed: call(CLIP_MODULE, x, y, scale),
    "directions": lambda call, x, y, scale, seed: call(
        megabatch.infonce_loss, x, y, scale, directions=("x_to_y", "y_to_x", "x_to_x")
    ),
    "nt_xent": lambda call, x, y, scale, seed: call(megabatch.nt_xent_loss, x, y, scale),
    "dcl": lambda call, x, y, scale, seed: call(megabatch.dcl_loss, x, y, scale),
    "supcon": lambda call, x, y, scale, seed: call(megabatch.supcon_loss, torch.cat((x, y)), ids_of(2 * len(x), seed), scale),
    "distill": lambda call, x, y, scale, seed: call(
        megabatch.distill_loss, x, y, scale, x.detach().roll(1, 1), y.detach(), torch.tensor(30.0, device="cuda")
    ),
    "spread out": lambda call, x, y, scale, seed: call(megabatch.spread_out_loss, x) + 0 * (y.sum() + scale),
    "matryoshka": lambda call, x, y, scale, seed: call(MATRYOSHKA, x, y, scale),
    "matryoshka, widths together": lambda call, x, y, scale, seed: call(MATRYOSHKA_TOGETHER, x, y, scale),
    "late interaction": lambda call, x, y, scale, seed: call(
        megabatch.maxsim_loss, x.view(-1, 4, x.shape[1]), y.view(-1, 4, y.shape[1]), scale
    ),
    "classes": lambda call, x, y, scale, seed: call(megabatch.class_softmax_loss, x, y, ids_of(len(x), seed), scale),
}
CLIP_MODULE = megabatch.ClipLoss(symmetric=False)
MATRYOSHKA = megabatch.matryoshka(megabatch.clip_loss, dims=(64, 24))
# Multiples of 16 have their own kernel on Hopper.
MATRYOSHKA_TOGETHER = megabatch.matryoshka(megabatch.clip_loss, dims=(64, 32))


@dtypes
@pytest.mark.parametrize("use", OTHERS.values(), ids=OTHERS)
def test_other_losses_and_options(use, dtype):
    criteria = {}

    def with_graph(loss, *args, **options):
        criterion = criteria.setdefault(loss, megabatch.graphed(loss))
        return criterion(*args, **options)

    def without(loss, *args, **options):
        return loss(*args, **options)

    def with_seed(call, seed, *tensors):
        return use(call, *tensors, seed)

    for seed in range(4):
        inputs = arguments(dtype=dtype, seed=seed)
        found, expected = (step(functools.partial(with_seed, call, seed), inputs) for call in (with_graph, without))
        assert same(found, expected), seed
    assert [len(criterion._graphs) for criterion in criteria.values()] == [1]


def test_a_graphed_loss_inside_of_another_one():
    inner = megabatch.graphed(megabatch.clip_loss)
    criterion = megabatch.graphed(lambda x, y, scale: inner(x, y, scale) + inner(y, x, scale))
    for seed in range(4):
        inputs = arguments(seed=seed)
        expected = step(lambda x, y, scale: megabatch.clip_loss(x, y, scale) + megabatch.clip_loss(y, x, scale), inputs)
        assert same(step(criterion, inputs), expected)
    # From the first call, which computed the sum without a graph.
    assert len(inner._graphs) == 1


def test_graphs_own_their_cublas_workspaces():
    criterion = megabatch.graphed(megabatch.clip_loss)
    kept, removed = arguments(rows=4096), arguments(rows=4032)
    for inputs in (kept, kept, removed, removed):
        criterion(*inputs)
    expected = step(criterion, kept)
    # The graph that was captured last, and all workspaces that PyTorch keeps, as torch.compile frees them.
    del criterion._graphs[list(criterion._graphs)[-1]]
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((2**22,), 7.0, device="cuda") for _ in range(64)]
    for _ in range(3):
        assert same(step(criterion, kept), expected)
    assert all(bool((t == 7).all()) for t in others)


def test_two_losses_before_one_backward_and_values_that_stay():
    criterion = captured()
    pairs = [arguments(seed=seed) for seed in (1, 2, 3)]
    values = [criterion(*inputs) for inputs in pairs]
    expected = [step(megabatch.clip_loss, inputs) for inputs in pairs]
    assert same([value.detach() for value in values], [each[0] for each in expected])
    sum(values).backward()
    for inputs, each in zip(pairs, expected, strict=True):
        assert same([t.grad for t in inputs], each[1:])
    # The gradients are not overwritten by later calls.
    criterion(*arguments(seed=4)).backward()
    for inputs, each in zip(pairs, expected, strict=True):
        assert same([t.grad for t in inputs], each[1:])


def test_backward_again_through_a_retained_graph():
    criterion = captured()
    first, second = arguments(seed=1), arguments(seed=2)
    expected = step(megabatch.clip_loss, first)[1:]
    value = criterion(*first)
    for _ in range(2):
        assert same(list(torch.autograd.grad(value, first, retain_graph=True)), expected)
        other = criterion(*second)
    assert same(list(torch.autograd.grad(value, first)), expected)
    assert same(list(torch.autograd.grad(other, second)), step(megabatch.clip_loss, second)[1:])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(value, first)


def test_a_change_in_place_and_a_second_derivative_raise():
    criterion = captured()
    inputs = arguments(seed=1)
    gradient = torch.autograd.grad(criterion(*inputs), inputs[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="first derivatives only"):
        gradient.sum().backward()
    value = criterion(*inputs)
    with torch.no_grad():
        inputs[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@names
def test_autocast(name):
    loss = getattr(megabatch, name)
    criterion = megabatch.graphed(loss)
    for seed in range(4):
        inputs = arguments(name, dtype=torch.float32, seed=seed)
        with torch.autocast("cuda", torch.bfloat16):
            found, expected = (call(*inputs) for call in (criterion, loss))
        assert torch.equal(found, expected) and not torch.equal(found, loss(*inputs))
        assert same(list(torch.autograd.grad(found, inputs)), list(torch.autograd.grad(expected, inputs)))
        assert same(step(criterion, inputs), step(loss, inputs))
    assert len(criterion._graphs) == 2


def test_casts_that_autocast_keeps_are_not_captured():
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return torch.logsumexp((x @ y.T).float(), (0, 1))

    criterion = megabatch.graphed(loss)
    with torch.autocast("cuda", torch.bfloat16):
        for seed in range(4):
            inputs = arguments(dtype=torch.float32, seed=seed)[:2]
            assert torch.equal(criterion(*inputs), loss(*inputs))
    assert len(criterion._graphs) == 1


def test_an_incoming_gradient_is_not_rounded_before_the_product():
    criterion = megabatch.graphed(megabatch.clip_loss)
    inputs = [*arguments(seed=1)[:2], torch.tensor(20.0, device="cuda", dtype=torch.bfloat16, requires_grad=True)]
    g = torch.tensor(0.3, device="cuda")
    gradients = step(megabatch.clip_loss, inputs)[1:]
    expected = [(t.float() * g).to(t.dtype) for t in gradients]
    for _ in range(2):
        criterion(*inputs)
    assert same(step(criterion, inputs, 0.3)[1:], expected)
    # Rounding 0.3 to bfloat16 first gives another result.
    assert not same([t * g for t in gradients[:2]], expected[:2])
    # The loss itself multiplies before it rounds to eight bits: three roundings by 2^-9 at most.
    plain = step(megabatch.clip_loss, inputs, 0.3)[1:]
    assert all(torch.allclose(a.float(), b.float(), rtol=2**-7, atol=0) for a, b in zip(expected, plain, strict=True))


def test_a_ragged_last_batch_and_removed_graphs():
    criterion = megabatch.graphed(megabatch.clip_loss, max_graphs=2)
    for rows in (256, 256, 100, 256, 100, 256, 60, 60):
        inputs = arguments(rows=rows, seed=rows)
        assert same(step(criterion, inputs), step(megabatch.clip_loss, inputs))
    assert len(criterion._graphs) == 2
    pending = arguments(rows=60, seed=5)
    value = criterion(*pending)
    with pytest.warns(UserWarning, match="has captured 4 graphs"):
        for rows in (256, 30, 30):
            criterion(*arguments(rows=rows))
    criterion.clear()
    torch.cuda.empty_cache()
    assert same(list(torch.autograd.grad(value, pending)), step(megabatch.clip_loss, pending)[1:])


def test_inputs_that_are_not_contiguous():
    criterion = captured()
    wide = [torch.cat((t, t), 1).detach().t().contiguous().t()[:, 64:].requires_grad_() for t in arguments(seed=1)[:2]]
    scale = torch.full((3,), 20.0, device="cuda")[1].requires_grad_()
    dense = [t.detach().contiguous().requires_grad_() for t in wide]
    assert same(step(criterion, [*wide, scale]), step(megabatch.clip_loss, [*dense, scale])) and len(criterion._graphs) == 1


def test_other_modes_and_frozen_inputs():
    criterion = megabatch.graphed(megabatch.clip_loss)
    x, y, scale = inputs = arguments()
    for context in (torch.inference_mode, torch.no_grad):
        with context():
            expected = megabatch.clip_loss(*inputs)
            assert all(torch.equal(criterion(*inputs), expected) for _ in range(3))
    for _ in range(3):
        values = [loss(x, y.detach(), scale) for loss in (criterion, megabatch.clip_loss)]
        found, expected = (torch.autograd.grad(value, (x, scale)) for value in values)
        assert torch.equal(*values) and same(list(found), list(expected))
    assert len(criterion._graphs) == 2


def test_another_stream_has_its_own_graph():
    criterion = captured()
    stream = torch.cuda.Stream()
    pairs = [arguments(rows=1024, seed=seed) for seed in range(4)]
    expected = [step(megabatch.clip_loss, inputs) for inputs in pairs]
    stream.wait_stream(torch.cuda.current_stream())
    results = []
    for number, inputs in enumerate([*pairs, *pairs, *pairs, *pairs]):
        with torch.cuda.stream(stream if number % 8 > 3 else torch.cuda.current_stream()):
            results.append(step(criterion, inputs))
    torch.cuda.synchronize()
    assert all(same(found, expected[number % 4]) for number, found in enumerate(results))
    assert len(criterion._graphs) == 3


def test_no_synchronisation_after_the_capture():
    criterion = captured()
    inputs = arguments(seed=1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        criterion(*inputs).backward()
        criterion.value_and_grad(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_of_the_caller_contains_the_loss_itself():
    criterion = captured()
    inputs = arguments(seed=1)
    expected = step(megabatch.clip_loss, inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(megabatch.clip_loss, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    g = torch.ones((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = criterion(*inputs)
        found = [value.detach(), *torch.autograd.grad(value, inputs, g)]
    graph.replay()
    assert same(found, expected) and len(criterion._graphs) == 1


@pytest.mark.parametrize("rows", [2, 256])
def test_a_loss_that_waits_for_the_device_is_refused_and_does_no_harm(rows):
    criterion = megabatch.graphed(lambda x, y, scale: megabatch.clip_loss(x, y, scale * (1 + (scale.item() > 1e9))))
    inputs = arguments(rows=rows)
    expected = step(megabatch.clip_loss, inputs)
    assert same(step(criterion, inputs), expected)
    before = torch.cuda.current_stream()
    with pytest.raises(ValueError, match="another thread, waits for the device in each call"):
        criterion(*inputs)
    assert torch.cuda.current_stream() == before and torch.cuda.get_sync_debug_mode() == 0
    assert same(step(megabatch.clip_loss, inputs), expected) and same(step(captured(inputs=inputs), inputs), expected)


def test_random_numbers_are_refused():
    criterion = megabatch.graphed(lambda x, y, scale: megabatch.clip_loss(nn.functional.dropout(x), y, scale))
    criterion(*arguments())
    with pytest.raises(ValueError, match="draws random numbers"):
        criterion(*arguments())


@dtypes
def test_a_training_is_the_plain_one_bit_for_bit(dtype):
    def train(loss) -> list[Tensor]:
        torch.manual_seed(0)
        encoder, log_scale = nn.Linear(64, 48).cuda(), nn.Parameter(torch.tensor(2.0, device="cuda"))
        optimizer = torch.optim.AdamW([*encoder.parameters(), log_scale], lr=0.01)
        values = []
        for number in range(20):
            x, y = (t.to("cuda", torch.float32) for t in embeddings(128 if number % 5 < 4 else 50, width=64, seed=number))
            value = loss(encoder(x).to(dtype), encoder(y).to(dtype), log_scale.exp())
            optimizer.zero_grad()
            (value / 2).backward()
            optimizer.step()
            values.append(value.detach())
        return [*values, *encoder.parameters(), log_scale]

    assert same(train(megabatch.graphed(megabatch.clip_loss)), train(megabatch.clip_loss))
