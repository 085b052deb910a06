"""How large a contrastive batch pays, measured: `python -m benchmarks.study --help`.

python -m benchmarks.study data --out build/study                                  # build the sources (minutes, no GPU)
python -m benchmarks.study run --minutes 7 --data build/study --out RESULTS.jsonl  # train cells until the time is over
python -m benchmarks.study keep RESULTS.jsonl                                     # add the rows to those of the repository
python -m benchmarks.study predict                                                # keep predictions of what was not run
python -m benchmarks.study report                                                 # write docs/study.md with its tables
python -m benchmarks.study law                                                    # fit the law that plans read
python -m benchmarks.study repeat RESULTS.jsonl --row 17 --data build/study        # train one row again
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks.study import data, fit, report, runs
from megabatch import batch_law

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
RECORD, ROWS, PREDICTIONS = RESULTS / "study-sources.json", RESULTS / "study-cuda.jsonl", RESULTS / "study-predictions.json"
# Trainings with other towers, by `benchmarks.batches`.
TOWERS = [RESULTS / "batches-250k-cuda.jsonl", RESULTS / "batches-cuda.jsonl"]
# The text of the page, and where it is written with its tables once there are rows.
TEMPLATE, PAGE = Path(__file__).with_name("page.md"), ROOT / "docs/study.md"


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.study", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("data", help="Build the sources.")
    build.add_argument("--out", type=Path, default=Path("build/study"))
    build.add_argument("--sources", default=",".join(data.SOURCES))
    run = commands.add_parser("run", help="Train cells until the time is over.")
    run.add_argument("--minutes", type=float, required=True)
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--processes", type=int, default=5)
    run.add_argument("--sources", default=",".join(runs.FITTED), help="Comma-separated; the most important first.")
    run.add_argument("--most-samples", type=int, default=None, help="Leave out cells with more samples than this.")
    repeat = commands.add_parser("repeat", help="Train one row again and print both.")
    repeat.add_argument("file", type=Path)
    repeat.add_argument("--row", type=int, required=True, help="Line of the file, from 1.")
    keep = commands.add_parser("keep", help="Add the rows of a file to those of the repository.")
    keep.add_argument("file", type=Path)
    predict = commands.add_parser("predict", help="Keep predictions for budgets of sources that were not run.")
    predict.add_argument("--sources", default=",".join(runs.HELD_BACK))
    commands.add_parser("report", help="Write the tables and the figure of the page.")
    commands.add_parser("law", help="Fit the law and write it where plans read it.")
    for command in (run, repeat):
        command.add_argument("--data", type=Path, default=Path("build/study"))
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if options.command == "data":
        data.main(options.out, options.sources.split(","), RECORD)
        return 0
    records = json.loads(RECORD.read_text())
    if options.command == "run":
        pairs = runs.training_pairs(records, options.data)
        if missing := set(options.sources.split(",")) - set(pairs):
            print(f"Left out, not in {options.data}: {', '.join(sorted(missing))}", flush=True)
        work_list = runs.cells(pairs, options.sources.split(","))
        limit = options.most_samples
        work_list = [cell for cell in work_list if limit is None or cell.samples <= limit]
        runs.run(options.data, options.out, options.minutes, options.device, options.processes, work_list, records)
        return 0
    rows = report.read([ROWS] if ROWS.exists() else [])
    if options.command == "keep":
        merged = report.thin(report.merge(rows, report.read([options.file])))
        ROWS.write_text("".join(json.dumps(row) + "\n" for row in merged))
        return 0
    towers = report.tower_curves(TOWERS, json.loads(report.PUBLISHED.read_text()))
    frozen = json.loads(PREDICTIONS.read_text()) if PREDICTIONS.exists() else []
    if options.command == "predict":
        made = [*frozen, report.predictions(rows, records, options.sources.split(","))]
        PREDICTIONS.write_text(json.dumps(made, indent=1) + "\n")
        return 0
    if options.command == "report":
        report.write_page(TEMPLATE, PAGE, report.blocks(rows, records, frozen, towers))
        curves = [c for c in fit.curves(rows) if c.kind == report.PLAIN]
        if curves:
            report.save_figure(curves, RESULTS / "study-cuda.png")
        return 0
    if options.command == "law":
        last = max(str(row.get("date", ""))[:10] for row in rows) if rows else ""
        batch_law.LAW_FILE.write_text(batch_law.to_json(fit.measured_law(rows, towers, last)))
        print(batch_law.LAW_FILE.read_text())
        return 0
    row = json.loads(options.file.read_text().splitlines()[options.row - 1])
    torch.set_float32_matmul_precision(runs.PRODUCTS)
    job = runs.Job(runs.cell_of(row), [row["rate"]], [row["seed"]])
    (again,) = runs.rows_of(job, runs.Trainer(options.data, torch.device(options.device)).train(job))
    for key in ("validation_1", "validation_mrr", "test_1", "test_10", "test_mrr", "scale"):
        print(f"{key}: {row[key]:.5f} in the file, {again[key]:.5f} again")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
