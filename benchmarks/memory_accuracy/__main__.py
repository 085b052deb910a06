"""Compare predict_memory with measured memory; write rows to benchmarks/results/memory-cuda.jsonl, and a figure beside them.

    python -m benchmarks.memory_accuracy                 # all cases and limits, on a GPU: about three minutes
    python -m benchmarks.memory_accuracy --no-limits     # only the cases
    python -m benchmarks.memory_accuracy --limits        # only the limits: run the largest batch that is predicted to fit
    python -m benchmarks.memory_accuracy --quick         # two tiny cases on a CPU, to test the program
    python -m benchmarks.memory_accuracy --predict-only  # without a device: only predictions and the formulas of others
    python -m benchmarks.memory_accuracy --again FILE    # predict again for kept measurements, without a device
    python -m benchmarks.memory_accuracy --redraw FILE   # table and figure from kept rows

Each prediction and each measurement runs in its own process; predictions see no device.
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
# A part that takes longer fails; the others still run.
TIMEOUT_S = 150
Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0, or 1 if a case failed or ran out of memory that was predicted to suffice."""
    options = _parser().parse_args(arguments)
    if options.part:
        print(json.dumps(run_here(options.part, json.loads(options.what))))
        return 0
    if options.redraw:
        _show(read_rows(options.redraw), options.redraw)
        return 0
    if options.again:
        # All of them first: the file that they come from is overwritten.
        return _write_and_report(list(_predict_again(read_rows(options.again), options.jobs)), options.again)
    on_device = not options.predict_only and not options.quick
    if on_device and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here: pass --predict-only or --quick")
    chosen: list[Case | Limit] = []
    if options.limits is not True:
        chosen += [case for case in (quick_cases() if options.quick else cases()) if _is_wanted(case, options.only)]
    if options.limits is not False and on_device:
        chosen += [limit for limit in limits() if _is_wanted(limit.case, options.only)]
    return _write_and_report(_rows(chosen, options), options.output)


def _write_and_report(new_rows: Iterable[Row], out: Path) -> int:
    rows = []
    with out.open("w") as file:
        for row in new_rows:
            print(json.dumps(row), file=file, flush=True)
            print(report.line(row), flush=True)
            rows.append(row)
    _show(rows, out)
    return int(any("failed" in row or row.get("ran") is False for row in rows))


def _predict_again(rows: list[Row], jobs: int) -> Iterator[Row]:
    """Yield kept rows with new predictions; rows of limits stay as they are."""
    with ThreadPoolExecutor(jobs) as predicting:
        predictions = {
            number: predicting.submit(run_in_process, "predict", asdict(of_row(row)))
            for number, row in enumerate(rows)
            if "limit" not in row
        }
        for number, row in enumerate(rows):
            measured = {name: row[name] for name in ("measured", "measured_reserved", "machine") if name in row}
            yield asdict(of_row(row)) | joined(predictions[number].result(), measured) if number in predictions else row


def _is_wanted(case: Case, only: str) -> bool:
    return any(part in case.model for part in only.split(","))


def _rows(chosen: list[Case | Limit], options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows in the order of the cases; several are predicted and measured at a time."""
    with ThreadPoolExecutor(options.jobs) as predicting, ThreadPoolExecutor(options.at_once) as measuring:
        waiting: list[tuple[Future[Row], Future[Row] | None]] = []
        for each in chosen:
            if isinstance(each, Limit):
                predicted = predicting.submit(run_in_process, "fit", asdict(each))
                waiting.append((predicted, measuring.submit(_measure_within, predicted)))
            else:
                predicted = predicting.submit(run_in_process, "predict", asdict(each))
                measured = None if options.predict_only else measuring.submit(run_in_process, "measure", asdict(each))
                waiting.append((predicted, measured))
        for each, (predicted, measured) in zip(chosen, waiting, strict=True):
            case = asdict(each.case if isinstance(each, Limit) else each)
            yield case | joined(predicted.result(), {} if measured is None else measured.result())


def _measure_within(predicted: Future[Row]) -> Row:
    """Return the measurement, within the limit, of what is predicted to fit."""
    row = predicted.result()
    return {} if "failed" in row else run_in_process("within", row)


def run_here(part: str, what: Row) -> Row:
    """Return a part of a row; runs in the process that was started for it."""
    if part == "fit":
        return fitting_row(Limit(Case(**what["case"]), what["bytes"]))
    if part == "within":
        return measured_row(of_row(what), what["limit"])
    return (predicted_row if part == "predict" else measured_row)(Case(**what))


def run_in_process(part: str, what: Row) -> Row:
    """Return a part of a row from a new process, so that one case leaves nothing to the next."""
    command = [sys.executable, "-m", "benchmarks.memory_accuracy", "--part", part, "--what", json.dumps(what)]
    # Predictions must not need a device.
    environment = {"CUDA_VISIBLE_DEVICES": ""} if part in ("predict", "fit") else {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=os.environ | environment)
    except subprocess.TimeoutExpired:
        return {"failed": f"{part}: took more than {TIMEOUT_S} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": f"{part}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"}
    return json.loads(lines[-1])  # type: ignore[no-any-return]


def joined(predicted: Row, measured: Row) -> Row:
    """Return one row, with the errors of peak and reserve if the step had no limit."""
    row = {**measured, **predicted}
    if row.get("measured") and "predicted" in row and "limit" not in row:
        row["error"] = row["predicted"] / row["measured"] - 1
        row["reserved_error"] = row["predicted_reserved"] / row["measured_reserved"] - 1
    return row


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
    parser.add_argument("--predict-only", action="store_true", help="predict and do not measure")
    parser.add_argument("--limits", action=argparse.BooleanOptionalAction, help="only the limits, or no limits")
    parser.add_argument("--only", default="", help="only models whose name contains one of these parts, separated by commas")
    parser.add_argument("--output", type=Path, default=RESULTS / "memory-cuda.jsonl")
    parser.add_argument("--again", type=Path, metavar="FILE", help="predict again for the measurements of this file")
    parser.add_argument("--redraw", type=Path, metavar="FILE", help="table and figure from the rows of this file")
    parser.add_argument("--jobs", type=int, default=4, help="parallel predictions")
    parser.add_argument("--at-once", type=int, default=1, help="parallel measurements, each in its own process")
    for internal in ("--part", "--what"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
