"""Compare predicted with measured seconds of steps; write rows to benchmarks/results/time-cuda.jsonl, and a figure beside them.

    python -m benchmarks.time_accuracy                 # all cases, on a GPU: about six minutes
    python -m benchmarks.time_accuracy --kinds         # with the device's seconds by kind of kernel, from the profiler
    python -m benchmarks.time_accuracy --quick         # two tiny cases on a CPU, to test the program
    python -m benchmarks.time_accuracy --again FILE    # predict again for kept measurements, without a device
    python -m benchmarks.time_accuracy --fresh         # only models that no efficiency was fitted on
    python -m benchmarks.time_accuracy --diagnosed     # only models whose errors led to classes of operations
    python -m benchmarks.time_accuracy --operations    # instead: one step's time by operator, to operations-cuda.jsonl

Steps are timed one after the other, with nothing else running; the predictions, which need no device, follow.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory_accuracy.cases import Case, of_row, quick_cases
from benchmarks.report import read_rows
from benchmarks.time_accuracy import report
from benchmarks.time_accuracy.cases import cases, diagnosed_cases, fresh_cases
from benchmarks.time_accuracy.measuring import operations_row, timed_row
from benchmarks.time_accuracy.predicting import predicted_rows

RESULTS = Path(__file__).resolve().parents[1] / "results"
Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0, or 1 if a case failed."""
    options = _parser().parse_args(arguments)
    out = options.again or options.output or RESULTS / ("operations-cuda.jsonl" if options.operations else "time-cuda.jsonl")
    if options.again:
        rows = read_rows(options.again)
    else:
        if not options.quick and not torch.cuda.is_available():
            raise SystemExit("there is no CUDA device here: pass --quick or --again FILE")
        candidates: Iterator[Case] = chain(cases(), fresh_cases())
        if options.diagnosed or options.fresh:
            candidates = diagnosed_cases() if options.diagnosed else fresh_cases()
        chosen = quick_cases() if options.quick else _filter_by_model(candidates, options.only)
        row_of = operations_row if options.operations else partial(timed_row, kinds=options.kinds)
        rows = list(_write(_measured(chosen, row_of), out))
    if not options.measure_only and not options.operations:
        rows = list(_write(predicted_rows(rows), out))
        print(report.summary(rows))
        report.draw(rows, out.with_suffix(".png"))
    return int(any("failed" in row for row in rows))


def _filter_by_model(candidates: Iterable[Case], parts: str) -> list[Case]:
    return [case for case in candidates if any(part in case.model for part in parts.split(","))]


def _measured(chosen: Iterable[Case], row_of: Callable[[Case], Row]) -> Iterator[Row]:
    for case in chosen:
        try:
            yield asdict(case) | row_of(case)
        # The other cases still run.
        except Exception as error:
            yield asdict(case) | {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}


def _write(rows: Iterable[Row], out: Path) -> Iterator[Row]:
    """Yield the rows, and write and print each one."""
    # The rows may come from the file that is written.
    with out.with_suffix(".part").open("w") as file:
        for row in rows:
            print(json.dumps(row), file=file, flush=True)
            print(report.line(of_row(row), row), flush=True)
            yield row
    out.with_suffix(".part").replace(out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.time_accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two tiny cases on a CPU")
    parser.add_argument("--kinds", action="store_true", help="also the device's seconds by kind of kernel")
    parser.add_argument("--only", default="", help="only models whose name contains one of these parts, separated by commas")
    parser.add_argument("--fresh", action="store_true", help="only models that no efficiency was fitted on")
    parser.add_argument("--diagnosed", action="store_true", help="only models whose errors led to classes of operations")
    parser.add_argument("--measure-only", action="store_true", help="do not predict; --again does it later")
    parser.add_argument("--operations", action="store_true", help="profile operators instead of timing steps")
    parser.add_argument("--output", type=Path, help="file of rows (results/time-cuda.jsonl, or operations-cuda.jsonl)")
    parser.add_argument("--again", type=Path, metavar="FILE", help="predict again for the measurements of this file")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
