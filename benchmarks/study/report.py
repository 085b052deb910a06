"""Tables, figure and predictions of the study, from its rows: `python -m benchmarks.study report` and `predict`."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks import batches
from benchmarks.study import fit, runs
from benchmarks.study.fit import Curve, HeldBack, Interval, RateLaw, Row, TowerCurve
from benchmarks.study.runs import PLAIN
from benchmarks.study.stack import WARM_UP, Cell, Kind
from megabatch.batch_law import MeasuredLaw
from megabatch.evidence import HOPELESS_UPDATES
from megabatch.recipes import power_near
from megabatch.reporting.figures import Axis, Chart, Figure, Series, save
from megabatch.reporting.format import count_text, percent_text
from megabatch.training.noise.estimator import NoiseEstimate, number

# Published comparisons and configurations, each with its source.
PUBLISHED = Path(__file__).with_name("published.json")
# The towers of results of `benchmarks.batches`.
TOWERS_TITLE = "convolutions and a text tower, images and names of characters"
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


def tower_curves(files: Sequence[Path], published: Mapping[str, Any]) -> list[TowerCurve]:
    """Return the trainings with other towers: of results of `benchmarks.batches`, and those that are known by their figures."""
    found = []
    for file in files:
        rows = read([file])
        best = batches.best_rates(rows)
        # As many pairs are reported as are used to choose the rate, each a tenth of all.
        samples, pairs = rows[0]["samples"], 8 * rows[0]["pairs"]
        recalls = np.array([fmean(each.recalls) for each in best])
        found.append(TowerCurve(TOWERS_TITLE, samples, pairs, np.array([each.batch for each in best], float), recalls))
    for case in published["towers"]:
        sizes, quality = np.array([[float(b), q / 100] for b, q in case["quality"].items()]).T
        found.append(TowerCurve(f"{case['name']} ({case['note']})", case["samples"], case["pairs"], sizes, quality))
    return sorted(found, key=lambda c: c.samples)


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


def blocks(
    rows: Sequence[Row],
    records: Mapping[str, Any],
    frozen: Sequence[Mapping[str, Any]] = (),
    towers: Sequence[TowerCurve] = (),
) -> dict[str, str]:
    """Return the generated parts of the page by name; those that need more rows say so.

    frozen: sets of predictions, as they were made. towers: trainings with towers other than MLPs.
    """
    every, rows = rows, fit.fitted_rows(rows)
    curves = fit.curves(rows)
    plain, fitted = [c for c in curves if c.kind == PLAIN], fit.law_curves(rows)
    confirming = [made for made in frozen if made["predictions"][0]["source"] in runs.CONFIRMATION]
    sections: dict[str, Callable[[], str]] = {
        "coverage": lambda: coverage(every),
        "curves": lambda: curves_table([c for c in fit.curves(every) if c.kind == PLAIN], fit.law_curves(every)),
        "law": lambda: law_text(fitted),
        "towers": lambda: towers_text(towers, fitted),
        "negatives": lambda: negatives_table(plain),
        "kinds": lambda: kinds_table(curves),
        "hard": lambda: hard_table(rows, curves),
        "rates": lambda: rates_text(rows),
        "warm-up": lambda: warm_up_text(rows),
        "noise": lambda: noise_text(rows, plain),
        "held-back": lambda: held_back_table(rows, plain, fitted),
        "sensitivity": lambda: sensitivity_text(rows, plain, towers),
        "predictions": lambda: judge([made for made in frozen if made not in confirming], rows),
        "confirmation": lambda: judge(confirming, every),
        "published": lambda: published_text(json.loads(PUBLISHED.read_text()), fit.measured_law(rows, towers, "")),
    }
    parts = {"sources": sources_table(records)}
    for name, section in sections.items():
        try:
            parts[name] = section()
        except fit.TooFewError as error:
            parts[name] = f"Not run yet: {error}."
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
    if not cells:
        raise fit.TooFewError("there are no rows")
    finished = [cell for cell in cells if runs.next_job(cell, cells) is None]
    failed = Counter(str(row["error"])[:80] for row in rows if "error" in row)
    eager = {runs.cell_of(row) for row in rows if row.get("not_captured")}
    first = next(row for row in rows if "error" not in row)
    budgets = Counter(count_text(cell.samples) for cell in finished)
    text = (
        f"{sum(map(len, cells.values())):,} runs in {len(cells)} cells, of which {len(finished)} are finished: the best rate lies "
        f"between two others, with {len(runs.SEEDS)} seeds ({', '.join(f'{n} with {b} samples' for b, n in budgets.items())}). "
        f"On {first.get('gpu') or first.get('cpu')} with torch {first.get('torch')}, {str(first.get('date'))[:10]}."
    )
    if eager:
        text += f" {len(eager)} cells ran without a graph."
    return text + "".join(f" {n} × failed: {reason}." for reason, n in failed.items())


def _batches(curves: Sequence[Curve]) -> list[int]:
    return sorted({point.batch for c in curves for point in c.points})


def curves_table(curves: Sequence[Curve], fitted: Sequence[Curve]) -> str:
    """Return recall against the batch for every source and number of samples, and the largest batch with its interval.

    A star marks the curves that are not fitted.
    """
    keys = {(c.source, c.samples) for c in fitted}
    if not curves:
        raise fit.TooFewError("no source has three batches")
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
        star = "" if (c.source, c.samples) in keys else " *"
        repeats = f"{c.samples / c.pairs:.1f}{star}"
        lines.append([c.source, count_text(c.samples), repeats, *cells, text])
    return _table(["source", "samples", "seen per pair", *(f"{b:,}" for b in batches), "largest batch"], lines, 2)


def law_text(curves: Sequence[Curve]) -> str:
    """Return the parameters of the law with their intervals."""
    law, intervals = fit.fit_law(curves), fit.law_intervals(fit.draw_laws(curves))
    typical = Interval(*(2.0**v for v in intervals["a"]))
    lines = [
        ["largest batch at 1M samples and 100k pairs", f"{2**law.a:,.0f}", f"{typical.low:,.0f} to {typical.high:,.0f}"],
        *(
            [title, f"{getattr(law, name):.2f}", f"{intervals[name].low:.2f} to {intervals[name].high:.2f}"]
            for name, title in (
                ("alpha", "exponent of the samples seen"),
                ("beta", "exponent of the different pairs"),
                ("steepness", "exponent of the loss beyond"),
                ("aim", "log2 of the planned over the largest batch"),
            )
        ),
    ]
    text = _table(["", "fit", "90 % interval"], lines)
    return f"{text}\n\n{len(curves)} curves of {len({c.source for c in curves})} sources; intervals over draws of sources."


def towers_text(towers: Sequence[TowerCurve], curves: Sequence[Curve]) -> str:
    """Return the largest batch of trainings with other towers beside the law, and the plan of each by the others' share."""
    if not towers:
        raise fit.TooFewError("there are no trainings with other towers")
    law = fit.fit_law(curves)
    shares = fit.tower_shares(towers, law)
    lines = []
    for place, (c, share) in enumerate(zip(towers, shares, strict=True)):
        largest = share * law.largest(c.samples, c.pairs)
        recalls = ", ".join(f"{b:,.0f}: {r:.1%}" for b, r in zip(c.batches, c.recalls, strict=True))
        others = 2 ** np.mean(np.log2([s for i, s in enumerate(shares) if i != place])) if len(shares) > 1 else share
        planned = power_near(float(others) * law.planned(c.samples, c.pairs))
        lost = c.recalls.max() - np.interp(np.log2(planned), np.log2(c.batches), c.recalls)
        texts = [f"{largest:,.0f}", f"{c.samples / largest:,.0f}", f"{share:.3f}", f"{planned:,.0f}", f"{100 * lost:.1f} points"]
        lines.append([c.title, count_text(c.samples), recalls, *texts])
    head = [
        "training",
        "samples",
        "recall@1 by batch",
        "largest batch",
        "updates",
        "over the law's",
        "planned by the others",
        "lost",
    ]
    mean = 2 ** np.mean(np.log2(shares))
    return f"{_table(head, lines)}\n\nTheir largest batch is {mean:.3f} of that of MLPs (geometric mean)."


