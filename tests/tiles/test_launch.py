"""Launches of Triton kernels without Triton's search for the compiled one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor

from megabatch.tiles.fused import launch


class FakeKernel:
    """Stands for a Triton kernel of three arguments and two constants, and counts what is asked of it."""

    arg_names = ("x", "y", "rows", "WIDTH", "SAFE")

    def __init__(self) -> None:
        self.searches = 0
        self.launches: list[tuple] = []

    def __getitem__(self, grid):
        def search_and_launch(*arguments, **constants):
            self.searches += 1
            return Compiled(self)

        return search_and_launch


class Compiled:
    function = packed_metadata = None

    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel

    def run(self, *arguments):
        self.kernel.launches.append(arguments)


@pytest.fixture
def kernel(monkeypatch) -> FakeKernel:
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "_stream", lambda device: 7)
    return FakeKernel()


def test_the_second_launch_does_not_search_and_passes_constants_in_their_order(kernel):
    x, y = torch.zeros(4), torch.zeros(4)
    for rows in (5, 6):
        launch.run_kernel(kernel, (3,), x, y, rows, SAFE=True, WIDTH=8, num_warps=4)
    assert kernel.searches == 1
    (arguments,) = kernel.launches
    # The grid, the stream, function and metadata of the kernel, metadata of the launch and two hooks come first.
    assert arguments[:4] == (3, 1, 1, 7)
    # Addresses take the place of tensors.
    assert arguments[9:] == (x.data_ptr(), y.data_ptr(), 6, 8, True)


BASE = torch.zeros(64, 8, dtype=torch.bfloat16)
DIFFERENT = {
    "dtype": (torch.zeros(4, dtype=torch.float64), None, 5),
    "alignment": (torch.zeros(5)[1:], None, 5),
    "None": (torch.zeros(4), torch.zeros(4), 5),
    "one": (torch.zeros(4), None, 1),
    "multiple of 16": (torch.zeros(4), None, 32),
    "64 bits": (torch.zeros(4), None, 2**31 + 1),
    "number": (torch.zeros(4), None, 5.0),
    "descriptor": (TensorDescriptor(BASE, [64, 8], [8, 1], [16, 8]), None, 5),
    "block of a descriptor": (TensorDescriptor(BASE, [64, 8], [8, 1], [32, 8]), None, 5),
}


def test_blocks_and_layouts_of_gluon_descriptors_tell_kernels_apart(kernel):
    gl = pytest.importorskip("triton.experimental.gluon.language")
    described = pytest.importorskip("triton.experimental.gluon.nvidia.hopper").TensorDescriptor
    base = torch.zeros(64, 64, dtype=torch.bfloat16)
    for block, swizzle in (([16, 64], 128), ([32, 64], 128), ([16, 64], 64)):
        for _ in range(2):
            layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=2)
            launch.run_kernel(kernel, (1,), described(base, [64, 64], [64, 1], block, layout), None, 5, WIDTH=8, SAFE=True)
    assert kernel.searches == 3 and len(kernel.launches) == 3


def test_a_compiled_kernel_is_not_used_for_other_kinds_of_arguments(kernel):
    plain = torch.zeros(4), None, 5
    for arguments in (plain, *DIFFERENT.values()):
        launch.run_kernel(kernel, (1,), *arguments, WIDTH=8, SAFE=True)
    assert kernel.searches == 1 + len(DIFFERENT)
    for constants in ({"WIDTH": 16, "SAFE": True}, {"WIDTH": 8, "SAFE": False}, {"WIDTH": 8, "SAFE": True, "num_warps": 8}):
        launch.run_kernel(kernel, (1,), *plain, **constants)
    assert kernel.searches == 4 + len(DIFFERENT)
    assert not kernel.launches
    launch.run_kernel(kernel, (1,), *plain, WIDTH=8, SAFE=True)
    assert len(kernel.launches) == 1
