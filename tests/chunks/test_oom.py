"""A step that runs out of memory, anywhere and on any rank, ends with the parameters of a run that fits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from world import error_of

import megabatch
from megabatch.chunks.oom import is_out_of_memory

pytestmark = pytest.mark.sampled(3)

ROWS = 12


class Limited(nn.Module):
    """A layer that raises an out-of-memory error above this number of rows, in forward, recomputation or backward."""

    def __init__(self, where: str, limit: int) -> None:
        super().__init__()
        self.where, self.limit = where, limit
        self.failures = 0

    def forward(self, x: Tensor) -> Tensor:
        recomputing = torch._C._current_graph_task_id() != -1
        if len(x) > self.limit and self.where == ("recomputation" if recomputing else "forward"):
            self._fail()
        if self.where == "backward" and x.requires_grad:
            x.register_hook(self._check)
        return x * 1

    def _check(self, grad: Tensor) -> None:
        if len(grad) > self.limit:
            self._fail()

    def _fail(self) -> None:
        self.failures += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def model(where: str = "nowhere", limit: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=0.5).eval(), nn.GELU(), Limited(where, limit), nn.Linear(8, 4)
    return nn.Sequential(*layers).double()


def data(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, 6, generator=generator).double(), torch.randn(ROWS, 6, generator=generator).double()


def train(
    tower: nn.Module,
    encode: Callable[[Tensor], Tensor],
    part: slice,
    *,
    group: Any = None,
    repeat: bool = True,
) -> list[Tensor]:
    """Run three steps; return parameters, losses and the remaining gradients."""
    log_scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    optimizer = torch.optim.AdamW([*tower.parameters(), log_scale], lr=0.05)
    losses = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        noise = torch.rand(1).item()
        loss = megabatch.clip_loss(encode(x), encode(y * (1 + noise)), log_scale.exp(), group=group)
        loss.backward()
        return loss.detach()

    take = megabatch.retry_on_oom(step, optimizer, group=group) if repeat else step
    torch.manual_seed(7)
    for seed in range(3):
        x, y = data(seed)
        losses.append(take(x[part], y[part]))
        nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
        optimizer.step()
        # The last gradients stay, to be compared.
        if seed < 2:
            optimizer.zero_grad()
    return [*losses, *tower.parameters(), log_scale, *(p.grad for p in tower.parameters()), log_scale.grad]


def close(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.allclose(x.detach(), y.detach(), rtol=1e-9, atol=1e-11) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("where", ["forward", "recomputation", "backward"])
def test_a_step_that_does_not_fit_is_repeated_with_smaller_chunks(where):
    expected = train(tower := model(), tower, slice(None), repeat=False)
    tower = model(where)
    encode = megabatch.cached(tower, chunk=12)
    with pytest.warns(UserWarning, match="chunk 3 instead of 12") as caught:
        found = train(tower, encode, slice(None))
    assert close(expected, found)
    assert encode.chunk == 3
    assert tower[3].failures == 2, "at 12 and at 6 rows, and never again"
    assert len(caught) == 1


def test_graphs_are_no_longer_kept_before_chunks_get_smaller():
    tower = model("backward")
    encode = megabatch.cached(tower, chunk=3, keep=4)
    tower[3].limit = 2
    with pytest.warns(UserWarning, match="graphs are no longer kept and chunk 1 instead of 3"):
        found = train(tower, encode, slice(None))
    assert close(train(plain := model(), plain, slice(None), repeat=False), found)
    assert tower[3].failures == 2, "with and without graphs kept"


def test_gradients_from_before_the_step_survive_a_retry():
    tower = model("recomputation")
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
    encode = megabatch.cached(tower, chunk=6)

    def step(x: Tensor) -> None:
        (encode(x) ** 2).sum().backward()

    take = megabatch.retry_on_oom(step, optimizer)
    x, y = data(0)
    (tower(x[:2]) ** 2).sum().backward()
    views = [p.grad for p in tower.parameters()]
    with pytest.warns(UserWarning, match="chunk 3 instead of 6"):
        take(y)
    plain = model()
    (plain(x[:2]) ** 2).sum().backward()
    (plain(y) ** 2).sum().backward()
    assert close([p.grad for p in plain.parameters()], [p.grad for p in tower.parameters()])
    assert all(p.grad is view for p, view in zip(tower.parameters(), views, strict=True))


def test_running_statistics_are_those_of_one_attempt():
    def train_norm(where: str) -> list[Tensor]:
        tower = model(where)
        tower[1].train()
        encode = megabatch.cached(tower, chunk=6)
        step = megabatch.retry_on_oom(lambda x: encode(x).sum().backward(), torch.optim.SGD(tower.parameters(), lr=0.1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(data(0)[0])
        return list(tower.buffers())

    # Chunks of 3 rows from the start, and after a failure in the recomputation of 6.
    found, tower = train_norm("recomputation"), model()
    tower[1].train()
    for piece in data(0)[0].split(3):
        tower(piece)
    assert close(list(tower.buffers()), found)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "recomputation"])
def test_what_cannot_shrink_raises_the_error_of_the_device(where):
    tower = model(where, limit=0)
    encode = megabatch.cached(tower, chunk=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            train(tower, encode, slice(None))


@pytest.mark.slow
def test_forward_alone_is_survived_without_the_wrapper():
    tower = model("forward")
    encode = megabatch.cached(tower, chunk=8, keep=1)
    with pytest.warns(UserWarning, match="graphs are no longer kept and chunk 2 instead of 8"):
        z = encode(data(0)[0])
    assert torch.allclose(z, model()(data(0)[0]))


def test_a_retry_draws_the_same_random_numbers_and_updates_buffers_once():
    def go(where: str, chunk: int) -> list[Tensor]:
        tower = model(where)
        tower[1].train()
        tower.insert(0, nn.Dropout(0.5))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(2)
            z = megabatch.cached(tower, chunk=chunk)(data(0)[0])
        z.sum().backward()
        return [z, *(p.grad for p in tower.parameters()), *tower.buffers(), torch.get_rng_state()]

    assert all(map(torch.equal, go("nowhere", 3), go("forward", 12)))


def test_a_failed_forward_leaves_the_chunk_as_it_was():
    tower = model("forward", limit=0)
    encode = megabatch.cached(tower, chunk=8)
    with pytest.raises(torch.OutOfMemoryError):
        encode(data(0)[0])
    assert encode.chunk == 8


def test_a_step_without_chunks_raises_the_error_of_the_device():
    def step() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        megabatch.retry_on_oom(step, torch.optim.SGD(model().parameters()))()


def test_other_errors_are_not_repeated():
    calls = []

    def step() -> None:
        calls.append(1)
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        megabatch.retry_on_oom(step, torch.optim.SGD(model().parameters()))()
    assert calls == [1]


@pytest.mark.parametrize("optimizers, words", [((), "no optimizer"), ((nn.Linear(1, 1),), "must be an optimizer")])
def test_optimizers_are_needed(optimizers, words):
    with pytest.raises(ValueError, match=words):
        megabatch.retry_on_oom(lambda: None, *optimizers)


@pytest.mark.parametrize(
    "error, expected",
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried ..."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB)"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_errors_are_recognised(error, expected):
    assert is_out_of_memory(error) is expected


def real_allocation() -> str:
    try:
        torch.empty(2**60, dtype=torch.uint8)
    except RuntimeError as error:
        return "survivable" if is_out_of_memory(error) else str(error)
    return "it fitted"


def test_the_message_of_the_cpu_allocator_is_recognised():
    assert real_allocation() == "survivable"


def part_of(rank: int, size: int) -> slice:
    return slice(ROWS * rank // size, ROWS * (rank + 1) // size)


def on_one_rank(rank: int, size: int, where: str, culprit: int) -> Any:
    tower = model(where if rank == culprit else "nowhere", limit=2)
    ddp = DDP(tower)
    encode = megabatch.cached(ddp, chunk=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(tower, encode, part_of(rank, size), group=dist.group.WORLD)
    messages = [str(warning.message) for warning in caught if "out of memory" in str(warning.message)]
    return [t.detach() for t in found], encode.chunk, messages


@pytest.mark.parametrize("where", ["forward", "recomputation", "backward"])
@pytest.mark.parametrize("culprit", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_one_rank_that_runs_out_of_memory_makes_all_of_them_repeat(world, where, culprit):
    expected = train(tower := model(), tower, slice(None), repeat=False)
    results = world.run(3, on_one_rank, where, culprit)
    for rank, (found, chunk, messages) in enumerate(results):
        assert close(expected, found), rank
        assert chunk == 2
        speaker = culprit if where == "forward" else 0
        assert len(messages) == (rank == speaker), messages


def exchanges(rank: int, size: int, options: dict[str, Any]) -> Any:
    from test_cached_ranks import counted

    tower = model()
    ddp = DDP(tower, **options)
    encode = megabatch.cached(ddp, chunk=2)
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
    x, _ = data(0)
    step = megabatch.retry_on_oom(lambda x: (encode(x) ** 2).mean().backward(), optimizer, group=dist.group.WORLD)
    for _ in range(3):
        counts = counted(lambda: step(x[part_of(rank, size)]))
        grads = [p.grad.clone() for p in tower.parameters()]
        optimizer.zero_grad()
    return counts, grads


@pytest.mark.parametrize("option", ["gradient_as_bucket_view", "find_unused_parameters"])
def test_gradients_are_exchanged_once_after_the_step(world, option):
    plain = model()
    (plain(data(0)[0]) ** 2).mean().backward()
    for counts, grads in world.run(2, exchanges, {option: True}):
        # One for the gradients, all in one bucket, and one for which of them exist on any rank; DDP may exchange that too.
        assert counts["allreduce_"] == 2 + (option == "find_unused_parameters")
        assert close([p.grad for p in plain.parameters()], grads)


def unused(rank: int, size: int) -> Any:
    """Has a parameter that only one rank uses, and one that none uses."""
    torch.manual_seed(0)
    layers = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("all", "one", "none")})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            return self.layers["all"](x) + (self.layers["one"](x) if rank else 0)

    ddp = DDP(Model(), find_unused_parameters=True)
    encode = megabatch.cached(ddp, chunk=2)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    step = megabatch.retry_on_oom(lambda x: (encode(x) ** 2).mean().backward(), optimizer, group=dist.group.WORLD)
    step(torch.ones(4, 3))
    return {name: layer.weight.grad for name, layer in layers.items()}


def test_parameters_that_some_or_all_ranks_do_not_use(world):
    first, second = world.run(2, unused)
    assert first["none"] is None and second["none"] is None
    assert torch.equal(first["one"], second["one"]) and first["one"].abs().sum() > 0
    assert torch.equal(first["all"], second["all"])


def refusals(rank: int, size: int) -> list[str]:
    sharded = model()
    fully_shard(sharded)
    around = nn.ModuleDict({"tower": model()})
    encode = megabatch.cached(around["tower"], chunk=2)
    around.forward = lambda x: encode(x)
    ddp = DDP(around)
    x = data(0)[0]
    static = megabatch.cached(DDP(model(), static_graph=True), chunk=2)
    messages = []
    for call in (megabatch.cached(sharded, chunk=2), ddp, static):
        optimizer = torch.optim.SGD(around.parameters(), lr=0.1)
        step = megabatch.retry_on_oom(lambda call=call: call(x).sum().backward(), optimizer, group=dist.group.WORLD)
        messages.append(error_of(step))
    messages.append(error_of(megabatch.retry_on_oom(lambda: None, optimizer)))
    return messages


def test_what_cannot_be_repeated_over_ranks_is_refused_with_the_reason(world):
    for sharded, around, static, no_group in world.run(2, refusals):
        assert "leave static_graph out" in static
        assert "one of them cannot drop out" in sharded
        assert "cache the DDP model itself" in around
        assert "group is not given" in no_group


def accumulated(rank: int, size: int, culprit: int) -> Any:
    tower = model("backward" if rank == culprit else "nowhere", limit=1)
    ddp = DDP(tower)
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
    mean = megabatch.accumulate(lambda x: (ddp(x) ** 2).mean(), ddp, chunk=4)
    step = megabatch.retry_on_oom(mean, optimizer, group=dist.group.WORLD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = step(data(0)[0][part_of(rank, size)])
    return value, mean.chunk, [p.grad for p in tower.parameters()]


def test_accumulation_is_repeated_too(world):
    plain = model()
    expected = (plain(data(0)[0]) ** 2).mean()
    expected.backward()
    for value, chunk, grads in world.run(2, accumulated, 1):
        assert torch.allclose(value, expected) and chunk == 1
        assert close([p.grad for p in plain.parameters()], grads)