def kinds_table(curves: Sequence[Curve]) -> str:
    """Return how the largest batch and the best recall of other kinds of training compare with the plain one.

    Those with hard negatives or another warm-up have tables of their own.
    """
    plain = {(c.source, c.samples): c for c in curves if c.kind == PLAIN}
    shifts: dict[Kind, list[tuple[float, float]]] = defaultdict(list)
    for c in curves:
        other = plain.get((c.source, c.samples))
        if c.kind != PLAIN and other is not None and (c.kind.warm_up, c.kind.negatives) == (PLAIN.warm_up, PLAIN.negatives):
            common = sorted({p.batch for p in c.points} & {p.batch for p in other.points})
            if len(common) < 3:
                continue
            own, base = ([p.recall for p in k.points if p.batch in common] for k in (c, other))
            ratio = fit.largest_batch(np.array(common, float), np.array(own)).batch
            ratio /= fit.largest_batch(np.array(common, float), np.array(base)).batch
            shifts[c.kind].append((ratio, max(own) - max(base)))
    if not shifts:
        raise fit.TooFewError("no other kind has three batches")
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


def negatives_table(curves: Sequence[Curve]) -> str:
    """Return what four times the batch changes at equal updates, with four times the samples, and at equal samples."""
    recalls = {(c.source, c.samples, p.batch): p.recall for c in curves for p in c.points}
    budgets = sorted({c.samples for c in curves})
    lines = []
    for batch in _batches(curves):
        equal_updates = [
            recalls[source, 4 * samples, 4 * b] - recall
            for (source, samples, b), recall in recalls.items()
            if b == batch and (source, 4 * samples, 4 * b) in recalls
        ]
        cells = [_gains(equal_updates)]
        for budget in budgets:
            cells.append(
                _gains(
                    [
                        recalls[source, samples, 4 * b] - recall
                        for (source, samples, b), recall in recalls.items()
                        if (b, samples) == (batch, budget) and (source, samples, 4 * b) in recalls
                    ]
                )
            )
        if any(cells):
            lines.append([f"{batch:,} to {4 * batch:,}", *cells])
    if not lines:
        raise fit.TooFewError("no source has a batch and four times that batch")
    ends = []
    for budget in budgets:
        own = [c for c in curves if c.samples == budget]
        low, high = ([f(c) for c in own] for f in (_smallest, _largest))
        ends.append(f"{count_text(budget)} samples: {median(low):,.0f} to {median(high):,.0f}")
    head = ["batch", "equal updates, four times the samples", *(f"equal samples, {count_text(budget)}" for budget in budgets)]
    text = "Median over sources of the smallest and of the largest batch within the tolerance: "
    return _table(head, lines) + "\n\n" + text + "; ".join(ends) + "."


