"""Search for the largest size that runs: doubling, then bisection.

Pure: `runs` answers whether a size runs, and everything here only chooses the next size to ask about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

Runs = Callable[[int], bool]
Hint = Callable[[], int | None]
# The step beyond a size that a hint predicts to be the largest is 1/FINE of that size.
FINE = 32


def largest(
    runs: Runs, start: int, *, cap: int | None = None, stride: int | None = None, within: float = 0.0, hint: Hint | None = None
) -> int | None:
    """Return the largest size for which `runs` returned True; None if not even 1 runs.

    runs: True up to some size, False beyond it. It is never called beyond `cap`, and never twice with one size.
    start: the first size to try. stride: the first step from there, doubled with every further step; None doubles the size itself.
        Use a small stride if the start is a good prediction.
    within: how far the result may lie below the smallest size that failed, as a fraction of the size; 0 is exact.
    hint: returns a guess of the result from what was seen so far, or None. Wrong guesses cost time and nothing else.

    >>> largest(lambda size: size <= 300, 64)
    300
    """
    low, high, step = 0, None, max(1, stride or start)
    size = start if cap is None else min(start, cap)
    may_guess, has_guessed = True, False
    while True:
        if runs(size):
            low = size
        else:
            high = size
        if _is_done(low, high, cap, within):
            return low or None
        guess = hint() if hint is not None and may_guess else None
        if guess is not None and high is None and guess > 2 * low:
            # What was seen so far says little about sizes this large.
            size = 2 * low
        elif guess is None:
            size, step, may_guess = _next_without_hint(low, high, step), 2 * step, True
        else:
            size = _next_with_hint(guess, low, high, within)
            # If the guess is any good, the limit is near it.
            step, has_guessed = step if has_guessed else max(1, size // FINE), True
            # The next size ignores the hint, so wrong hints cannot keep the search going forever.
            may_guess = False
        size = size if cap is None else min(size, cap)


def largest_confirmed(
    runs: Runs, start: int, *, cap: int | None = None, stride: int | None = None, within: float = 0.0, hint: Hint | None = None
) -> int | None:
    """Return a size as `largest` does, that has also run after the last failure.

    A failure may leave memory behind (a leak), after which the largest size no longer runs: the result is then somewhat smaller.
    """
    answers: list[tuple[int, bool]] = []

    def ask(size: int) -> bool:
        answers.append((size, runs(size)))
        return answers[-1][1]

    size = largest(ask, start, cap=cap, stride=stride, within=within, hint=hint)
    decrement = max(1, (size or 0) // FINE)
    while size is not None and not _ran_since_last_failure(answers, size) and not ask(size):
        # Go down in growing steps and never up again: if every failure leaks, a fine search would fail again and again.
        size, decrement = max(size - decrement, size // 2) or None, 2 * decrement
    return size


def largest_without_failing(runs: Runs, start: int, cap: int, ceiling: Callable[[], int]) -> int | None:
    """Return a size as `largest_confirmed` does, trying only sizes that are expected to run, because a failure could be fatal.

    start: well below what is expected to run, so that twice as much can be expected to run too.
    ceiling: returns the largest size that can be expected to run, by what was seen of two others. The search follows it until it
        hardly rises.
    """
    size = min(start, cap)
    while not runs(size):
        if size == 1:
            return None
        size //= 2
    further = min(cap, 2 * size)
    while further > size and further >= min(cap, size + size // FINE):
        if not runs(further):
            return largest_confirmed(runs, size, cap=size)
        size = further
        further = min(cap, 2 * size, ceiling())
    return size


def with_margin(size: int, margin: float) -> int:
    """Return the size less the margin, at least 1.

    >>> with_margin(300, 0.05), with_margin(20, 0.05), with_margin(1, 0.5)
    (285, 19, 1)
    """
    return max(1, int(size * (1 - margin) + 1e-9))


def extrapolated(peaks: Mapping[int, int], limit: int) -> int | None:
    """Return the size at which the line through the peaks of the two largest sizes reaches the limit; None if it never does.

    >>> extrapolated({10: 200, 20: 300, 40: 500}, 1000)
    90
    """
    if len(peaks) < 2:
        return None
    small, large = sorted(peaks)[-2:]
    slope = (peaks[large] - peaks[small]) / (large - small)
    return None if slope <= 0 else max(1, int(large + (limit - peaks[large]) / slope))


def in_proportion(peaks: Mapping[int, int], limit: int) -> int:
    """Return a size that respects the limit even if the whole peak of the largest size grew in proportion to it; 1 without peaks.

    >>> in_proportion({10: 200, 20: 300}, 900)
    60
    """
    if not peaks:
        return 1
    size = max(peaks)
    return max(1, size * limit // max(1, peaks[size]))


def _is_done(low: int, high: int | None, cap: int | None, within: float) -> bool:
    if high is None:
        return cap is not None and low >= cap
    return high - low <= max(1, int(within * low))


def _next_without_hint(low: int, high: int | None, step: int) -> int:
    if high is None:
        return low + step
    if low == 0:
        return max(high - step, high // 2)
    return (low + high) // 2


def _next_with_hint(guess: int, low: int, high: int | None, within: float) -> int:
    """Return the guess; a size just above what ran if the guess is lower; the middle if the guess is known to be wrong."""
    near = max(1, int(within * low))
    if high is None:
        return max(guess, low + max(near, low // FINE))
    if guess >= high or low + near >= high:
        return (low + high) // 2
    return max(guess, low + near)


def _ran_since_last_failure(answers: list[tuple[int, bool]], size: int) -> bool:
    for asked, ran in reversed(answers):
        if not ran:
            return False
        if asked == size:
            return True
    return False
