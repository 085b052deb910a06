"""What several verbs have in common: a run's file and settings, and an error in one line."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

from .. import config
from ..files import check_file
from ..reporting.terminal import visible

SETTINGS_HELP = (
    "The TOML file of a run and settings as section.key=value, in any order; settings replace those of the file."
    " Without a file, the embedded default."
)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the switch without which code that a run's file or folder names is not imported."""
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="Import and call the functions that the run names as package.module:function, also from the current folder.",
    )


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Add the switch without which an output file that exists is not replaced."""
    parser.add_argument("--overwrite", action="store_true", help="Replace an output file that exists already.")


def check_output(path: Path | None, option: str, overwrite: bool, *, make_folder: bool = False) -> None:
    """Raise ValueError where an option names a file that cannot be written, or one that exists and may not be replaced."""
    if path is None:
        return
    check_file(path, option, make_folder=make_folder)
    if path.is_file() and not overwrite:
        raise ValueError(f"{option} is {str(path)!r}: the file exists; name another one, or add --overwrite to replace it")


def settings_of(settings: Sequence[str], defaults: Iterable[str] = ()) -> config.Run:
    """Return the run of "run.toml key=value …", in any order; without a file the embedded default, with `defaults` behind the
    settings."""
    files = [argument for argument in settings if not _is_setting(argument)]
    settings = [argument for argument in settings if _is_setting(argument)]
    if len(files) > 1:
        raise ValueError(
            f"{files[0]!r} and {files[1]!r} are given: a run has one file, and settings are written as section.key=value"
            " (batch.size=4096)"
        )
    if not files:
        return config.build(config.EMBEDDED, [*defaults, *settings])
    if not Path(files[0]).exists():
        raise ValueError(f"{files[0]}: there is no such file; {_instead_of(files[0])}")
    return config.read(files[0], settings)


def _is_setting(argument: str) -> bool:
    """Whether an argument is a setting rather than a file: runs/lr=3/run.toml is a file, since no key has a slash."""
    key, equals, _ = argument.partition("=")
    return bool(equals) and "/" not in key and "\\" not in key


def _instead_of(missing: str) -> str:
    """Return what to do about a file that is not there."""
    path = Path(missing)
    if path.suffix != ".toml" and path.name == missing:
        return f"a setting is written as section.key=value, as {missing}=…, and a run's file ends in .toml"
    folder = path.parent
    there = sorted(file.name for file in folder.glob("*.toml")) if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, there, 1)
    if near:
        return f"did you mean {folder / near[0]}?"
    return "name the TOML file of a run, or no file for the embedded default"


def one_line(error: object) -> str:
    """Return an error as the one line that the command prints."""
    return "megabatch: error: " + visible(" ".join(str(error).splitlines()))
