"""The law of the batch: how large a batch may be before it costs quality at a fixed number of samples, and which rate it needs.

A curve is the recall of one kind of training at one number of samples against the batch, each batch at its best rate. Its largest
batch loses less than `tolerance` of the best recall. The law over all curves is

    lost(batch) / tolerance = (batch / largest)^steepness,   log2 largest = a + alpha log2(samples / 1M) + beta log2(pairs / 100k)
    log2 rate = (one offset for each kind) + e log2(batch) + f log2(samples)

The planned batch is the multiple of the largest that loses least over all curves, as a power of two. The share of warm-up follows
log2 share = (one offset for each source) + w log2(batch), and the critical batch of gradient noise is compared with the largest
one. Recall is recall@1 on the test pairs, the mean of both directions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from benchmarks.study.runs import (
    CONFIRMATION,
    NOISE_SAMPLES,
    PLAIN,
    REPEATED,
    SEEDS,
    best_rate,
    cell_for,
    cell_of,
    unpack,
)
from benchmarks.study.stack import WARM_UP, Cell, Kind
from megabatch.batch_law import HUNDRED_THOUSAND, MILLION, Law, MeasuredLaw, NoiseRelation, WarmUpLaw
from megabatch.evidence import HOPELESS_UPDATES
from megabatch.recipes import power_near
from megabatch.training.noise.estimator import Moments, NoiseEstimate, estimate

# A batch may lose this many points of recall, or this share of it if that is more.
LOST_POINTS, LOST_SHARE = 0.01, 0.03
# Draws of a bootstrap, and the central share of them that an interval covers.
DRAWS, COVERED = 200, 0.9
# What a planned batch loses counts in tolerances, up to this many.
MOST_LOST = 3.0
# Batches that are considered for plans: log2 of their ratio to the largest.
AIMS = np.arange(-5.0, 1.01, 0.125)

Row = Mapping[str, Any]


class TooFewError(ValueError):
    """There are too few rows for a fit."""


class Interval(NamedTuple):
    low: float
    high: float


class Point(NamedTuple):
    """A batch at its best rate. recalls: of each seed. hits: (seeds, 2, queries), None where rows have none."""

    batch: int
    rate: float
    recalls: list[float]
    hits: np.ndarray | None

    @property
    def recall(self) -> float:
        return fmean(self.recalls)


class Curve(NamedTuple):
    """Recall against the batch."""

    source: str
    kind: Kind
    samples: int
    pairs: int
    points: list[Point]

    @property
    def batches(self) -> np.ndarray:
        return np.array([point.batch for point in self.points], float)

    @property
    def recalls(self) -> np.ndarray:
        return np.array([point.recall for point in self.points])

    @property
    def best(self) -> float:
        return float(self.recalls.max())

    @property
    def cells(self) -> list[Cell]:
        return [cell_for(self.source, self.kind, point.batch, self.samples) for point in self.points]


class TowerCurve(NamedTuple):
    """Recall against the batch of towers other than MLPs, in one training of another program."""

    title: str
    samples: int
    pairs: int
    batches: np.ndarray
    recalls: np.ndarray


class Largest(NamedTuple):
    """The largest batch of a curve. beyond: the largest that was run still loses too little, so that the true one is larger."""

    batch: float
    beyond: bool


class RateLaw(NamedTuple):
    """log2 rate = offset + e log2(batch) + f log2(samples). offset: the mean over sources and kinds; offsets: of each kind."""

    offset: float
    e: float
    f: float
    offsets: Mapping[Kind, float]

    def rate(self, batch: float, samples: float, kind: Kind | None = None) -> float:
        """Return the rate of a kind of training, or of the mean kind if it was not fitted."""
        offset = self.offset if kind is None else self.offsets.get(kind, self.offset)
        return float(2 ** (offset + self.e * np.log2(batch) + self.f * np.log2(samples)))


class HeldBack(NamedTuple):
    """What a law fitted without a source costs on one of that source's cells. lost and allowed: recall."""

    source: str
    kind: Kind
    samples: int
    batch: float
    planned: float
    lost: float
    allowed: float

    @property
    def good(self) -> bool:
        return self.lost <= self.allowed


def tolerance(best: float) -> float:
    """Return the recall that a batch may lose.

    >>> tolerance(0.2), tolerance(0.5)
    (0.01, 0.015)
    """
    return max(LOST_POINTS, LOST_SHARE * best)


