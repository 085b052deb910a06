"""What all tests share: OpenCLIP beside a CPU torch, kernels without a GPU, and a world of worker processes."""

import os
from collections.abc import Iterator

import pytest
import torch

# Triton reads this when a kernel is declared, which is when the fused tiles are first imported; worker processes inherit it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from world import World

from benchmarks.peers import declare_torchvision_schemas

declare_torchvision_schemas()


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    processes = World()
    yield processes
    processes.close()