def _smallest(curve: Curve) -> float:
    return fit.smallest_batch(curve.batches, curve.recalls)


def _largest(curve: Curve) -> float:
    return fit.largest_batch(curve.batches, curve.recalls).batch


def _gains(gains: Sequence[float]) -> str:
    return f"{100 * median(gains):+.1f} points ({len(gains)})" if gains else ""


def hard_table(rows: Sequence[Row], curves: Sequence[Curve]) -> str:
    """Return recall with a mined hard negative for each pair and without, at the same batches."""
    plain = {(c.source, c.samples): c for c in curves if c.kind == PLAIN}
    both = [(c, plain[c.source, c.samples]) for c in curves if c.kind.negatives and (c.source, c.samples) in plain]
    if not both:
        raise fit.TooFewError("no source has three batches with hard negatives")
    batches = _batches([hard for hard, _ in both])
    lines = []
    for hard, base in both:
        for name, c in (("without", base), ("with", hard)):
            by_batch = {p.batch: p.recall for p in c.points if p.batch in batches}
            common = np.array(sorted(by_batch), float)
            recalls = np.array([by_batch[int(b)] for b in common])
            largest = fit.largest_batch(common, recalls)
            cells = [f"{by_batch[b]:.1%}" if b in by_batch else "" for b in batches]
            best = f"{common[recalls.argmax()]:,.0f}"
            lines.append([hard.source, name, *cells, best, f"{'≥ ' if largest.beyond else ''}{largest.batch:,.0f}"])
    return _table(["source", "hard negatives", *(f"{b:,}" for b in batches), "best batch", "largest batch"], lines, 2)


def _text(value: float, interval: Interval, digits: int = 2) -> str:
    return f"{value:,.{digits}f} ({interval.low:,.{digits}f} to {interval.high:,.{digits}f})"


