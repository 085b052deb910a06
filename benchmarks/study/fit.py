"""The law of the batch: how large a batch may be before it costs quality at a fixed number of samples, and which rate it needs.

A curve is the recall of one kind of training at one number of samples against the batch, each batch at its best rate. Its largest
batch loses less than `tolerance` of the best recall. The law over all curves is

    lost(batch) / tolerance = (batch / largest)^steepness,   log2 largest = a + alpha log2(samples / 1M) + beta log2(pairs / 100k)
    log2 rate = (one offset for each kind) + e log2(batch) + f log2(samples)

Recall is recall@1 on the test pairs, the mean of both directions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from benchmarks.study.runs import SEEDS, best_rate, cell_of, unpack
from benchmarks.study.stack import WARM_UP, Cell, Kind

# A batch may lose this many points of recall, or this share of it if that is more.
LOST_POINTS, LOST_SHARE = 0.01, 0.03
# Draws of a bootstrap, and the central share of them that an interval covers.
DRAWS, COVERED = 200, 0.9
# The share of curves that should allow the planned batch, and the share of the tolerance that it aims at.
ALLOWED, AIM = 0.9, 0.5
MILLION, HUNDRED_THOUSAND = 1e6, 1e5

Row = Mapping[str, Any]


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


class Largest(NamedTuple):
    """The largest batch of a curve. beyond: the largest that was run still loses too little, so that the true one is larger."""

    batch: float
    beyond: bool


class Law(NamedTuple):
    """The fitted law. spread: quantile 1 - ALLOWED of log2(measured largest / fitted largest) over the curves."""

    a: float
    alpha: float
    beta: float
    steepness: float
    spread: float

    def largest(self, samples: float, pairs: float) -> float:
        return float(2 ** (self.a + self.alpha * np.log2(samples / MILLION) + self.beta * np.log2(pairs / HUNDRED_THOUSAND)))

    def planned(self, samples: float, pairs: float) -> float:
        """Return the batch that loses AIM of the tolerance on a curve that allows less than ALLOWED of the curves do."""
        return self.largest(samples, pairs) * 2.0**self.spread * AIM ** (1 / self.steepness)


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


def curves(rows: Iterable[Row], fewest: int = 3) -> list[Curve]:
    """Return the curves with at least `fewest` batches whose best rate has run with all seeds."""
    found: dict[tuple[str, Kind, int], list[Point]] = defaultdict(list)
    pairs: dict[str, int] = {}
    for cell, own in by_cell(rows).items():
        best = best_rate(own)
        winners = {row["seed"]: row for row in own if row["rate"] == best}
        if best is None or set(winners) != set(SEEDS):
            continue
        ordered = [winners[seed] for seed in SEEDS]
        hits = [unpack(row["hits"], row["queries"]) for row in ordered if "hits" in row]
        point = Point(cell.batch, best, [row["test_1"] for row in ordered], np.stack(hits) if len(hits) == len(SEEDS) else None)
        found[cell.source, cell.kind, cell.samples].append(point)
        pairs[cell.source] = int(own[0]["pairs"])
    return [
        Curve(source, kind, samples, pairs[source], sorted(points, key=lambda p: p.batch))
        for (source, kind, samples), points in sorted(found.items())
        if len(points) >= fewest
    ]


def largest_batch(batches: np.ndarray, recalls: np.ndarray) -> Largest:
    """Return the largest batch, from the best one on, that loses less than the tolerance; on straight lines over log2 batch."""
    best = int(recalls.argmax())
    floor = recalls[best] - tolerance(float(recalls[best]))
    for i in range(best + 1, len(batches)):
        if recalls[i] < floor:
            share = (recalls[i - 1] - floor) / (recalls[i - 1] - recalls[i])
            return Largest(float(batches[i - 1] * (batches[i] / batches[i - 1]) ** share), False)
    return Largest(float(batches[-1]), True)


def largest_interval(curve: Curve, draws: int = DRAWS) -> Interval:
    """Return the interval of a curve's largest batch over draws of seeds and of test pairs, the same pairs for all batches."""
    generator = np.random.default_rng(0)
    found = []
    for _ in range(draws):
        recalls = []
        queries = next((p.hits.shape[2] for p in curve.points if p.hits is not None), 0)
        weights = generator.multinomial(queries, np.full(queries, 1 / queries)) / queries if queries else None
        for point in curve.points:
            seeds = generator.integers(0, len(SEEDS), len(SEEDS))
            if point.hits is None or weights is None:
                recalls.append(np.mean([point.recalls[seed] for seed in seeds]))
            else:
                recalls.append((point.hits[seeds].mean((0, 1)) * weights).sum())
        found.append(largest_batch(curve.batches, np.array(recalls)).batch)
    return _interval(found)


