"""The verbs of the `megabatch` command: each parses its arguments, calls the library, prints the answer.

Nothing here imports torch before a verb runs: help, versions and errors in the arguments are answered at once. What a verb alone
needs is imported by it: `megabatch env` works where nothing but torch is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..training.signals import Stopped
from ..version import __version__
from . import measuring, planning, training
from .arguments import Parser
from .common_args import add_overwrite, check_output, one_line

# What some verbs need beyond torch, all of it in one extra.
EXTRA = ("PIL", "matplotlib", "rich", "safetensors")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status, as a program that calls it wants it; the `megabatch` command itself also
    handles signals and closed pipes (see `megabatch.__main__`).

    The status is 0; 2 where the arguments cannot be met; 1, or 128 and the signal's number, where a run stopped before its end.
    `argv` None reads sys.argv.
    """
    status, message = run(argv)
    if message is not None:
        print(message, file=sys.stderr)
    return status


def run(argv: Sequence[str] | None = None) -> tuple[int, str | None]:
    """Run one command line; return its exit status and the line that says why it failed, None if it did not."""
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:
        _complete(parser)
    arguments = parser.parse_args(argv)
    if arguments.verb is None:
        parser.print_help()
        return 0, None
    if getattr(arguments, "trust_code", False):
        # Towers and optimizers of one's own may lie in the current folder; installed packages go before them.
        sys.path.append(os.getcwd())
    try:
        return int(arguments.run(arguments) or 0), None
    except Stopped as stopped:
        return stopped.status, one_line(stopped)
    except ValueError as error:
        # By our convention a ValueError names the value, the rule and the remedy: a traceback would only bury them.
        return 2, one_line(error)
    except BrokenPipeError:
        # Nobody reads the output any more: the entry point ends the process.
        raise
    except OSError as error:
        # A full disk, a folder that may not be written: what is wrong is in the message.
        return 1, one_line(error)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        return 2, one_line(f"`megabatch {arguments.verb}` needs {error.name}: pip install 'megabatch[train]'")


def build_parser() -> Parser:
    """Return the parser of all verbs."""
    parser = Parser(
        prog="megabatch", description="Contrastive training at the batch size that the problem needs, on the hardware at hand."
    )
    parser.add_argument("--version", action="version", version=f"megabatch {__version__}", help="Print the version and exit.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for room in (training, planning, measuring):
        room.add(verbs)
    env = verbs.add_parser(
        "env", help="Describe this machine and its software, to paste into a bug report.", description=_env.__doc__
    )
    env.add_argument("--json", action="store_true", help="Print JSON instead of text.")
    env.add_argument(
        "--measure", action="store_true", help="Measure the rates of the device, which `megabatch plan --rates` reads (minutes)."
    )
    env.add_argument("--out", type=Path, metavar="FILE", help="File that the measured rates are written to; needs --measure.")
    add_overwrite(env)
    env.set_defaults(run=_env)
    return parser


def _complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell's request for completions and exit; return where argcomplete is not installed."""
    try:
        import argcomplete
    except ModuleNotFoundError:
        return
    argcomplete.autocomplete(parser)


def _env(arguments: argparse.Namespace) -> None:
    """Print the versions, devices and launcher variables that a bug report needs, or measure the rates of the device."""
    if arguments.measure:
        _measure_rates(arguments)
        return
    if arguments.out is not None:
        raise ValueError(f"--out is {str(arguments.out)!r}: only measured rates are written to a file; add --measure")
    from .. import environment

    report = environment.describe()
    print(json.dumps(report, indent=2) if arguments.json else environment.as_text(report))


def _measure_rates(arguments: argparse.Namespace) -> None:
    from ..costs.rates import as_text, write_rates
    from ..measuring.rates import measure_here

    check_output(arguments.out, "--out", arguments.overwrite, make_folder=True)
    rates = measure_here()
    print(json.dumps(asdict(rates), indent=2) if arguments.json else as_text(rates))
    if arguments.out is not None:
        print("written:", write_rates(rates, arguments.out), file=sys.stderr)
