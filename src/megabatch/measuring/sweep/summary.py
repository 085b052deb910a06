"""Each batch at its best rate: quality, spread and cost over seeds, and which batches no other beats in both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from .cases import Case, Choice, Edge
from .outcome import Outcome
from .spread import deviation


@dataclass(frozen=True)
class Summary:
    """What a batch reaches at the rate that was chosen for it.

    qualities, times: of each seed that came to its end; failed: how many did not. pairs: held-out ones that are reported; apart:
    whether rates were chosen on others. tried: how many rates were; edge, extended: see `Choice`. processes: how many runs shared
    the machine. lost: batches of the sweep without any result.
    """

    batch: int
    lr: float
    weight_decay: float
    qualities: tuple[float, ...]
    times: tuple[float, ...]
    pairs_per_s: float
    steps: int
    samples: int
    gap: float | None = None
    pairs: int = 0
    apart: bool = True
    failed: int = 0
    tried: int = 1
    edge: Edge | None = None
    extended: int = 0
    processes: int = 1
    lost: tuple[int, ...] = ()

    @property
    def mean(self) -> float:
        return fmean(self.qualities)

    @property
    def spread(self) -> float | None:
        return deviation(self.qualities)

    @property
    def seconds(self) -> float:
        return fmean(self.times)

    def as_row(self) -> dict[str, Any]:
        """A row of the measurement's file."""
        first = {"batch": self.batch, "lr": self.lr, "mean": self.mean, "spread": self.spread, "seconds": self.seconds}
        return first | {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def from_row(row: Mapping[str, Any]) -> Summary:
    """The summary of such a row."""
    fields: dict[str, Any] = {key: value for key, value in row.items() if key not in ("mean", "spread", "seconds")}
    fields |= {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
    return Summary(**fields)


def summary(batch: int, chosen: Choice, outcomes: Mapping[Case, Outcome], processes: int, lost: Sequence[int]) -> Summary:
    """The summary of a batch over the seeds of its chosen rate, of which the first came to its end, or it would not be chosen."""
    runs = [outcome for case, outcome in outcomes.items() if case[:3] == (batch, chosen.lr, chosen.weight_decay)]
    ended = [outcome for outcome in runs if outcome.quality is not None]
    gaps = [outcome.gap for outcome in ended if outcome.gap is not None]
    return Summary(
        batch,
        chosen.lr,
        chosen.weight_decay,
        qualities=tuple(outcome.quality for outcome in ended if outcome.quality is not None),
        times=tuple(outcome.seconds for outcome in ended),
        pairs_per_s=fmean(outcome.pairs_per_s for outcome in ended),
        steps=ended[0].steps,
        samples=ended[0].samples,
        gap=fmean(gaps) if gaps else None,
        pairs=ended[0].pairs,
        apart=all(outcome.apart for outcome in ended),
        failed=len(runs) - len(ended),
        tried=len({case.lr for case in outcomes if case.batch == batch}),
        edge=chosen.edge,
        extended=chosen.extended,
        processes=processes,
        lost=tuple(lost),
    )


def pareto(summaries: Iterable[Summary]) -> list[Summary]:
    """The batches that no other one beats in both seconds and quality, the fastest first."""
    front: list[Summary] = []
    for each in sorted(summaries, key=lambda s: (s.seconds, -s.mean)):
        if not front or each.mean > front[-1].mean:
            front.append(each)
    return front
