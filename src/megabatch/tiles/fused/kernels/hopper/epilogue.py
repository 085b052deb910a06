"""How a gradient leaves: a tile in quarters, each by way of a place in shared memory. Legend: ../../../contract.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .pipeline import layout_of_tile

# Triton 3.7 has it by another name.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def open_places(gradient, M: gl.constexpr, N: gl.constexpr, PLACES: gl.constexpr):
    """A tile leaves in quarters, by way of some places for each group, which the next tile takes in the same order."""
    gl.static_assert(4 % PLACES == 0)
    return gl.allocate_shared_memory(gradient.dtype, [2 * PLACES, M, N // 4], gradient.layout)


@gluon.jit
def quarters(z, M: gl.constexpr, N: gl.constexpr):
    """The quarters of a tile from left to right, which threads hold as they would hold the product of a tile so narrow."""
    layout: gl.constexpr = layout_of_tile(M, N // 4)
    left, right = gl.split(gl.permute(gl.reshape(z, (M, 2, N // 2)), (0, 2, 1)))
    a, b = gl.split(gl.permute(gl.reshape(left, (M, 2, N // 4)), (0, 2, 1)))
    c, d = gl.split(gl.permute(gl.reshape(right, (M, 2, N // 4)), (0, 2, 1)))
    return (
        gl.convert_layout(a, layout, assert_trivial=True),
        gl.convert_layout(b, layout, assert_trivial=True),
        gl.convert_layout(c, layout, assert_trivial=True),
        gl.convert_layout(d, layout, assert_trivial=True),
    )


@gluon.jit
def put_quarter(g, gradient, places, row, column, WHO: gl.constexpr, QUARTER: gl.constexpr, PLACES: gl.constexpr):
    """Sends off a quarter whose first row and column are given. Whoever sends the last waits for all: `wait_for_quarters`."""
    # What was in this place has left it.
    tma.store_wait(PLACES - 1)
    _barrier()
    place = places.index(WHO * PLACES + QUARTER % PLACES)
    place.store(g.to(gradient.dtype))
    fence_async_shared()
    _barrier()
    tma.async_copy_shared_to_global(gradient, [row, column], place)


@gluon.jit
def wait_for_quarters():
    tma.store_wait(0)
