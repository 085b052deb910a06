"""Every rule, in the order in which findings of one severity are listed."""

from __future__ import annotations

from . import batches, negatives, rates, settings, starts, steps

RULES = (*settings.RULES, *starts.RULES, *negatives.RULES, *batches.RULES, *rates.RULES, *steps.RULES)

__all__ = ["RULES"]
