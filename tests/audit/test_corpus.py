"""The audit finds planted mistakes in files of every tool, has nothing against published settings, and its diffs are fixes."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
from diffs import apply

from megabatch.audit import Finding, audit, read_any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CORPUS = Path(__file__).parent / "corpus"


@functools.cache
def cases(name: str) -> list[dict[str, Any]]:
    return tomllib.loads((CORPUS / f"{name}.toml").read_text("utf-8"))["case"]


def with_text(case: dict[str, Any]) -> dict[str, Any]:
    """Return a case with the text and the name of its file, which may be a changed file of the published ones."""
    if "base" not in case:
        return case | {"text": case["text"].lstrip("\n")}
    (base,) = [published for published in cases("published") if published["name"] == case["base"]]
    text = base["text"].lstrip("\n")
    for old, new in case["change"]:
        assert text.count(old) == 1, (case["name"], old)
        text = text.replace(old, new)
    return case | {"file": base["file"], "text": text}


FILES = ("planted", "held_back", "held_back_2")
PLANTED = [with_text(case) for name in FILES for case in cases(name)]


def audited(folder: Path, case: dict[str, Any], text: str) -> list[Finding]:
    (folder / case["file"]).write_text(text, "utf-8")
    return audit(read_any(folder / case["file"], **case.get("known", {})))


def described(case: dict[str, Any]) -> str:
    return case["name"].replace(" ", "-")


def codes(findings: list[Finding]) -> set[str]:
    return {finding.code for finding in findings}


def check_fixes(folder: Path, case: dict[str, Any], findings: list[Finding]) -> int:
    """Apply each diff to the file and audit it again: its finding is gone, and there is no new one. Return the number of diffs."""
    diffs = [finding for finding in findings if finding.fix.startswith("--- ")]
    for finding in diffs:
        again = audited(folder, case, apply(finding.fix, case["text"]))
        assert codes(again) <= codes(findings) - {finding.code}, (case["name"], finding.code, finding.fix, codes(again))
    return len(diffs)


def test_the_corpus_is_large_and_names_its_sources():
    assert len(PLANTED) >= 80 and len(cases("published")) >= 40
    assert all(case["source"] for case in cases("published"))
    names = [case["name"] for name in ("published", *FILES) for case in cases(name)]
    assert len(set(names)) == len(names)
    assert {Path(case["file"]).suffix for case in PLANTED} >= {".sh", ".json", ".yaml", ".yml", ".py", ".toml"}


@pytest.mark.parametrize("case", [with_text(case) for case in cases("published")], ids=described)
def test_published_settings_have_no_error_and_no_warning(case, tmp_path):
    findings = audited(tmp_path, case, case["text"])
    assert [finding for finding in findings if finding.severity != "note"] == []
    check_fixes(tmp_path, case, findings)


@pytest.mark.parametrize("case", PLANTED, ids=described)
def test_a_planted_mistake_is_found_and_its_diff_fixes_it(case, tmp_path):
    findings = audited(tmp_path, case, case["text"])
    assert set(case["finds"]) <= codes(findings)
    check_fixes(tmp_path, case, findings)
    # The fix is a sentence only where the file has no key for it: a launcher, a loss, weights that are not there.
    planted = [finding for finding in findings if finding.code in case["finds"]]
    assert all(finding.fix.startswith("--- ") for finding in planted) != case.get("by_hand", False), planted
