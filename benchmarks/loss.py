"""Compare time and memory of the losses with other implementations: `python -m benchmarks.loss --help`.

One run writes a file of rows, prints a table, and draws a figure next to the file.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from itertools import groupby, product
from pathlib import Path

import torch

from benchmarks import figures, peers, report
from benchmarks.check import LOSSES
from benchmarks.measure import Case, Row, Step, measure_device, run_case, run_in_turn, with_the_host, worst

RESULTS = Path(__file__).parent / "results"
# A new row replaces an earlier one that has the same values of these keys.
SAME = ("loss", "implementation", "batch", "dim", "dtype", "device")


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 1 if an implementation of ours gave a wrong result or none, or if nothing was measured; otherwise 0."""
    parser = _parser()
    options = parser.parse_args(arguments)
    kept = options.markdown or options.redraw
    out = kept or options.out or RESULTS / f"loss-{options.device}.jsonl"
    earlier = kept or (out if options.append and out.exists() else None)
    try:
        cases = [] if kept else list(_cases(options))
        rows = report.read_rows(earlier) if earlier else []
    except ValueError as error:
        parser.error(str(error))
    if options.markdown:
        print(report.markdown(rows))
        return 0
    if not kept:
        rows = _run(cases, rows, options, out)
        print(f"rows: {out}")
    _show(rows, options.figure or out.with_suffix(".png"))
    failed = any(report.is_ours(row) and "error" in row for row in rows)
    return int(failed or not any("total_s" in row for row in rows))


def _run(cases: list[Case], rows: list[Row], options: argparse.Namespace, out: Path) -> list[Row]:
    """Measure the cases and return the given rows, in which the new rows replace those of the same cases."""
    absent = set()
    in_process = options.in_process
    done = 0
    for _, same_size in groupby(cases, lambda case: (case.loss, case.batch, case.dim)):
        # Compiled code of an earlier size would count as a reason to compile for all sizes.
        torch.compiler.reset()
        steps: list[tuple[Row, Step]] = []
        timed: list[tuple[Row, Case]] = []
        for case in same_size:
            done += 1
            if (case.loss, case.implementation) in absent:
                continue
            row, step = _measured_here(case) if in_process else (run_case(case, options.timeout), None)
            if step:
                steps.append((row, step))
            print(f"[{done}/{len(cases)}] {_progress(row)}", flush=True)
            # A failed kernel makes the device unusable for this process: the remaining cases run in separate processes.
            if "AcceleratorError" in row.get("error", ""):
                in_process, steps = False, []
            if "unavailable" in row:
                absent.add((case.loss, case.implementation))
                continue
            rows = [other for other in rows if any(other[key] != row[key] for key in SAME)] + [row]
            if not in_process and case.device == "cpu" and "total_s" in row:
                timed.append((row, case))
            # Written after every case, so that a run that is stopped loses nothing.
            report.write_rows(out, rows)
        if len(timed) > 1:
            times, error = run_in_turn([case for _, case in timed], options.timeout)
            if error:
                print(f"in turn: {error}; rows keep the times of their own processes", flush=True)
            for (row, _case), own in zip(timed, times or [{}] * len(timed), strict=True):
                row |= own
                if own:
                    print(f"in turn: {report.title(row):<30}{report.three_digits(row['total_s'])} s", flush=True)
            report.write_rows(out, rows)
        if steps:
            for (row, _step), times in zip(steps, with_the_host([step for _, step in steps]), strict=True):
                row |= times
                text = f"{report.three_digits(1e3 * row['wall_s'])} ms" if times else "out of memory"
                print(f"with the host: {report.title(row):<30}{text}", flush=True)
            report.write_rows(out, rows)
    return rows