def fit_law(given: Sequence[Curve]) -> Law:
    """Return the law that fits the losses of all curves from their best batch on, by least squares of log(1 + lost / tolerance)."""
    if len(given) < 3:
        raise ValueError(f"{len(given)} curves are too few to fit the law; run more cells first")
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
    shifts = [np.log2(largest_batch(c.batches, c.recalls).batch / law.largest(c.samples, c.pairs)) for c in given]
    return law._replace(spread=float(np.quantile(shifts, 1 - ALLOWED)))


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


def law_intervals(given: Sequence[Curve], draws: int = DRAWS) -> dict[str, Interval]:
    """Return the interval of each parameter of the law over draws of sources, whose curves stay together."""
    generator = np.random.default_rng(0)
    sources = sorted({c.source for c in given})
    laws = []
    for _ in range(draws):
        drawn = generator.choice(sources, len(sources))
        laws.append(fit_law([c for source in drawn for c in given if c.source == source]))
    return {name: _interval([getattr(law, name) for law in laws]) for name in Law._fields}


def _interval(values: Sequence[float]) -> Interval:
    return Interval(*(float(v) for v in np.quantile(values, [(1 - COVERED) / 2, (1 + COVERED) / 2])))


def recall_at(curve: Curve, batch: float) -> float:
    """Return the recall of a batch between those that were run."""
    return float(np.interp(np.log2(batch), np.log2(curve.batches), curve.recalls))


def hold_out_batches(given: Sequence[Curve]) -> list[HeldBack]:
    """Return what the batch planned by the other sources' law costs on each curve of a source."""
    found = []
    for source in sorted({c.source for c in given}):
        law = fit_law([c for c in given if c.source != source])
        for c in (c for c in given if c.source == source):
            planned = float(np.clip(law.planned(c.samples, c.pairs), c.batches[0], c.batches[-1]))
            top = float(c.recalls.max())
            found.append(HeldBack(source, c.kind, c.samples, planned, planned, top - recall_at(c, planned), tolerance(top)))
    return found


def best_rates(rows: Iterable[Row]) -> dict[Cell, float]:
    """Return the best rate of every cell that has rates on both sides of it, with the usual warm-up."""
    rates = {}
    for cell, own in by_cell(rows).items():
        if cell.warm_up != WARM_UP:
            continue
        tried = sorted({row["rate"] for row in own})
        best = best_rate(own)
        if best is not None and tried[0] < best < tried[-1]:
            rates[cell] = best
    return rates


def fit_rates(rates: Mapping[Cell, float]) -> RateLaw:
    """Return the law of the rate by least squares, with one offset for each source and kind."""
    groups = sorted({_group(cell) for cell in rates})
    if len(rates) < len(groups) + 2:
        raise ValueError(f"{len(rates)} tuned cells of {len(groups)} kinds are too few to fit the rate; run more cells first")
    design = np.zeros((len(rates), len(groups) + 2))
    for i, cell in enumerate(rates):
        design[i, groups.index(_group(cell))] = 1
        design[i, -2:] = np.log2(cell.batch), np.log2(cell.samples)
    solution = np.linalg.lstsq(design, np.log2(list(rates.values())), rcond=None)[0]
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


def hold_out_rates(rows: Sequence[Row]) -> list[HeldBack]:
    """Return what the nearest tried rate to the one planned by the other sources' law costs in each cell of a source."""
    rates, cells = best_rates(rows), by_cell(rows)
    found = []
    for source in sorted({cell.source for cell in rates}):
        law = fit_rates({cell: rate for cell, rate in rates.items() if cell.source != source})
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
