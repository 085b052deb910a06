"""What several verbs say alike: a run's file and settings, a table, an error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from .. import config

SETTINGS_HELP = "a run's file, and settings that go before it"


def settings_of(settings: Sequence[str], defaults: Iterable[str] = ()) -> config.Run:
    """The run of "run.toml key=value …"; without a file the embedded default, with `defaults` behind the settings."""
    if settings and "=" not in settings[0]:
        return config.read(settings[0], settings[1:])
    return config.build(config.EMBEDDED, [*defaults, *settings])


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        # Captions are data, not markup.
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    Console().print(table)


def complain(error: object, status: int) -> int:
    print("megabatch: error:", " ".join(str(error).splitlines()), file=sys.stderr)
    return status
