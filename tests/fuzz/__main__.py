"""`python -m fuzz`: run the fuzzer for long, print failures and how to replay them, and write a summary."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

from megabatch.towers.without_torchvision import import_open_clip

from .harness import Failure, Report, fuzz, replayed
from .targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="Inputs over all targets.")
    parser.add_argument("--seed", type=int, default=0, help="Seed from which every input follows.")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="Processes at a time.")
    parser.add_argument("--only", default="", help="Run only targets whose name contains this text.")
    parser.add_argument("--out", type=Path, help="Write a summary as JSON here.")
    parser.add_argument(
        "--replay", metavar="TARGET/INDEX", help="Run one input of the seed in this process and print what happens."
    )
    arguments = parser.parse_args()
    targets = [target for target in TARGETS if arguments.only in target.name]
    if arguments.replay:
        name, _, index = arguments.replay.rpartition("/")
        return _replay(name, arguments.seed, int(index))
    # An import of some seconds, which would count as the time of the first input that needs it.
    import_open_clip()
    began = time.monotonic()
    reports = fuzz(
        targets, arguments.inputs, arguments.seed, processes=arguments.processes, say=lambda line: print(line, flush=True)
    )
    seconds = time.monotonic() - began
    failures = [failure for report in reports.values() for failure in report.failures]
    for name, report in reports.items():
        outcomes = ", ".join(f"{kind} {count:,}" for kind, count in report.outcomes.most_common())
        rate = report.inputs / report.seconds if report.seconds else 0
        print(f"{name}: {report.inputs:,} inputs, {rate:,.0f} a second, slowest {report.slowest_s:.2f} s; {outcomes}")
    for failure in failures:
        print(f"\n{describe(failure, arguments.seed)}")
    print(f"\n{arguments.inputs:,} inputs in {seconds:,.0f} s, seed {arguments.seed}: {len(failures)} kinds of failure")
    if arguments.out is not None:
        arguments.out.write_text(
            json.dumps(_summary(reports, arguments.seed, seconds, arguments.processes), indent=1) + "\n", "utf-8"
        )
    return 1 if failures else 0


def describe(failure: Failure, seed: int) -> str:
    """Return the failure, its smallest known input, and the command that runs it again."""
    return (
        f"FAILED {failure.target}: {failure.kind} at {failure.where}, {failure.times:,} times\n"
        f"  replay: python -m fuzz --seed {seed} --replay '{failure.target}/{failure.index}'\n"
        f"  input: {failure.case[:1500]}\n" + "".join(f"  | {line}\n" for line in failure.trace.rstrip().splitlines()[-12:])
    )


def _replay(name: str, seed: int, index: int) -> int:
    target = next((target for target in TARGETS if target.name == name), None)
    if target is None:
        print(f"there is no target {name!r}; there are {', '.join(target.name for target in TARGETS)}", file=sys.stderr)
        return 2
    case, outcome, failure = replayed(target, seed, index)
    print(f"input: {case!r}\noutcome: {outcome}")
    if failure is not None:
        print(failure.trace)
    return 1 if failure else 0


def _summary(reports: dict[str, Report], seed: int, seconds: float, processes: int) -> dict[str, object]:
    from benchmarks.machine import describe as machine

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seed": seed,
        "inputs": sum(report.inputs for report in reports.values()),
        "seconds": round(seconds, 1),
        "processes": processes,
        "machine": machine("cpu"),
        "failures": [
            {"target": f.target, "index": f.index, "kind": f.kind, "where": f.where, "times": f.times, "input": f.case[:2000]}
            for report in reports.values()
            for f in report.failures
        ],
        "targets": {
            name: {
                "inputs": report.inputs,
                "slowest_s": round(report.slowest_s, 3),
                "slowest_index": report.slowest,
                "outcomes": dict(report.outcomes.most_common()),
            }
            for name, report in reports.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
