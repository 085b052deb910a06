"""Time and memory of the losses beside other implementations: `python -m benchmarks.loss --help`.

One run writes one file of rows, a table on the terminal and a picture beside the file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks import peers, picture, report
from benchmarks.check import LOSSES
from benchmarks.measure import Case, Row, run_case

RESULTS = Path(__file__).parent / "results"


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, or 1 when an implementation of ours gave a wrong result or none, or nothing was measured."""
    parser = _parser()
    options = parser.parse_args(arguments)
    kept = options.markdown or options.redraw
    out = kept or options.out or RESULTS / f"loss-{options.device}.jsonl"
    try:
        cases = [] if kept else list(_cases(options))
        rows = report.read_rows(kept) if kept else []
    except ValueError as error:
        parser.error(str(error))
    if options.markdown:
        print(report.markdown(rows))
        return 0
    if not kept:
        rows = _run(cases, options.timeout, out)
        print(f"rows: {out}")
    _show(rows, options.picture or out.with_suffix(".png"))
    failed = any(row["implementation"] == "ours" and "error" in row for row in rows)
    return int(failed or not any("total_s" in row for row in rows))


def _run(cases: list[Case], timeout_s: float, out: Path) -> list[Row]:
    rows: list[Row] = []
    absent = set()
    for place, case in enumerate(cases, start=1):
        if (case.loss, case.implementation) in absent:
            continue
        row = run_case(case, timeout_s)
        print(f"[{place}/{len(cases)}] {_progress(row)}", flush=True)
        if "unavailable" in row:
            absent.add((case.loss, case.implementation))
            continue
        rows.append(row)
        # Kept after every case: a run that is stopped has lost nothing.
        report.write_rows(out, rows)
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", help="of the embeddings, as torch names it")
    parser.add_argument("--sizes", default="1024,4096,16384", type=_sizes, help="batch sizes, with commas")
    parser.add_argument("--dim", type=int, default=512, help="width of an embedding")
    parser.add_argument("--losses", default=",".join(LOSSES), help="with commas")
    parser.add_argument("--only", help="implementations, with commas; module:function for one of your own")
    parser.add_argument("--scale", type=float, default=20.0, help="factor on the cosines (1 / temperature)")
    parser.add_argument("--repeats", type=int, help="timed runs after the first; without it, as time allows")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds a case may take")
    parser.add_argument("--out", type=Path, help="file of rows (results/loss-DEVICE.jsonl)")
    parser.add_argument("--picture", type=Path, help="file of the picture (beside the rows)")
    parser.add_argument("--redraw", type=Path, metavar="FILE", help="table and picture again, from kept rows")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the README's table, from kept rows")
    return parser


def _sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers with commas, such as 1024,4096") from None


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    """The cases in interleaved order, so that a slow spell of the machine meets every implementation alike."""
    wanted = {loss: _implementations(loss, options) for loss in options.losses.split(",")}
    for batch in sorted(options.sizes):
        for loss, names in wanted.items():
            for name in names:
                yield Case(
                    loss=loss,
                    implementation=name,
                    batch=batch,
                    dim=options.dim,
                    dtype=options.dtype,
                    device=options.device,
                    scale=options.scale,
                    repeats=options.repeats,
                )


def _implementations(loss: str, options: argparse.Namespace) -> list[str]:
    """The names to run for a loss; those that cannot run here are printed with the reason."""
    if loss not in LOSSES:
        raise ValueError(f"loss is {loss!r}: choose among {', '.join(LOSSES)}")
    known = [peer.name for peer in peers.PEERS if peer.loss == loss]
    names = [name.strip() for name in options.only.split(",")] if options.only else known
    runnable = []
    for name in names:
        # A name may belong to the other loss only.
        if ":" not in name and name not in known and any(name == peer.name for peer in peers.PEERS):
            continue
        reason = peers.unavailable(peers.find(name, loss), options.device)
        if reason:
            print(f"{loss}, {name}: not run, {reason}")
        else:
            runnable.append(name)
    return runnable


def _progress(row: Row) -> str:
    start = f"{row['loss']:<7}{report.title(row):<22}N = {row['batch']:<8,}"
    if "total_s" not in row:
        return f"{start}{report.reason(row)}"
    seconds, mib = report.three_digits(row["total_s"]), report.three_digits(row["extra_bytes"] / 2**20)
    return f"{start}{seconds} s, {mib} MiB, gradient error {row['errors']['gradient']:.1e}"


def _show(rows: list[Row], path: Path) -> None:
    measured = any("total_s" in row for row in rows)
    if measured:
        report.show(report.HEADERS, report.table(rows))
    for line in report.notes(rows):
        print(f"not measured: {line}")
    if measured:
        print("speed and memory are relative to OpenCLIP in the same run; extra MiB include the gradients of both inputs")
        picture.draw(rows, path)
        print(f"picture: {path}")


if __name__ == "__main__":
    raise SystemExit(main())