def rates_text(rows: Sequence[Row]) -> str:
    """Return how the best rate moves with the batch, and what plans by other exponents cost."""
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
    inside = intervals["e"].low <= 0.5 <= intervals["e"].high
    root = f"The square root, 0.5, is {'within' if inside else 'outside'} the interval"
    text = (
        f"The best rate grows with the batch to the power {_text(law.e, intervals['e'])}, and with the samples to the power"
        f" {_text(law.f, intervals['f'])}: {len(rates)} cells. {root}."
    )
    head = ["batch", "best rate over that of batch 1,024, median", "range", "cells"]
    return "\n\n".join([_table(head, lines), text, repeats_text(rows, law)])


def repeats_text(rows: Sequence[Row], law: RateLaw) -> str:
    """Return how far the best rate is from the law where pairs are seen more often than in the cells that it is fitted to."""
    pairs, ratios = {row["source"]: row["pairs"] for row in rows}, defaultdict(list)
    ends = (runs.REPEATED, 16, 50, np.inf)
    for cell, rate in fit.best_rates(rows, most_seen=np.inf).items():
        seen = cell.samples / pairs[cell.source]
        if cell.kind == PLAIN and seen > runs.REPEATED:
            place = next(i for i, end in enumerate(ends[1:]) if seen <= end)
            ratios[place].append(rate / law.rate(cell.batch, cell.samples, cell.kind))
    lines = [
        [
            f"{low:g} to {high:g}" if high < np.inf else f"more than {low:g}",
            f"{median(ratios[i]):.2g}×",
            " to ".join(f"{quantile:.2g}×" for quantile in np.quantile(ratios[i], (0.1, 0.9))),
            str(len(ratios[i])),
        ]
        for i, (low, high) in enumerate(itertools.pairwise(ends))
        if ratios[i]
    ]
    return _table(["pairs seen, times", "best rate over the law's, median", "80 % of the cells", "cells"], lines) if lines else ""


def warm_up_text(rows: Sequence[Row]) -> str:
    """Return recall against the share of warm-up, and how the best share moves with the batch."""
    cases = fit.warm_ups(rows)
    if not cases:
        raise fit.TooFewError("no cell has three shares of warm-up")
    shares = sorted({share for case in cases for share in case.shares})
    lines, lost = [], []
    for case in cases:
        recalls = {share: point.recall for share, point in zip(case.shares, case.points, strict=True)}
        best = fit.best_share(case.shares, np.array(list(recalls.values())))
        lost.append(max(recalls.values()) - recalls[WARM_UP])
        cells = [f"{recalls[share]:.1%}" if share in recalls else "" for share in shares]
        lines.append(
            [case.source, count_text(case.samples), f"{case.batch:,}", f"{case.samples // case.batch:,}", *cells, f"{best:.0%}"]
        )
    text = _table(["source", "samples", "batch", "steps", *(f"{share:.0%}" for share in shares), "best share"], lines)
    text += f"\n\nThe usual {WARM_UP:.0%} loses at most {100 * max(lost):.1f} points."
    try:
        exponent = fit.fit_warm_up(cases, [np.array([p.recall for p in case.points]) for case in cases])
        text += (
            " The best share, between the smallest and the largest that were tried, grows with the batch to the power"
            f" {_text(exponent, fit.warm_up_interval(cases))}; the interval is over draws of seeds and of test pairs."
        )
    except fit.TooFewError as error:
        text += f" {str(error).capitalize()}."
    return text


def noise_text(rows: Sequence[Row], curves: Sequence[Curve]) -> str:
    """Return the critical batch by the noise of gradients beside the best and the largest batch."""
    estimates = fit.noise_estimates(rows)
    at_samples = [c for c in curves if c.samples == runs.NOISE_SAMPLES and any(cell.source == c.source for cell in estimates)]
    if not at_samples:
        raise fit.TooFewError("no curve has measured its noise")
    batches, lines, ratios = sorted({cell.batch for cell in estimates}), [], defaultdict(list)
    for c in at_samples:
        own = {cell.batch: found for cell, found in estimates.items() if cell.source == c.source}
        largest = fit.largest_batch(c.batches, c.recalls)
        for batch, found in own.items():
            if np.isfinite(found.critical) and found.critical > 0:
                ratios[batch].append((found.critical, largest.batch))
        best = c.batches[c.recalls.argmax()]
        cells = [sizes_text(own[b]) if b in own else "" for b in batches]
        lines.append([c.source, *cells, f"{best:,.0f}", f"{'≥ ' if largest.beyond else ''}{largest.batch:,.0f}"])
    text = _table(["source", *(f"at {b:,}" for b in batches), "best batch", "largest batch"], lines)
    notes = []
    for batch, found in sorted(ratios.items()):
        critical, largest_batches = np.log2(np.array(found)).T
        note = f"{batch:,}: {2 ** np.median(largest_batches - critical):.2g}×"
        if len(found) >= 4 and np.std(critical) > 0 and np.std(largest_batches) > 0:
            note += f" (correlation of the logarithms {np.corrcoef(critical, largest_batches)[0, 1]:.2f} over {len(found)} sources)"
        notes.append(note)
    return f"{text}\n\nThe largest batch over the critical batch measured at a batch, median: {'; '.join(notes)}."


