"""What predict_memory says beside what a GPU then takes: rows to benchmarks/results/memory-cuda.jsonl, a figure beside them.

    python -m benchmarks.memory_accuracy                 # all cases and limits, on a GPU: about three minutes
    python -m benchmarks.memory_accuracy --no-limits     # the cases alone
    python -m benchmarks.memory_accuracy --limits        # the limits alone: the largest batch that is said to fit runs
    python -m benchmarks.memory_accuracy --quick         # two tiny cases on a CPU: that the program works
    python -m benchmarks.memory_accuracy --predict-only  # no device: predictions and others' formulas alone
    python -m benchmarks.memory_accuracy --again FILE    # predictions anew beside kept measurements, which needs no device
    python -m benchmarks.memory_accuracy --redraw FILE   # table and figure again, from kept rows

Each prediction and each measurement has a process of its own, a prediction without a device to look at.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory_accuracy import report
from benchmarks.memory_accuracy.cases import Case, Limit, cases, limits, of_row, quick_cases
from benchmarks.memory_accuracy.measuring import measured_row
from benchmarks.memory_accuracy.predicting import fitting_row, predicted_row
from benchmarks.report import read_rows

RESULTS = Path(__file__).resolve().parents[1] / "results"
# A part that takes longer is given up; the others still have their turn.
SECONDS = 150
Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, or 1 where a case failed or ran out of memory that was said to be enough."""
    options = _parser().parse_args(arguments)
    if options.part:
        print(json.dumps(run_here(options.part, json.loads(options.what))))
        return 0
    if options.redraw:
        _show(read_rows(options.redraw), options.redraw)
        return 0
    if options.again:
        # All of them first: the file that they came from is written over.
        return _finish(list(_again(read_rows(options.again), options.jobs)), options.again)
    on_device = not options.predict_only and not options.quick
    if on_device and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here: pass --predict-only, or --quick")
    chosen: list[Case | Limit] = []
    if options.limits is not True:
        chosen += [case for case in (quick_cases() if options.quick else cases()) if _is_wanted(case, options.only)]
    if options.limits is not False and on_device:
        chosen += [limit for limit in limits() if _is_wanted(limit.case, options.only)]
    return _finish(_rows(chosen, options), options.output)


def _finish(found: Iterable[Row], out: Path) -> int:
    rows = []
    with out.open("w") as file:
        for row in found:
            print(json.dumps(row), file=file, flush=True)
            print(report.line(row), flush=True)
            rows.append(row)
    _show(rows, out)
    return int(any("failed" in row or row.get("ran") is False for row in rows))


def _again(rows: list[Row], jobs: int) -> Iterator[Row]:
    """Kept rows with today's predictions; what was run within a limit stays what it was."""
    with ThreadPoolExecutor(jobs) as predicting:
        said = {
            place: predicting.submit(run_apart, "predict", asdict(of_row(row)))
            for place, row in enumerate(rows)
            if "limit" not in row
        }
        for place, row in enumerate(rows):
            measured = {name: row[name] for name in ("measured", "measured_reserved", "machine") if name in row}
            yield asdict(of_row(row)) | joined(said[place].result(), measured) if place in said else row


def _is_wanted(case: Case, only: str) -> bool:
    return any(part in case.model for part in only.split(","))


def _rows(chosen: list[Case | Limit], options: argparse.Namespace) -> Iterator[Row]:
    """The rows in the order of the cases; several are predicted and some measured at a time."""
    with ThreadPoolExecutor(options.jobs) as predicting, ThreadPoolExecutor(options.at_once) as measuring:
        waiting: list[tuple[Future[Row], Future[Row] | None]] = []
        for each in chosen:
            if isinstance(each, Limit):
                said = predicting.submit(run_apart, "fit", asdict(each))
                waiting.append((said, measuring.submit(_within, said)))
            else:
                said = predicting.submit(run_apart, "predict", asdict(each))
                measured = None if options.predict_only else measuring.submit(run_apart, "measure", asdict(each))
                waiting.append((said, measured))
        for each, (said, measured) in zip(chosen, waiting, strict=True):
            known = asdict(each.case if isinstance(each, Limit) else each)
            yield known | joined(said.result(), {} if measured is None else measured.result())


def _within(said: Future[Row]) -> Row:
    """The measurement of what is said to fit, within the limit."""
    row = said.result()
    return {} if "failed" in row else run_apart("within", row)


def run_here(part: str, what: Row) -> Row:
    """A part of a row, in the process that was started for it."""
    if part == "fit":
        return fitting_row(Limit(Case(**what["case"]), what["bytes"]))
    if part == "within":
        return measured_row(of_row(what), what["limit"])
    return (predicted_row if part == "predict" else measured_row)(Case(**what))


def run_apart(part: str, what: Row) -> Row:
    """A part of a row from a process of its own: nothing of one case is left to the next."""
    command = [sys.executable, "-m", "benchmarks.memory_accuracy", "--part", part, "--what", json.dumps(what)]
    # A prediction is to be made where there is no device.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if part in ("predict", "fit") else {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=os.environ | hidden)
    except subprocess.TimeoutExpired:
        return {"failed": f"{part}: took more than {SECONDS} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": f"{part}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"}
    return json.loads(lines[-1])  # type: ignore[no-any-return]


def joined(predicted: Row, measured: Row) -> Row:
    """One row, with the errors of both predictions where the step was not held to a limit."""
    found = {**measured, **predicted}
    if found.get("measured") and "predicted" in found and "limit" not in found:
        found["error"] = found["predicted"] / found["measured"] - 1
        found["reserved_error"] = found["predicted_reserved"] / found["measured_reserved"] - 1
    return found


def _show(rows: list[Row], out: Path) -> None:
    if any("error" in row for row in rows):
        print(report.summary(rows))
        report.draw(rows, out.with_suffix(".png"))
        print(f"figure: {out.with_suffix('.png')}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory_accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two tiny cases on a CPU")
    parser.add_argument("--predict-only", action="store_true", help="measure nothing")
    parser.add_argument("--limits", action=argparse.BooleanOptionalAction, help="the limits alone, or none of them")
    parser.add_argument("--only", default="", help="cases whose model's name holds this, or one of these, with commas")
    parser.add_argument("--output", type=Path, default=RESULTS / "memory-cuda.jsonl")
    parser.add_argument("--again", type=Path, metavar="FILE", help="predictions anew, beside the measurements of kept rows")
    parser.add_argument("--redraw", type=Path, metavar="FILE", help="table and figure again, from kept rows")
    parser.add_argument("--jobs", type=int, default=4, help="predictions made at once")
    parser.add_argument("--at-once", type=int, default=1, help="steps measured at once, each in its own process")
    for hidden in ("--part", "--what"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
