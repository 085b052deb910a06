"""Triton's interpreter without what it repeats: it looks through the whole language at every call of a function of a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """From now on a launch puts the interpreter's functions into each module of the language once, not at every call."""
    patch, execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[str] = set()

    @functools.cache
    def visible(function: Callable[..., Any]) -> frozenset[str]:
        seen = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        return frozenset(module.__name__ for module in seen)

    def once(function: Callable[..., Any]) -> Any:
        if visible(function) <= patched:
            return None
        patched.update(visible(function))
        return patch(function)

    def afresh(self: Any, *args: Any, **options: Any) -> None:
        # A launch takes the functions out again at its end.
        patched.clear()
        execute(self, *args, **options)

    interpreter._patch_lang = once
    interpreter.GridExecutor.__call__ = afresh
