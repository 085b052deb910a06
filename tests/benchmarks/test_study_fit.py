"""The fit of the study: it finds a known law again, with intervals, and judges plans on sources that it has not seen."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.readme import ROOT
from benchmarks.study import fit, report, runs
from benchmarks.study.stack import Cell

# So many that no pair is seen more than eight times.
PAIRS = {"one": 2_000_000, "two": 4_000_000, "three": 16_000_000, "four": 32_000_000}
# log2 of the largest batch at 1M samples and 100k pairs, its exponents, the steepness, and the exponent of the rate.
A, ALPHA, BETA, STEEPNESS, E = 11.0, 0.5, 0.1, 1.5, 0.3


def synthetic_rows(noise: float = 0.0, rates: int = 1) -> list[dict[str, Any]]:
    """Return rows that follow the law exactly, or with noise in the recall."""
    generator = np.random.default_rng(1)
    rows = []
    for (source, pairs), samples in ((item, budget) for item in PAIRS.items() for budget in runs.BUDGETS.values()):
        largest = 2 ** (A + ALPHA * math.log2(samples / 1e6) + BETA * math.log2(pairs / 1e5))
        top = 0.3 + 0.05 * math.log2(samples / 250_000)
        for batch in (64, 256, 1024, 4096, 16384):
            # The smallest batch is the best and loses nothing.
            lost = fit.tolerance(top) * (batch / largest) ** STEEPNESS if batch > 64 else 0.0
            best = runs.RATE * 2 ** round(E * math.log2(batch / 64))
            for seed, k in ((seed, k) for seed in runs.SEEDS for k in range(-rates, rates + 1)):
                recall = top - lost - 0.02 * abs(k) + noise * generator.standard_normal()
                cell = Cell(source, "small", "scratch", "clip", 0.0, batch, samples)._asdict()
                rows.append(
                    {**cell, "rate": best * 2.0**k, "seed": seed, "validation_mrr": recall, "test_1": recall, "pairs": pairs}
                )
    return rows


def tower_curve(share: float, samples: int) -> fit.TowerCurve:
    """Return a training of other towers, whose largest batch is a part of the law's."""
    largest = share * 2 ** (A + ALPHA * math.log2(samples / 1e6))
    batches = np.array([16.0, 128.0, 512.0, 2048.0, 8192.0])
    lost = np.where(batches > 16, 0.01 * (batches / largest) ** STEEPNESS, 0.0)
    return fit.TowerCurve("towers", samples, 100_000, batches, 0.3 - lost)


def test_the_law_of_synthetic_runs_is_found_again() -> None:
    curves = fit.curves(synthetic_rows())
    law = fit.fit_law(curves)
    # Weak priors move the parameters a little.
    assert (law.a, law.alpha, law.beta, law.steepness) == pytest.approx((A, ALPHA, BETA, STEEPNESS), abs=0.03)
    noisy = fit.curves(synthetic_rows(noise=0.002))
    intervals = fit.law_intervals(fit.draw_laws(noisy, draws=20))
    assert intervals["alpha"].low < ALPHA + 0.05 and intervals["alpha"].high > ALPHA - 0.05
    assert intervals["alpha"].high - intervals["alpha"].low < 0.4


def test_the_exponent_of_the_rate_is_found_again() -> None:
    rates = fit.best_rates(synthetic_rows())
    # Those with at least 100 updates: 3, 4, 5 and 5 batches of each source.
    assert len(rates) == 17 * len(PAIRS)
    # Rates are rounded to a factor of 2.
    law = fit.fit_rates(rates)
    assert law.e == pytest.approx(E, abs=0.06)
    # Another kind with four times the rate has its own offset and the same exponents.
    siglip = {cell._replace(loss="siglip"): 4 * rate for cell, rate in rates.items()}
    both = fit.fit_rates({**rates, **siglip})
    assert both.e == pytest.approx(law.e)
    ratio = both.rate(1024, 1e6, next(iter(siglip)).kind) / both.rate(1024, 1e6, runs.PLAIN)
    assert ratio == pytest.approx(4)
    interval = fit.rate_intervals(rates, draws=20)["e"]
    assert interval.low <= interval.high and interval.low - 0.05 <= E <= interval.high + 0.05


