"""The files of a sweep: a row for each run, the measurement, its picture, its page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ... import config, environment, measurements
from ...reporting.html import write_report
from .cases import FAILED, Case, Space, choice
from .outcome import Outcome, write_whole
from .report import sweep_report
from .request import Request
from .summary import Summary, summary
from .verdict import verdict


def scores(outcomes: Mapping[Case, Outcome]) -> dict[Case, float]:
    """What rates are chosen by."""
    return {case: FAILED if outcome.choosing is None else outcome.choosing for case, outcome in outcomes.items()}


def rows_of(outcomes: Mapping[Case, Outcome]) -> list[dict[str, Any]]:
    """A row for each run, failed ones with their error."""
    return [{**case._asdict(), **asdict(outcome)} for case, outcome in sorted(outcomes.items())]


def write_rows(out: Path, outcomes: Mapping[Case, Outcome]) -> None:
    write_whole(out / "rows.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows_of(outcomes)))


def write_results(
    request: Request, outcomes: Mapping[Case, Outcome], out: Path, device: str | None, processes: int
) -> measurements.Measured:
    """The measurement, with its files; ValueError where every run has failed."""
    summaries = summaries_of(request.space, outcomes, processes)
    if not summaries:
        first = next(outcome.error for outcome in outcomes.values())
        raise ValueError(f"every run of the sweep failed; {out / 'rows.jsonl'} says why, the first one: {first}")
    told = verdict(summaries, request.same)
    found = measurements.Measured(
        measurements.Sweep(told.batch, told.lr, request.same, tuple(each.as_row() for each in summaries)),
        run=config.as_table(request.run),
        device=_device_name(device),
        torch=str(torch.__version__),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    )
    rows = rows_of(outcomes)
    measurements.write(found, out / "measured.json")
    write_report(sweep_report(found, rows), out)
    return found


def summaries_of(space: Space, outcomes: Mapping[Case, Outcome], processes: int) -> list[Summary]:
    """Each batch at its best rate, smallest first; those without a result are named in each of the others."""
    known = scores(outcomes)
    chosen = {batch: choice(space, known, batch) for batch in sorted(space.middles)}
    lost = [batch for batch, found in chosen.items() if found is None]
    return [summary(batch, pick, outcomes, processes, lost) for batch, pick in chosen.items() if pick is not None]


def _device_name(device: str | None) -> str:
    """What the runs were computed on; where nothing was said, the accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    chosen = torch.device(device) if device is not None else accelerator or torch.device("cpu")
    return environment.device_name(chosen)
