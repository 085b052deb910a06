"""Python scripts: calls with their keywords, read from the syntax tree. A script is never executed."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LARGEST_PYTHON = 2**18


class _Unknown:
    """The value of an expression that only running the script would tell."""

    def __repr__(self) -> str:
        return "an expression"


UNKNOWN = _Unknown()


@dataclass(frozen=True)
class FunctionCall:
    """A call: the last part of the function's name, its arguments, and the node that holds their places in the text."""

    function: str
    positional: tuple[Any, ...]
    keywords: Mapping[str, Any]
    node: ast.Call


@dataclass(frozen=True)
class Script:
    """The calls of a script in their order, the names that it imports, and those of functions it decorates with a call."""

    calls: tuple[FunctionCall, ...]
    modules: frozenset[str]
    decorators: tuple[FunctionCall, ...]
    tree: ast.Module

    def find(self, names: Collection[str]) -> FunctionCall | None:
        """Return the first call of a function with one of these names."""
        return next((call for call in self.calls if call.function in names), None)


def parse_python(text: str, name: str) -> Script:
    """Return the calls of a Python script; values that are not written out are UNKNOWN."""
    if len(text) > LARGEST_PYTHON:
        raise ValueError(f"{name}: is larger than {LARGEST_PYTHON:,} characters, the limit of a script")
    try:
        tree = ast.parse(text)
        nodes = list(ast.walk(tree))
        constants = _constants(tree)
        calls = tuple(_call(node, constants) for node in nodes if isinstance(node, ast.Call))
        ordered = tuple(sorted(calls, key=lambda call: (call.node.lineno, call.node.col_offset)))
        functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        decorated = {id(decorator) for function in functions for decorator in function.decorator_list}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{name}: is not valid Python ({error.__class__.__name__}: {str(error)[:200]})") from None
    decorators = tuple(call for call in ordered if id(call.node) in decorated)
    return Script(ordered, frozenset(_modules(nodes)), decorators, tree)


def _modules(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return the names that the script sets once, to a value that is written out."""
    values: dict[str, list[Any]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values.setdefault(node.targets[0].id, []).append(value_of(node.value, {}))
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)) and isinstance(node.target, ast.Name):
            values.setdefault(node.target.id, []).append(UNKNOWN)
    return {name: given[0] for name, given in values.items() if len(given) == 1 and given[0] is not UNKNOWN}


def value_of(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    """Return the value of an expression that is written out; the name in lower case of a member such as Samplers.NO_DUPLICATES."""
    if isinstance(node, ast.Name):
        return constants.get(node.id, UNKNOWN)
    if isinstance(node, ast.Attribute):
        return node.attr.lower() if node.attr.isupper() else UNKNOWN
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return {entry.arg: value_of(entry.value, constants) for entry in node.keywords if entry.arg}
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return UNKNOWN


def _call(node: ast.Call, constants: Mapping[str, Any]) -> FunctionCall:
    function = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
    keywords = {entry.arg: value_of(entry.value, constants) for entry in node.keywords if entry.arg}
    return FunctionCall(function, tuple(value_of(argument, constants) for argument in node.args), keywords, node)


def edit_calls(text: str, edits: Mapping[tuple[str, str], Any], name: str = "the edited text") -> str:
    """Return the text with keywords of calls set; edits: by (function, keyword), for the first call of the function."""
    for (function, keyword), value in edits.items():
        call = parse_python(text, name).find((function,))
        if call is None:
            raise ValueError(f"{name}: has no call of {function} to edit")
        text = _set(text, call.node, keyword, repr(value))
    return text


def _set(text: str, node: ast.Call, keyword: str, written: str) -> str:
    # The lines of the syntax tree; `splitlines` would also split at other characters.
    lines = [f"{line}\n" for line in text.split("\n")]
    given = next((entry for entry in node.keywords if entry.arg == keyword), None)
    if given is not None:
        return _replaced(lines, given.value, written)
    after: ast.expr | None = node.keywords[-1].value if node.keywords else node.args[-1] if node.args else None
    if after is None:
        end = _offset(lines, node.end_lineno or 0, node.end_col_offset or 0) - 1
        return text[:end] + f"{keyword}={written}" + text[end:]
    end = _offset(lines, after.end_lineno or 0, after.end_col_offset or 0)
    first = node.keywords[0] if node.keywords else None
    # On a line of its own if the other keywords have one.
    own_line = first is not None and first.lineno != node.lineno
    indent = " " * first.col_offset if first is not None and own_line else ""
    return text[:end] + (f",\n{indent}" if own_line else ", ") + f"{keyword}={written}" + text[end:]


def _replaced(lines: list[str], node: ast.expr, written: str) -> str:
    text = "".join(lines)[:-1]
    begin = _offset(lines, node.lineno, node.col_offset)
    return text[:begin] + written + text[_offset(lines, node.end_lineno or 0, node.end_col_offset or 0) :]


def _offset(lines: list[str], line: int, column: int) -> int:
    """Return the position in the text of a line and a column; the tree counts columns in bytes of UTF-8."""
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())
