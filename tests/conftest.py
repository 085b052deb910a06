"""What all tests share: OpenCLIP beside a CPU torch, kernels without a GPU, and a world of worker processes."""

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

# Triton reads this when a kernel is declared, which is when the fused tiles are first imported; worker processes inherit it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton"):
        import quick_interpreter

        quick_interpreter.install()

from world import World

from benchmarks.peers import declare_torchvision_schemas

declare_torchvision_schemas()


@pytest.fixture
def unwritten_memory_is_no_number() -> Iterator[None]:
    """On a CPU, what nothing has written yet is NaN, or the largest integer, and shows in every sum."""
    torch.use_deterministic_algorithms(not torch.cuda.is_available())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    processes = World()
    yield processes
    processes.close()
