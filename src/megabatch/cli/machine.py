"""The verb `env`: describe this machine and its software, or measure the rates of its device."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .arguments import add_overwrite, check_output


def add(verbs: Any) -> None:
    env = verbs.add_parser("env", help="Describe this machine for a bug report, or measure its speed.", description=_env.__doc__)
    env.add_argument("--json", action="store_true", help="Print JSON instead of text.")
    env.add_argument(
        "--measure",
        action="store_true",
        help="Measure the speed of the device, which `megabatch plan --rates` reads; this takes minutes.",
    )
    env.add_argument("--out", type=Path, metavar="FILE", help="File to write the measured rates to; needs --measure.")
    add_overwrite(env)
    env.set_defaults(run=_env)


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
        print("Rates written to", write_rates(rates, arguments.out), file=sys.stderr)
