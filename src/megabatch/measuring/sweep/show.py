"""A sweep on a terminal: each batch at its best rate as a table, and the verdict in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ... import config
from ...measurements import Measured, Sweep
from ...objectives import OBJECTIVES
from ...reporting.wording import count_text, seconds_text
from ...terminal import print_table, print_text
from .cases import rule_in_words
from .summary import Summary, difference, from_row, pareto
from .verdict import Verdict, best_of, quality_text, verdict

if TYPE_CHECKING:
    from rich.console import Console

EDGES = {"lowest": "≤", "highest": "≥"}
LENGTH = {"samples": "the same samples", "updates": "the same updates", "time": "the same time"}


def sweep_of(result: Measured) -> Sweep:
    if not isinstance(result.found, Sweep):
        raise ValueError(f"the measurement is of {result.kind!r}: must be of 'sweep'; read the file that a sweep has written")
    return result.found


def summaries_of(result: Measured) -> list[Summary]:
    return [from_row(row) for row in sweep_of(result).rows]


def quality_name(run: Mapping[str, Any]) -> str:
    """What a run is measured by, in a word; `run` as a measurement holds it."""
    return OBJECTIVES[run["loss"]["objective"]].held_out_metric


def verdict_of(result: Measured) -> Verdict:
    """The verdict, and how the rates follow the batch."""
    told = verdict(summaries_of(result), sweep_of(result).same, quality_name(result.run))
    base = config.build(result.run)
    batches = tuple(each.batch for each in summaries_of(result))
    return told._replace(sentences=(*told.sentences, rule_in_words(base, batches)))


def columns(result: Measured) -> list[str]:
    decays = ["weight decay"] if _several_decays(summaries_of(result)) else []
    return ["batch", "rate", *decays, "updates", f"{quality_name(result.run)}, %", "to the best", "gap", "time", "pairs/s", "front"]


def batch_rows(result: Measured) -> list[list[str]]:
    """Each batch as texts, under `columns`. ≤ and ≥: the rate is the lowest or highest that was tried."""
    summaries = summaries_of(result)
    best, front = best_of(summaries), pareto(summaries)
    several = _several_decays(summaries)
    return [
        [
            f"{each.batch:,}",
            ("" if each.edge is None else EDGES[each.edge]) + f"{each.lr:g}",
            *([f"{each.weight_decay:g}"] if several else []),
            f"{each.steps:,}",
            quality_text(each).removesuffix(" %"),
            "" if each is best else _against(each, best),
            "" if each.gap is None else f"{100 * each.gap:.1f}",
            seconds_text(each.seconds),
            count_text(each.pairs_per_s),
            "✓" if each in front else "",
        ]
        for each in summaries
    ]


def show(result: Measured, console: Console | None = None) -> None:
    """Prints the verdict, the table and what they rest on."""
    told = verdict_of(result)
    print_text(told.headline, bold=True, console=console)
    title = f"{LENGTH[sweep_of(result).same]} at every batch; gap and differences in points"
    print_table(columns(result), batch_rows(result), title=title, justify="right", compact=True, console=console)
    for sentence in told.sentences:
        print_text(sentence, item=True, console=console)


def _against(each: Summary, best: Summary) -> str:
    apart = difference(each.qualities, best.qualities)
    return f"{100 * apart.mean:+.1f}" + ("" if apart.half is None else f" ± {100 * apart.half:.1f}")


def _several_decays(summaries: list[Summary]) -> bool:
    return len({each.weight_decay for each in summaries}) > 1