def _measured_here(case: Case) -> tuple[Row, Step | None]:
    row, step = measure_device(case)
    for leaf in step.batch[:4] if step else ():
        leaf.grad = None
    gc.collect()
    if case.device == "cuda":
        torch.cuda.empty_cache()
    return row, step


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", help="dtype of the embeddings, by its name in torch")
    parser.add_argument("--sizes", default="1024,4096,16384", type=_sizes, help="batch sizes, separated by commas")
    parser.add_argument("--dim", default="512", type=_sizes, help="embedding widths, separated by commas")
    parser.add_argument("--losses", default=",".join(LOSSES), help="losses, separated by commas")
    parser.add_argument("--only", help="implementations, separated by commas; module:function for your own")
    parser.add_argument("--scale", type=float, default=20.0, help="factor of the cosines (1 / temperature)")
    parser.add_argument("--repeats", type=int, help="timed runs after the first; by default as many as the time budget allows")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds that a case in a separate process may take")
    parser.add_argument(
        "--in-process",
        action="store_true",
        help="run all cases in this process, which saves time on CUDA; steps with the host's time then take turns",
    )
    parser.add_argument("--out", type=Path, help="file of rows (default: results/loss-DEVICE.jsonl)")
    parser.add_argument("--append", action="store_true", help="keep the rows of other cases in the file")
    parser.add_argument("--figure", type=Path, help="file of the figure (default: next to the rows)")
    parser.add_argument("--redraw", type=Path, metavar="FILE", help="print the table and draw the figure of stored rows")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="print the table of the docs from stored rows")
    return parser


def _sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers separated by commas, such as 1024,4096") from None


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases in interleaved order, so that a slow phase of the machine affects every implementation alike."""
    wanted = {loss: _implementations(loss, options) for loss in options.losses.split(",")}
    for batch, dim in product(sorted(options.sizes), sorted(options.dim)):
        for loss, names in wanted.items():
            for name in names:
                yield Case(
                    loss=loss,
                    implementation=name,
                    batch=batch,
                    dim=dim,
                    dtype=options.dtype,
                    device=options.device,
                    scale=options.scale,
                    repeats=options.repeats,
                )


def _implementations(loss: str, options: argparse.Namespace) -> list[str]:
    """Return the names to run for a loss; print the reason for those that cannot run here."""
    if loss not in LOSSES:
        raise ValueError(f"loss is {loss!r}: must be one of {', '.join(LOSSES)}")
    known = [peer.name for peer in peers.PEERS if peer.loss == loss]
    by_default = [peer.name for peer in peers.PEERS if peer.loss == loss and peer.by_default]
    names = _names(options.only) if options.only else by_default
    runnable = []
    for name in names:
        # Some names exist for the other loss only.
        if ":" not in name and name not in known and any(name == peer.name for peer in peers.PEERS):
            continue
        reason = peers.unavailable(peers.find(name, loss), options.device)
        if reason:
            print(f"{loss}, {name}: not run, {reason}")
        else:
            runnable.append(name)
    return runnable


def _names(text: str) -> list[str]:
    """Return the names in a list separated by commas; some names contain a comma themselves.

    >>> _names("ours,ours, ids,openclip")
    ['ours', 'ours, ids', 'openclip']
    """
    known = {peer.name for peer in peers.PEERS}
    names: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        longer = f"{names[-1]}, {part}" if names else ""
        if longer in known:
            names[-1] = longer
        else:
            names.append(part)
    return names


def _progress(row: Row) -> str:
    start = f"{row['loss']:<7}{report.title(row):<30}N = {row['batch']:<10,}D = {row['dim']:<6,}"
    if "total_s" not in row:
        return f"{start}{report.reason(row)}"
    seconds, mib = report.three_digits(row["total_s"]), report.three_digits(row["extra_bytes"] / 2**20)
    share = f", {row['share']:.0%} of cuBLAS" if "share" in row else ""
    if "rested_share" in row:
        share += f", after idling {report.three_digits(row['rested_s'])} s, {row['rested_share']:.0%}"
    if "wall_s" in row:
        share += f", with the host {report.three_digits(row['wall_s'])} s"
    wrong = "" if row["right"] else f", wrong: {worst(row)}"
    return f"{start}{seconds} s{share}, {mib} MiB, gradient error {row['errors']['gradient']:.1e}{wrong}"


def _show(rows: list[Row], path: Path) -> None:
    measured = any("total_s" in row for row in rows)
    if measured:
        report.show(report.HEADERS, report.table(rows))
    for line in report.notes(rows):
        print(f"not measured: {line}")
    for line in report.wrong(rows):
        print(f"timed, but wrong: {line}")
    if measured:
        print("Speed and memory are relative to OpenCLIP in the same run; extra MiB include the gradients of both inputs.")
        figures.draw(rows, path)
        print(f"figure: {path}")


if __name__ == "__main__":
    raise SystemExit(main())
