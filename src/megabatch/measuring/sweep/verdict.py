"""The verdict of a sweep in words: which batch to take, and what each other batch costs or gains, as far as chance allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .cases import Same
from .summary import Difference, Summary, difference

# Runs whose times differ by less than this share are called equally fast.
SAME_SPEED = 0.05
# With same="time", a sentence says so if the times of the runs differ by more than this share.
SAME_TIME = 0.1


class Verdict(NamedTuple):
    """The batch to take and its learning rate, the recommendation in a sentence, and the sentences that support it."""

    batch: int
    lr: float
    headline: str
    sentences: tuple[str, ...]


def verdict(summaries: Sequence[Summary], same: Same, quality: str = "recall@1") -> Verdict:
    """Recommend the best batch or, of those that are not significantly worse, the fastest. quality: the name of the metric."""
    if not summaries:
        raise ValueError("summaries is empty: a verdict needs at least one batch, and every run failed")
    best = best_of(summaries)
    taken = best if same == "time" else _fastest(_sound(summaries), best)
    others = [_comparison(each, best, same) for each in summaries if each is not best]
    sentences = [*_risk(taken, best), *others, *_edges(summaries), *_failures(summaries), *_caveats(summaries, same)]
    return Verdict(taken.batch, taken.lr, _headline(taken, best, quality), tuple(sentences))


def best_of(summaries: Sequence[Summary]) -> Summary:
    """Return the batch with the best quality; of equal ones the fastest."""
    return max(_sound(summaries), key=lambda each: (each.mean, -each.seconds))


def _sound(summaries: Sequence[Summary]) -> list[Summary]:
    """Return the batches without failed seeds, or all of them if every batch has some."""
    return [each for each in summaries if not each.failed] or list(summaries)


def _fastest(sound: Sequence[Summary], best: Summary) -> Summary:
    """Return the fastest batch that is not significantly worse than the best; the best if no spread is known."""
    differences = {each.batch: difference(each.qualities, best.qualities) for each in sound}
    near = [each for each in sound if differences[each.batch].half is not None and not differences[each.batch].known]
    near = [each for each in near if (_speed(each, best) or 1) > 1]
    return min(near, key=lambda each: each.seconds, default=best)


def _speed(a: Summary, b: Summary) -> float | None:
    """Return how many times as fast a is as b; None if the difference is not significant."""
    ratio, apart = b.seconds / a.seconds, difference(a.times, b.times)
    if 1 / (1 + SAME_SPEED) < ratio < 1 + SAME_SPEED or (apart.half is not None and not apart.known):
        return None
    return ratio


def _headline(taken: Summary, best: Summary, quality: str) -> str:
    begin = f"Take batch {taken.batch:,} at a learning rate of {taken.lr:g}: its held-out {quality}, {quality_text(taken)},"
    if taken is best:
        return f"{begin} is the best."
    return f"{begin} does not differ significantly from the best, that of {best.batch:,}, and it is {_times(_speed(taken, best))}."


def _risk(taken: Summary, best: Summary) -> list[str]:
    """Return what may be lost by taking the fastest batch instead of the best."""
    apart = difference(taken.qualities, best.qualities)
    if taken is best or apart.half is None:
        return []
    return [f"Batch {taken.batch:,} instead of {best.batch:,} may lose up to {_points(max(0.0, apart.half - apart.mean))}."]


def _comparison(each: Summary, best: Summary, same: Same) -> str:
    """Return a sentence that compares a batch with the best."""
    apart = difference(each.qualities, best.qualities)
    name, other = f"Batch {each.batch:,}", f"{best.batch:,}"
    if apart.half is None:
        text = f"{name} comes out {_away(apart)} than {other}"
    elif apart.known:
        text = f"{name} {'loses' if apart.mean < 0 else 'gains'} {_with_interval(apart)} against {other}"
    else:
        text = f"{name} does not differ significantly from {other} ({_away(apart)})"
    if same == "time":
        return f"{text}, with {each.steps:,} updates instead of {best.steps:,}."
    speed = _speed(each, best)
    return f"{text} and {'is not significantly faster or slower' if speed is None else f'is {_times(speed)}'}."


def _edges(summaries: Sequence[Summary]) -> list[str]:
    sentences = []
    for each in summaries:
        if each.extended:
            many = "one further rate was" if each.extended == 1 else f"{each.extended} further rates were"
            sentences.append(f"Batch {each.batch:,}: the best rate was the lowest or highest requested, so {many} tried.")
        if each.edge is not None:
            beyond = "lower" if each.edge == "lowest" else "higher"
            sentences.append(
                f"Batch {each.batch:,}: the best rate, {each.lr:g}, is still the {each.edge} that was tried; a {beyond} one may be"
                " better, which would make the comparison unfair to this batch."
            )
    return sentences


def _failures(summaries: Sequence[Summary]) -> list[str]:
    sentences = [
        f"Batch {each.batch:,}: {each.failed} of {each.failed + len(each.qualities)} seeds failed at its best rate; see rows.jsonl."
        for each in summaries
        if each.failed
    ]
    lost = [f"{batch:,}" for batch in summaries[0].lost]
    return sentences + ([f"No run finished at batch {', '.join(lost)}; see rows.jsonl."] if lost else [])


def _caveats(summaries: Sequence[Summary], same: Same) -> list[str]:
    """Return what the numbers depend on."""
    first, seeds = summaries[0], max(len(each.qualities) for each in summaries)
    if seeds == 1:
        sentences = ["One seed: the spread is unknown, and any of these differences may be chance; use more seeds."]
    else:
        sentences = [
            f"± after a quality is the standard deviation over {seeds} seeds; after a difference, half of its 95 % interval"
            " (Welch's). It covers the seeds only: other held-out pairs would differ too."
        ]
    if all(each.tried == 1 for each in summaries):
        sentences.append("One rate was tried at each batch, that of the scaling rule: another may suit a batch better.")
    elif first.apart:
        sentences.append(
            f"Rates were chosen with the first seed on one half of the held-out pairs; quality is reported on the other half"
            f" ({first.pairs:,} pairs), also for the first seed."
        )
    else:
        sentences.append(
            f"Rates were chosen with the first seed on the same {first.pairs:,} held-out pairs that quality is reported on, which"
            " were too few to be halved: qualities are a little too good."
        )
    if first.processes > 1:
        sentences.append(
            f"{first.processes} runs at a time shared the machine: times compare batches, but a run on its own is faster."
        )
    times = [each.seconds for each in summaries]
    if same == "time" and max(times) > (1 + SAME_TIME) * min(times):
        sentences.append(f"Times were between {min(times):.3g} and {max(times):.3g} s, because the pilots' speeds did not hold.")
    return sentences


def quality_text(each: Summary) -> str:
    """Return a quality in per cent, with its spread over seeds if there is one.

    >>> quality_text(Summary(64, 1e-3, 0.1, (0.31, 0.33), (1.0, 1.0), 64, 9, 576))
    '32.0 ± 1.4 %'
    """
    return f"{100 * each.mean:.1f} %" if each.spread is None else f"{100 * each.mean:.1f} ± {100 * each.spread:.1f} %"


def _with_interval(apart: Difference) -> str:
    """Return "0.3 ± 0.2 points"."""
    assert apart.half is not None
    # Enough digits that the larger number also looks larger.
    places = next((n for n in (1, 2, 3) if round(100 * abs(apart.mean), n) > round(100 * apart.half, n)), 4)
    return f"{100 * abs(apart.mean):.{places}f} ± {100 * apart.half:.{places}f} points"


def _away(apart: Difference) -> str:
    """Return "0.1 points lower, ± 0.4"."""
    text = f"{_points(abs(apart.mean))} {'higher' if apart.mean > 0 else 'lower'}"
    return text if apart.half is None else f"{text}, ± {100 * apart.half:.1f}"


def _points(share: float) -> str:
    return f"{100 * share:.{1 if share >= 0.0005 or not share else 2}f} points"


def _times(speed: float | None) -> str:
    assert speed is not None
    return f"{speed:.1f}× faster" if speed > 1 else f"{1 / speed:.1f}× slower"
