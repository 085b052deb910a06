"""From two blocks of embeddings to kernel launches: panels, kernel arguments, and the interface of an architecture's own kernels.

A pass goes over panels of the similarity matrix. At small batches the host is the bottleneck, so little work is done per launch.
Legend: ../contract.py.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar, cast, overload

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..contract import ComputeOptions, Pairs, Softmax
from ..panels import panel_size
from .tile import PairArgs
from .tuned_configs import Blocks, blocks_for

MATCHED_TILES = 8
# A pass has as many marks as the largest tile has rows or columns.
MARKS = 256
# What a pass without saved exponentials takes of the workspace at most: a panel whose products fill the device.
UNSAVED_WORKSPACE = 512 * 2**20
# The fraction of the workspace that the partial sums of forward get beside saved exponentials, as a divisor.
PARTS_BESIDE_SAVED_EXP = 4


class Panel:
    """A rectangle of the similarity matrix: a slice of x's rows and one of y's."""

    def __init__(self, r: slice, c: slice) -> None:
        self.r, self.c = r, c
        self.rows, self.columns = r.stop - r.start, c.stop - c.start


class PartialSums(NamedTuple):
    """Where a kernel writes the sums of its tiles, and the marks of tiles that the safe launch has to compute again."""

    row_parts: Any
    column_parts: Any
    needs_fallback: Any


class GradsRequest(NamedTuple):
    """What the gradient in the logits is computed from. dpos_M: given if similarities may be computed in int8."""

    scale: Tensor
    pairs: Pairs
    rows: Softmax
    columns: Softmax | None
    needs_fallback: Tensor
    dpos_M: Tensor | None


class SpecialisedGrads(Protocol):
    """Kernels of one architecture for one backward pass."""

    def __call__(self, p: Panel, panel: Tensor, pair_args: PairArgs) -> bool:
        """Write the gradient of a panel, and return whether that was done."""
        ...

    def saved_products(self, p: Panel) -> Callable[[Tensor, Tensor | None, Tensor | None], None] | None:
        """Return a function that writes both products with a panel, given its saved exponentials or, if a mark is set, its
        gradient; or None. Marks peaks out of range. The function takes the panel and where to write the products, if they are
        wanted."""
        ...


class SpecialisedKernels(Protocol):
    """Kernels of one architecture, for pairs that all count alike: no further positives, no drop_above; in forward no ranking and
    no label smoothing either.

    What computes a panel returns whether it has done so. If not, the portable kernel is faster there, or the only one. The safe
    launch of the portable kernel follows in both cases.
    """

    def softmax_stats(
        self, launch: Launch, p: Panel, scale: Tensor, sums: PartialSums, pair_args: PairArgs, pairs: Pairs, saved: Tensor | None
    ) -> bool:
        """saved: where to write the exponentials, if anywhere."""
        ...

    def softmax_grads(self, launch: Launch, request: GradsRequest) -> SpecialisedGrads: ...


class Architecture(NamedTuple):
    """One GPU architecture. To add one, add a record to architectures.py, and its kernels.

    capability: the smallest compute capability of its devices.
    descriptors: kernels read and write by tensor descriptors (TMA) instead of pointers.
    load_kernels: returns its own kernels, or None if the installed Triton cannot compile them.
    prefixes: one product for all widths of Matryoshka is expected to pay (matryoshka.py).
    """

    name: str
    capability: tuple[int, int] = (0, 0)
    descriptors: bool = False
    load_kernels: Callable[[], SpecialisedKernels | None] = lambda: None
    prefixes: bool = False


class Launch:
    """One kernel over two blocks of embeddings, panel by panel."""

    def __init__(
        self,
        architecture: Architecture,
        kernel: str,
        x_MD: Tensor,
        y_ND: Tensor,
        compute: ComputeOptions,
        pieces: int = 1,
        blocks: Blocks | None = None,
    ) -> None:
        """pieces: the least number of pieces to split a tile into, because options need registers and shared memory too.

        blocks: of the kernel, if they are not those that were tuned for its name.
        """
        self.architecture, self.kernel = architecture, kernel
        self.descriptors = architecture.descriptors
        self.x_MD, self.y_ND = (_aligned(x_MD), _aligned(y_ND)) if self.descriptors else (x_MD, y_ND)
        width = self.x_MD.shape[1]
        self.blocks = blocks or blocks_for(kernel, x_MD.device, x_MD.dtype, compute.precision, width)
        if pieces > self.blocks.pieces:
            self.blocks = self.blocks._replace(pieces=pieces)
        self.workspace = compute.workspace
        self.piece_width = self.blocks.n // self.blocks.pieces
        self.max_programs = multiprocessors(x_MD.device) * self.blocks.programs
        precision = compute.precision if x_MD.dtype == torch.float32 else "tf32"
        self.product_constants, self.constants = _constants(self.blocks, width, self.descriptors, precision)

    def with_pieces(self, pieces: int) -> Launch:
        """Return the same launch with tiles split into at least that many pieces."""
        if self.blocks.pieces >= pieces:
            return self
        other = copy.copy(self)
        other.blocks, other.piece_width = self.blocks._replace(pieces=pieces), self.blocks.n // pieces
        other.constants = {**self.constants, "PIECES": pieces}
        return other

    def panels(self, bytes_per_cell: float, max_columns: int | None = None, saved: Panel | None = None) -> Iterator[Panel]:
        """Yield panels that cover all pairs; with a saved panel, those in it first, then those below it, then those beside it.

        The saved panel occupies the workspace, so the others get a fraction of its size in addition.
        """
        rows, columns = slice(0, self.x_MD.shape[0]), slice(0, self.y_ND.shape[0])
        areas, workspace = [Panel(rows, columns)], self.workspace
        if saved is not None:
            below, beside = Panel(slice(saved.rows, rows.stop), saved.c), Panel(rows, slice(saved.columns, columns.stop))
            areas, workspace = [saved, below, beside], self.workspace // PARTS_BESIDE_SAVED_EXP
        for area in areas:
            yield from panels_of(area, self.blocks[:2], workspace, bytes_per_cell, max_columns)

    def tile_counts(self, p: Panel) -> tuple[int, int]:
        """Return how many tiles a panel has from top to bottom and from left to right."""
        return cdiv(p.rows, self.blocks.m), cdiv(p.columns, self.blocks.n)

    def grid(self, p: Panel) -> tuple[int]:
        """Return the number of programs for a panel: no more than there are tiles."""
        return (min(math.prod(self.tile_counts(p)), self.max_programs),)

    def operands(self, p: Panel) -> tuple[Any, Any]:
        """Return the arguments by which a kernel reads blocks of x and y."""
        m, n, k = self.blocks[:3]
        return self._operand(part(self.x_MD, p.r), m, k), self._operand(part(self.y_ND, p.c), n, k)

    def diagonal_operands(self) -> tuple[Any, Any]:
        """Return the same for the positives, in square tiles."""
        m, k, rows = self.blocks.m, self.blocks.k, slice(0, self.x_MD.shape[0])
        return self._operand(self.x_MD, m, k), self._operand(part(self.y_ND, rows), m, k)

    def target(self, panel: Tensor) -> Any:
        """Return the argument by which a kernel writes a piece of a tile of a panel."""
        return self._operand(panel, self.blocks.m, self.piece_width)

    def pair_args(self, pairs: Pairs, p: Panel) -> PairArgs:
        """Return which pairs of a panel count, having marked the tiles in which ids may be equal."""
        compared = pairs.positive_M if pairs.ranked or pairs.drop_above is not None else None
        margin = 0.0 if pairs.drop_above is None else float(pairs.drop_above)
        matches = ids_M = ids_N = None
        if pairs.ids_M is not None and pairs.ids_N is not None:
            ids_M, ids_N = (ids.to(torch.int64).view(torch.int32) for ids in (pairs.ids_M[p.r], pairs.ids_N[p.c]))
            down, across = self.tile_counts(p)
            matches = ids_M.new_empty(down, across, dtype=torch.int8)
            grid = (cdiv(across, MATCHED_TILES), down)
            m, n = self.blocks[:2]
            run_kernel(match_kernel, grid, ids_M, ids_N, matches, p.rows, p.columns, across, M=m, N=n, TILES=MATCHED_TILES)
        positives = part(compared, p.r), part(pairs.positive_N, p.c)
        return PairArgs(matches, ids_M, ids_N, *positives, margin, p.rows, p.columns, p.r.start - p.c.start)

    def new_marks(self, passes: int = 1) -> Tensor:
        """Allocate the marks of tiles that the safe launch has to compute again, none of them set; MARKS for each pass."""
        assert max(self.blocks[:2]) <= MARKS, f"tiles of {self.blocks[:2]} need more than {MARKS} marks"
        return self.x_MD.new_zeros(passes * MARKS, dtype=torch.int32)

    def _operand(self, t: Tensor | None, rows: int, columns: int) -> Any:
        """Return the descriptor of a matrix, or the matrix itself."""
        assert t is not None
        return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns]) if self.descriptors else t


@functools.lru_cache(maxsize=256)
def _constants(blocks: Blocks, width: int, descriptors: bool, precision: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the constants of a kernel that has one product, and of one that goes over tiles; not to be changed."""
    product = {
        "WIDTH": width,
        "K": blocks.k,
        "DESCRIPTORS": descriptors,
        "PRECISION": precision,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }
    return product, {**product, "M": blocks.m, "N": blocks.n, "GROUP": blocks.group, "PIECES": blocks.pieces}


