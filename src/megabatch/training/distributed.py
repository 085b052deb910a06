"""The ranks of a run, as torchrun started them: device, process group, and the wrappers that replicate or shard a model."""

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
from ..towers.repeats import sharded_blocks
from .signals import Stopped

TIMEOUT = timedelta(minutes=30)
# Seconds between two checks whether the launcher is still running.
LOOK = 0.5
# Messages of gloo, the store and sockets about a rank that has died, which torch raises as a plain RuntimeError. Other errors of a
# collective, such as buffers of different sizes, do not mean that.
LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)( by peer)?|broken pipe|socket (is )?closed|timed out|timeout",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run. `group` is None for a single process."""

    device: torch.device
    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, *numbers: float) -> list[float]:
        """Return the sums over ranks, computed in fp64 on the host."""
        if self.group is None:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(sums, group=self.group)
        return sums.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks, in rank order, on the host."""
        return torch.cat(self.gather(rows.detach().cpu()))

    def wait(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)


@contextmanager
def ranks(compute: Compute) -> Iterator[Ranks]:
    """Yield the ranks of the existing process group, or of the one that torchrun's variables describe; else this process alone."""
    device = _device(compute.device, int(os.environ.get("LOCAL_RANK", "0")))
    is_ours = "RANK" in os.environ and not dist.is_initialized()
    # Read before the rendezvous, which fails if the launcher has ended by then.
    launcher = os.getppid()
    if is_ours:
        _join(device)
    elif compute.sharded and not dist.is_initialized():
        raise ValueError(
            f'compute.sharding is "{compute.sharding}": it shards over ranks; start the run with torchrun -m megabatch train …'
        )
    threads = torch.get_num_threads()
    if compute.threads is not None:
        torch.set_num_threads(compute.threads)
    grouped = dist.is_initialized()
    ended = threading.Event()
    if is_ours and "TORCHELASTIC_RUN_ID" in os.environ:
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
        if is_ours:
            # Dropping the last reference to a gloo group waits for the group's thread while holding the GIL, and the thread may be
            # waiting for the GIL to free tensors. An extra reference avoids that deadlock: the group ends with the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
            dist.destroy_process_group()


def _stop_with_launcher(launcher: int, ended: threading.Event) -> None:
    """Send this process SIGTERM when its parent, torchrun, has ended, as torchrun itself does when it is terminated.

    A torchrun that is killed cannot do that: its ranks would continue unnoticed and hold the folder of the run.
    """
    while not ended.wait(LOOK):
        if os.getppid() != launcher:
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _lost(error: RuntimeError) -> Stopped:
    """Return the error about a rank that has died; that rank's own output has the cause."""
    match = LOST.search(str(error))
    reason = " ".join(str(error).split())[:200] if match is None else match[0]
    return Stopped(
        f"rank {os.environ.get('RANK', '0')}: another rank has died or left, and its own output says why; the same command resumes"
        f" from the last checkpoint ({reason})",
        1,
    )


def is_lost_rank(error: BaseException) -> bool:
    """Return whether an exception means that another rank can no longer be reached."""
    lost = (dist.DistNetworkError, dist.DistStoreError, dist.DistBackendError) if dist.is_available() else ()
    return isinstance(error, lost) or (isinstance(error, RuntimeError) and LOST.search(str(error)) is not None)


def _join(device: torch.device) -> None:
    """Create the process group of the ranks that torchrun has started."""
    # Exchanges of the host (counts, keys, stop signals) use gloo, so that they do not wait for the device.
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
        # On one node torchrun keeps its store over a restart, with the addresses of the ranks that died. (Several nodes get a new
        # store, and may count restarts differently.)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]
    device_id = None if device.type == "cpu" else device
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT, device_id=device_id)


def share(module: nn.Module, compute: Compute, ranks: Ranks) -> nn.Module:
    """Return the module wrapped in DDP; unchanged if it is sharded, locked, or in a single process."""
    if compute.sync_batchnorm and ranks.group is not None:
        if ranks.device.type == "cpu":
            raise ValueError("compute.sync_batchnorm is true: PyTorch synchronises batch norm on GPUs only; remove it on a CPU")
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module, ranks.group)
    if ranks.group is None or not any(p.requires_grad for p in module.parameters()):
        return module
    if compute.sharded:
        return module
    _check_exchange(module, compute)
    devices = None if ranks.device.type == "cpu" else [ranks.device]
    ddp = DistributedDataParallel(module, device_ids=devices, process_group=ranks.group)
    if compute.gradient_exchange is None or ranks.size == 1:
        return ddp
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    # By its name, DDP refuses this hook where PyTorch was built without NCCL; gloo sums bf16 as well.
    ddp.register_comm_hook(ranks.group, lambda group, bucket: bf16_compress_hook(group, bucket))
    return ddp


def shard(module: nn.Module, compute: Compute, ranks: Ranks) -> None:
    """Shard the weights of a module over the ranks in place, with compute.sharding "fsdp2" or "hsdp".

    Each block is sharded by itself, so that one block at a time is gathered; then the rest of the module.
    """
    if ranks.group is None or not compute.sharded:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _check_exchange(module, compute)
    sizes = (ranks.size,) if compute.sharding == "fsdp2" else _nodes_and_ranks(ranks)
    mesh = init_device_mesh(ranks.device.type, sizes, mesh_dim_names=("nodes", "ranks")[-len(sizes) :])
    in_bf16 = compute.gradient_exchange is not None and ranks.size > 1
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if in_bf16 else None)
    for block in sharded_blocks(module):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)


def _check_exchange(module: nn.Module, compute: Compute) -> None:
    """Raise ValueError if the gradients of a module cannot be exchanged in bf16 as the run asks."""
    name = next((name for name, p in module.named_parameters() if p.requires_grad and p.is_complex()), None)
    if compute.gradient_exchange is not None and name is not None:
        raise ValueError(
            f'compute.gradient_exchange is "bf16", but the weight {name!r} is complex, and bf16 would drop the imaginary part of'
            " its gradient; remove the key"
        )


def _nodes_and_ranks(ranks: Ranks) -> tuple[int, ...]:
    """Return the number of nodes and of the ranks on each; only the ranks of a single node."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdigit() or ranks.size % int(local):
        raise ValueError(
            f'compute.sharding is "hsdp", with {ranks.size} ranks and LOCAL_WORLD_SIZE {local or "not set"}: every node must have '
            'equally many ranks, and torchrun must have started them; choose "fsdp2" otherwise'
        )
    nodes = ranks.size // int(local)
    return (nodes, int(local)) if nodes > 1 else (ranks.size,)


def autocast(compute: Compute, device: torch.device) -> Callable[[], torch.autocast]:
    """Return a function that creates the autocast context of the encoders."""
    dtypes = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = dtypes[compute.precision]
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


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
            raise ValueError(f'compute.device is {asked!r}: this machine has none; remove the key, or set it to "cpu"')
    except RuntimeError as error:
        raise ValueError(f'compute.device is {asked!r}: not a device of PyTorch ({error}); set it to "cpu" or "cuda"') from None
    if device.index is None and device.type != "mps":
        device = torch.device(device.type, local_rank % module.device_count())
        module.set_device(device)
    return device