def by_cell(rows: Iterable[Row]) -> dict[Cell, list[Row]]:
    """Return the rows of each cell, without those of failed runs."""
    cells: dict[Cell, list[Row]] = defaultdict(list)
    for row in rows:
        if "error" not in row:
            cells[cell_of(row)].append(row)
    return dict(cells)


def fitted_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows without those of the sources that only confirm."""
    return [row for row in rows if row["source"] not in CONFIRMATION]


def points(rows: Iterable[Row]) -> dict[Cell, Point]:
    """Return every cell whose best rate has run with all seeds, at that rate."""
    found = {}
    for cell, own in by_cell(rows).items():
        best = best_rate(own)
        winners = {row["seed"]: row for row in own if row["rate"] == best}
        if best is None or set(winners) != set(SEEDS):
            continue
        ordered = [winners[seed] for seed in SEEDS]
        hits = [unpack(row["hits"], row["queries"]) for row in ordered if "hits" in row]
        recalls = [row["test_1"] for row in ordered]
        found[cell] = Point(cell.batch, best, recalls, np.stack(hits) if len(hits) == len(SEEDS) else None)
    return found


def curves(rows: Sequence[Row], fewest: int = 3) -> list[Curve]:
    """Return the curves with at least `fewest` batches whose best rate has run with all seeds."""
    found: dict[tuple[str, Kind, int], list[Point]] = defaultdict(list)
    for cell, point in points(rows).items():
        found[cell.source, cell.kind, cell.samples].append(point)
    pairs = {row["source"]: int(row["pairs"]) for row in rows if "error" not in row}
    return [
        Curve(source, kind, samples, pairs[source], sorted(own, key=lambda p: p.batch))
        for (source, kind, samples), own in sorted(found.items())
        if len(own) >= fewest
    ]


def law_curves(rows: Sequence[Row]) -> list[Curve]:
    """Return the curves that the law is fitted to: the plain ones that see no pair too often."""
    return [c for c in curves(rows) if c.kind == PLAIN and c.samples <= REPEATED * c.pairs]


def largest_batch(batches: np.ndarray, recalls: np.ndarray) -> Largest:
    """Return the largest batch, from the best one on, that loses less than the tolerance; on straight lines over log2 batch."""
    best = int(recalls.argmax())
    floor = recalls[best] - tolerance(float(recalls[best]))
    for i in range(best + 1, len(batches)):
        if recalls[i] < floor:
            share = (recalls[i - 1] - floor) / (recalls[i - 1] - recalls[i])
            return Largest(float(batches[i - 1] * (batches[i] / batches[i - 1]) ** share), False)
    return Largest(float(batches[-1]), True)


def smallest_batch(batches: np.ndarray, recalls: np.ndarray) -> float:
    """Return the smallest batch, from the best one down, that loses less than the tolerance; on straight lines over log2 batch."""
    best = int(recalls.argmax())
    floor = recalls[best] - tolerance(float(recalls[best]))
    for i in range(best, 0, -1):
        if recalls[i - 1] < floor:
            share = (recalls[i] - floor) / (recalls[i] - recalls[i - 1])
            return float(batches[i] * (batches[i - 1] / batches[i]) ** share)
    return float(batches[0])


def draw_recalls(given: Sequence[Point], generator: np.random.Generator) -> np.ndarray:
    """Return the recall of each point for a draw of its seeds and of the test pairs, the same pairs for all points."""
    queries = next((p.hits.shape[2] for p in given if p.hits is not None), 0)
    weights = generator.multinomial(queries, np.full(queries, 1 / queries)) / queries if queries else None
    recalls = []
    for point in given:
        seeds = generator.integers(0, len(SEEDS), len(SEEDS))
        if point.hits is None or weights is None:
            recalls.append(np.mean([point.recalls[seed] for seed in seeds]))
        else:
            recalls.append((point.hits[seeds].mean((0, 1)) * weights).sum())
    return np.array(recalls)


def largest_interval(curve: Curve, draws: int = DRAWS) -> Interval:
    """Return the interval of a curve's largest batch over draws of seeds and of test pairs."""
    generator = np.random.default_rng(0)
    return _interval([largest_batch(curve.batches, draw_recalls(curve.points, generator)).batch for _ in range(draws)])