def test_plans_for_sources_not_seen_are_good_where_the_law_holds_and_bad_where_it_does_not() -> None:
    rows = synthetic_rows(noise=0.001)
    assert fit.good_share(fit.hold_out_batches(fit.curves(rows))) >= 0.9
    assert fit.good_share(fit.hold_out_rates(rows)) >= 0.9
    # Negatives pay up to 1,024, and one source needs 64 times as many updates: plans from the others lose too much on it.
    pays = [{**row, "test_1": row["test_1"] - 0.02 * max(0, math.log2(1024 / row["batch"]))} for row in rows]
    moved = [{**row, "batch": row["batch"] // 64} if row["source"] == "two" else row for row in pays]
    outside = [case for case in fit.hold_out_batches(fit.curves(moved)) if case.source == "two"]
    assert fit.good_share(outside) < 0.5


def test_curves_that_see_pairs_often_have_no_part_in_the_laws() -> None:
    rows = synthetic_rows()
    assert len(fit.law_curves(rows)) == len(fit.curves(rows))
    # Source one sees its pairs 16 times with 16M samples.
    often = [{**row, "pairs": 1_000_000} if row["source"] == "one" else row for row in rows]
    assert len(fit.law_curves(often)) == len(fit.curves(rows)) - 1
    left_out = fit.best_rates(often, most_seen=math.inf).keys() - fit.best_rates(often).keys()
    assert left_out and {(cell.source, cell.samples) for cell in left_out} == {("one", 16_000_000)}


def test_the_largest_batch_of_one_curve_follows_the_shape_of_the_law() -> None:
    curve = tower_curve(0.25, 1_000_000)
    assert fit.fit_largest(curve.batches, curve.recalls, STEEPNESS) == pytest.approx(0.25 * 2**A, rel=0.02)
    (share,) = fit.tower_shares([curve], fit.Law(A, ALPHA, 0.0, STEEPNESS, 0.0))
    assert share == pytest.approx(0.25, rel=0.02)


def test_the_largest_batch_is_where_the_loss_reaches_the_tolerance() -> None:
    batches, recalls = np.array([64.0, 256.0, 1024.0]), np.array([0.20, 0.21, 0.19])
    # 0.21 - 0.01 is half of the way from 256 to 1,024 on a log scale.
    assert fit.largest_batch(batches, recalls) == (pytest.approx(512.0), False)
    assert fit.largest_batch(batches, np.array([0.1, 0.2, 0.195])) == (1024.0, True)


def test_the_interval_of_a_largest_batch_covers_it_and_narrows_with_more_queries() -> None:
    generator = np.random.default_rng(0)

    def curve(queries: int) -> fit.Curve:
        points = []
        for batch, share in ((64, 0.5), (256, 0.49), (1024, 0.46), (4096, 0.4)):
            hits = generator.random((3, 2, queries)) < share
            points.append(fit.Point(batch, 1e-3, [float(h.mean()) for h in hits], hits))
        return fit.Curve("one", runs.PLAIN, 1_000_000, 1000, points)

    few, many = (fit.largest_interval(curve(queries), draws=60) for queries in (500, 20_000))
    assert many.low <= 256 * 4 ** (1 / 6) * 1.15 and many.high >= 256 * 4 ** (1 / 6) / 1.15
    assert many.high / many.low < few.high / few.low


def test_cells_without_all_seeds_and_failed_runs_are_left_out() -> None:
    rows = synthetic_rows()
    whole = fit.curves(rows)
    without = [row for row in rows if not (row["source"] == "one" and row["batch"] == 1024 and row["seed"] == 2)]
    shorter = fit.curves([*without, {**rows[0], "error": "out of memory"}])
    assert {c.source: len(c.points) for c in whole} == dict.fromkeys(PAIRS, 5)
    assert {c.source: len(c.points) for c in shorter} == {**dict.fromkeys(PAIRS, 5), "one": 4}


def other_kinds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of two sources with hard negatives and with other shares of warm-up, and give the plain ones noise."""
    some = [row for row in rows if row["samples"] == 1_000_000 and row["source"] in ("one", "two") and row["loss"] == "clip"]
    found = [{**row, "negatives": 1, "test_1": row["test_1"] + 0.01} for row in some if row["batch"] <= 4096]
    for share in runs.WARM_UPS:
        # Large batches want more warm-up.
        lost = [0.01 if (share > 0.1) == (row["batch"] < 1024) else 0.001 for row in some]
        found += [{**row, "warm_up": share, "test_1": row["test_1"] - loss} for row, loss in zip(some, lost, strict=True)]
    for row in some:
        row["noise_scale"] = [{"step": step, "trace": 2.0 + 0.01 * step, "signal": 1e-3, "critical": 2000.0} for step in (1, 2, 3)]
    return found


def test_the_best_share_of_warm_up_is_found_again() -> None:
    # A parabola over log2 share, whose top moves with the square root of the batch.
    cases, recalls = [], []
    for source, batch in ((source, batch) for source in ("one", "two") for batch in (256, 1024, 4096)):
        top = np.log2(0.05 * math.sqrt(batch / 1024))
        shares = [0.01, 0.02, 0.05, 0.1, 0.3]
        recalls.append(np.array([0.3 - 0.01 * (np.log2(share) - top) ** 2 for share in shares]))
        points = [fit.Point(batch, 1e-3, [float(r)] * 3, None) for r in recalls[-1]]
        cases.append(fit.WarmUps(source, batch, 1_000_000, shares, points))
        assert fit.best_share(shares, recalls[-1]) == pytest.approx(2**top)
    assert fit.fit_warm_up(cases, recalls) == pytest.approx(0.5)
    assert fit.warm_up_interval(cases, draws=5) == (pytest.approx(0.5), pytest.approx(0.5))
    with pytest.raises(fit.TooFewError):
        fit.fit_warm_up(cases[:1], recalls[:1])


def test_the_noise_of_a_cell_is_that_of_its_best_rate_over_all_seeds() -> None:
    rows = [row for row in synthetic_rows() if row["samples"] == 1_000_000 and row["batch"] == 256 and row["source"] == "one"]
    best = fit.best_rate(rows)
    for row in rows:
        trace = (100.0 + row["seed"]) if row["rate"] == best else 1e9
        row["noise_scale"] = [{"step": 5, "trace": trace, "signal": 0.5}, {"step": 9, "trace": None, "signal": None}]
    (found,) = fit.noise_estimates(rows).values()
    assert found.critical == pytest.approx(202) and found.steps == 3


def test_noise_moves_the_law_only_where_it_explains_what_the_law_does_not() -> None:
    law = fit.Law(A, ALPHA, BETA, STEEPNESS, 0.0)
    rows, plain = [], []
    for number, shift in enumerate((-1.0, -0.6, -0.2, 0.2, 0.6, 1.0)):
        # The largest batch is 2^shift of the law's, which is 2^A here.
        knee, source = 2 ** (A + shift), f"source {number}"
        points = [fit.Point(int(b), 1e-3, [0.2 - lost] * 3, None) for b, lost in ((64, 0.0), (knee, 0.01), (4 * knee, 0.1))]
        plain.append(fit.Curve(source, runs.PLAIN, runs.NOISE_SAMPLES, 100_000, points))
        # At batch 256 the critical batch is four times as large for twice the largest batch; at 64 it is unrelated.
        for batch, critical in ((256, 1000 * 4**shift), (64, 1000 * 2 ** (number % 2))):
            cell = runs.cell_for(source, runs.PLAIN, batch, runs.NOISE_SAMPLES)._asdict()
            noise = [{"step": 1, "trace": critical, "signal": 1.0}]
            rows.append({**cell, "rate": 1e-3, "seed": 0, "validation_mrr": 0.1, "noise_scale": noise})
    relations = fit.noise_relations(rows, plain, law)
    assert set(relations) == {256}
    assert relations[256].slope == pytest.approx(0.5, abs=0.02) and relations[256].center == pytest.approx(1000, rel=0.05)


def test_a_rate_law_with_a_given_exponent_has_it_and_the_best_offsets() -> None:
    rates = fit.best_rates(synthetic_rows())
    law = fit.fit_rates(rates, 0.5)
    assert law.e == 0.5
    misses = [np.log2(rate / law.rate(cell.batch, cell.samples, cell.kind)) for cell, rate in rates.items()]
    assert np.mean(misses) == pytest.approx(0, abs=1e-9)


def test_the_smallest_batch_is_where_the_loss_reaches_the_tolerance() -> None:
    batches = np.array([64.0, 256.0, 1024.0])
    assert fit.smallest_batch(batches, np.array([0.19, 0.21, 0.20])) == pytest.approx(128.0)
    assert fit.smallest_batch(batches, np.array([0.2, 0.205, 0.2])) == 64.0


def test_a_report_without_rows_says_so_everywhere(tmp_path: Path) -> None:
    parts = report.blocks([], {})
    assert all(part.startswith("Not run yet") for name, part in parts.items() if name != "sources")
    report.write_page(ROOT / "benchmarks/study/page.md", tmp_path / "study.md", parts)
    # A single cell is too little for any fit, and no error.
    one = [row for row in synthetic_rows() if (row["source"], row["batch"], row["samples"]) == ("one", 64, 250_000)]
    parts = report.blocks(one, {})
    assert parts["coverage"].startswith("9 runs in 1 cells") and parts["law"].startswith("Not run yet")


@pytest.mark.slow
def test_published_figures_have_sources_and_lie_beyond_the_measured_range() -> None:
    published = json.loads(report.PUBLISHED.read_text())
    assert all(case["source"] for kind in published.values() for case in kind)
    assert all(case["samples"] > 4_000_000 for kind in ("comparisons", "configurations") for case in published[kind])
    text = report.published_text(published, fit.measured_law(synthetic_rows(), [], ""))
    assert text.count("\n| ") == len(published["comparisons"]) + len(published["configurations"]) + 3
    # SigLIP with softmax at 9 G samples: 98k is the best, and 307k loses less than 3 %.
    assert "| 98,304 | ≥ 307,200 |" in text


@pytest.mark.slow
def test_the_law_for_plans_says_what_it_was_measured_on() -> None:
    rows = synthetic_rows(noise=0.001)
    rows += other_kinds(rows)
    towers = [tower_curve(0.25, samples) for samples in (1_000_000, 4_000_000)]
    law = fit.measured_law(rows, towers, "2026-01-01")
    assert law.towers == pytest.approx(0.25, rel=0.1) and law.towers_deviation < 0.1
    assert law.largest(1e6, 1e6) == pytest.approx(law.towers * law.law.largest(1e6, 1e6))
    assert law.law.alpha == pytest.approx(ALPHA, abs=0.05) and law.rate_exponent == pytest.approx(E, abs=0.06)
    assert law.samples == (250_000, 16_000_000) and law.pairs == (2_000_000, 32_000_000) and law.batches == (64, 16_384)
    assert law.held_back >= 0.9 and law.sources == tuple(sorted(PAIRS))
    # Noise of two sources tells nothing.
    assert law.noise == {}
    assert law.warm_up is not None and law.warm_up.exponent > 0 and 0.02 <= law.warm_up.at(1024) <= 0.3
    with pytest.raises(fit.TooFewError):
        fit.measured_law([], [], "")


@pytest.mark.slow
def test_a_report_fills_every_place_of_the_page(tmp_path: Path) -> None:
    rows = synthetic_rows(noise=0.001)
    rows += [{**row, "loss": "siglip", "test_1": row["test_1"] - 0.01} for row in rows if row["samples"] == 1_000_000]
    records = {
        name: dict.fromkeys(("validation", "test", "read", "near_equal", "equal_pair", "equal_x", "equal_y"), 1)
        | {"title": name, "train": pairs, "sha256": "0", "pixels": None}
        for name, pairs in {**PAIRS, "five": 50_000}.items()
    }
    rows += other_kinds(rows)
    frozen = report.predictions(rows, records, ["five"])
    later = [{**row, "source": "five", "pairs": 50_000} for row in synthetic_rows() if row["source"] == "two"]
    parts = report.blocks([*rows, *later], records, [frozen], [tower_curve(0.25, 1_000_000), tower_curve(0.5, 4_000_000)])
    # Nothing of the sources that confirm was run.
    assert [name for name, part in parts.items() if "Not run yet" in part] == ["confirmation"]
    page = tmp_path / "study.md"
    report.write_page(ROOT / "benchmarks/study/page.md", page, parts)
    text = page.read_text()
    assert text.count("<!-- study: ") == len(parts) and all(part in text for part in parts.values())
    # One line for each number of samples that was predicted and run, and one of rates, where pairs are seen at most eight times.
    assert parts["predictions"].count("| five |") == len(runs.BUDGETS) + 1
    with pytest.raises(ValueError, match="five"):
        report.predictions([*rows, *later], records, ["five"])
    report.save_figure(fit.curves(rows)[:4], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.slow
def test_sources_that_confirm_are_judged_by_what_was_predicted_and_change_no_law() -> None:
    rows, (name, *_) = synthetic_rows(), runs.CONFIRMATION
    frozen = report.predictions(rows, {name: {"train": PAIRS["one"]}}, [name])
    assert [case["planned"] for case in frozen["predictions"]] == [
        2 ** round(math.log2(c["planned"])) for c in frozen["predictions"]
    ]
    # A source that follows the law, and one with a quarter of its largest batch and of its rates.
    good = [{**row, "source": name} for row in rows if row["source"] == "one"]
    bad = [{**row, "batch": row["batch"] // 4, "rate": row["rate"] / 8} for row in good]
    assert fit.measured_law([*rows, *bad], [], "") == fit.measured_law(rows, [], "")
    judged = [list(report.judged_rates(frozen, own).values()) for own in (good, bad)]
    assert fit.good_share(judged[0]) == 1 > fit.good_share(judged[1])
    # Cells with too few updates are not judged.
    assert all(case.samples / case.batch >= 100 for case in judged[0])
    text = report.judge([frozen], good)
    assert text.count(f"| {name} |") == 2 * len(runs.BUDGETS) and "| no |" not in text


def test_only_the_hits_of_the_best_rate_are_kept() -> None:
    rows = [{**row, "hits": "AA==", "queries": 4} for row in synthetic_rows()]
    thin = report.thin(rows)
    kept = [row for row in thin if "hits" in row]
    assert len(kept) == len(rows) // 3
    assert all(row["rate"] == fit.best_rate(fit.by_cell(rows)[runs.cell_of(row)]) for row in kept)
    # Rows that are there, with their hits or without, are not added again.
    assert len(report.merge(thin, [*rows, {**rows[0], "seed": 9}])) == len(rows) + 1
