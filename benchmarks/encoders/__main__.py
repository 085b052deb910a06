"""Time and memory of whole CLIP training steps, by ways to take a large batch through: `python -m benchmarks.encoders --help`.

One run writes one file of rows, a table on the terminal and a figure beside the file. On CUDA the model is ViT-L/14, on a CPU a
tiny one that only shows that everything works. A step is zero_grad, both encoders, loss, backward and AdamW, in bf16 autocast,
with pictures and texts in host memory. A contestant whose gradients are wrong is not timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.encoders import schemes
from benchmarks.encoders.cases import CASES, FULL, SMALL, Case
from benchmarks.encoders.measure import Bench
from benchmarks.encoders.report import HEADERS, draw, outcome, table, what
from benchmarks.measure import Row
from benchmarks.report import read_rows, reason, show, write_rows

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def measure_group(group: list[Case], small: bool, out: Path) -> None:
    """Adds a row to the file for each case, measured in this process one after the other."""
    # On a CPU without bf16 products every first one says so.
    warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)
    start = time.perf_counter()
    bench = Bench(group[0].device, small)
    rate = f"{bench.rate / 1e12:,.0f} TFLOP/s" if bench.rate > 1e12 else f"{bench.rate / 1e9:,.0f} GFLOP/s"
    print(f"{group[0].case}: model made in {time.perf_counter() - start:.1f} s, large products run at {rate}", flush=True)
    for place, case in enumerate(group, start=1):
        print(f"[{place}/{len(group)}, {time.perf_counter() - start:.0f} s] {what(asdict(case))}", flush=True)
        row = bench.row(case)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"    {outcome(row)}", flush=True)


def _run_group(group: list[Case], small: bool, timeout_s: float, out: Path) -> None:
    """Measures cases in a process of their own; where it dies, the case it was at is a row with `error`, and a new one goes on."""
    while group:
        before = len(read_rows(out))
        work = json.dumps({"group": [asdict(case) for case in group], "small": small})
        command = [sys.executable, "-m", "benchmarks.encoders", "--measure", work, "--output", str(out.resolve())]
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=timeout_s).returncode
            why = f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
        except subprocess.TimeoutExpired:
            why = f"stopped after {timeout_s:.0f} s"
        rows = read_rows(out)
        group = group[len(rows) - before :]
        if group:
            rows.append({**asdict(group[0]), "error": why})
            write_rows(out, rows)
            print(f"    {why}", flush=True)
            group = group[1:]


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, or 1 when a row of ours has an error or nothing was measured."""
    parser = _parser()
    options = parser.parse_args(arguments)
    name = f"encoders-{options.device}{'-quick' if options.quick else ''}.jsonl"
    out = options.redraw or options.output or RESULTS / name
    if options.measure:
        work = json.loads(options.measure)
        measure_group([Case(**case) for case in work["group"]], work["small"], out)
        return 0
    try:
        groups = {} if options.redraw else {name: list(_cases(name, options)) for name in options.cases.split(",")}
        rows = read_rows(out) if options.redraw or out.exists() else []
    except ValueError as error:
        parser.error(str(error))
    if groups:
        # Rows of other cases stay: one command on a borrowed machine may be too short for all of them.
        write_rows(out, [row for row in rows if row["case"] not in groups])
        for group in groups.values():
            _run_group(group, _small(options), options.timeout, out)
        rows = read_rows(out)
        print(f"rows: {out}")
    _show(rows, out.with_suffix(".png"))
    failed = any(row["contestant"] == "megabatch" and "error" in row for row in rows)
    return int(failed or not any("seconds" in row for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoders", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--cases", default=",".join(CASES), help=f"with commas ({','.join(CASES)}); others in the file stay")
    parser.add_argument("--only", help="contestants, with commas")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one timed step: does everything work?")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds a case may take with all its contestants")
    parser.add_argument("--output", type=Path, help="file of rows (results/encoders-DEVICE[-quick].jsonl), beside it the figure")
    parser.add_argument("--redraw", type=Path, metavar="FILE", help="table and figure again, from kept rows")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser


def _small(options: argparse.Namespace) -> bool:
    return options.quick or options.device == "cpu"


def _cases(name: str, options: argparse.Namespace) -> Iterator[Case]:
    """The cases of one name; contestants that cannot run here are printed with the reason."""
    if name not in CASES:
        raise ValueError(f"case is {name!r}: choose among {', '.join(CASES)}")
    only = options.only.split(",") if options.only else list(schemes.SCHEMES)
    missing = {contestant: schemes.unavailable(contestant) for contestant in only}
    for choice in CASES[name](SMALL if _small(options) else FULL):
        reason = missing.get(choice["contestant"], "")
        if reason:
            print(f"{name}, {choice['contestant']}: not run, {reason}", flush=True)
        elif reason is None:
            runs = {"runs": 1} if options.quick else {}
            yield Case(case=name, device=options.device, **{**choice, **runs})


def _show(rows: list[Row], path: Path) -> None:
    measured = [row for row in rows if "seconds" in row]
    if measured:
        show(HEADERS, table(measured))
    for row in rows:
        if "seconds" not in row:
            print(f"not measured: {row['case']}, {what(row)}: {reason(row)}")
    if importlib.util.find_spec("matplotlib") is None:
        print("no figure: matplotlib is not installed")
    elif any(row["case"] in ("contestants", "chunks") for row in measured):
        draw(measured, path)
        print(f"figure: {path}")


if __name__ == "__main__":
    raise SystemExit(main())
