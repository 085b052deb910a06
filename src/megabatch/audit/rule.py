"""What a rule is and what it says: a pure function of a training's facts, with its source."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from .training import Training

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


class Finding(NamedTuple):
    """One mistake. code: of the rule; where: the key or option; why: with the source; fix: a diff of the file, or what to do."""

    code: str
    severity: Severity
    where: str
    why: str
    fix: str


@dataclass(frozen=True)
class Problem:
    """What a rule found. fact: the fact to look at; text: what is wrong, with this training's numbers; changes: facts that put it
    right, where facts can; advice: what to do where they cannot, or beside them."""

    severity: Severity
    fact: str
    text: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    advice: str = ""


@dataclass(frozen=True)
class Rule:
    """code: its name; severities: those it can have; source: what it rests on; remedy: how it is put right, in general.
    The docstring of `check` begins with a title and says why."""

    code: str
    severities: tuple[Severity, ...]
    source: str
    remedy: str
    check: Callable[[Training], Iterable[Problem]]

    @property
    def title(self) -> str:
        return self._text()[0]

    @property
    def because(self) -> str:
        return self._text()[1]

    def problems(self, training: Training) -> list[Problem]:
        found = list(self.check(training))
        assert all(problem.severity in self.severities for problem in found)
        return found

    def _text(self) -> tuple[str, str]:
        title, _, because = inspect.cleandoc(self.check.__doc__ or "").partition("\n\n")
        return title.rstrip("."), " ".join(because.split())


def rule(code: str, *severities: Severity, source: str, remedy: str) -> Callable[[Callable[[Training], Iterable[Problem]]], Rule]:
    """Makes a rule of a function of a training."""
    return lambda check: Rule(code, severities, source, remedy, check)


def exit_code(findings: Iterable[Finding], fail_on: Severity = "error") -> int:
    """1 where a finding is as severe as `fail_on` or worse, else 0: for a launch script to stop on.

    >>> exit_code([Finding("no-warmup", "warning", "schedule.warmup", "…", "…")]), exit_code([])
    (0, 0)
    """
    if fail_on not in SEVERITIES:
        raise ValueError(f"fail_on is {fail_on!r}: must be one of {', '.join(SEVERITIES)}")
    fatal = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    return int(any(finding.severity in fatal for finding in findings))