def sizes_text(found: NoiseEstimate) -> str:
    """Return a critical batch with its interval."""
    return f"{number(found.critical)} ({number(found.low)} to {number(found.high)})"


def held_back_table(rows: Sequence[Row], plain: Sequence[Curve], fitted: Sequence[Curve]) -> str:
    """Return what plans from the other sources cost on each source, and what rates by fixed exponents would."""
    if len({c.source for c in fitted}) < 2:
        raise fit.TooFewError("fewer than two sources have three batches")
    batches, rates = fit.hold_out_batches(fitted), fit.hold_out_rates(rows)
    lines = []
    for source in sorted({case.source for case in (*batches, *rates)}):
        own = ([case for case in cases if case.source == source] for cases in (batches, rates))
        lines.append([source, *(text for cases in own for text in _held_back_texts(cases))])
    lines.append(["**all**", *(text for cases in (batches, rates) for text in _held_back_texts(cases))])
    for name, exponent in (("all, rate by the square root", 0.5), ("all, rate that does not depend on the batch", 0.0)):
        lines.append([name, "", "", *_held_back_texts(fit.hold_out_rates(rows, exponent))])
    lines.append(["all, also curves with a star", *_held_back_texts(fit.hold_out_batches(fitted, plain)), "", ""])
    return _table(["held back", "batch: within", "worst loss", "rate: within", "worst loss"], lines)


def sensitivity_text(rows: Sequence[Row], plain: Sequence[Curve], towers: Sequence[TowerCurve]) -> str:
    """Return what the law, the rate and their held-back errors would be with other cells left out."""
    curves, far = [], (450_000_000, 450_000_000)
    for most in (4, runs.REPEATED, 12.5, np.inf):
        chosen = [c for c in plain if c.samples <= most * c.pairs]
        law, held = fit.fit_law(chosen), fit.hold_out_batches(chosen)
        share = 2 ** np.mean(np.log2(fit.tower_shares(towers, law))) if towers else 1.0
        texts = [str(len(chosen)), f"{law.alpha:.2f}", f"{2**law.a:,.0f}", _held_back_texts(held)[0]]
        curves.append(["all" if most == np.inf else f"at most {most:g} times", *texts, f"{share * law.largest(*far):,.0f}"])
    head = [
        "pairs seen",
        "curves",
        "exponent of the samples",
        "largest at 1M",
        "batch: within",
        "with the towers' part, at 450M samples",
    ]
    cells = []
    for updates, most in itertools.product((0, HOPELESS_UPDATES), (np.inf, runs.REPEATED)):
        rates = fit.best_rates(rows, updates, most)
        law, interval = fit.fit_rates(rates), fit.rate_intervals(rates)["e"]
        held = fit.hold_out_rates(rows, rates=rates)
        names = [
            f"at least {updates}" if updates else "any",
            "any number of times" if most == np.inf else f"at most {most:g} times",
        ]
        cells.append([*names, str(len(rates)), _text(law.e, interval), _held_back_texts(held)[0]])
    rate_head = ["updates", "pairs seen", "cells", "exponent of the batch", "rate: within"]
    return f"{_table(head, curves)}\n\n{_table(rate_head, cells, 2)}"


def _held_back_texts(cases: Sequence[HeldBack]) -> list[str]:
    if not cases:
        return ["", ""]
    good = sum(case.good for case in cases)
    return [f"{good} of {len(cases)} ({percent_text(good / len(cases))})", f"{100 * max(case.lost for case in cases):.1f} points"]


