"""Tables, figure and predictions of the study, from its rows: `python -m benchmarks.study report` and `predict`."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.study import fit, runs
from benchmarks.study.fit import Curve, HeldBack, Interval, Row
from benchmarks.study.runs import PLAIN
from benchmarks.study.stack import Kind
from megabatch.reporting.figures import Axis, Chart, Figure, Series, save
from megabatch.reporting.format import count_text, percent_text

PLACE = r"(<!-- study: {} -->\n).*?(<!-- end -->)"


def read(files: Sequence[Path]) -> list[Row]:
    """Return the rows of several files; half a line at the end of one is left out."""
    rows = []
    for file in files:
        for line in file.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return rows


def merge(rows: Sequence[Row], more: Sequence[Row]) -> list[Row]:
    """Return the rows and those of `more` whose run is not among them."""
    known: dict[tuple[Any, ...], Row] = {}
    for row in (*rows, *more):
        run = (row["rate"], row["seed"]) if "error" not in row else (row["error"],)
        known.setdefault((runs.cell_of(row), *run), row)
    return list(known.values())


def thin(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows without the hits of runs that are not at their cell's best rate, which nothing reads."""
    best = {cell: fit.best_rate(own) for cell, own in fit.by_cell(rows).items()}
    return [{k: v for k, v in row.items() if k != "hits" or row["rate"] == best[runs.cell_of(row)]} for row in rows]


def blocks(rows: Sequence[Row], records: Mapping[str, Any]) -> dict[str, str]:
    """Return the generated parts of the page by name. Without rows only the table of the sources."""
    parts = {"sources": sources_table(records)}
    curves = fit.curves(rows)
    if curves:
        parts |= {
            "coverage": coverage(rows),
            "curves": curves_table([c for c in curves if c.kind == PLAIN]),
            "law": law_text([c for c in curves if c.kind == PLAIN]),
            "kinds": kinds_table(curves),
            "rates": rates_text(rows),
            "held-back": held_back_table(rows, curves),
        }
    return parts


def write_page(template: Path, page: Path, parts: Mapping[str, str]) -> None:
    """Write a page with its named blocks filled; every part must have its place in the template."""
    text = template.read_text()
    for name, part in parts.items():
        text, count = re.subn(PLACE.format(name), lambda place, part=part: place[1] + part + "\n" + place[2], text, flags=re.S)
        if count != 1:
            raise ValueError(f"{template} has {count} places for the block {name!r}; it needs one `<!-- study: {name} -->`")
    page.write_text(text)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    rule = ["---"] * text_columns + ["---:"] * (len(head) - text_columns)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def sources_table(records: Mapping[str, Any]) -> str:
    """Return the sources with their sizes and what was left out of them."""
    lines = []
    for name, record in sorted(records.items(), key=lambda item: item[1]["train"]):
        equal = sum(record[key] for key in ("equal_pair", "equal_x", "equal_y"))
        parts = [f"{record[key]:,}" for key in ("train", "validation", "test")]
        lines.append([name, record["title"], *parts, f"{record['read']:,}", f"{equal:,}", f"{record['near_equal']:,}"])
    head = ["source", "x and y", "training", "validation", "test", "read", "equal x or y", "near-equal, kept together"]
    return _table(head, lines, 2)


def coverage(rows: Sequence[Row]) -> str:
    """Return what was run, and what of the schedule was not."""
    cells = fit.by_cell(rows)
    finished = [cell for cell in cells if runs.next_job(cell, cells) is None]
    failed = Counter(str(row["error"])[:80] for row in rows if "error" in row)
    eager = {runs.cell_of(row) for row in rows if row.get("not_captured")}
    first = next(row for row in rows if "error" not in row)
    budgets = Counter(count_text(cell.samples) for cell in finished)
    text = (
        f"{sum(map(len, cells.values())):,} runs in {len(cells)} cells, of which {len(finished)} have their best rate between two "
        f"others and {len(runs.SEEDS)} seeds at it ({', '.join(f'{n} with {b} samples' for b, n in budgets.items())}). "
        f"On {first.get('gpu') or first.get('cpu')} with torch {first.get('torch')}, {str(first.get('date'))[:10]}."
    )
    if eager:
        text += f" {len(eager)} cells ran without a graph."
    return text + "".join(f" {n} × failed: {reason}." for reason, n in failed.items())


def _batches(curves: Sequence[Curve]) -> list[int]:
    return sorted({point.batch for c in curves for point in c.points})


