"""accumulate() gives the gradient of the mean over the whole batch, for any number of chunks and ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_cached_ranks import counted
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from world import error_of

import megabatch

pytestmark = pytest.mark.sampled(3)

CLASSES = 5
IGNORED = -100


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, CLASSES)).double()


def data(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator).double(), torch.randint(CLASSES, (rows,), generator=generator)


def tokens(rows: int, length: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return sequences with different numbers of labels; the first row and every fifth have none."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, 6, generator=generator).double()
    labels = torch.randint(CLASSES, (rows, length), generator=generator)
    ends = torch.randint(1, length + 1, (rows, 1), generator=generator) * (torch.arange(rows)[:, None] % 5 != 0)
    return x, labels.masked_fill(torch.arange(length) >= ends, IGNORED)


def mean_loss(net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, labels: F.cross_entropy(net(x).flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


def labelled(x: Tensor, labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()


def expected(x: Tensor, labels: Tensor) -> list[Tensor]:
    net = model()
    loss = mean_loss(net)(x, labels)
    loss.backward()
    return [loss, *(p.grad for p in net.parameters())]


def close(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-9, atol=1e-12) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1024])
def test_any_number_of_chunks_gives_the_large_batch(count):
    x, y = data(1024)
    net = model()
    loss = megabatch.accumulate(mean_loss(net), net, chunk=-(-1024 // count))(x, y)
    assert not loss.requires_grad
    assert close(expected(x, y), [loss, *(p.grad for p in net.parameters())])


@pytest.mark.parametrize("chunk", [1, 2, 3, 10, 26, 100])
def test_tokens_have_equal_weights_in_all_chunks(chunk):
    x, labels = tokens(26)
    net = model()
    loss = megabatch.accumulate(mean_loss(net), net, chunk=chunk, count=labelled)(x, labels)
    assert close(expected(x, labels), [loss, *(p.grad for p in net.parameters())])


def test_chunks_without_terms_are_left_out():
    """A mean over 0 terms, written by hand, has NaN gradients."""
    x, labels = tokens(26)
    net = model()

    def by_hand(x: Tensor, labels: Tensor) -> Tensor:
        mask = labels != IGNORED
        every = F.cross_entropy(net(x).flatten(0, -2), labels.clamp(min=0).flatten(), reduction="none")
        return (every * mask.flatten()).sum() / mask.sum()

    loss = megabatch.accumulate(by_hand, net, chunk=1, count=labelled)(x, labels)
    assert close(expected(x, labels), [loss, *(p.grad for p in net.parameters())])


def test_the_mean_of_means_differs():
    """The classic mistake: chunks with few tokens have the same weight as those with many."""
    x, labels = tokens(26)
    net = model()
    loss = megabatch.accumulate(mean_loss(net), net, chunk=13, check=False)(x, labels)
    assert not close(expected(x, labels), [loss, *(p.grad for p in net.parameters())])


def test_micro_batches_of_different_lengths():
    """Each padded to its own length, as collators do."""
    x, labels = tokens(12)
    lengths = (3, 7, 5)
    pieces, long_x, long_labels = [], [], []
    for index, length in enumerate(lengths):
        part = slice(4 * index, 4 * index + 4)
        pieces.append(((x[part, :length],), {"labels": labels[part, :length]}))
        long_x.append(x[part])
        long_labels.append(labels[part].masked_fill(torch.arange(7) >= length, IGNORED))
    net = model()
    loss = megabatch.accumulate(mean_loss(net), net, chunk=4, count=labelled).over(pieces)
    assert close(expected(torch.cat(long_x), torch.cat(long_labels)), [loss, *(p.grad for p in net.parameters())])


def test_gradients_add_to_those_there_are_and_one_step_follows():
    """Clipping, the update, the schedule and weight averaging run once afterwards, as after any backward."""
    x, y = data(32)
    nets = model(), model()
    averages = [
        torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)) for net in nets
    ]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in nets]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    steps = [megabatch.accumulate(mean_loss(nets[0]), nets[0], chunk=5), lambda x, y: mean_loss(nets[1])(x, y).backward()]
    for seed in range(3):
        x, y = data(32, seed)
        for net, step, optimizer, schedule, average in zip(nets, steps, optimizers, schedules, averages, strict=True):
            step(x, y)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            average.update_parameters(net)
            optimizer.zero_grad()
    assert close(*[[*net.parameters(), *average.parameters()] for net, average in zip(nets, averages, strict=True)])


def test_a_scaler_scales():
    x, y = data(10)
    net = model()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loss = megabatch.accumulate(mean_loss(net), net, chunk=4, scaler=scaler)(x, y)
    assert close(expected(x, y), [loss, *(p.grad / 8 for p in net.parameters())])


def contrastive(net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: megabatch.clip_loss(net(x), net(y), 4.0, group=None)


def by_hand(net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: F.cross_entropy(4 * net(x) @ net(y).T, torch.arange(len(x)))


def sigmoid(net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: megabatch.siglip_loss(net(x), net(y), 4.0, -4.0, group=None)


@pytest.mark.parametrize("loss, words", [(contrastive, "a contrastive loss inside"), (sigmoid, "a contrastive loss inside")])
@pytest.mark.parametrize("check", [True, False])
def test_our_contrastive_losses_are_refused_with_the_reason(loss, words, check):
    x, _ = data(16)
    net = model()
    with pytest.raises(ValueError, match=rf"{words}.*adds no negatives.*cached"):
        megabatch.accumulate(loss(net), net, chunk=4, check=check)(x, x.flip(0))


def test_other_contrastive_losses_are_detected():
    x, _ = data(16)
    net = model()
    with pytest.raises(ValueError, match=r"not a mean over samples.*adds no negatives"):
        megabatch.accumulate(by_hand(net), net, chunk=4)(x, x.flip(0))
    assert all(p.grad is None for p in net.parameters())
    megabatch.accumulate(by_hand(net), net, chunk=4, check=False)(x, x.flip(0))


def test_outside_of_it_the_losses_work_again():
    x, _ = data(16)
    net = model()
    with pytest.raises(ValueError):
        megabatch.accumulate(contrastive(net), net, chunk=4)(x, x)
    contrastive(net)(x, x).backward()


def test_the_check_has_no_side_effects():
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES)).double()
    net[1].eval()
    calls = []
    loss = mean_loss(net)

    def counting(x: Tensor, y: Tensor) -> Tensor:
        calls.append((len(x), net.training, net[1].training))
        return loss(x, y)

    step = megabatch.accumulate(counting, net, chunk=6)
    torch.manual_seed(0)
    step(*data(12))
    state = torch.get_rng_state()
    assert calls == [(4, False, False), (2, False, False), (2, False, False), (6, True, False), (6, True, False)]
    calls.clear()
    step(*data(12))
    assert calls == [(6, True, False), (6, True, False)], "only once"
    net.zero_grad()
    torch.manual_seed(0)
    megabatch.accumulate(counting, net, chunk=6, check=False)(*data(12))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    "loss, words",
    [
        (lambda net: lambda x, y: net(x), r"a tensor of shape \(4, 5\): must be one number"),
        (lambda net: lambda x, y: 1.0, "returned a float"),
    ],
)
def test_a_loss_must_be_one_number(loss, words):
    net = model()
    for check in (True, False):
        with pytest.raises(ValueError, match=words):
            megabatch.accumulate(loss(net), net, chunk=4, check=check)(*data(8))


def test_a_batch_without_terms_is_refused():
    net = model()
    x, labels = tokens(4)
    with pytest.raises(ValueError, match="0 terms"):
        megabatch.accumulate(mean_loss(net), net, chunk=2, count=labelled)(x, torch.full_like(labels, IGNORED))


def test_bad_arguments_are_named():
    net = model()
    with pytest.raises(ValueError, match="chunk=0"):
        megabatch.accumulate(mean_loss(net), net, chunk=0)
    with pytest.raises(ValueError, match="model is a function"):
        megabatch.accumulate(mean_loss(net), mean_loss(net), chunk=2)


def part(rank: int, size: int, tensors: tuple[Tensor, ...], last: str) -> list[Tensor]:
    """Return unequal shards; the last of several ranks may hold only sequences without labels, or nothing."""
    rows = len(tensors[0])
    cuts = [0, *(rows * (r + 1) // size - (r + 1 < size) for r in range(size))]
    x, labels = (t[cuts[rank] : cuts[rank + 1]] for t in tensors)
    if size > 1 and rank == size - 1:
        x, labels = (x[:0], labels[:0]) if last == "no rows" else (x, labels)
        labels = torch.full_like(labels, IGNORED) if last == "no labels" else labels
    return [x, labels]


def sharded_step(rank: int, size: int, wrapper: str, chunk: int, last: str) -> Any:
    net = model()
    if wrapper == "fsdp":
        fully_shard(net[0])
        wrapped = fully_shard(net)
    else:
        wrapped = DDP(net, find_unused_parameters=wrapper == "unused")
    step = megabatch.accumulate(mean_loss(wrapped), wrapped, chunk=chunk, count=labelled)
    inputs = part(rank, size, tokens(26), last)
    step(*inputs)
    net.zero_grad()
    values: list[Tensor] = []
    counts = counted(lambda: values.append(step(*inputs)))
    return values[0], [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in net.parameters()], counts


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("wrapper", ["ddp", "unused", "fsdp"])
@pytest.mark.parametrize("last", ["rows", "no labels", "no rows"])
def test_ranks_give_the_gradient_of_all_tokens_and_exchange_it_once(world, size, wrapper, last):
    x, labels = map(torch.cat, zip(*(part(rank, size, tokens(26), last) for rank in range(size)), strict=True))
    want = expected(x, labels)
    exchanges = set()
    for chunk in (3, 100):
        for loss, grads, counts in world.run(size, sharded_step, wrapper, chunk, last):
            assert close(want, [loss, *grads])
            exchanges.add(counts["_reduce_scatter_base_" if wrapper == "fsdp" else "allreduce_"])
    # FSDP2 on one rank has nothing to exchange.
    assert len(exchanges) == 1 and (min(exchanges) > 0 or size == 1), "whatever the number of chunks"


class Switch(nn.Module):
    """Uses one of two layers, depending on its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, CLASSES), nn.Linear(6, CLASSES)]).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[int(x[0, 0] > 0)](x)


