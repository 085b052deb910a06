"""`megabatch env --measure`: the speed of this machine's device, measured in a few seconds, for `megabatch plan --rates`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import date

import torch
import torch.distributed as dist
from torch import nn

from .. import host_memory
from ..config import Compute
from ..costs.counting import count_work
from ..costs.rates import Rates
from ..environment import device_memory, device_name
from ..training import distributed
from .timing import seconds_each, seconds_of

MIB = 2**20
# Seconds for which each rate is measured.
SECONDS = 0.25
QUICK_SECONDS = 0.1
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def measure_rates(device: torch.device, group: dist.ProcessGroup | None = None, seconds: float = SECONDS) -> Rates:
    """Return the rates of a device; with a group, whose ranks must all call this, also of the exchange between them."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    return Rates(
        device=device_name(device),
        kind=device.type,
        memory=_memory(device),
        gpus=1 if module is None else module.device_count(),
        products=_products(device, seconds),
        bandwidth=_bandwidth(device, seconds),
        copy=_copy(device, seconds) if hasattr(module, "get_device_properties") else None,
        link=None if group is None or dist.get_world_size(group) == 1 else _link(device, group, seconds),
        ranks=1 if group is None else dist.get_world_size(group),
        torch=str(torch.__version__),
        date=date.today().isoformat(),
        host=host_seconds(device, seconds),
    )


def measure_here(seconds: float = SECONDS) -> Rates:
    """Return the rates of this process's device; if torchrun started it, also of the exchange between ranks."""
    with distributed.ranks(Compute()) as ranks:
        return measure_rates(ranks.device, ranks.group, seconds)


def quick_rates() -> Rates | None:
    """Return the rates of the device that a plan for this machine means, in about two seconds; None if they cannot be measured."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return measure_rates(device, seconds=QUICK_SECONDS)
    except (ValueError, RuntimeError):
        # The memory of the machine cannot be read, or the device is taken by another program: the plan states its assumption.
        return None


def _memory(device: torch.device) -> int:
    memory = device_memory(device)
    if memory is None:
        raise ValueError(f"the memory of this machine cannot be read, since {host_memory.REMEDY}")
    return memory


def _products(device: torch.device, seconds: float) -> dict[str, float]:
    """Return the FLOP/s of square matrix products by precision."""
    rates = {}
    for precision, dtype in DTYPES.items():
        if _has(device, precision):
            with _tensor_cores(precision == "tf32") if device.type == "cuda" else nullcontext():
                rates[precision] = _product(device, dtype, seconds)
    return rates


def _product(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Return the FLOP/s of the largest product that can be repeated in that time.

    On a CPU some precisions are thousands of times slower than others, so no single size suits all.
    """
    side, most = (64, 1024) if device.type == "cpu" else (1024, 8192)
    while True:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))

        def multiply(a: torch.Tensor = a, b: torch.Tensor = b) -> torch.Tensor:
            return a @ b

        # The first call also initializes the library, which takes longer than any product.
        seconds_of(multiply, device, 1)
        if side == most or seconds_of(multiply, device, 2) > seconds / 16:
            return 2 * side**3 / seconds_each(multiply, device, seconds)
        side *= 2


def _has(device: torch.device, precision: str) -> bool:
    if device.type == "cuda":
        # Below 8.0 tf32 does not exist, and bf16 is emulated.
        new = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
        return precision in ("fp32", "fp16") or new or (precision == "bf16" and torch.version.hip is not None)
    # fp16 on a CPU is for inference; training does not use it.
    return precision in ("fp32", "bf16") if device.type == "cpu" else precision != "tf32"


@contextmanager
def _tensor_cores(on: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if on else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _bandwidth(device: torch.device, seconds: float) -> float:
    size = (64 if device.type == "cpu" else 512) * MIB
    a, b = (torch.ones(size // 4, device=device) for _ in range(2))
    return 2 * size / seconds_each(lambda: b.copy_(a), device, seconds)


def _copy(device: torch.device, seconds: float) -> float:
    size = 256 * MIB
    source, target = torch.ones(size // 4).pin_memory(), torch.empty(size // 4, device=device)
    return size / seconds_each(lambda: target.copy_(source, non_blocking=True), device, seconds)


def host_seconds(device: torch.device, seconds: float) -> float:
    """Return the host's seconds per operation, from a transformer so small that the device always waits for the host."""
    width, length = 16, 4
    model = nn.TransformerEncoderLayer(width, 2, width, batch_first=True, device=device)
    inputs = torch.zeros(1, length, width, device=device)
    counted = nn.TransformerEncoderLayer(width, 2, width, batch_first=True)
    work = count_work(counted, lambda rows: torch.zeros(rows, length, width), device="cpu" if device.type == "cpu" else "cuda")

    def step() -> None:
        torch.autograd.grad(model(inputs).sum(), list(model.parameters()))

    step()
    return seconds_each(step, device, seconds) / (work.forward.operations + work.backward.operations)


def _link(device: torch.device, group: dist.ProcessGroup, seconds: float) -> float:
    size, ranks = (16 if device.type == "cpu" else 256) * MIB, dist.get_world_size(group)
    buffer = torch.zeros(size // 4, device=device)

    def exchange() -> None:
        dist.all_reduce(buffer, group=group)

    # All ranks must call it equally often, so the number of calls must not depend on their clocks.
    seconds_of(exchange, device, 2)
    each = seconds_of(exchange, device, max(2, round(10 * seconds)))
    return 2 * (ranks - 1) / ranks * size / each
