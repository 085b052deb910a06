"""The verbs of the `megabatch` command: each parses its arguments, calls the library, prints the answer."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from megabatch import __version__, environment


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of one command line: 0, or 2 where the arguments cannot be met. `argv` None reads sys.argv."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.verb is None:
        parser.print_help()
        return 0
    try:
        arguments.run(arguments)
    except ValueError as error:
        # By our convention a ValueError names the value, the rule and the remedy: a traceback would only bury them.
        print("megabatch: error:", " ".join(str(error).splitlines()), file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megabatch", description="Exact contrastive losses at any batch size for PyTorch.")
    parser.add_argument("--version", action="version", version=f"megabatch {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")

    env = verbs.add_parser("env", help="describe this machine and its software, to paste into a bug report")
    env.add_argument("--json", action="store_true", help="print JSON instead of text")
    env.set_defaults(run=_env)
    return parser


def _env(arguments: argparse.Namespace) -> None:
    report = environment.describe()
    print(json.dumps(report, indent=2) if arguments.json else environment.as_text(report))
