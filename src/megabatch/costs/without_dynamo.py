"""Trace and count without importing torch._dynamo, the front end of torch.compile: its import takes longer than a trace.

Nothing is compiled here, but torch imports it all the same: in functions that exclude themselves from compilation (optimizers, the
shapes of most operations, activation checkpointing), and for settings of fake tensors.
"""

from __future__ import annotations

import importlib.util
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"
# Where `torch._disable_dynamo` keeps what `torch._dynamo.disable` returned for a function.
DISABLED = "__dynamo_disable"


@contextmanager
def without_dynamo() -> Iterator[None]:
    """A context in which torch._dynamo is not imported unless something is asked of it that only the package itself can answer."""
    spec = None if NAME in sys.modules else importlib.util.find_spec(NAME)
    if spec is None:
        yield
        return
    stand_in = _StandIn(spec)
    finder = _Finder(stand_in)
    stand_in.install()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        stand_in.remove()


class _StandIn(ModuleType):
    """Answers for torch._dynamo: functions stay as they are, and the settings are imported alone. All else imports the package."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(NAME)
        self.__spec__, self.__file__, self.__path__ = spec, spec.origin, spec.submodule_search_locations or []
        # Weakly: a function must not keep the tensors of its closure alive.
        self._functions: weakref.WeakSet[Any] = weakref.WeakSet()

    def install(self) -> None:
        sys.modules[NAME] = torch._dynamo = self

    def remove(self) -> None:
        """Leave torch._dynamo to be imported by whoever needs it. Nothing happens if that was done already."""
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
        if vars(torch).get("_dynamo") is self:
            del torch._dynamo
        for function in self._functions:
            vars(function).pop(DISABLED, None)
        self._functions.clear()

    def package(self) -> Any:
        """Return torch._dynamo itself."""
        self.remove()
        import torch._dynamo  # noqa: F401

        return sys.modules[NAME]

    def disable(self, function: Any = None, *args: Any, **kwargs: Any) -> Any:
        if sys.modules.get(NAME) is not self or function is None:
            return self.package().disable(function, *args, **kwargs)
        self._functions.add(function)
        return function

    def graph_break(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no graph."""

    def __getattr__(self, name: str) -> Any:
        if name == "config":
            import torch._dynamo.config  # noqa: F401

            return sys.modules[f"{NAME}.config"]
        # Tools ask all modules for names such as __warningregistry__.
        if name.startswith("__"):
            raise AttributeError(f"{NAME} has no attribute {name!r}")
        return getattr(self.package(), name)


class _Finder(MetaPathFinder, Loader):
    """Imports the package itself before any of its modules except the settings."""

    def __init__(self, stand_in: _StandIn) -> None:
        self.stand_in = stand_in

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith(f"{NAME}.") or fullname == f"{NAME}.config" or sys.modules.get(NAME) is not self.stand_in:
            return None
        self.stand_in.package()
        # The package imports most of its modules: such a one must not be executed again.
        return ModuleSpec(fullname, self) if fullname in sys.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._own_spec = sys.modules[spec.name].__spec__
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec
