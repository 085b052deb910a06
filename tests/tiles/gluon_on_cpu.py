"""A small interpreter of Gluon that runs the Hopper kernels on a CPU, from their source, without a device or a compiler.

Programs run one after another, each on the simulated device of gluon_device.py with the values of gluon_values.py. A feature of the
language that is not implemented raises an AttributeError that names it.
"""

from __future__ import annotations

import builtins
import collections
import functools
import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gluon_device as device
import torch
from gluon_device import Descriptor, Program, program
from gluon_values import DTYPES, FUNCTIONS, OF_TORCH, PointerType, Value, cdiv, maximum, minimum, value_of
from torch import Tensor

import megabatch

PACKAGE = Path(megabatch.__file__).parent
KERNELS = PACKAGE / "tiles" / "fused"
# Keyword arguments of a launch that are for the compiler.
COMPILER_OPTIONS = {"num_warps", "num_ctas", "num_stages", "maxnreg"}


class Kernel:
    """A function of the language. `kernel[grid](...)` launches it, as in Triton; seed: of the order of events."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function, self.signature = function, inspect.signature(function)
        annotations = {name: parameter.annotation for name, parameter in self.signature.parameters.items()}
        self.arg_names = list(annotations)
        self.constants = {name for name, a in annotations.items() if a is _constexpr or str(a).endswith("constexpr")}

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return functools.partial(self._start, grid)

    def _start(self, grid: Sequence[int], *args: Any, seed: int = 0, **named: Any) -> None:
        bound = self.signature.bind(*args, **{name: v for name, v in named.items() if name not in COMPILER_OPTIONS})
        bound.apply_defaults()
        given = {name: v if name in self.constants else _argument(v) for name, v in bound.arguments.items()}
        places = list(itertools.product(*(range(size) for size in grid)))
        random.Random(seed).shuffle(places)
        for place in places:
            Program(place, grid, seed).run(self.function, given)


def _argument(given: Any) -> Any:
    """Return what a kernel gets for an argument that is not a constant."""
    if isinstance(given, Tensor):
        if not given.is_contiguous():
            raise ValueError("a pointer argument must be a contiguous tensor")
        return Value(torch.tensor(0), PointerType(given.detach().view(-1), OF_TORCH[given.dtype]))
    if hasattr(given, "block_shape"):
        return Descriptor(given.base, given.shape, given.strides, given.block_shape, given.layout)
    return None if given is None else value_of(given)


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return jit if function is None else Kernel(function)


def _constexpr(value: Any) -> Any:
    return value


_compiling: list[None] = []


def _constexpr_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that runs at compile time, with Python numbers instead of values."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        _compiling.append(None)
        try:
            return function(*args, **named)
        finally:
            _compiling.pop()

    return call


def _range(*bounds: Any, **hints: Any) -> range | Iterator[Value]:
    """Replace `range`: in a kernel, the loop variable is a value."""
    numbers = range(*(int(bound) for bound in bounds))
    return numbers if Program.now is None or _compiling else map(value_of, numbers)


def _of_two(of_values: Callable[..., Any], of_numbers: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return (of_values if any(isinstance(each, Value) for each in given) else of_numbers)(*given, **named)


def _warp_specialize(functions_and_args: Sequence[Any], worker_num_warps: Sequence[int], worker_num_regs: Any = None) -> Any:
    for numbers in (worker_num_warps, worker_num_regs):
        if numbers is not None and len(numbers) != len(functions_and_args) - 1:
            raise ValueError("warp_specialize needs one number of warps and of registers per partition except the first")
    return program().specialize(functions_and_args)


class Layout:
    """Any layout of tensors or of shared memory."""

    def __init__(self, *args: Any, **named: Any) -> None:
        pass


class Namespace(SimpleNamespace):
    """A stand-in for a module of Triton."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the Gluon interpreter has no {name!r}")


