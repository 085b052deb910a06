"""Rules and what they report: a rule is a pure function of the facts of a training, with its source."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from .facts import TrainingFacts

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


class Finding(NamedTuple):
    """One mistake. code: of the rule. where: the key or option. fix: a diff of the file, or advice. source: of the rule."""

    code: str
    severity: Severity
    where: str
    why: str
    fix: str
    source: str = ""


@dataclass(frozen=True)
class Violation:
    """What a rule reports.

    fact: the fact that is wrong. text: what is wrong, with the numbers of this training. changes: facts that fix it, if facts can.
    otherwise: other changes that fix it, for tools that cannot make the first ones. advice: what to do in addition, or if facts
    cannot fix it.
    """

    severity: Severity
    fact: str
    text: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    advice: str = ""
    otherwise: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Rule:
    """code: its name. severities: those that it can report. source: its evidence. remedy: the fix in general.

    The docstring of `check` has a title and the reason.
    """

    code: str
    severities: tuple[Severity, ...]
    source: str
    remedy: str
    check: Callable[[TrainingFacts], Iterable[Violation]]

    @property
    def title(self) -> str:
        return self._text()[0]

    @property
    def because(self) -> str:
        return self._text()[1]

    def violations(self, training: TrainingFacts) -> list[Violation]:
        violations = list(self.check(training))
        assert all(violation.severity in self.severities for violation in violations)
        return violations

    def _text(self) -> tuple[str, str]:
        title, _, because = inspect.cleandoc(self.check.__doc__ or "").partition("\n\n")
        return title.rstrip("."), " ".join(because.split())


def rule(
    code: str, *severities: Severity, source: str, remedy: str
) -> Callable[[Callable[[TrainingFacts], Iterable[Violation]]], Rule]:
    """Return a decorator that makes a rule of a function of a training's facts."""
    return lambda check: Rule(code, severities, source, remedy, check)


def exit_code(findings: Iterable[Finding], fail_on: Severity = "error") -> int:
    """Return 1 if a finding is as severe as `fail_on` or worse, else 0, so that a launch script can stop.

    >>> exit_code([Finding("no-warmup", "warning", "schedule.warmup", "…", "…")]), exit_code([])
    (0, 0)
    """
    if fail_on not in SEVERITIES:
        raise ValueError(f"fail_on is {fail_on!r}: must be one of {', '.join(SEVERITIES)}")
    fatal = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    return int(any(finding.severity in fatal for finding in findings))
