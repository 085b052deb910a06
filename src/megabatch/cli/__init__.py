"""The verbs of the `megabatch` command: each parses its arguments, calls the library, prints the answer.

What a verb alone needs is imported by it: `megabatch env` works where nothing but torch is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .. import __version__, environment
from ..training.signals import Stopped
from . import measuring, planning, training
from .words import complain

# What some verbs need beyond torch, all of it in one extra.
EXTRA = ("PIL", "matplotlib", "rich", "safetensors")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of one command line: 0; 2 where the arguments cannot be met; 1, or 128 and the signal's number, where a run
    stopped before its end. `argv` None reads sys.argv."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.verb is None:
        parser.print_help()
        return 0
    # Towers and optimizers that a user names may lie in the folder where the command was given; installed ones go before them.
    sys.path.append(os.getcwd())
    try:
        return int(arguments.run(arguments) or 0)
    except Stopped as stopped:
        return complain(stopped, stopped.status)
    except ValueError as error:
        # By our convention a ValueError names the value, the rule and the remedy: a traceback would only bury them.
        return complain(error, 2)
    except OSError as error:
        # A full disk, a folder that may not be written: what is wrong is in the message.
        return complain(error, 1)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        return complain(f"`megabatch {arguments.verb}` needs {error.name}: pip install 'megabatch[train]'", 2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megabatch", description="Contrastive training at the batch that the problem needs, on the hardware there is."
    )
    parser.add_argument("--version", action="version", version=f"megabatch {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for room in (training, planning, measuring):
        room.add(verbs)
    env = verbs.add_parser("env", help="describe this machine and its software, to paste into a bug report")
    env.add_argument("--json", action="store_true", help="print JSON instead of text")
    env.add_argument("--measure", action="store_true", help="measure the device's rates, for `megabatch plan --rates`")
    env.add_argument("--out", type=Path, help="where to write them")
    env.set_defaults(run=_env)
    return parser


def _env(arguments: argparse.Namespace) -> None:
    if arguments.measure:
        _measure_rates(arguments)
        return
    if arguments.out is not None:
        raise ValueError(f"--out is {str(arguments.out)!r}: rates are written there, with --measure")
    report = environment.describe()
    print(json.dumps(report, indent=2) if arguments.json else environment.as_text(report))


def _measure_rates(arguments: argparse.Namespace) -> None:
    from ..measuring.rates import measure_here
    from ..planning.rates import as_text, write_rates

    rates = measure_here()
    print(json.dumps(asdict(rates), indent=2) if arguments.json else as_text(rates))
    if arguments.out is not None:
        print("written:", write_rates(rates, arguments.out), file=sys.stderr)