def fit_law(given: Sequence[Curve]) -> Law:
    """Return the law that fits the losses of all curves from their best batch on, by least squares of log(1 + lost / tolerance)."""
    if len(given) < 3:
        raise TooFewError(f"{len(given)} curves are too few to fit the law; run more cells first")
    columns = [(*_place(c), np.log2(batch), lost) for c in given for batch, lost in _losses(c)]
    samples, pairs, batches, lost = np.array(columns).T

    def residuals(theta: np.ndarray) -> np.ndarray:
        a, alpha, beta, log_steepness = theta
        exponent = np.exp(log_steepness) * (batches - a - alpha * samples - beta * pairs)
        model = np.logaddexp(0, np.clip(exponent, -40, 40) * np.log(2))
        # Weak priors: without different numbers of pairs or samples their exponents are 0, and a steepness is near 1.
        return np.concatenate([model - np.log1p(lost), 0.05 * np.array([alpha, beta, log_steepness])])

    theta = least_squares(residuals, np.array([12.0, 0.5, 0.0, 0.0]))
    law = Law(*(float(t) for t in theta[:3]), float(np.exp(theta[3])), 0.0)
    aimed = [law._replace(aim=float(aim)) for aim in AIMS]
    lost_at = np.mean([np.minimum(planned_losses(c, aimed) / tolerance(c.best), MOST_LOST) for c in given], 0)
    return aimed[int(lost_at.argmin())]


def planned_losses(curve: Curve, laws: Sequence[Law]) -> np.ndarray:
    """Return the recall that each law's planned batch loses on a curve. Beyond the batches that were run it is what the last one
    loses."""
    planned = [power_near(law.planned(curve.samples, curve.pairs)) for law in laws]
    return curve.best - recalls_at(curve, np.clip(planned, curve.batches[0], curve.batches[-1]))


def fit_largest(batches: np.ndarray, recalls: np.ndarray, steepness: float) -> float:
    """Return the largest batch of one curve, whose losses from the best batch on grow as the law's do."""
    best = int(recalls.argmax())
    lost = np.maximum(0, recalls[best] - recalls[best:]) / tolerance(float(recalls[best]))
    candidates = np.arange(0.0, 24.0, 0.01)
    model = np.log1p(2 ** (steepness * (np.log2(batches[best:])[None] - candidates[:, None])))
    return float(2 ** candidates[((model - np.log1p(lost)) ** 2).sum(1).argmin()])


def tower_shares(given: Sequence[TowerCurve], law: Law) -> list[float]:
    """Return the largest batch of each training with other towers, over the law's."""
    return [fit_largest(c.batches, c.recalls, law.steepness) / law.largest(c.samples, c.pairs) for c in given]


def _place(curve: Curve) -> tuple[float, float]:
    return float(np.log2(curve.samples / MILLION)), float(np.log2(curve.pairs / HUNDRED_THOUSAND))


def _losses(curve: Curve) -> list[tuple[float, float]]:
    """Return the batches from the best on, and their losses over the tolerance."""
    best = int(curve.recalls.argmax())
    top = float(curve.recalls[best])
    return [(b, (top - r) / tolerance(top)) for b, r in zip(curve.batches[best:], curve.recalls[best:], strict=True)]


def least_squares(residuals: Callable[[np.ndarray], np.ndarray], theta: np.ndarray, steps: int = 200) -> np.ndarray:
    """Return the parameters with the least sum of squares near a start (Levenberg-Marquardt, numerical derivatives)."""
    damping, now = 1e-2, residuals(theta)
    for _ in range(steps):
        jacobian = np.stack([(residuals(theta + 1e-5 * e) - now) / 1e-5 for e in np.eye(len(theta))], 1)
        normal = jacobian.T @ jacobian
        step = np.linalg.solve(normal + damping * (np.diag(normal.diagonal()) + 1e-9 * np.eye(len(theta))), -jacobian.T @ now)
        trial = residuals(theta + step)
        if trial @ trial < now @ now:
            theta, now, damping = theta + step, trial, max(damping / 3, 1e-9)
            if np.abs(step).max() < 1e-7:
                break
        else:
            damping *= 4
            if damping > 1e9:
                break
    return theta


def draw_laws(given: Sequence[Curve], draws: int = DRAWS) -> list[Law]:
    """Return the laws of draws of sources, whose curves stay together."""
    generator = np.random.default_rng(0)
    sources = sorted({c.source for c in given})
    laws = []
    for _ in range(draws):
        drawn = generator.choice(sources, len(sources))
        laws.append(fit_law([c for source in drawn for c in given if c.source == source]))
    return laws


