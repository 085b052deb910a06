"""The argument parser of all verbs, and the arguments that several verbs share."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .. import config, vocabulary
from ..files import check_file
from ..reporting.terminal import visible

SETTINGS_HELP = (
    "The TOML file of a run, and settings as section.key=value, in any order; settings override those of the file."
    " Without a file, the embedded default run is used."
)


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
            # By convention, arguments after "--" are never options.
            end = rest.index("--") if "--" in rest else len(rest)
            values = [argument for argument in rest[:end] if not argument.startswith("-")] + rest[end + 1 :]
            rest = [argument for argument in rest[:end] if argument.startswith("-")]
            # Not extend(): the list may be the default of the action, which would be changed for the next call.
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
        named = vocabulary.foreign(name)
        if named is not None and named.option in options:
            return f"there is no option {name!r}; here it is {named.option}"
        return f"there is no option {name!r}{guess(name, options)}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices: Sequence[str] = [str(choice) for choice in action.choices]
        name = "/".join(action.option_strings) or action.metavar or action.dest
        raise argparse.ArgumentError(None, f"{name} is {value!r}: must be one of {', '.join(choices)}{guess(str(value), choices)}")


def guess(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" with the most similar known word, or an empty string.

    >>> guess("--frehs", ["--fresh", "--show"])
    '; did you mean --fresh?'
    """
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add --trust-code, without which code that a run's file or folder names is not imported."""
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="Import and call the functions that the run names as package.module:function, also from the current folder.",
    )


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Add --overwrite, without which an existing output file is not replaced."""
    parser.add_argument("--overwrite", action="store_true", help="Replace the output file if it exists already.")


def check_output(path: Path | None, option: str, overwrite: bool, *, make_folder: bool = False) -> None:
    """Raise ValueError if an option names a file that cannot be written, or that exists and must not be replaced."""
    if path is None:
        return
    check_file(path, option, make_folder=make_folder)
    if path.is_file() and not overwrite:
        raise ValueError(f"{option} is {str(path)!r}: the file exists; choose another one, or add --overwrite to replace it")


def settings_of(settings: Sequence[str], defaults: Iterable[str] = ()) -> config.Run:
    """Return the run of "run.toml key=value …", in any order.

    Without a file it is the embedded default with `defaults`, which the settings override.
    """
    files = [argument for argument in settings if not _is_setting(argument)]
    settings = [argument for argument in settings if _is_setting(argument)]
    if len(files) > 1:
        raise ValueError(
            f"{files[0]!r} and {files[1]!r} are given, but a run has only one file; settings are written as section.key=value"
            " (batch.size=4096)"
        )
    if not files:
        return config.build(config.EMBEDDED, [*defaults, *settings])
    if not Path(files[0]).exists():
        raise ValueError(f"{files[0]}: there is no such file; {_remedy(files[0])}")
    return config.read(files[0], settings)


def one_line(error: object) -> str:
    """Return an error as the one line that the command prints."""
    return "megabatch: error: " + visible(" ".join(str(error).splitlines()))


def _is_setting(argument: str) -> bool:
    """Return whether an argument is a setting and not a file: runs/lr=3/run.toml is a file, because no key has a slash."""
    key, equals, _ = argument.partition("=")
    return bool(equals) and "/" not in key and "\\" not in key


def _remedy(missing: str) -> str:
    """Return what to do about a file that does not exist."""
    path = Path(missing)
    if path.suffix != ".toml" and path.name == missing:
        return f"a setting is written as section.key=value, as {missing}=…, and a run's file ends in .toml"
    folder = path.parent
    existing = sorted(file.name for file in folder.glob("*.toml")) if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, existing, 1)
    if near:
        return f"did you mean {folder / near[0]}?"
    return "name the TOML file of a run, or no file for the embedded default"
