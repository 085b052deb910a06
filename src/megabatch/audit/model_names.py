"""What a model's name tells: how many parameters it has."""

from __future__ import annotations

import re

_BILLIONS = re.compile(r"(?<![A-Za-z\d.])(\d{1,3}(?:\.\d{1,2})?)[bB](?![A-Za-z])")


def parameters_of(name: str) -> int | None:
    """Return the parameters that a name states in billions, or None.

    >>> parameters_of("NousResearch/Meta-Llama-3-8B"), parameters_of("bert-base-uncased")
    (8000000000, None)
    """
    match = _BILLIONS.search(name)
    return round(float(match[1]) * 1e9) or None if match else None
