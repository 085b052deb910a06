"""Compare time and memory of whole CLIP training steps at large batches: `python -m benchmarks.encoders --help`.

One run writes a file of rows, prints a table, and draws a figure next to the file. On CUDA the model is ViT-L/14, on a CPU a
tiny one that only shows that everything works. A step is zero_grad, both encoders, loss, backward and AdamW, in bf16 autocast,
with images and texts in host memory. A contestant whose gradients are wrong is not timed.
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
    """Measure the cases one after the other in this process, and append a row to the file for each."""
    # On a CPU without bf16 products, the first one warns.
    warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)
    start = time.perf_counter()
    bench = Bench(group[0].device, small)
    rate = f"{bench.rate / 1e12:,.0f} TFLOP/s" if bench.rate > 1e12 else f"{bench.rate / 1e9:,.0f} GFLOP/s"
    print(f"{group[0].case}: model created in {time.perf_counter() - start:.1f} s, large products run at {rate}", flush=True)
    for place, case in enumerate(group, start=1):
        print(f"[{place}/{len(group)}, {time.perf_counter() - start:.0f} s] {what(asdict(case))}", flush=True)
        row = bench.row(case)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"    {outcome(row)}", flush=True)


def _run_group(group: list[Case], small: bool, timeout_s: float, out: Path) -> None:
    """Measure the cases in a new process. If it dies, its current case gets a row with `error`, and another process continues."""
    while group:
        before = len(read_rows(out))
        work = json.dumps({"group": [asdict(case) for case in group], "small": small})
        command = [sys.executable, "-m", "benchmarks.encoders", "--measure", work, "--output", str(out.resolve())]
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=timeout_s).returncode
            failure = f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
        except subprocess.TimeoutExpired:
            failure = f"stopped after {timeout_s:.0f} s"
        rows = read_rows(out)
        group = group[len(rows) - before :]
        if group:
            rows.append({**asdict(group[0]), "error": failure})
            write_rows(out, rows)
            print(f"    {failure}", flush=True)
            group = group[1:]


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 1 if a row of ours has an error or nothing was measured, otherwise 0."""
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
        # Rows of other cases stay, so that the cases can be measured by several commands.
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
    parser.add_argument(
        "--cases", default=",".join(CASES), help=f"separated by commas ({','.join(CASES)}); rows of other cases stay"
    )
    parser.add_argument("--only", help="contestants, separated by commas")
    parser.add_argument("--quick", action="store_true", help="use a tiny model and one timed step, to see whether everything works")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that a case may take with all its contestants")
    parser.add_argument("--output", type=Path, help="file of rows (default: results/encoders-DEVICE[-quick].jsonl)")
    parser.add_argument("--redraw", type=Path, metavar="FILE", help="print the table and draw the figure of stored rows")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser


def _small(options: argparse.Namespace) -> bool:
    return options.quick or options.device == "cpu"


def _cases(name: str, options: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases of one name; print the reason for contestants that cannot run here."""
    if name not in CASES:
        raise ValueError(f"case is {name!r}: must be one of {', '.join(CASES)}")
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
