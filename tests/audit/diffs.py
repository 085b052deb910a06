"""Apply a unified diff."""

from __future__ import annotations

import re


def apply(diff: str, text: str) -> str:
    """Return the text after a unified diff, every line of which must match."""
    old, new, place = text.splitlines(), [], 0
    # A last line without a newline is marked in the diff, and no other.
    assert text.endswith("\n") or f"{old[-1]}\n\\ No newline" in diff or old[-1] not in diff
    for line in diff.splitlines()[2:]:
        hunk = re.fullmatch(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@", line)
        if hunk:
            begin = int(hunk[1]) - 1 if hunk[2] != "0" else int(hunk[1])
            new += old[place:begin]
            place = begin
            continue
        assert line[0] in " +-\\"
        if line[0] in " -":
            assert old[place] == line[1:]
            place += 1
        if line[0] in " +":
            new.append(line[1:])
    return "\n".join([*new, *old[place:]]) + "\n"
