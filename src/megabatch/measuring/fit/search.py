"""The largest size that runs: doubling, then bisection. Pure: answers in, a size out; nothing here runs anything itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Runs = Callable[[int], bool]
Hint = Callable[[], int | None]
# Beyond a size that a hint names as the last one, the next step is this share of it.
FINE = 32


def largest(
    runs: Runs, start: int, *, cap: int | None = None, stride: int | None = None, within: float = 0.0, hint: Hint | None = None
) -> int | None:
    """The largest size for which `runs` has answered yes; None where not even 1 runs.

    runs: yes up to some size, no beyond it. It is never asked beyond `cap`, and never twice about a size.
    start: the first size asked about. stride: from there, steps double beginning with this one; None doubles the size. A small one
        is for a start that is trusted.
    within: of the size, how far below the first that fails the answer may lie; 0 is exact.
    hint: a guess of the answer from what was seen so far, or None; wrong ones cost time and nothing else.

    >>> largest(lambda size: size <= 300, 64)
    300
    """
    low, high, step = 0, None, max(1, stride or start)
    size = start if cap is None else min(start, cap)
    guessing, guessed = True, False
    while True:
        if runs(size):
            low = size
        else:
            high = size
        if _is_found(low, high, cap, within):
            return low or None
        guess = hint() if hint is not None and guessing else None
        if guess is not None and high is None and guess > 2 * low:
            # Nothing was seen so far that says anything of sizes this large.
            size = 2 * low
        elif guess is None:
            size, step, guessing = _without_hint(low, high, step), 2 * step, True
        else:
            size = _with_hint(guess, low, high, within)
            # Beyond a guess the limit should be near, if there is anything to it.
            step, guessed = step if guessed else max(1, size // FINE), True
            # The next question does without: hints that are wrong cannot keep the search going.
            guessing = False
        size = size if cap is None else min(size, cap)


def lasting(
    runs: Runs, start: int, *, cap: int | None = None, stride: int | None = None, within: float = 0.0, hint: Hint | None = None
) -> int | None:
    """As `largest`, and the size has run after every failure, so that what failures leave behind (a leak) does not matter; after
    one, it may be somewhat smaller than the largest."""
    answers: list[tuple[int, bool]] = []

    def ask(size: int) -> bool:
        answers.append((size, runs(size)))
        return answers[-1][1]

    size = largest(ask, start, cap=cap, stride=stride, within=within, hint=hint)
    less = max(1, (size or 0) // FINE)
    while size is not None and not _ran_last(answers, size) and not ask(size):
        # Down in growing steps, and not up again: where every failure leaks, a close search would fail again and again.
        size, less = max(size - less, size // 2) or None, 2 * less
    return size


def carefully(runs: Runs, start: int, cap: int, ceiling: Callable[[], int]) -> int | None:
    """As `lasting`, for where a failure may not be survived: sizes grow no further than they are expected to run.

    start: well below what is expected to run, so that twice as much can be trusted to.
    ceiling: the largest size that, by what was seen of two others, can be expected to. It is followed until it hardly rises.
    """
    size = min(start, cap)
    while not runs(size):
        if size == 1:
            return None
        size //= 2
    further = min(cap, 2 * size)
    while further > size and further >= min(cap, size + size // FINE):
        if not runs(further):
            return lasting(runs, size, cap=size)
        size = further
        further = min(cap, 2 * size, ceiling())
    return size


def with_margin(size: int, margin: float) -> int:
    """The size less the margin, at least 1.

    >>> with_margin(300, 0.05), with_margin(20, 0.05), with_margin(1, 0.5)
    (285, 19, 1)
    """
    return max(1, int(size * (1 - margin) + 1e-9))


def on_the_line(peaks: Mapping[int, int], limit: int) -> int | None:
    """The size at which the line through the peaks of the two largest sizes comes to the limit; None where it never does.

    >>> on_the_line({10: 200, 20: 300, 40: 500}, 1000)
    90
    """
    if len(peaks) < 2:
        return None
    small, large = sorted(peaks)[-2:]
    slope = (peaks[large] - peaks[small]) / (large - small)
    return None if slope <= 0 else max(1, int(large + (limit - peaks[large]) / slope))


def in_proportion(peaks: Mapping[int, int], limit: int) -> int:
    """A size that keeps within the limit even if all of the largest size's peak grew with it; 1 where nothing is known.

    >>> in_proportion({10: 200, 20: 300}, 900)
    60
    """
    if not peaks:
        return 1
    size = max(peaks)
    return max(1, size * limit // max(1, peaks[size]))


def _is_found(low: int, high: int | None, cap: int | None, within: float) -> bool:
    if high is None:
        return cap is not None and low >= cap
    return high - low <= max(1, int(within * low))


def _without_hint(low: int, high: int | None, step: int) -> int:
    if high is None:
        return low + step
    if low == 0:
        return max(high - step, high // 2)
    return (low + high) // 2


def _with_hint(guess: int, low: int, high: int | None, within: float) -> int:
    """The guess, or next to what ran where it lies no higher; the middle where it is known to be wrong."""
    near = max(1, int(within * low))
    if high is None:
        return max(guess, low + max(near, low // FINE))
    if guess >= high or low + near >= high:
        return (low + high) // 2
    return max(guess, low + near)


def _ran_last(answers: list[tuple[int, bool]], size: int) -> bool:
    """Whether nothing failed after the size ran the last time."""
    for asked, ran in reversed(answers):
        if not ran:
            return False
        if asked == size:
            return True
    return False