def published_text(published: Mapping[str, Any], law: MeasuredLaw) -> str:
    """Return what the law says for published comparisons and configurations, beside what they found or used."""
    compared, used = [], []
    for case in published["comparisons"]:
        best, largest = _published_batches(case)
        name = f"{case['name']}, {case['metric']}" + (f" ({case['note']})" if "note" in case else "")
        places = [name, case["source"], count_text(case["samples"]), _pairs_text(case)]
        compared.append([*places, best, largest, *_predicted(law, case)])
    for case in published["configurations"]:
        texts = [case["name"], case["source"], count_text(case["samples"]), _pairs_text(case), f"{case['batch']:,}"]
        used.append([*texts, *_predicted(law, case)])
    places, predicted = ["training", "source", "samples", "different pairs"], ["law: largest batch", "samples beyond the fit"]
    first = _table([*places, "best batch", "largest batch", *predicted], compared, 2)
    return f"{first}\n\n{_table([*places, 'batch used', *predicted], used, 2)}"


def _pairs_text(case: Mapping[str, Any]) -> str:
    return "" if case["pairs"] is None else count_text(case["pairs"])


def _published_batches(case: Mapping[str, Any]) -> tuple[str, str]:
    """Return the best batch of a published comparison, and the largest within the tolerance where its qualities are known."""
    if "quality" not in case:
        return f"{case['best']:,}", ""
    batches, recalls = np.array([[float(b), q / 100] for b, q in case["quality"].items()]).T
    largest = fit.largest_batch(batches, recalls)
    return f"{batches[recalls.argmax()]:,.0f}", f"{'≥ ' if largest.beyond else ''}{largest.batch:,.0f}"


def _predicted(law: MeasuredLaw, case: Mapping[str, Any]) -> list[str]:
    """Return the law's largest batch with its interval, and by how much the samples exceed the largest number of the fit."""
    # Pairs that are not known are taken to be seen once.
    place = case["samples"], case["pairs"] or case["samples"]
    beyond = case["samples"] / law.samples[1]
    return [_text(law.largest(*place), Interval(*law.interval(*place)), 0), f"{beyond:,.0f}×" if beyond > 1 else "within"]


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
    """Return what the law of the given rows predicts for budgets of sources that have no row, with the commit that made it.

    The planned batch is rounded as plans do. Rates are to be judged in cells with at least `fewest_updates`.
    """
    seen = {(row["source"], row["samples"]) for row in rows}
    if all((source, samples) in seen for source in sources for samples in runs.BUDGETS.values()):
        raise ValueError(f"{', '.join(sources)} already have rows at every budget; predict only what was not run")
    rows = fit.fitted_rows(rows)
    curves, rate_law = fit.law_curves(rows), fit.fit_rates(fit.best_rates(rows))
    # Without other towers: the study trains MLPs.
    law = fit.measured_law(rows, [], "")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    cases = []
    for source in sources:
        pairs = records[source]["train"]
        for samples in runs.BUDGETS.values():
            if (source, samples) in seen or (source in runs.CONFIRMATION and samples > runs.REPEATED * pairs):
                continue
            plan = runs.cells({source: pairs}, [source])
            batches = sorted({cell.batch for cell in plan if cell.samples == samples and cell.kind == PLAIN})
            rates = {str(b): rate_law.rate(b, samples, PLAIN) for b in batches}
            cases.append(
                {
                    "source": source,
                    "samples": samples,
                    "pairs": pairs,
                    "largest": law.largest(samples, pairs),
                    "interval": list(law.interval(samples, pairs)),
                    "planned": power_near(law.planned(samples, pairs)),
                    "rates": rates,
                }
            )
    return {
        "commit": commit,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "fitted_sources": sorted({c.source for c in curves}),
        "curves": len(curves),
        "law": law.law._asdict(),
        "intervals": {name: list(interval) for name, interval in fit.law_intervals(fit.draw_laws(curves)).items()},
        "rate_law": {"offset": rate_law.offsets[PLAIN], "e": rate_law.e, "f": rate_law.f},
        "fewest_updates": HOPELESS_UPDATES,
        "predictions": cases,
    }


