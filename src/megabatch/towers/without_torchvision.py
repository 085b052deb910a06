"""Import timm, OpenCLIP and transformers although torchvision cannot be imported.

torchvision's operators are compiled for one build of torch. With another build its import raises ("operator torchvision::nms does
not exist"), and so does the import of every library that imports it. Towers do not use torchvision: `PrepareImage` prepares images,
and the layers of the models are those of torch. If the import of torchvision fails, transformers sees it as not installed, which it
supports; timm and OpenCLIP, which import it unconditionally, get placeholders for the names they import from it. A working
torchvision is not touched.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch

# torch 2.N was released together with torchvision 0.(N + 15).
OFFSET = 15


def import_timm() -> Any:
    """Return the module timm."""
    with placeholders():
        import timm
    return timm


def import_open_clip(*, unused: bool = False) -> Any:
    """Return the module open_clip. unused: torchvision is not imported for it, even if it works, since nothing of it is called."""
    if unused and "torchvision" not in sys.modules:
        with _replaced(ImportError("it was not tried")):
            import open_clip
        return open_clip
    # OpenCLIP imports transformers, which looks for torchvision once and caches the result.
    with suppress(ModuleNotFoundError), hidden():
        pass
    with placeholders():
        import open_clip
    return open_clip


def error_of_import() -> Exception | None:
    """Return what `import torchvision` raises, or None if it works."""
    try:
        import torchvision  # type: ignore[import-untyped]  # noqa: F401
    # OSError if its shared library does not load, RuntimeError if an operator is missing, and others.
    except Exception as error:
        return error
    return None


@contextmanager
def hidden() -> Iterator[None]:
    """Make a torchvision that cannot be imported look as if it were not installed, also to transformers, which caches this."""
    if error_of_import() is None:
        yield
        return
    with _removed():
        # Python raises ModuleNotFoundError for a module that is None here.
        sys.modules["torchvision"] = None  # type: ignore[assignment]
        from transformers.utils.import_utils import is_torchvision_available

        is_torchvision_available()
        yield


@contextmanager
def placeholders() -> Iterator[None]:
    """Replace a torchvision that cannot be imported by placeholders, which can be imported and subclassed but not called."""
    error = error_of_import()
    if error is None:
        yield
        return
    with _replaced(error):
        yield


@contextmanager
def _replaced(error: Exception) -> Iterator[None]:
    """Replace torchvision by placeholders. error: why it is not imported."""
    finder = _Finder(error)
    with _removed():
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)


def remedy() -> str:
    """Return the sentence that tells how to install the torchvision that matches the installed torch."""
    version, _, build = str(torch.__version__).partition("+")
    match = re.match(r"2\.(\d+)\.", version)
    if match is None:
        return f"Install the torchvision that was released with torch {version}"
    # Builds for CUDA, ROCm and CPUs are in separate package indexes.
    index = f" --index-url https://download.pytorch.org/whl/{build}" if re.fullmatch(r"cpu|cu\d+|rocm[\d.]+|xpu", build) else ""
    return f"Install the one built for this torch: pip install 'torchvision==0.{int(match[1]) + OFFSET}.*'{index}"


@contextmanager
def _removed() -> Iterator[None]:
    """Remove torchvision and the remains of a failed import from sys.modules, and restore them afterwards."""
    before = {name: module for name, module in sys.modules.items() if _is_torchvision(name)}
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_torchvision(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_torchvision(name: str) -> bool:
    return name.partition(".")[0] == "torchvision"


class _Finder(MetaPathFinder, Loader):
    """Imports torchvision and its submodules as modules of placeholders."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if _is_torchvision(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name, self.error)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Module(ModuleType):
    """A module whose every public name is a placeholder."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(name)
        self._error = error

    def __getattr__(self, name: str) -> type:
        return _placeholder(self, name, self.__name__, self._error)


class _Placeholder(type):
    """A class that can be subclassed and whose attributes are placeholders too, as in an enumeration; calling it raises."""

    error: Exception

    def __getattr__(cls, name: str) -> type:
        return _placeholder(cls, name, f"{cls.__module__}.{cls.__name__}", cls.error)

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise ImportError(
            f"{cls.__module__}.{cls.__name__} is called, but torchvision cannot be imported ({cls.error}). {remedy()}"
        )


def _placeholder(owner: Any, name: str, prefix: str, error: Exception) -> type:
    """Set and return a placeholder as the attribute `name` of a module or class."""
    if name.startswith("_"):
        raise AttributeError(f"{prefix} has no attribute {name!r}")
    placeholder = _Placeholder(name, (), {"__module__": prefix, "error": error})
    setattr(owner, name, placeholder)
    return placeholder