def curves_table(curves: Sequence[Curve]) -> str:
    """Return recall against the batch for every source and number of samples, and the largest batch with its interval."""
    batches = _batches(curves)
    lines = []
    for c in curves:
        top = c.recalls.max()
        by_batch = {p.batch: p.recall for p in c.points}
        cells = [
            (f"**{by_batch[b]:.1%}**" if by_batch[b] == top else f"{by_batch[b]:.1%}") if b in by_batch else "" for b in batches
        ]
        largest, interval = fit.largest_batch(c.batches, c.recalls), fit.largest_interval(c)
        text = f"{'≥ ' if largest.beyond else ''}{largest.batch:,.0f} ({interval.low:,.0f} to {interval.high:,.0f})"
        lines.append([c.source, count_text(c.samples), *cells, text])
    return _table(["source", "samples", *(f"{b:,}" for b in batches), "largest batch"], lines, 2)


def law_text(curves: Sequence[Curve]) -> str:
    """Return the parameters of the law with their intervals."""
    law, intervals = fit.fit_law(curves), fit.law_intervals(curves)
    typical = Interval(*(2.0**v for v in intervals["a"]))
    lines = [
        ["largest batch at 1M samples and 100k pairs", f"{2**law.a:,.0f}", f"{typical.low:,.0f} to {typical.high:,.0f}"],
        *(
            [title, f"{getattr(law, name):.2f}", f"{intervals[name].low:.2f} to {intervals[name].high:.2f}"]
            for name, title in (
                ("alpha", "exponent of the samples seen"),
                ("beta", "exponent of the different pairs"),
                ("steepness", "exponent of the loss beyond"),
                ("spread", "log2 of what 90 % of the curves allow, over the fit"),
            )
        ),
    ]
    text = _table(["", "fit", "90 % interval"], lines)
    return f"{text}\n\n{len(curves)} curves of {len({c.source for c in curves})} sources; intervals over draws of sources."


def kinds_table(curves: Sequence[Curve]) -> str:
    """Return how the largest batch and the best recall of other kinds of training compare with the plain one."""
    plain = {(c.source, c.samples): c for c in curves if c.kind == PLAIN}
    shifts: dict[Kind, list[tuple[float, float]]] = defaultdict(list)
    for c in curves:
        other = plain.get((c.source, c.samples))
        if c.kind != PLAIN and other is not None:
            common = sorted({p.batch for p in c.points} & {p.batch for p in other.points})
            if len(common) < 3:
                continue
            own, base = ([p.recall for p in k.points if p.batch in common] for k in (c, other))
            ratio = fit.largest_batch(np.array(common, float), np.array(own)).batch
            ratio /= fit.largest_batch(np.array(common, float), np.array(base)).batch
            shifts[c.kind].append((ratio, max(own) - max(base)))
    lines = [
        [
            f"{kind.size}, {kind.start}, {kind.loss}, smoothing {kind.smoothing:g}",
            f"{len(found)}",
            f"{median(ratio for ratio, _ in found):.2f}×",
            f"{min(ratio for ratio, _ in found):.2f}× to {max(ratio for ratio, _ in found):.2f}×",
            f"{100 * median(gain for _, gain in found):+.1f} points",
        ]
        for kind, found in sorted(shifts.items())
    ]
    return _table(["kind", "curves", "largest batch, median", "range", "best recall, median"], lines)


def rates_text(rows: Sequence[Row]) -> str:
    """Return how the best rate moves with the batch."""
    rates = fit.best_rates(rows)
    law, intervals = fit.fit_rates(rates), fit.rate_intervals(rates)
    groups: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for cell, rate in rates.items():
        groups[(cell.source, cell.kind, cell.samples)][cell.batch] = rate
    lines = []
    for batch in sorted({cell.batch for cell in rates}):
        ratios = [own[batch] / own[1024] for own in groups.values() if batch in own and 1024 in own]
        if ratios:
            lines.append([f"{batch:,}", f"{median(ratios):g}×", f"{min(ratios):g}× to {max(ratios):g}×", str(len(ratios))])
    e, f = (f"{getattr(law, name):.2f} ({intervals[name].low:.2f} to {intervals[name].high:.2f})" for name in ("e", "f"))
    text = f"The best rate grows with the batch to the power {e}, and with the samples to the power {f}: {len(rates)} cells."
    return _table(["batch", "best rate over that of batch 1,024, median", "range", "cells"], lines) + "\n\n" + text