def law_intervals(laws: Sequence[Law]) -> dict[str, Interval]:
    """Return the interval of each parameter of the law over draws."""
    return {name: _interval([getattr(law, name) for law in laws]) for name in Law._fields}


def predicted_interval(laws: Sequence[Law], samples: float, pairs: float) -> Interval:
    """Return the interval of the largest batch over draws of the law."""
    return _interval([law.largest(samples, pairs) for law in laws])


def _interval(values: Sequence[float]) -> Interval:
    return Interval(*(float(v) for v in np.quantile(values, [(1 - COVERED) / 2, (1 + COVERED) / 2])))


def recalls_at(curve: Curve, batches: np.ndarray | float) -> np.ndarray:
    """Return the recalls of batches between those that were run."""
    return np.interp(np.log2(batches), np.log2(curve.batches), curve.recalls)


def hold_out_batches(given: Sequence[Curve], judged: Sequence[Curve] | None = None) -> list[HeldBack]:
    """Return what the batch planned by the law of the other sources' given curves costs on each of the judged ones, or of these."""
    found = []
    judged = given if judged is None else judged
    for source in sorted({c.source for c in judged}):
        law = fit_law([c for c in given if c.source != source])
        for c in (c for c in judged if c.source == source):
            planned = power_near(law.planned(c.samples, c.pairs))
            found.append(
                HeldBack(source, c.kind, c.samples, planned, planned, float(planned_losses(c, [law])[0]), tolerance(c.best))
            )
    return found


def best_rates(rows: Iterable[Row], fewest_updates: int = HOPELESS_UPDATES, most_seen: float = REPEATED) -> dict[Cell, float]:
    """Return the best rate of every cell with the usual warm-up that has rates on both sides of it.

    By default of those that the law is for: no fewer updates than a plan warns of, and no pair seen too often.
    """
    rates = {}
    for cell, own in by_cell(rows).items():
        if cell.warm_up != WARM_UP or cell.steps < fewest_updates or cell.samples > most_seen * own[0]["pairs"]:
            continue
        tried = sorted({row["rate"] for row in own})
        best = best_rate(own)
        if best is not None and tried[0] < best < tried[-1]:
            rates[cell] = best
    return rates


def fit_rates(rates: Mapping[Cell, float], exponent: float | None = None) -> RateLaw:
    """Return the law of the rate by least squares, with one offset for each source and kind. exponent: of the batch, if given."""
    groups = sorted({_group(cell) for cell in rates})
    if len(rates) < len(groups) + 2:
        raise TooFewError(f"{len(rates)} tuned cells of {len(groups)} kinds are too few to fit the rate; run more cells first")
    design, target = np.zeros((len(rates), len(groups) + 2)), np.log2(list(rates.values()))
    for i, cell in enumerate(rates):
        design[i, groups.index(_group(cell))] = 1
        design[i, -2:] = np.log2(cell.batch), np.log2(cell.samples)
    if exponent is not None:
        target, design = target - exponent * design[:, -2], np.delete(design, -2, 1)
    solution = np.linalg.lstsq(design, target, rcond=None)[0]
    if exponent is not None:
        solution = np.insert(solution, -1, exponent)
    offsets = dict(zip(groups, solution[:-2].tolist(), strict=True))
    kinds = {kind: fmean(offset for group, offset in offsets.items() if group[1] == kind) for _, kind in groups}
    return RateLaw(fmean(offsets.values()), float(solution[-2]), float(solution[-1]), kinds)


def _group(cell: Cell) -> tuple[str, Kind]:
    return cell.source, cell.kind


def rate_intervals(rates: Mapping[Cell, float], draws: int = DRAWS) -> dict[str, Interval]:
    """Return the interval of both exponents of the rate over draws of the sources and kinds, whose cells stay together."""
    generator = np.random.default_rng(0)
    groups: dict[tuple[str, Kind], list[Cell]] = defaultdict(list)
    for cell in rates:
        groups[_group(cell)].append(cell)
    names, laws = sorted(groups), []
    for _ in range(draws):
        # A group drawn twice is two groups with an offset each, which is the same fit with twice its weight.
        drawn = [names[i] for i in generator.integers(0, len(names), len(names))]
        twice = {cell._replace(source=f"{cell.source} {i}"): rates[cell] for i, name in enumerate(drawn) for cell in groups[name]}
        laws.append(fit_rates(twice))
    return {name: _interval([getattr(law, name) for law in laws]) for name in ("e", "f")}


