"""The `megabatch` command: every verb parses its arguments, calls the library and prints the result.

Nothing here imports torch before a verb runs, so help, versions and errors in the arguments appear at once. A verb imports what it
alone needs when it runs: `megabatch env` works if nothing but torch is installed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..training.signals import Stopped
from ..version import __version__
from . import machine, measuring, planning, training
from .arguments import Parser, one_line

# Packages that some verbs need besides torch, all of them in one extra.
EXTRA = ("PIL", "matplotlib", "rich", "safetensors")
DESCRIPTION = """\
Find the batch size that a contrastive training needs, and train at it: batches
that do not fit into memory are computed in chunks, with the same gradients.

"""
# The modules whose verbs appear under each heading of the help.
GROUPS = {"Choose a batch size": (planning, measuring), "Train at it": (training,), "This machine": (machine,)}
EPILOG = "`megabatch VERB --help` explains a verb; `megabatch train` needs no arguments."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status, for programs that call it.

    The `megabatch` command itself also handles signals and closed pipes (see `megabatch.__main__`). The status is 0; 2 if the
    arguments are invalid; 1, or 128 plus the signal's number, if a run stopped before its end. `argv` None reads sys.argv.
    """
    status, message = run(argv)
    if message is not None:
        print(message, file=sys.stderr)
    return status


def run(argv: Sequence[str] | None = None) -> tuple[int, str | None]:
    """Run one command line; return its exit status and the error in one line, None if there is none."""
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:
        _complete(parser)
    arguments = parser.parse_args(argv)
    if arguments.verb is None:
        parser.print_help()
        return 0, None
    if getattr(arguments, "trust_code", False):
        # The user's own towers and optimizers may be in the current folder; installed packages take precedence.
        sys.path.append(os.getcwd())
    try:
        return int(arguments.run(arguments) or 0), None
    except Stopped as stopped:
        return stopped.status, one_line(stopped)
    except ValueError as error:
        # By convention a ValueError names the value, the rule and the remedy, so a traceback would only hide them.
        return 2, one_line(error)
    except BrokenPipeError:
        # Nobody reads the output any more: the entry point ends the process.
        raise
    except OSError as error:
        # A full disk, a folder without write permission: the message says what is wrong.
        return 1, one_line(error)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        return 2, one_line(f"`megabatch {arguments.verb}` needs {error.name}: pip install 'megabatch[train]'")


def build_parser() -> Parser:
    """Return the parser of all verbs."""
    parser = Parser(
        prog="megabatch",
        usage="megabatch VERB [arguments]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megabatch {__version__}", help="Print the version and exit.")
    # argparse lists all verbs under one heading, so the list is hidden and is part of the description.
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", prog="megabatch", help=argparse.SUPPRESS)
    lines = []
    for heading, modules in GROUPS.items():
        before = len(verbs._choices_actions)
        for module in modules:
            module.add(verbs)
        lines.append(f"{heading}:\n")
        lines += [f"  {verb.dest:<10} {verb.help}\n" for verb in verbs._choices_actions[before:]]
    parser.description = DESCRIPTION + "".join(lines)
    parser.epilog = EPILOG
    return parser


def _complete(parser: argparse.ArgumentParser) -> None:
    """Print completions for the shell and exit; do nothing if argcomplete is not installed."""
    try:
        import argcomplete
    except ModuleNotFoundError:
        return
    argcomplete.autocomplete(parser)