def switched(rank: int, size: int) -> list[Tensor]:
    net = Switch()
    ddp = DDP(net, find_unused_parameters=True)
    x, y = data(8, seed=rank)
    x[:4, 0], x[4:, 0] = 1.0, -1.0
    megabatch.accumulate(mean_loss(ddp), ddp, chunk=4, check=False)(x, y)
    return [p.grad for p in net.parameters()]


def test_parameters_that_only_an_early_chunk_uses_are_exchanged_too(world):
    first, second = world.run(2, switched)
    assert close(first, second)
    assert all(grad.abs().sum() > 0 for grad in first)


def nothing_on_one_rank(rank: int, size: int) -> str:
    ddp = DDP(model())
    step = megabatch.accumulate(mean_loss(ddp), ddp, chunk=4)
    return error_of(lambda: step.over([] if rank else [(data(8), {})]))


def test_a_rank_without_micro_batches_is_an_error_on_all(world):
    assert all("a rank has no micro-batch at all" in message for message in world.run(2, nothing_on_one_rank))


def unwrapped(rank: int, size: int) -> list[Any]:
    net = model()
    x, y = data(8)
    message = error_of(lambda: megabatch.accumulate(mean_loss(net), net, chunk=4)(x, y))
    alone = megabatch.accumulate(mean_loss(net), net, chunk=4, group=None)(x, y)
    return [message, alone]


def test_a_model_without_a_wrapper_needs_the_group(world):
    want = expected(*data(8))[0]
    for message, alone in world.run(2, unwrapped):
        assert "in no wrapper that exchanges gradients" in message
        assert torch.allclose(alone, want)