def held_back_table(rows: Sequence[Row], curves: Sequence[Curve]) -> str:
    """Return what plans from the other sources cost on each source."""
    plain = [c for c in curves if c.kind == PLAIN]
    batches, rates = fit.hold_out_batches(plain), fit.hold_out_rates(rows)
    lines = []
    for source in sorted({case.source for case in (*batches, *rates)}):
        own = ([case for case in cases if case.source == source] for cases in (batches, rates))
        lines.append([source, *(text for cases in own for text in _held_back_texts(cases))])
    lines.append(["**all**", *(text for cases in (batches, rates) for text in _held_back_texts(cases))])
    return _table(["held back", "batch: within", "worst loss", "rate: within", "worst loss"], lines)


def _held_back_texts(cases: Sequence[HeldBack]) -> list[str]:
    if not cases:
        return ["", ""]
    good = sum(case.good for case in cases)
    return [f"{good} of {len(cases)} ({percent_text(good / len(cases))})", f"{100 * max(case.lost for case in cases):.1f} points"]


def figure(curves: Sequence[Curve]) -> Figure:
    """Return one chart for each source: recall lost against the batch, one line for each number of samples."""
    charts = []
    for source in sorted({c.source for c in curves}):
        series = [
            Series(
                [(p.batch, max(c.recalls) - p.recall) for p in c.points],
                label=f"{count_text(c.samples)} samples",
                color=(None, 0, 1, 2)[i % 4],
            )
            for i, c in enumerate(sorted((c for c in curves if c.source == source), key=lambda c: c.samples))
        ]
        ticks = {b: f"{b:,}" for b in _batches(curves) if round(np.log2(b)) % 2 == 0}
        x = Axis("batch", scale="log2", ticks=ticks)
        charts.append(Chart(f"{source}: recall@1 lost against the best batch", series, x, Axis(format=percent_text, low=0)))
    return Figure(charts, "recall lost against the batch, for every source and number of samples")


def predictions(rows: Sequence[Row], records: Mapping[str, Any], sources: Sequence[str]) -> dict[str, Any]:
    """Return what the law of the given rows predicts for sources that have no row, with the commit that made it."""
    seen = {row["source"] for row in rows} & set(sources)
    if seen:
        raise ValueError(f"{', '.join(sorted(seen))} already have rows; predict only sources that were not run")
    curves = [c for c in fit.curves(rows) if c.kind == PLAIN]
    law, intervals, rate_law = fit.fit_law(curves), fit.law_intervals(curves), fit.fit_rates(fit.best_rates(rows))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    cases = []
    for source in sources:
        pairs = records[source]["train"]
        for samples in runs.BUDGETS.values():
            rates = {
                str(b): rate_law.rate(b, samples, PLAIN) for b in runs.BATCHES if b <= pairs and samples // b >= runs.FEWEST_STEPS
            }
            largest, planned = law.largest(samples, pairs), law.planned(samples, pairs)
            cases.append(
                {"source": source, "samples": samples, "pairs": pairs, "largest": largest, "planned": planned, "rates": rates}
            )
    return {
        "commit": commit,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "fitted_sources": sorted({c.source for c in curves}),
        "curves": len(curves),
        "law": law._asdict(),
        "intervals": {name: list(interval) for name, interval in intervals.items()},
        "rate_law": {"offset": rate_law.offsets[PLAIN], "e": rate_law.e, "f": rate_law.f},
        "predictions": cases,
    }


def judge(frozen: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return how the predictions compare with the rows of their sources, as a table."""
    curves = {(c.source, c.samples): c for c in fit.curves(rows) if c.kind == PLAIN}
    lines = []
    for case in frozen["predictions"]:
        c = curves.get((case["source"], case["samples"]))
        if c is None:
            continue
        largest = fit.largest_batch(c.batches, c.recalls)
        batch = float(np.clip(case["planned"], c.batches[0], c.batches[-1]))
        top = float(c.recalls.max())
        lost = top - fit.recall_at(c, batch)
        measured = f"{'≥ ' if largest.beyond else ''}{largest.batch:,.0f}"
        texts = [f"{case['largest']:,.0f}", measured, f"{batch:,.0f}", f"{100 * lost:.1f} points"]
        lines.append([case["source"], count_text(case["samples"]), *texts, "yes" if lost <= fit.tolerance(top) else "no"])
    head = ["source", "samples", "largest, predicted", "measured", "planned", "lost there", "within the tolerance"]
    return _table(head, lines, 2) + f"\n\nPredicted at commit `{frozen['commit'][:12]}`, before any of these sources was run."


def save_figure(curves: Sequence[Curve], file: Path) -> None:
    save(figure(curves), file)
