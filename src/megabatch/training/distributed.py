"""The ranks of a run, as torchrun started them: device, process group, and the wrappers that share a model among them."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from ..config import Compute
from .signals import Stopped

TIMEOUT = timedelta(minutes=30)
# Seconds between two looks at whether the launcher is still there.
LOOK = 0.5
# What gloo, the store and sockets say of a rank that is gone; torch raises it as a plain RuntimeError. Other errors of a
# collective, as buffers of different sizes, do not mean that.
LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)( by peer)?|broken pipe|socket (is )?closed|timed out|timeout",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among those of the run. `group` is None for a process alone."""

    device: torch.device
    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, *numbers: float) -> list[float]:
        """The numbers added up over ranks, in fp64 on the host."""
        if self.group is None:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(sums, group=self.group)
        return sums.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, in the order of ranks."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_rows(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, in the order of ranks, on the host."""
        return torch.cat(self.gather(rows.detach().cpu()))

    def wait(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)


@contextmanager
def ranks(compute: Compute) -> Iterator[Ranks]:
    """The ranks of the process group there is, or that torchrun's variables announce; without either, this process alone."""
    device = _device(compute.device, int(os.environ.get("LOCAL_RANK", "0")))
    ours = "RANK" in os.environ and not dist.is_initialized()
    # Before the ranks meet: if the launcher is gone by then, they do not.
    launcher = os.getppid()
    if ours:
        _join(device)
    elif compute.sharding == "fsdp2" and not dist.is_initialized():
        raise ValueError('compute.sharding is "fsdp2": it shards over ranks; start it with torchrun -m megabatch train …')
    threads = torch.get_num_threads()
    if compute.threads is not None:
        torch.set_num_threads(compute.threads)
    grouped = dist.is_initialized()
    ended = threading.Event()
    if ours and "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_stop_with_launcher, args=(launcher, ended), daemon=True).start()
    try:
        yield Ranks(device, dist.group.WORLD, dist.get_rank(), dist.get_world_size()) if grouped else Ranks(device)
    except RuntimeError as error:
        if grouped and is_lost_rank(error):
            raise _lost(error) from error
        raise
    finally:
        ended.set()
        torch.set_num_threads(threads)
        if ours:
            # Whoever lets go of a gloo group last, be it the garbage collector, waits for its thread under the interpreter's lock,
            # and the thread may be waiting for that lock, to let go of tensors. So nobody is: the group ends with the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
            dist.destroy_process_group()


def _stop_with_launcher(launcher: int, ended: threading.Event) -> None:
    """Send this process SIGTERM when its parent, torchrun, is gone, as torchrun does when it is told to end.

    A torchrun that is killed cannot tell its ranks. They would go on, seen by nobody, and keep the folder of the run.
    """
    while not ended.wait(LOOK):
        if os.getppid() != launcher:
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _lost(error: RuntimeError) -> Stopped:
    """Return the sentence on a rank that is gone; what went wrong there, that rank has said itself."""
    found = LOST.search(str(error))
    reason = " ".join(str(error).split())[:200] if found is None else found[0]
    return Stopped(
        f"rank {os.environ.get('RANK', '0')}: another rank has died or left, and its own output says why; the same command goes on"
        f" from the last checkpoint ({reason})",
        1,
    )


def is_lost_rank(error: BaseException) -> bool:
    """Return whether an exception says that another rank cannot be reached any more."""
    lost = (dist.DistNetworkError, dist.DistStoreError, dist.DistBackendError) if dist.is_available() else ()
    return isinstance(error, lost) or (isinstance(error, RuntimeError) and LOST.search(str(error)) is not None)


def _join(device: torch.device) -> None:
    """Makes the process group of the ranks that torchrun has started."""
    # The host's exchanges (counts, keys, stop signs) go through gloo, so that they need not wait for the device.
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    try:
        _meet(backend, device)
    except RuntimeError as error:
        if is_lost_rank(error):
            raise _lost(error) from error
        raise


def _meet(backend: str, device: torch.device) -> None:
    store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # On one node torchrun keeps its store over a restart, with the addresses of those that died. (Several nodes get a new one,
        # and may count restarts differently.)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]
    at = None if device.type == "cpu" else device
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT, device_id=at)


def share(module: nn.Module, compute: Compute, ranks: Ranks) -> nn.Module:
    """The module as the ranks train it: copied on each (DDP), or sharded over them in place (FSDP2); alone, or locked, as it is."""
    if compute.sync_batchnorm and ranks.group is not None:
        if ranks.device.type == "cpu":
            raise ValueError("compute.sync_batchnorm is true: PyTorch synchronises batch norm on GPUs only; leave it out on a CPU")
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module, ranks.group)
    if ranks.group is None or not any(p.requires_grad for p in module.parameters()):
        return module
    if compute.sharding == "fsdp2":
        return module
    devices = None if ranks.device.type == "cpu" else [ranks.device]
    return DistributedDataParallel(module, device_ids=devices, process_group=ranks.group)


def shard(module: nn.Module, compute: Compute, ranks: Ranks) -> None:
    """Shards the weights of a module over the ranks, in place, where that is asked for: blocks by themselves, so that one at a
    time is gathered, then the rest."""
    if ranks.group is None or compute.sharding != "fsdp2":
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for block in _blocks(module):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)


def autocast(compute: Compute, device: torch.device) -> Callable[[], torch.autocast]:
    """What to encode under, made anew for each use."""
    dtypes = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = dtypes[compute.precision]
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The members of the longest list of modules inside: the layers of a transformer, the stages of a convolutional network."""
    lists = [m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1]
    longest = max(lists, key=len, default=None)
    return [block for block in longest if any(True for _ in block.parameters())] if longest is not None else []


def _device(asked: str | None, local_rank: int) -> torch.device:
    if asked is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        asked = "cpu" if accelerator is None else accelerator.type
    try:
        device = torch.device(asked)
        if device.type == "cpu":
            return torch.device("cpu")
        module = torch.get_device_module(device)
        if not module.is_available():
            raise ValueError(f'compute.device is {asked!r}: there is none here; leave it out, or say "cpu"')
    except RuntimeError as error:
        raise ValueError(f'compute.device is {asked!r}: not a device of PyTorch ({error}); say "cpu" or "cuda"') from None
    if device.index is None and device.type != "mps":
        device = torch.device(device.type, local_rank % module.device_count())
        module.set_device(device)
    return device
