"""What all tests share: OpenCLIP beside a CPU torch, and a world of worker processes."""

from collections.abc import Iterator

import pytest
from world import World

from benchmarks.peers import declare_torchvision_schemas

declare_torchvision_schemas()


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    processes = World()
    yield processes
    processes.close()
