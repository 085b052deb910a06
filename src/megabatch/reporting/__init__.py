"""The report of a run: one HTML file that holds all of it, loads nothing and runs nothing."""

from __future__ import annotations

from pathlib import Path

from ..files import write_text
from .folder import Folder, read_folder
from .markup import document, text
from .opening import opening
from .sections import answers, bad_samples, curves, machine, memory, notes, settings

SECTIONS = (opening, curves, answers, memory, settings, machine, bad_samples, notes)


def write_report(run: Path) -> Path:
    """Writes RUN/report.html from what the folder holds, and returns its path. What the folder lacks is left out."""
    if not run.is_dir():
        raise ValueError(f"{run}: there is no such folder; name the folder that `megabatch train` wrote to")
    page = _page(read_folder(run))
    path = run / "report.html"
    write_text(path, page)
    return path


def _page(folder: Folder) -> str:
    footer = f"<footer>megabatch {text(folder.environment.get('megabatch', ''))}</footer>\n"
    return document(f"{folder.name} · megabatch", "".join(section(folder) for section in SECTIONS) + footer)
