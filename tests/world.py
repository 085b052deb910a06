"""Worker processes for distributed tests: started once, with a new gloo process group for every task."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# How long a process waits for another one: to start, to join a process group, to finish. Importing torch alone can take minutes on
# a machine under load, so this is only meant to end a test that hangs.
MEETING_TIME = timedelta(minutes=10)


def fresh_processes() -> BaseContext:
    """Return a context that starts fresh processes. With a fork server, one process imports torch for all, which takes seconds."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Optimizers import the compiler, though nothing is compiled, and runs draw figures.
    context.set_forkserver_preload(["torch._dynamo", "megabatch.training.loop", "matplotlib.figure"])
    return context


class Collectives(TorchDispatchMode):
    """Counts the collectives that run inside, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._schema.name.removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


class World:
    """Processes that run one function as the ranks of a group, and return its results."""

    def __init__(self) -> None:
        self.workers: list[tuple[Any, Connection]] = []

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the results of function(rank, size, *args) on ranks 0 to size - 1."""
        while len(self.workers) < size:
            self._start()
        try:
            with tempfile.TemporaryDirectory() as folder:
                for rank, (_, pipe) in enumerate(self.workers[:size]):
                    pipe.send_bytes(pickle.dumps((function, rank, size, f"{folder}/store", args)))
                replies = [pickle.loads(pipe.recv_bytes()) for _, pipe in self.workers[:size]]
        except (EOFError, OSError):
            # A process died. The next test gets new ones.
            self.close()
            raise
        failures = [f"rank {rank}: {text}" for rank, (succeeded, text) in enumerate(replies) if not succeeded]
        assert not failures, "\n".join(failures)
        return [result for _, result in replies]

    def close(self) -> None:
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join()
        self.workers.clear()

    def _start(self) -> None:
        context = fresh_processes()
        pipe, worker_pipe = context.Pipe()
        process = context.Process(target=_work, args=(worker_pipe,), daemon=True)
        process.start()
        worker_pipe.close()
        self.workers.append((process, pipe))


def _work(pipe: Connection) -> None:
    torch.set_num_threads(1)
    group = None
    while True:
        try:
            function, rank, size, store, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=MEETING_TIME)
            reply = True, function(rank, size, *args)
        except BaseException:
            reply = False, traceback.format_exc()
        finally:
            if dist.is_initialized():
                # Kept until the next task: releasing the last reference waits for the group's thread, which is idle by then.
                group = dist.group.WORLD  # noqa: F841
                dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps(reply))


def error_of(function: Callable[[], Any]) -> str:
    """Return the message of the ValueError that function raises, or "no error"."""
    try:
        function()
    except ValueError as error:
        return str(error)
    return "no error"
