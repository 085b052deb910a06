"""Numbers and texts as people read them."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any

Format = Callable[[Any], str]

# Joiners are invisible, but letters and emoji need them; other invisible characters could reverse the text around them.
JOINERS = "\u200c\u200d"


def whole(value: float) -> str:
    """Return a number without decimals, with commas.

    >>> whole(1024)
    '1,024'
    """
    return f"{value:,.0f}"


def plural(noun: str) -> str:
    """Return the plural of a noun.

    >>> plural("image"), plural("query")
    ('images', 'queries')
    """
    return f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"


def count_text(number: float) -> str:
    """Return a count in full up to five digits, then to three.

    >>> count_text(1024), count_text(65536), count_text(400_000), count_text(1234567)
    ('1,024', '65,536', '400 k', '1.23 M')
    """
    # Each limit is where three digits would round up to the next unit.
    for least, size, unit in ((999.5e9, 1e12, "T"), (999.5e6, 1e9, "G"), (999.5e3, 1e6, "M"), (1e5, 1e3, "k")):
        if abs(number) >= least:
            return f"{number / size:.3g} {unit}"
    return f"{number:,.0f}"


def bytes_text(number: float) -> str:
    """Return an amount of memory to three digits.

    >>> bytes_text(512), bytes_text(300 * 2**20), bytes_text(1.5 * 2**30)
    ('512 B', '300 MiB', '1.5 GiB')
    """
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(number) >= 2**power:
            value = number / 2**power
            return f"{value:.3g} {unit}" if value < 100 else f"{value:,.0f} {unit}"
    return f"{number:.0f} B"


def seconds_text(seconds: float) -> str:
    """Return a duration in its two largest units.

    >>> seconds_text(0.0123), seconds_text(9.5), seconds_text(252), seconds_text(7500)
    ('12.3 ms', '9.5 s', '4 min 12 s', '2 h 5 min')
    """
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def percent_text(share: float) -> str:
    """Return a share in [0, 1] as a percentage with one decimal, or two digits of a small one.

    >>> percent_text(0.83), percent_text(1), percent_text(0.00021), percent_text(0)
    ('83.0 %', '100 %', '0.021 %', '0 %')
    """
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    return f"{100 * share:.1f} %" if share >= 0.01 else f"{100 * share:.2g} %"


def change_text(change: float) -> str:
    """Return a relative change with its sign.

    >>> change_text(0.5), change_text(-0.031)
    ('+50.0 %', '−3.1 %')
    """
    return ("+" if change >= 0 else "−") + percent_text(abs(change))


def plain(text: str, limit: int) -> str:
    """Return a text on one line, at most `limit` characters, without what is invisible or cannot be written as UTF-8.

    >>> plain("one\\n\\ttwo\\x00 three", 10)
    'one two t…'
    """
    # A text far longer than what is shown is not read to its end.
    text = text[: 8 * limit].encode("utf-8", "replace").decode("utf-8")
    kept = (c if c in JOINERS or not unicodedata.category(c).startswith("C") else " " for c in text)
    line = " ".join("".join(kept).split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"
