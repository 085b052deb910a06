"""The report of an audit, and the rules as documentation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from ..reporting.report import Code, Paragraph, Report, Section
from .comparison import COMPARISON_RULES
from .rule import SEVERITIES, Finding
from .rules import RULES

# Columns of a sentence. Lines of a diff are as long as those of the file.
WIDTH = 100


def audit_report(findings: Sequence[Finding]) -> Report:
    """Return the findings, each with its fix, the most severe first."""
    findings = sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in SEVERITIES}
    summary = ", ".join(f"{count} {severity}{'s' * (count > 1)}" for severity, count in counts.items() if count)
    total = f"{len(findings)} finding{'s' * (len(findings) > 1)}: {summary}"
    return Report(
        title="megabatch audit",
        subject="",
        headline=total if findings else "nothing found",
        sections=[
            Section(
                "",
                [
                    Paragraph(f"{finding.severity}: {finding.where} ({finding.code})", finding.severity == "error"),
                    Paragraph(_wrapped(finding.why)),
                    *([Paragraph(_wrapped(f"Source: {finding.source}."))] if finding.source else []),
                    Code(finding.fix if _is_diff(finding) else _wrapped(f"Fix: {finding.fix}")),
                ],
            )
            for finding in findings
        ],
    )


def _is_diff(finding: Finding) -> bool:
    return finding.fix.startswith("--- ")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def rules_page() -> str:
    """Return every rule with its severities, reason, source and fix, as Markdown."""
    single = [_entry(r.code, r.severities, r.title, r.because, r.source, r.remedy) for r in RULES]
    several = [_entry(*about) for about in COMPARISON_RULES]
    return "\n\n".join([*single, "### Several files together", *several]) + "\n"


def _entry(code: str, severities: Iterable[str], title: str, because: str, source: str, remedy: str) -> str:
    paragraphs = [f"{title} ({', '.join(severities)}). {because}", f"- *Fix:* {remedy}", f"- *Source:* {source}."]
    about, fix, origin = (
        textwrap.fill(text, 138, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for text, indent in zip(paragraphs, ("", "  ", "  "), strict=True)
    )
    return f"#### `{code}`\n\n{about}\n\n{fix}\n{origin}"
