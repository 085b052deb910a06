"""The rules as a page of documentation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from .comparison import COMPARISON_RULES
from .rules import RULES


def rules_page() -> str:
    """Every finding with its severities, why, source and fix, as Markdown."""
    own = [_entry(r.code, r.severities, r.title, r.because, r.source, r.remedy) for r in RULES]
    several = [_entry(*about) for about in COMPARISON_RULES]
    return "\n\n".join([*own, "### Several files together", *several]) + "\n"


def _entry(code: str, severities: Iterable[str], title: str, because: str, source: str, remedy: str) -> str:
    paragraphs = [f"{title} ({', '.join(severities)}). {because}", f"- *Fix:* {remedy}", f"- *Source:* {source}."]
    about, fix, origin = (
        textwrap.fill(text, 138, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for text, indent in zip(paragraphs, ("", "  ", "  "), strict=True)
    )
    return f"#### `{code}`\n\n{about}\n\n{fix}\n{origin}"
