"""The argument parser of all verbs: arguments in any order, errors in one line, and a guess for what was misspelt."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that accepts positional arguments before, between and after options.

    argparse gives a positional argument of any number of values only those that stand together, and refuses the rest:
    `train run.toml --fresh batch.size=32` would be an error. Errors are one line, on standard error, with exit status 2.
    """

    def __init__(self, **options: Any) -> None:
        # Abbreviated options would change their meaning whenever an option is added.
        super().__init__(**{"allow_abbrev": False, "add_help": False, **options})
        self.add_argument("-h", "--help", action="help", help="Print this help and exit.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        namespace, rest = super().parse_known_args(sys.argv[1:] if args is None else args, namespace)
        collecting = [action for action in self._actions if not action.option_strings and action.nargs in ("*", "+")]
        if collecting:
            # As everywhere, what follows "--" is no option.
            end = rest.index("--") if "--" in rest else len(rest)
            values = [argument for argument in rest[:end] if not argument.startswith("-")] + rest[end + 1 :]
            rest = [argument for argument in rest[:end] if argument.startswith("-")]
            # Not extend(): the list may be the default of the action, which the next call would find changed.
            setattr(namespace, collecting[0].dest, [*getattr(namespace, collecting[0].dest), *values])
        if rest:
            self.error(self._unknown(rest[0]))
        return namespace, rest

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help lists the arguments)\n")

    def _unknown(self, argument: str) -> str:
        if not argument.startswith("-"):
            return f"unexpected argument {argument!r}"
        name = argument.partition("=")[0]
        options = [option for action in self._actions for option in action.option_strings]
        return f"there is no option {name!r}{guess(name, options)}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices: Sequence[str] = [str(choice) for choice in action.choices]
        name = "/".join(action.option_strings) or action.metavar or action.dest
        raise argparse.ArgumentError(None, f"{name} is {value!r}: must be one of {', '.join(choices)}{guess(str(value), choices)}")


def guess(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" with the known word that is most alike, or nothing.

    >>> guess("--frehs", ["--fresh", "--show"])
    '; did you mean --fresh?'
    """
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""