def _taken(*names: str) -> dict[str, Any]:
    return {name: getattr(device, name) for name in names}


mbarrier = Namespace(MBarrierLayout=Layout, **_taken("arrive", "expect", "init", "wait"))
tma = Namespace(**_taken("async_copy_global_to_shared", "async_copy_shared_to_global", "store_wait"))
hopper = Namespace(mbarrier=mbarrier, tma=tma, **_taken("fence_async_shared", "warpgroup_mma", "warpgroup_mma_wait"))
language = Namespace(
    **DTYPES,
    **FUNCTIONS,
    **dict.fromkeys(("BlockedLayout", "DotOperandLayout", "NVMMADistributedLayout", "SliceLayout"), Layout),
    # One thread simulates all threads of a warp group.
    **dict.fromkeys(("barrier", "thread_barrier"), lambda: None),
    **_taken("allocate_shared_memory", "load", "store"),
    constexpr=_constexpr,
    num_programs=lambda axis=0: value_of(program().grid[axis]),
    nvidia=Namespace(hopper=hopper),
    program_id=lambda axis=0: value_of(program().place[axis]),
    range=_range,
    warp_specialize=_warp_specialize,
)
gluon = Namespace(
    jit=jit,
    constexpr_function=_constexpr_function,
    language=language,
    nvidia=Namespace(hopper=Namespace(TensorDescriptor=Descriptor)),
)
triton = Namespace(
    jit=jit,
    constexpr_function=_constexpr_function,
    cdiv=cdiv,
    language=language,
    experimental=Namespace(gluon=gluon),
    tools=Namespace(tensor_descriptor=Namespace(TensorDescriptor=Descriptor)),
)


class Sources:
    """Modules of kernels, loaded from their files. They import Triton from here, and each other through this loader.

    They are not put into sys.modules, so all other code sees the real modules. What they import from outside the package of kernels
    is real too. changes: pieces of source, and their replacements.
    """

    def __init__(self, changes: Mapping[str, str]) -> None:
        self.changes, self.found = changes, collections.Counter[str]()
        self.modules: dict[Path, ModuleType] = {}
        self.names = {**vars(builtins), "__import__": self._find, "range": _range}
        self.names["max"] = functools.partial(_of_two, maximum, max)
        self.names["min"] = functools.partial(_of_two, minimum, min)

    def module(self, path: Path) -> ModuleType:
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path not in self.modules:
            source = path.read_text("utf-8")
            for before, after in self.changes.items():
                self.found[before] += source.count(before)
                source = source.replace(before, after)
            self.modules[path] = module = ModuleType(path.stem)
            vars(module).update(__file__=str(path), __builtins__=self.names)
            exec(compile(source, path, "exec", dont_inherit=True), vars(module))
        return self.modules[path]

    def _find(self, name: str, within: Any = None, _: Any = None, names: Sequence[str] | None = (), level: int = 0) -> Any:
        """Replace `__import__`."""
        if level:
            path = Path(within["__file__"]).parents[level - 1].joinpath(*(name.split(".") if name else ()))
            if path != KERNELS and KERNELS not in path.parents:
                real = ".".join(path.relative_to(PACKAGE.parent).parts)
                return builtins.__import__(real, None, None, names or ("*",))
            if name:
                return self.module(path)
            return Namespace(**{each: self.module(path / each) for each in names or ()})
        first, *further = name.split(".")
        if first == "triton":
            return functools.reduce(getattr, further if names else (), triton)
        return builtins.__import__(name, within, None, names or (), level)


def kernels(path: Path, changes: Mapping[str, str] | None = None) -> ModuleType:
    """Load a module of kernels. changes: of its source or that of its imports; each piece must occur exactly once."""
    sources = Sources(changes or {})
    module = sources.module(path)
    unfit = {change: sources.found[change] for change in sources.changes if sources.found[change] != 1}
    assert not unfit, f"pieces of source that do not occur exactly once: {unfit}"
    return module