def hold_out_rates(rows: Sequence[Row], exponent: float | None = None, rates: Mapping[Cell, float] | None = None) -> list[HeldBack]:
    """Return what the nearest tried rate to the one planned by the other sources' law costs in each cell of a source.

    exponent: of the batch in that law, if it is not to be fitted. rates: the best ones of other cells than those of `best_rates`.
    """
    rates, cells = best_rates(rows) if rates is None else rates, by_cell(rows)
    found = []
    for source in sorted({cell.source for cell in rates}):
        law = fit_rates({cell: rate for cell, rate in rates.items() if cell.source != source}, exponent)
        for cell, best in ((cell, rate) for cell, rate in rates.items() if cell.source == source):
            tested = {row["rate"]: row["test_1"] for row in cells[cell] if row["seed"] == SEEDS[0]}
            planned = law.rate(cell.batch, cell.samples, cell.kind)
            nearest = min(tested, key=lambda rate, planned=planned: abs(np.log2(rate / planned)))  # type: ignore[misc]
            lost = tested[best] - tested[nearest]
            found.append(HeldBack(source, cell.kind, cell.samples, cell.batch, planned, lost, tolerance(tested[best])))
    return found


def good_share(held_back: Sequence[HeldBack]) -> float:
    """Return the share of held-back cells in which the plan loses no more than allowed."""
    return fmean(case.good for case in held_back)


class WarmUps(NamedTuple):
    """A plain cell with several shares of warm-up, in rising order, each at its best rate."""

    source: str
    batch: int
    samples: int
    shares: list[float]
    points: list[Point]


def warm_ups(rows: Sequence[Row]) -> list[WarmUps]:
    """Return the plain cells that ran with at least three shares of warm-up."""
    found: dict[tuple[str, int, int], dict[float, Point]] = defaultdict(dict)
    for cell, point in points(rows).items():
        if cell.kind._replace(warm_up=WARM_UP) == PLAIN:
            found[cell.source, cell.batch, cell.samples][cell.warm_up] = point
    return [
        WarmUps(*place, sorted(own), [own[share] for share in sorted(own)]) for place, own in sorted(found.items()) if len(own) >= 3
    ]


def best_share(shares: Sequence[float], recalls: np.ndarray) -> float:
    """Return the share of warm-up at the top of the parabola through the best one and its neighbours, over log2 share.

    If the best one is the first or the last, it is returned.
    """
    best = int(np.argmax(recalls))
    if best in (0, len(shares) - 1):
        return shares[best]
    near = slice(best - 1, best + 2)
    curvature, slope, _ = np.polyfit(np.log2(shares[near]), recalls[near], 2)
    return float(2 ** (-slope / (2 * curvature))) if curvature < 0 else shares[best]


def fit_warm_up(cases: Sequence[WarmUps], recalls: Sequence[np.ndarray]) -> float:
    """Return the exponent of the batch in the best share of warm-up, with one offset for each source and number of samples."""
    groups = sorted({(case.source, case.samples) for case in cases})
    if len(cases) < len(groups) + 1:
        raise TooFewError(f"{len(cases)} cells with other shares of warm-up are too few for an exponent; run more cells first")
    design = np.zeros((len(cases), len(groups) + 1))
    for i, case in enumerate(cases):
        design[i, groups.index((case.source, case.samples))], design[i, -1] = 1, np.log2(case.batch)
    target = np.log2([best_share(case.shares, own) for case, own in zip(cases, recalls, strict=True)])
    return float(np.linalg.lstsq(design, target, rcond=None)[0][-1])


def warm_up_interval(cases: Sequence[WarmUps], draws: int = DRAWS) -> Interval:
    """Return the interval of the exponent of warm-up over draws of seeds and of test pairs."""
    generator = np.random.default_rng(0)
    return _interval([fit_warm_up(cases, [draw_recalls(case.points, generator) for case in cases]) for _ in range(draws)])


def noise_estimates(rows: Sequence[Row]) -> dict[Cell, NoiseEstimate]:
    """Return the critical batch by gradient noise of each cell that measured it: over all seeds and points, at its best rate."""
    found = {}
    for cell, own in by_cell(rows).items():
        best = best_rate(own)
        measured = [p for row in own if row["rate"] == best for p in row.get("noise_scale", ()) if p["trace"] is not None]
        if measured and cell.kind == PLAIN and cell.samples == NOISE_SAMPLES:
            found[cell] = estimate([Moments(p["trace"], p["signal"]) for p in sorted(measured, key=lambda p: p["step"])])
    return found


