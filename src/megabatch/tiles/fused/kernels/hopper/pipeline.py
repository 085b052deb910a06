"""Products of tiles two by two: what loads, what multiplies, and how they wait for each other. Legend: ../../../contract.py.

A program has a multiprocessor to itself. Two groups of four warps take tiles that lie one above the other, and share the blocks of
y: a quarter less to load than two tiles that are strangers. The second group is some steps behind the first, so that one makes what
it has to make of a tile while the other multiplies. Three more warps load: y, and the x of each group.

What is loaded goes through rings of slots. A slot is `full` when its block is there, and `empty` when those that read it are
through; whoever waits knows which turn of the slot it waits for.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ..product import tile_at

# Of all but the first of the two groups, which has what is left: the second, and those that load.
WARPS = gl.constexpr([4, 1, 1, 1])
REGISTERS = gl.constexpr([232, 40, 40, 40])


@gluon.constexpr_function
def layout_of_tile(M, N, BITS=16):
    """Which threads of a group hold what of a product, of numbers with so many bits."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 256 // BITS])


@gluon.jit
def open_rings(x, y, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr):
    """Slots of both groups' x, then of y; what says that they are full and empty; and what says that the second group may begin."""
    xs = gl.allocate_shared_memory(x.dtype, [2 * X_SLOTS, M, K], x.layout)
    ys = gl.allocate_shared_memory(y.dtype, [Y_SLOTS, N, K], y.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [2 * X_SLOTS, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [2 * X_SLOTS, 1], mbarrier.MBarrierLayout())
    y_full = gl.allocate_shared_memory(gl.int64, [Y_SLOTS, 1], mbarrier.MBarrierLayout())
    y_empty = gl.allocate_shared_memory(gl.int64, [Y_SLOTS, 1], mbarrier.MBarrierLayout())
    second = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(second, count=1)
    for slot in gl.static_range(2 * X_SLOTS):
        mbarrier.init(x_full.index(slot), count=1)
        mbarrier.init(x_empty.index(slot), count=1)
    for slot in gl.static_range(Y_SLOTS):
        mbarrier.init(y_full.index(slot), count=1)
        mbarrier.init(y_empty.index(slot), count=2)
    fence_async_shared()
    return xs, ys, x_full, x_empty, y_full, y_empty, second


@gluon.jit
def pairs_of_tiles(rows, columns, M: gl.constexpr, N: gl.constexpr):
    """How many pairs of tiles this program has."""
    pairs = gl.cdiv(rows, 2 * M) * gl.cdiv(columns, N)
    return gl.cdiv(pairs - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def pair_at(n, rows, columns, M: gl.constexpr, N: gl.constexpr, GROUP: gl.constexpr):
    """First row and first column of this program's n-th pair."""
    return tile_at(gl.program_id(0) + n * gl.num_programs(0), rows, columns, 2 * M, N, GROUP)


@gluon.jit
def load_rows(
    x, rings, rows, columns, WHO: gl.constexpr, WIDTH: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    GROUP: gl.constexpr, X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr, BEHIND: gl.constexpr,
):  # fmt: skip
    """Fills a group's slots for x. The second group begins when the first is BEHIND steps ahead."""
    STEPS: gl.constexpr = (WIDTH + K - 1) // K
    pairs = pairs_of_tiles(rows, columns, M, N)
    # A slot is given back when the next step's product is under way. The first group alone comes as far as the slots for y reach.
    gl.static_assert((X_SLOTS > 1) & (Y_SLOTS > 1) & (BEHIND < Y_SLOTS))
    ahead = gl.minimum(BEHIND + X_SLOTS, pairs * STEPS) - 1
    if WHO == 1:
        mbarrier.wait(rings[6], 0)
    for n in range(pairs):
        row = pair_at(n, rows, columns, M, N, GROUP)[0]
        for k in range(STEPS):
            step = n * STEPS + k
            _load(x, rings[0], rings[2], rings[3], row + WHO * M, k * K, WHO * X_SLOTS + step % X_SLOTS, step // X_SLOTS, M, K)
            if WHO == 0:
                if step == ahead:
                    mbarrier.arrive(rings[6], count=1)


@gluon.jit
def load_columns(
    y, rings, rows, columns,
    WIDTH: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, Y_SLOTS: gl.constexpr,
):  # fmt: skip
    """Fills the slots for y."""
    STEPS: gl.constexpr = (WIDTH + K - 1) // K
    for n in range(pairs_of_tiles(rows, columns, M, N)):
        column = pair_at(n, rows, columns, M, N, GROUP)[1]
        for k in range(STEPS):
            step = n * STEPS + k
            _load(y, rings[1], rings[4], rings[5], column, k * K, step % Y_SLOTS, step // Y_SLOTS, N, K)


@gluon.jit
def _load(source, slots, full, empty, row, k, slot, turn, R: gl.constexpr, K: gl.constexpr):
    mbarrier.wait(empty.index(slot), (turn & 1) ^ 1)
    mbarrier.expect(full.index(slot), R * K * source.dtype.primitive_bitwidth // 8)
    tma.async_copy_global_to_shared(source, [row, k], full.index(slot), slots.index(slot))


@gluon.jit
def similarities(
    z, n, rings, WHO: gl.constexpr, WIDTH: gl.constexpr, K: gl.constexpr, X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr
):  # fmt: skip
    """The product of a group's n-th tile, in the place of z, the one before."""
    xs, ys, x_full, x_empty, y_full, y_empty, _ = rings
    STEPS: gl.constexpr = (WIDTH + K - 1) // K
    x_slot, y_slot = WHO * X_SLOTS, 0
    for k in range(STEPS):
        step = n * STEPS + k
        before_x, before_y = x_slot, y_slot
        x_slot, y_slot = WHO * X_SLOTS + step % X_SLOTS, step % Y_SLOTS
        mbarrier.wait(y_full.index(y_slot), (step // Y_SLOTS) & 1)
        mbarrier.wait(x_full.index(x_slot), (step // X_SLOTS) & 1)
        z = warpgroup_mma(xs.index(x_slot), ys.index(y_slot).permute((1, 0)), z, use_acc=k > 0, is_async=True)
        # The step before is through, and its slots are free.
        z = warpgroup_mma_wait(1, deps=(z,))
        if k > 0:
            mbarrier.arrive(y_empty.index(before_y), count=1)
            mbarrier.arrive(x_empty.index(before_x), count=1)
    z = warpgroup_mma_wait(0, deps=(z,))
    mbarrier.arrive(y_empty.index(y_slot), count=1)
    mbarrier.arrive(x_empty.index(x_slot), count=1)
    return z


@gluon.jit
def negatives(panel, row, column, IS_LOCAL: gl.constexpr, M: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """The pairs of a tile inside the panel that are neither positives nor equal in id, as ../pairs.py has them."""
    _, ids_M, ids_N, rows, columns, shift = panel
    i = row + gl.arange(0, M, gl.SliceLayout(1, layout))
    j = column + gl.arange(0, N, gl.SliceLayout(0, layout))
    found = (i < rows)[:, None] & (j < columns)[None, :]
    if IS_LOCAL:
        found = found & ((i + shift)[:, None] != j[None, :])
    if ids_M is not None:
        equal = found
        for half in gl.static_range(2):
            half_M = gl.load(ids_M + 2 * i.to(gl.int64) + half, mask=i < rows, other=0)
            half_N = gl.load(ids_N + 2 * j.to(gl.int64) + half, mask=j < columns, other=0)
            equal = equal & (half_M[:, None] == half_N[None, :])
        found = found & ~equal
    return found


@gluon.jit
def is_special(panel, row, column, IS_LOCAL: gl.constexpr, M: gl.constexpr, N: gl.constexpr, MARKED: gl.constexpr):
    """Whether some pair of the tile does not count as a negative, as ../pairs.py has it. MARKED: how wide marked tiles are."""
    matches, _, _, rows, columns, shift = panel
    special = (row + M > rows) | (column + N > columns)
    if IS_LOCAL:
        special = special | ((row + shift < column + N) & (column < row + shift + M))
    if matches is not None:
        inside = row < rows
        place = (row // M) * gl.cdiv(columns, MARKED) + column // MARKED
        special = special | (gl.load(matches + place, mask=inside, other=0) != 0)
    return special
