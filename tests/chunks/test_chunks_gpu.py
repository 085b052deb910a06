"""cached() on a CUDA device: generator, autocast, compiler and memory."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megabatch
from megabatch import config
from megabatch.chunks.oom import release
from megabatch.chunks.rng_state import ForwardState
from megabatch.training.build import assemble
from megabatch.training.distributed import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 2**20


def tower(dropout: float = 0.3, width: int = 64, depth: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Dropout(dropout), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 32)).cuda()


def in_chunks(encoder: Callable[..., Any], *, chunk: int, device: Any = None) -> Callable[..., Any]:
    def call(x: Tensor) -> Tensor:
        pieces = []
        for piece in x.split(chunk):
            torch.clear_autocast_cache()
            pieces.append(encoder(piece if device is None else piece.to(device)))
        return torch.cat(pieces)

    return call


def step(model: nn.Module, encode: Callable[..., Any], x: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cuda", dtype or torch.float32, enabled=dtype is not None):
        z = encode(x)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    scaler.scale(megabatch.clip_loss(z, z.roll(1, 0), 5.0)).backward()
    return [z.detach(), *(p.grad.clone() for p in model.parameters()), torch.cuda.get_rng_state()]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", ["device", "pinned", "pinned bytes", "pageable"])
@pytest.mark.parametrize("keep", [0, 1, "auto"])
def test_dropout_is_replayed_wherever_the_inputs_are(dtype, place, keep):
    model = tower()
    x = torch.randn(37, 64)
    encoder: Callable[[Tensor], Tensor] = model
    if place == "pinned bytes":
        x = torch.randint(256, (37, 64), dtype=torch.uint8)

        def encoder(pixels: Tensor) -> Tensor:
            return model(pixels.float() / 127.5 - 1)

    x = x.cuda() if place == "device" else x.pin_memory() if place.startswith("pinned") else x
    device = None if place == "device" else "cuda"
    expected = step(model, in_chunks(encoder, chunk=8, device=device), x, dtype)
    found = step(model, megabatch.cached(encoder, chunk=8, keep=keep, device=device), x, dtype)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("place", ["device", "pinned"])
def test_the_case_above_needs_the_replay(place, monkeypatch):
    @contextmanager
    def forgetful(self: ForwardState) -> Iterator[None]:
        yield

    monkeypatch.setattr(ForwardState, "replayed", forgetful)
    model, x = tower(), torch.randn(37, 64)
    x = x.cuda() if place == "device" else x.pin_memory()
    device = None if place == "device" else "cuda"
    expected = step(model, in_chunks(model, chunk=8, device=device), x, None)
    found = step(model, megabatch.cached(model, chunk=8, device=device, check=False), x, None)
    assert not all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_an_encoder_that_moves_its_inputs_itself_is_replayed_too():
    model, x = tower(), torch.randn(37, 64)
    expected = step(model, in_chunks(model, chunk=8, device="cuda"), x, None)
    found = step(model, megabatch.cached(lambda x: model(x.cuda()), chunk=8), x, None)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_cuda_generator_of_the_encoder_is_replayed():
    model, x = tower(), torch.randn(37, 64, device="cuda")
    found = []
    for wrap in (in_chunks, megabatch.cached):
        generator = torch.Generator("cuda").manual_seed(3)

        def encoder(x: Tensor, generator: torch.Generator = generator) -> Tensor:
            return model(x + torch.randn(x.shape, device="cuda", generator=generator))

        found.append([*step(model, wrap(encoder, chunk=8), x, None), torch.rand(1, device="cuda", generator=generator)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_encoder_that_is_not_repeatable_raises_at_the_end_of_backward(dtype):
    model, x = tower(), torch.randn(37, 64, device="cuda")
    calls = []

    def counting(x: Tensor) -> Tensor:
        calls.append(1)
        return model(x) * len(calls)

    with pytest.raises(RuntimeError, match="not repeatable"):
        step(model, megabatch.cached(counting, chunk=8), x, dtype)


def test_a_pinned_input_that_is_overwritten_before_backward_is_an_error():
    model, x = tower(), torch.randn(37, 64).pin_memory()
    z = megabatch.cached(model, chunk=8, device="cuda")(x)
    torch.cuda.synchronize()
    x.zero_()
    with pytest.raises(RuntimeError, match="modified in place"):
        z.sum().backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_compiled_with_inductor(dtype):
    model, x = tower(), torch.randn(32, 64, device="cuda")
    compiled = torch.compile(model, dynamic=False)
    expected = step(model, in_chunks(compiled, chunk=8), x, dtype)
    found = step(model, megabatch.cached(compiled, chunk=8, keep=1), x, dtype)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)


def peak_mib(rows: int, chunk: int, keep: Any = 0) -> float:
    model = tower(depth=8, width=1024)
    x = torch.randn(rows, 1024).pin_memory()
    encode = megabatch.cached(model, chunk=chunk, keep=keep, device="cuda")
    for _ in range(2):
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        z = encode(x)
        megabatch.clip_loss(z, z.roll(1, 0), 5.0, workspace=MIB).backward()
        del z
        torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def test_memory_is_set_by_the_chunk_and_not_by_the_batch():
    whole, half, small = (peak_mib(8192, chunk) for chunk in (8192, 2048, 512))
    assert whole > 2.5 * half > 2.5 * 1.5 * small
    # Embeddings of 32 numbers, their gradients and the temporaries of the loss.
    assert peak_mib(65536, 512) < small + 65536 * 32 * 4 * 12 / MIB


@contextmanager
def use(total: float) -> Iterator[None]:
    """Limit this process to this number of MiB above its present use."""
    release()
    _, whole = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + total * MIB) / whole)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def test_auto_keeps_more_with_more_memory(monkeypatch):
    monkeypatch.setattr("megabatch.chunks.keep.SPARE", 0.0005)
    kept = []
    for total in (300, 450, 3000):
        model = tower(depth=8, width=1024)
        x = torch.randn(8192, 1024).pin_memory()
        encode = megabatch.cached(model, chunk=512, keep="auto", device="cuda")
        # What was allocated before must not count.
        torch.empty(2**32, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        with use(total):
            for _ in range(3):
                model.zero_grad()
                encode(x).square().mean().backward()
        kept.append(encode.kept)
    assert 0 < kept[0] < kept[1] < kept[2] == 16, kept


def test_a_device_that_is_really_out_of_memory_is_survived():
    x = torch.randn(4096, 1024).pin_memory()

    def train(chunk: int, total: float | None) -> tuple[list[Tensor], int]:
        model = tower(dropout=0.0, depth=12, width=1024)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        encode = megabatch.cached(model, chunk=chunk, device="cuda")

        def once() -> None:
            z = encode(x)
            megabatch.clip_loss(z, z.roll(1, 0), 5.0, workspace=MIB).backward()

        repeated = megabatch.retry_on_oom(once, optimizer)
        with use(total) if total else warnings.catch_warnings():
            for _ in range(2):
                repeated()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()], encode.chunk

    expected, _ = train(256, None)
    # Where other processes use the device too, half of the chunk may not fit either.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, chunk = train(4096, 250)
    assert chunk < 4096 and any("instead of 4096" in str(warning.message) for warning in caught)
    for a, b in zip(expected, found, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-5)


def test_keep_auto_that_kept_too_much_is_corrected(monkeypatch):
    monkeypatch.setattr("megabatch.chunks.keep.free_bytes", lambda device: 2**50)
    model = tower(depth=12, width=1024)
    x = torch.randn(4096, 1024).pin_memory()
    encode = megabatch.cached(model, chunk=256, keep="auto", device="cuda")
    encode(x).square().mean().backward()
    with use(250), pytest.warns(UserWarning, match="graphs are no longer kept"):
        encode(x).square().mean().backward()
    assert encode.kept == 0 and encode.chunk == 256


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_nothing_waits_for_the_device():
    model, x = tower(), torch.randn(32, 64, device="cuda")
    encode = megabatch.cached(model, chunk=8, keep=1)
    run = functools.partial(step, model, encode, x, torch.bfloat16)
    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        z = encode(x)
        z.square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("good_passes", [0, 1])
def test_an_encoder_that_is_not_repeatable_is_found_without_waiting(good_passes):
    calls = []

    def encoder(x):
        calls.append(None)
        # A pass runs two chunks forward and both again in backward.
        return (x * (1 if len(calls) <= 4 * good_passes else len(calls))).square()

    encode = megabatch.cached(encoder, chunk=8, keep=0)
    x = torch.randn(16, 64, device="cuda", requires_grad=True)
    for _ in range(good_passes):
        encode(x).sum().backward()
    with pytest.raises(RuntimeError, match="is not repeatable"):
        encode(x).sum().backward()
        # The host waits for the first pass; the result of a later one is read when it has arrived.
        assert good_passes
        torch.cuda.synchronize()
        encode(x)


def test_the_host_does_not_wait_for_a_batch_of_the_loader():
    settings = ["batch.size=64", "batch.chunk=8", "data.workers=0", "schedule.steps=2", "compute.device=cuda"]
    run = config.build(config.EMBEDDED, settings)
    with ranks(run.compute) as here:
        parts = assemble(run, here)
        batch = next(parts.shuffled().batches([(0, 64)]))
        parts.objective.step(batch)
        torch.cuda.synchronize()
        busy = torch.cuda.Event()
        torch.cuda._sleep(2**32)
        busy.record()
        parts.objective.encode_x(batch.x)
        assert batch.x.is_pinned() and not busy.query()
        torch.cuda.synchronize()
