"""A sweep in words: which batch to take, and what each of the others costs or gains. What chance explains is not claimed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .cases import Same
from .summary import Difference, Summary, difference

# Runs whose times differ by less than this share are called equally fast.
SAME_SPEED = 0.05
# For the same time: how far the runs' times may lie from each other before it is said.
SAME_TIME = 0.1


class Verdict(NamedTuple):
    """The batch to take and its rate; the answer in a sentence, and the sentences that it rests on."""

    batch: int
    lr: float
    headline: str
    sentences: tuple[str, ...]


def verdict(summaries: Sequence[Summary], same: Same, quality: str = "recall@1") -> Verdict:
    """The best batch or, of those that cannot be told from it, the fastest. quality: what is measured, in a word."""
    if not summaries:
        raise ValueError("a verdict needs the summary of one batch at least; every run failed")
    best = best_of(summaries)
    taken = best if same == "time" else _fastest(_sound(summaries), best)
    others = [_beside(each, best, same) for each in summaries if each is not best]
    told = [*_risk(taken, best), *others, *_edges(summaries), *_failures(summaries), *_doubts(summaries, same)]
    return Verdict(taken.batch, taken.lr, _headline(taken, best, quality), tuple(told))


def best_of(summaries: Sequence[Summary]) -> Summary:
    """The batch with the best quality, of equal ones the fastest."""
    return max(_sound(summaries), key=lambda each: (each.mean, -each.seconds))


def _sound(summaries: Sequence[Summary]) -> list[Summary]:
    """A batch that some seeds do not survive is taken only where no other is left."""
    return [each for each in summaries if not each.failed] or list(summaries)


def _fastest(sound: Sequence[Summary], best: Summary) -> Summary:
    """The fastest of those that are no worse than the best as far as the seeds can tell; the best where no spread is known."""
    differences = {each.batch: difference(each.qualities, best.qualities) for each in sound}
    near = [each for each in sound if differences[each.batch].half is not None and not differences[each.batch].known]
    near = [each for each in near if (_speed(each, best) or 1) > 1]
    return min(near, key=lambda each: each.seconds, default=best)


def _speed(a: Summary, b: Summary) -> float | None:
    """How many times as fast a is as b; None where they cannot be told apart."""
    ratio, apart = b.seconds / a.seconds, difference(a.times, b.times)
    if 1 / (1 + SAME_SPEED) < ratio < 1 + SAME_SPEED or (apart.half is not None and not apart.known):
        return None
    return ratio


def _headline(taken: Summary, best: Summary, quality: str) -> str:
    begin = f"Take batch {taken.batch:,} at a learning rate of {taken.lr:g}: its held-out {quality}, {quality_text(taken)},"
    if taken is best:
        return f"{begin} is the best."
    return f"{begin} cannot be told from the best, that of {best.batch:,}, and it is {_times(_speed(taken, best))}."


def _risk(taken: Summary, best: Summary) -> list[str]:
    """What may be lost by taking the fastest instead of the best."""
    apart = difference(taken.qualities, best.qualities)
    if taken is best or apart.half is None:
        return []
    return [f"Batch {taken.batch:,} instead of {best.batch:,} may lose up to {_points(max(0.0, apart.half - apart.mean))}."]


def _beside(each: Summary, best: Summary, same: Same) -> str:
    """One batch beside the best."""
    apart = difference(each.qualities, best.qualities)
    name, other = f"Batch {each.batch:,}", f"{best.batch:,}"
    if apart.half is None:
        words = f"{name} comes out {_away(apart)} than {other}"
    elif apart.known:
        words = f"{name} {'loses' if apart.mean < 0 else 'gains'} {_with_interval(apart)} against {other}"
    else:
        words = f"{name} cannot be told from {other} ({_away(apart)})"
    if same == "time":
        return f"{words}, with {each.steps:,} updates instead of {best.steps:,}."
    speed = _speed(each, best)
    return f"{words} and {'is as fast as far as can be told' if speed is None else f'is {_times(speed)}'}."


def _edges(summaries: Sequence[Summary]) -> list[str]:
    found = []
    for each in summaries:
        if each.extended:
            many = "one further rate was" if each.extended == 1 else f"{each.extended} further rates were"
            found.append(f"Batch {each.batch:,}: the best rate lay at the edge of those asked for, and {many} tried.")
        if each.edge is not None:
            beyond = "lower" if each.edge == "lowest" else "higher"
            found.append(
                f"Batch {each.batch:,}: the best rate, {each.lr:g}, is still the {each.edge} that was tried; a {beyond} one may be"
                " better, and the comparison be unfair to this batch."
            )
    return found


def _failures(summaries: Sequence[Summary]) -> list[str]:
    found = [
        f"Batch {each.batch:,}: {each.failed} of {each.failed + len(each.qualities)} seeds failed at its best rate; see rows.jsonl."
        for each in summaries
        if each.failed
    ]
    lost = [f"{batch:,}" for batch in summaries[0].lost]
    return found + ([f"No run came to its end at batch {', '.join(lost)}; see rows.jsonl."] if lost else [])


def _doubts(summaries: Sequence[Summary], same: Same) -> list[str]:
    """What the numbers rest on."""
    first, seeds = summaries[0], max(len(each.qualities) for each in summaries)
    if seeds == 1:
        found = ["One seed: no spread is known, and any of these differences may be chance; give more seeds."]
    else:
        found = [
            f"± after a quality is the standard deviation over {seeds} seeds; after a difference, half of its 95 % interval"
            " (Welch's). Seeds are all that it covers: other held-out pairs would differ too."
        ]
    if all(each.tried == 1 for each in summaries):
        found.append("One rate was tried at each batch, the rule's: another may suit a batch better.")
    elif first.apart:
        found.append(
            f"Rates were chosen by the first seed on one half of the held-out pairs; what is reported is of the other half"
            f" ({first.pairs:,} pairs), the first seed's included."
        )
    else:
        found.append(
            f"Rates were chosen by the first seed on the same {first.pairs:,} held-out pairs that are reported, which could not be"
            " halved: qualities are a little too good."
        )
    if first.processes > 1:
        found.append(
            f"{first.processes} runs at a time shared the machine: seconds compare batches, and are not those of a run alone."
        )
    times = [each.seconds for each in summaries]
    if same == "time" and max(times) > (1 + SAME_TIME) * min(times):
        found.append(f"Times came out between {min(times):.3g} and {max(times):.3g} s: the pilots' speeds did not hold.")
    return found


def quality_text(each: Summary) -> str:
    """A quality in per cent, with its spread over seeds if there is one.

    >>> quality_text(Summary(64, 1e-3, 0.1, (0.31, 0.33), (1.0, 1.0), 64, 9, 576))
    '32.0 ± 1.4 %'
    """
    return f"{100 * each.mean:.1f} %" if each.spread is None else f"{100 * each.mean:.1f} ± {100 * each.spread:.1f} %"


def _with_interval(apart: Difference) -> str:
    """ "0.3 ± 0.2 points"."""
    assert apart.half is not None
    # So many digits that what is larger also looks larger.
    places = next((n for n in (1, 2, 3) if round(100 * abs(apart.mean), n) > round(100 * apart.half, n)), 4)
    return f"{100 * abs(apart.mean):.{places}f} ± {100 * apart.half:.{places}f} points"


def _away(apart: Difference) -> str:
    """ "0.1 points lower, ± 0.4"."""
    words = f"{_points(abs(apart.mean))} {'higher' if apart.mean > 0 else 'lower'}"
    return words if apart.half is None else f"{words}, ± {100 * apart.half:.1f}"


def _points(share: float) -> str:
    return f"{100 * share:.{1 if share >= 0.0005 or not share else 2}f} points"


def _times(speed: float | None) -> str:
    assert speed is not None
    return f"{speed:.1f}× faster" if speed > 1 else f"{1 / speed:.1f}× slower"