@triton.jit(do_not_specialize=["rows", "columns", "across"])
def match_kernel(ids_M, ids_N, matches, rows, columns, across, M: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr):
    """Mark the tiles in which the low halves of two ids are equal, which seldom happens for ids that differ.

    A program looks at TILES tiles side by side, and a thread at some of their columns, so that no thread waits for another.
    """
    row, column = tl.program_id(1) * M, tl.program_id(0) * TILES * N
    j = column + tl.arange(0, TILES * N)
    low_N = tl.load(ids_N + 2 * j.to(tl.int64), mask=j < columns, other=0)
    difference = tl.full((TILES * N,), -1, tl.int32).to(tl.uint32, bitcast=True)
    first_M = ids_M + 2 * row.to(tl.int64)
    for i in range(0, tl.minimum(M, rows - row)):
        low = tl.load(first_M + 2 * i)
        difference = tl.minimum(difference, (low_N ^ low).to(tl.uint32, bitcast=True))
    difference = tl.where(j < columns, difference, 1)
    equal = tl.min(tl.reshape(difference, (TILES, N)), 1) == 0
    t = tl.program_id(0) * TILES + tl.arange(0, TILES)
    tl.store(matches + tl.program_id(1) * across + t, equal.to(tl.int8), mask=t < across)