def judge(frozen: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> str:
    """Return how each set of predictions compares with what was run afterwards: a table of batches, and one of rates."""
    curves = {(c.source, c.samples): c for c in fit.curves(rows) if c.kind == PLAIN}
    tables = []
    for made in frozen:
        lines, cases = [], []
        for case in made["predictions"]:
            c = curves.get((case["source"], case["samples"]))
            if c is None:
                continue
            largest = fit.largest_batch(c.batches, c.recalls)
            # As it was predicted: the first sets have no rounding.
            batch = float(np.clip(case["planned"], c.batches[0], c.batches[-1]))
            held = HeldBack(
                c.source, PLAIN, c.samples, batch, batch, c.best - float(fit.recalls_at(c, batch)), fit.tolerance(c.best)
            )
            measured = f"{'≥ ' if largest.beyond else ''}{largest.batch:,.0f}"
            texts = [_text(case["largest"], Interval(*case["interval"]), 0), measured, f"{c.batches[c.recalls.argmax()]:,.0f}"]
            texts += [f"{batch:,.0f}", f"{100 * held.lost:.1f} points", "yes" if held.good else "no"]
            lines.append([c.source, count_text(c.samples), *texts])
            cases.append(held)
        if lines:
            within, worst = _held_back_texts(cases)
            text = (
                f"Predicted at commit `{made['commit'][:12]}`, before any of these cells was run. "
                f"Planned batches within the tolerance: {within}, and at most {worst} lost. {_rates_summary(made, rows)}"
            )
            head = ["source", "samples", "largest, predicted", "measured", "best", "planned", "lost there", "within the tolerance"]
            tables += [text.strip(), _table(head, lines, 2)]
            if "fewest_updates" in made:
                tables += [_rates_table(made, rows)]
    if not tables:
        raise fit.TooFewError("nothing that was predicted has three batches")
    return "\n\n".join(tables)


def judged_rates(made: Mapping[str, Any], rows: Sequence[Row]) -> dict[Cell, HeldBack]:
    """Return what the tried rate nearest to the predicted one costs in each cell that was tuned, within the set's own limits."""
    predicted = {
        (case["source"], case["samples"], int(batch)): rate for case in made["predictions"] for batch, rate in case["rates"].items()
    }
    found, cells = {}, fit.by_cell(rows)
    # The first sets count all cells that were tuned: which of them a plan could have was decided later.
    limits = (made["fewest_updates"], runs.REPEATED) if "fewest_updates" in made else (0, np.inf)
    for cell, best in fit.best_rates(rows, *limits).items():
        planned = predicted.get((cell.source, cell.samples, cell.batch))
        if cell.kind == PLAIN and planned is not None:
            tested = {row["rate"]: row["test_1"] for row in cells[cell] if row["seed"] == runs.SEEDS[0]}
            nearest = min(tested, key=lambda rate, planned=planned: abs(np.log2(rate / planned)))  # type: ignore[misc]
            lost, allowed = tested[best] - tested[nearest], fit.tolerance(tested[best])
            found[cell] = HeldBack(cell.source, cell.kind, cell.samples, cell.batch, planned, lost, allowed)
    return found


def _rates_summary(made: Mapping[str, Any], rows: Sequence[Row]) -> str:
    cases = list(judged_rates(made, rows).values())
    if not cases:
        return ""
    within, worst = _held_back_texts(cases)
    limit = f" with at least {made['fewest_updates']} updates" if "fewest_updates" in made else ""
    return f"Predicted rates within the tolerance: {within} cells{limit}, and at most {worst} lost."


def _rates_table(made: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return the predicted rate of each judged cell, the best one that was tried, and what the nearest tried one loses."""
    judged, cells = judged_rates(made, rows), fit.by_cell(rows)
    batches = sorted({cell.batch for cell in judged})
    groups: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    for cell, case in judged.items():
        mark = "" if case.good else "**"
        best = fit.best_rate(cells[cell])
        assert best is not None
        text = f"{case.planned:.2g}, {best:.2g}, {mark}{100 * case.lost:.1f}{mark}"
        groups[cell.source, cell.samples][cell.batch] = text
    lines = [[source, count_text(n), *(own.get(b, "") for b in batches)] for (source, n), own in sorted(groups.items())]
    head = ["rate: predicted, best, points lost", "samples", *(f"batch {b:,}" for b in batches)]
    return _table(head, lines, 2)


def save_figure(curves: Sequence[Curve], file: Path) -> None:
    save(figure(curves), file)
