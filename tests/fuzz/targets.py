"""All targets of the fuzzer."""

from __future__ import annotations

from .arguments import TARGETS as ARGUMENTS
from .files import TARGETS as FILES
from .harness import Target
from .settings import TARGETS as SETTINGS

TARGETS: tuple[Target, ...] = (*SETTINGS, *ARGUMENTS, *FILES)


def all_targets() -> tuple[Target, ...]:
    """Return TARGETS. Child processes import this function by name."""
    return TARGETS