# Compiled kernels and the values of their constants, by all that a kernel is compiled for.
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def run_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the current device as `kernel[grid](…)` does, but let Triton search for the compiled one only once.

    The parameters that are not constants come first in the kernel.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    # Not the kernel itself: Triton computes its hash from its source.
    key = id(kernel), device, *map(_kind, arguments), *constants.items()
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*arguments, **constants)
        # Triton's interpreter compiles nothing.
        if compiled is not None:
            _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        return
    launch_compiled(found[0], grid, device, arguments, found[1])


def launch_compiled(
    compiled: Any, grid: tuple[int, ...], device: int | None, arguments: tuple[Any, ...], constants: tuple[Any, ...]
) -> None:
    """Launch a compiled kernel, without Triton's search for it."""
    # For a tensor, Triton would call data_ptr and then ask the driver about the address.
    values = addresses(arguments)
    hook = triton.knobs.runtime.launch_enter_hook
    if getattr(hook, "calls", hook):
        # A profiler of Triton asks to be told of launches.
        compiled[grid](*values, *constants)
        return
    x, y, z = (*grid, 1, 1)[:3]
    compiled.run(x, y, z, _stream(device), compiled.function, compiled.packed_metadata, None, None, None, *values, *constants)


def addresses(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of a kernel with addresses in place of tensors."""
    return tuple([a.data_ptr() if isinstance(a, Tensor) else a for a in arguments])


def _stream(device: int | None) -> int:
    assert device is not None
    return torch._C._cuda_getCurrentRawStream(device)


def _kind(argument: Any) -> Any:
    """Return what a kernel is compiled for in an argument: dtypes, alignment, and what Triton knows of integers."""
    if argument is None:
        return None
    kind = type(argument)
    if kind is TensorDescriptor:
        return argument.base.dtype, *argument.block_shape
    if kind is int:
        return argument == 1, argument % 16 == 0, argument.bit_length() // 32
    if isinstance(argument, Tensor):
        # Most are aligned, and a dtype is its own key.
        return (argument.dtype,) if argument.data_ptr() % 16 else argument.dtype
    if hasattr(argument, "block_shape"):
        # Gluon's descriptors say too how blocks lie in shared memory.
        return argument.base.dtype, argument.layout, *argument.block_shape
    return kind


Function = TypeVar("Function", bound=Callable[..., Any])


def on_device_of_input(function: Function) -> Function:
    """Make a function launch its kernels on the device of its first argument, whichever device is current."""

    @functools.wraps(function)
    def call(first: Any, *args: Any, **options: Any) -> Any:
        tensor = first if isinstance(first, Tensor) else first[0]
        if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
            return function(first, *args, **options)
        with torch.cuda.device_of(tensor):
            return function(first, *args, **options)

    return cast(Function, call)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; two on a CPU, so that interpreted programs share the tiles."""
    return 2 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def as_compared_ids(pairs: Pairs, x_MD: Tensor) -> Pairs:
    """Return the same pairs in the terms of the kernels: limits as positives without a margin, skipped pairs as equal ids."""
    assert pairs.guide is None, "the similarities of a guide need the eager tiles"
    if pairs.skip_N is not None:
        assert pairs.ids_M is None, "ids and skipped pairs together need the eager tiles"
        rows = torch.arange(x_MD.shape[0], device=x_MD.device)
        pairs = replace(pairs, ids_M=rows, ids_N=pairs.skip_N, multi_positive=False, skip_N=None)
    if pairs.limit_M is not None or pairs.limit_N is not None:
        limit_M = x_MD.new_full((x_MD.shape[0],), math.inf, dtype=torch.float32) if pairs.limit_M is None else pairs.limit_M
        pairs = replace(pairs, drop_above=0.0, positive_M=limit_M, positive_N=pairs.limit_N, limit_M=None, limit_N=None)
    return pairs


def without_saved_exp(compute: ComputeOptions) -> ComputeOptions:
    """Return the options for a pass that saves no exponentials, to which a larger workspace would bring nothing."""
    return compute._replace(workspace=min(compute.workspace, UNSAVED_WORKSPACE))


def is_multi_positive(pairs: Pairs) -> bool:
    """Return whether there are further positives."""
    return pairs.multi_positive and pairs.ids_M is not None


def first_panel(kernel: str, x_MD: Tensor, y_ND: Tensor, compute: ComputeOptions, bytes_per_cell: float) -> Panel:
    """Return the first of the panels that a launch of a kernel will have."""
    blocks = blocks_for(kernel, x_MD.device, x_MD.dtype, compute.precision, x_MD.shape[1])
    area = Panel(slice(0, x_MD.shape[0]), slice(0, y_ND.shape[0]))
    return panels_of(area, blocks[:2], compute.workspace, bytes_per_cell)[0]


def panels_of(
    area: Panel, tile: tuple[int, int], workspace: int, bytes_per_cell: float, max_columns: int | None = None
) -> tuple[Panel, ...]:
    """Return panels of equal size, row after row, as large as the workspace allows and no wider than `max_columns`.

    tile: rows and columns, of which panels have multiples.
    """
    return _panels_of(area.r.start, area.r.stop, area.c.start, area.c.stop, tile, workspace, bytes_per_cell, max_columns)


@functools.lru_cache(maxsize=256)
def _panels_of(
    top: int,
    bottom: int,
    left: int,
    right: int,
    tile: tuple[int, int],
    workspace: int,
    bytes_per_cell: float,
    max_columns: int | None,
) -> tuple[Panel, ...]:
    rows, columns = bottom - top, right - left
    if not rows or not columns:
        return ()
    height, width = panel_size(rows, columns, tile, workspace / bytes_per_cell, max_columns)
    across = [slice(start, min(start + width, right)) for start in range(left, right, width)]
    down = [slice(start, min(start + height, bottom)) for start in range(top, bottom, height)]
    return tuple(Panel(r, c) for r in down for c in across)


@overload
def part(t: Tensor, where: slice) -> Tensor: ...
@overload
def part(t: Tensor | None, where: slice) -> Tensor | None: ...
def part(t: Tensor | None, where: slice) -> Tensor | None:
    """Return a slice of the rows; the tensor itself if that is all of it, as it mostly is."""
    if t is None or (where.start == 0 and where.stop == t.shape[0]):
        return t
    return t[where]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _aligned(t: Tensor) -> Tensor:
    """Return the embeddings in a form that a descriptor can read: rows start at multiples of 16 bytes."""
    missing = -t.shape[1] % (16 // t.element_size())
    if missing:
        return torch.nn.functional.pad(t, (0, missing))
    if t.data_ptr() % 16:
        t = t.clone()
    # A single row may have any stride.
    return t if t.shape[0] > 1 else t.reshape(-1).view(t.shape)
