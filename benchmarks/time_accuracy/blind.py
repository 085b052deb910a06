"""Predict steps of models that nothing was fitted on, keep the predictions in a file, and measure them later.

    python -m benchmarks.time_accuracy.blind --freeze    # predict, on any machine, to results/time-blind-frozen.jsonl: commit it
    python -m benchmarks.time_accuracy.blind             # then measure, on a GPU, in four minutes: results/time-blind-cuda.jsonl

The device's part of a prediction rests on an H200. The host's part, launching operations, depends on the machine's CPU: a
prediction is frozen at the rate of `costs.devices` and, beside it, at several others, between which the rate that is measured on
the machine selects, as a plan for this machine does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory_accuracy.cases import Case, of_row
from benchmarks.memory_accuracy.report import step_text
from benchmarks.report import read_rows
from benchmarks.time_accuracy.cases import cases, diagnosed_cases, fresh_cases
from benchmarks.time_accuracy.measuring import timed_row
from benchmarks.time_accuracy.predicting import predict, work_of

RESULTS = Path(__file__).resolve().parents[1] / "results"
FROZEN, MEASURED = RESULTS / "time-blind-frozen.jsonl", RESULTS / "time-blind-cuda.jsonl"
# Seconds of the host per operation.
HOST_RATES = (5e-6, 10e-6, 20e-6, 30e-6, 40e-6, 50e-6, 70e-6, 100e-6)
WITHIN = 0.20
Row = dict[str, Any]


def blind_cases() -> Iterator[Case]:
    """Yield steps of image towers, language models, text embedders and pairs of towers. No constant was fitted on any of them."""
    yield Case("vit_tiny_patch16_224", 256, "bf16")
    yield Case("vit_large_patch16_224", 64, "bf16")
    yield Case("resnet34", 256, "bf16")
    yield Case("resnet152", 64, "bf16")
    for name in ("efficientnet_b3", "convnext_base", "swin_base_patch4_window7_224", "maxvit_tiny_tf_224", "caformer_s18"):
        yield Case(name, 64, "bf16")
    for name in ("davit_tiny", "hiera_tiny_224", "convit_small", "repvgg_b0", "dla60"):
        yield Case(name, 128, "bf16")
    yield Case("convnext_small", 64)
    yield Case("gpt2-large", 4, "bf16")
    for name in ("EleutherAI/pythia-410m", "HuggingFaceTB/SmolLM2-360M", "Qwen/Qwen2.5-0.5B"):
        yield Case(name, 8, "bf16")
    yield Case("TinyLlama/TinyLlama-1.1B", 4, "bf16")
    yield Case("meta-llama/Llama-3.2-1B", 4, "bf16", checkpointing=True)
    yield Case("embed:sentence-transformers/all-MiniLM-L6-v2@128", 1024, "bf16")
    yield Case("embed:sentence-transformers/all-mpnet-base-v2@128", 256, "bf16")
    yield Case("embed:intfloat/e5-base-v2@256", 128, "bf16")
    yield Case("embed:BAAI/bge-large-en-v1.5@512", 16)
    yield Case("embed:BAAI/bge-m3@512", 32, "bf16")
    yield Case("embed:Qwen/Qwen3-Embedding-0.6B@256", 32, "bf16")
    yield Case("clip-vit-s-16", 1024, "bf16", objective="clip", chunk=256)
    yield Case("clip-vit-l-16", 256, "bf16", objective="siglip", chunk=64, keep=2)
    yield Case("clip-vit-l-14-336", 64, "bf16", objective="clip")
    yield Case("clip-vit-h-14", 128, "bf16", objective="clip", chunk=32)


def frozen_row(case: Case) -> Row:
    """Return a prediction at the default host rate and at others."""
    work = work_of(case)
    usual = predict(case, work)
    by_host = [predict(case, work, host_s=rate).seconds for rate in HOST_RATES]
    return asdict(case) | {"predicted_s": usual.seconds, "parts": usual.parts, "by_host_s": by_host, "torch": torch.__version__}


def at_host_rate(row: Row, rate: float) -> float:
    """Return the frozen prediction at a host rate; it is piecewise linear in the rate."""
    place = min(max(1, bisect_right(HOST_RATES, rate)), len(HOST_RATES) - 1)
    (low, high), (a, b) = HOST_RATES[place - 1 : place + 1], row["by_host_s"][place - 1 : place + 1]
    return float(a + (b - a) * (min(max(rate, HOST_RATES[0]), HOST_RATES[-1]) - low) / (high - low))


def measure(rows: list[Row]) -> Iterator[Row]:
    """Yield the frozen rows with measured seconds and the errors of both predictions."""
    from megabatch.measuring.rates import host_seconds

    rate = host_seconds(torch.device("cuda"), 1.0)
    for row in rows:
        began = time.perf_counter()
        try:
            measured = timed_row(of_row(row))
        # The other cases still run.
        except Exception as error:
            yield row | {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
            continue
        here = at_host_rate(row, rate)
        seconds = measured["seconds"]
        errors = {"error": row["predicted_s"] / seconds - 1, "error_here": here / seconds - 1}
        more = {"predicted_here_s": here, "host_rate_s": rate, "took_s": round(time.perf_counter() - began, 1)}
        yield row | measured | more | errors


def line(row: Row) -> str:
    start = f"{row['model']:<52} {row['rows']:>5} {step_text(row):<30}"
    if "failed" in row:
        return f"{start} failed: {row['failed']}"
    if "seconds" not in row:
        return f"{start} predicted {1e3 * row['predicted_s']:8.1f} ms"
    return (
        f"{start} {1e3 * row['seconds']:8.1f} ms, predicted {1e3 * row['predicted_s']:8.1f} ({row['error']:+.0%}),"
        f" at this host's rate {1e3 * row['predicted_here_s']:8.1f} ({row['error_here']:+.0%})"
    )


def summary(rows: list[Row]) -> str:
    """Return how many predictions were within 20 %, at the default host rate and at the machine's."""
    measured = [row for row in rows if "error" in row]
    if not measured:
        return f"{len(rows)} predictions, none measured"
    texts = []
    for name, key in (("default host rate", "error"), ("this machine's host rate", "error_here")):
        off = [abs(row[key]) for row in measured]
        within = sum(error <= WITHIN for error in off)
        texts.append(f"{name}: {within} of {len(off)} within {WITHIN:.0%}, {statistics.median(off):.0%} in the median")
    return f"{'; '.join(texts)}; host: {1e6 * measured[0]['host_rate_s']:.1f} µs per operation"


def seen_models() -> set[str]:
    """Return the models that constants were fitted on or whose errors led to classes."""
    return {case.model for group in (cases(), fresh_cases(), diagnosed_cases()) for case in group}


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0, or 1 if a case failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.time_accuracy.blind", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--freeze", action="store_true", help="predict and write the frozen file")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--output", type=Path, help=f"file of measured rows (results/{MEASURED.name})")
    options = parser.parse_args(arguments)
    out = options.output or (FROZEN if options.freeze else MEASURED)
    chosen = (frozen_row(case) for case in blind_cases() if options.only in case.model)
    if not options.freeze:
        chosen = measure([row for row in read_rows(FROZEN) if options.only in row["model"]])
    rows = []
    with out.open("w") as file:
        for row in chosen:
            print(json.dumps(row), file=file, flush=True)
            print(line(row), flush=True)
            rows.append(row)
    print(summary(rows))
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