def measured_law(rows: Sequence[Row], towers: Sequence[TowerCurve], date: str) -> MeasuredLaw:
    """Return the law with what a plan needs to know about it. towers: trainings with towers as people train them."""
    rows = fitted_rows(rows)
    plain = law_curves(rows)
    law, laws = fit_law(plain), draw_laws(plain)
    shifts = [np.log2(largest_batch(c.batches, c.recalls).batch / law.largest(c.samples, c.pairs)) for c in plain]
    try:
        rate_exponent = fit_rates(best_rates(rows)).e
    except TooFewError:
        rate_exponent = None

    def ends(values: Iterable[float]) -> tuple[float, float]:
        found = list(values)
        return min(found), max(found)

    shares = np.log2(tower_shares(towers, law)) if towers else np.zeros(1)
    return MeasuredLaw(
        law=law,
        covariance=tuple(map(tuple, np.cov(np.array([draw[:3] for draw in laws]).T).tolist())),
        deviation=float(np.std(shifts)),
        towers=float(2 ** shares.mean()),
        towers_deviation=float(np.std(shares)),
        samples=ends(c.samples for c in plain),
        pairs=ends(c.pairs for c in plain),
        batches=ends(batch for c in plain for batch in c.batches),
        repeats=REPEATED,
        held_back=good_share(hold_out_batches(plain, [c for c in curves(rows) if c.kind == PLAIN])),
        rate_exponent=rate_exponent,
        warm_up=_warm_up_law(warm_ups(rows)),
        noise=noise_relations(rows, plain, law),
        rows=sum(map(len, by_cell(rows).values())),
        sources=tuple(sorted({c.source for c in plain})),
        date=date,
    )


def _warm_up_law(cases: Sequence[WarmUps]) -> WarmUpLaw | None:
    """Return the law of the share of warm-up from two sources or more; its exponent is 0 if the interval does not exclude that."""
    if len({case.source for case in cases}) < 2:
        return None
    recalls = [np.array([p.recall for p in case.points]) for case in cases]
    try:
        exponent, interval = fit_warm_up(cases, recalls), warm_up_interval(cases)
    except TooFewError:
        return None
    exponent = 0.0 if interval.low <= 0 <= interval.high else exponent
    found = [
        np.log2(best_share(case.shares, own)) - exponent * np.log2(case.batch / 1024)
        for case, own in zip(cases, recalls, strict=True)
    ]
    shares = [share for case in cases for share in case.shares]
    return WarmUpLaw(float(2 ** np.median(found)), exponent, min(shares), max(shares))


def noise_relations(rows: Sequence[Row], plain: Sequence[Curve], law: Law, fewest: int = 5) -> dict[int, NoiseRelation]:
    """Return at each batch how sources differ from the law with their critical batch by noise.

    Only where enough sources measured it, and where nearly all draws of sources have a slope above 0.
    """
    curves_at = {c.source: c for c in plain if c.samples == NOISE_SAMPLES}
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for cell, noise in noise_estimates(rows).items():
        c = curves_at.get(cell.source)
        if c is not None and 0 < noise.critical < np.inf:
            largest = largest_batch(c.batches, c.recalls).batch
            found[cell.batch].append((float(np.log2(noise.critical)), float(np.log2(largest / law.largest(c.samples, c.pairs)))))
    relations = {}
    for batch, cases in sorted(found.items()):
        critical, shift = np.array(cases).T
        if len(cases) < fewest or np.ptp(critical) == 0:
            continue
        generator = np.random.default_rng(0)
        drawn = (generator.integers(0, len(cases), len(cases)) for _ in range(DRAWS))
        slopes = [_slope(critical[own], shift[own]) for own in drawn if np.ptp(critical[own]) > 0]
        # One in a hundred, because several batches are tried.
        if np.quantile(slopes, 0.01) > 0:
            middle = (critical.mean(), critical.min(), critical.max())
            relations[batch] = NoiseRelation(_slope(critical, shift), *(float(2**v) for v in middle))
    return relations


def _slope(x: np.ndarray, y: np.ndarray) -> float:
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
