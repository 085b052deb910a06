"""A profile on a terminal and as one HTML page that loads nothing and runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...evidence import steps_factor
from ...measurements import Measured, Profile
from ...objectives import OBJECTIVES
from ...reporting.markup import LONG, document, figure, section, table, text
from ...reporting.wording import bytes_text, percent_text, seconds_text
from ...terminal import print_table, print_text
from .picture import picture

if TYPE_CHECKING:
    from rich.console import Console

NONE = "–"


def columns(found: Profile, *, brief: bool = False) -> list[str]:
    """The head of the table. brief: for a terminal, where of a device only what it reserves is shown."""
    sizes = ["batch", "chunk", "keep", "samples/s", "a step", "±", "predicted"]
    if not _reserves(found):
        return [*sizes, "peak", "predicted"]
    return [*sizes, *([] if brief else ["peak", "predicted"]), "reserved", "predicted"]


def rows(found: Profile, *, brief: bool = False) -> list[list[str]]:
    """The table: one row a size."""
    memory = ["reserved_bytes", "predicted_reserved"] if _reserves(found) else []
    if not (brief and memory):
        memory = ["peak_bytes", "predicted_bytes", *memory]
    return [_row(row, memory) for row in found.points]


def sentences(measured: Measured) -> Iterator[str]:
    """What the curve says, in words with the numbers."""
    found = _found(measured)
    size, ran = found.against, {row[found.against]: row for row in found.points if "seconds" in row}
    best, least = ran[found.best], ran[found.enough]
    yield f"the best rate is at {size} {found.best:,}: {best['pairs_per_s']:,.0f} samples/s, {seconds_text(best['seconds'])} a step"
    if found.enough != found.best:
        yield f"{size} {found.enough:,} is within 5 % of it" + (
            f", and takes {bytes_text(least['peak_bytes'])} instead of {bytes_text(best['peak_bytes'])}"
            if "peak_bytes" in least and "peak_bytes" in best
            else ""
        )
    if found.knee is not None:
        yield f"the curve bends at {found.knee:,}: up to there the rate grows with the {size}, from there on hardly"
    if found.soonest is not None and found.critical is not None:
        seconds, factor = ran[found.soonest]["seconds"], steps_factor(found.soonest, found.critical)
        yield (
            f"with a critical batch of {found.critical:,.0f} a target is reached first at batch {found.soonest:,}: steps ∝ 1 +"
            f" {found.critical:,.0f}/{found.soonest:,} = {factor:.3g}, times {seconds_text(seconds)}"
        )
    lost = next((row for row in found.points if row.get("out_of_memory")), None)
    if lost is not None:
        yield f"{size} {lost[size]:,} ran out of memory: the curve ends there"
    if found.reading_per_s is not None:
        yield f"the loader reads {found.reading_per_s:,.0f} samples/s; steps were timed on batches read before"
    yield from _predicted(found)
    yield from found.notes


def show(measured: Measured, console: Console | None = None) -> None:
    """Prints the table and the sentences."""
    print_text(_title(measured), bold=True, console=console)
    print_text(_machine(measured), console=console)
    found = _found(measured)
    print_table(columns(found, brief=True), rows(found, brief=True), justify="right", compact=True, wrap=False, console=console)
    for sentence in sentences(measured):
        print_text(sentence, item=True, console=console)


def page(measured: Measured) -> str:
    """The page; whatever comes from outside is escaped."""
    found = _found(measured)
    said = "".join(f"<li>{text(sentence, LONG)}</li>\n" for sentence in sentences(measured))
    drawn = figure(picture, measured, f"samples a second and memory against the {found.against}")
    body = (
        f'<h1>{text(_title(measured))}</h1>\n<p class="faint">{text(_machine(measured))}</p>\n<ul>\n{said}</ul>\n'
        + section("The curve", f'<div class="wide">{drawn}</div>\n')
        + section("Every size", table(columns(found), [[text(cell) for cell in row] for row in rows(found)]))
    )
    return document(f"{_title(measured)} · megabatch profile", body)


def _found(measured: Measured) -> Profile:
    assert isinstance(measured.found, Profile)
    return measured.found


def _title(measured: Measured) -> str:
    x, y = measured.run["x"]["name"], measured.run["y"]["name"]
    towers = f"{x} and {y}" if OBJECTIVES[measured.run["loss"]["objective"]].contrastive else x
    return f"{towers}, time and memory against the {_found(measured).against}"


def _machine(measured: Measured) -> str:
    return f"{measured.device}, {measured.run['compute']['precision']}, PyTorch {measured.torch}, {measured.date}"


def _reserves(found: Profile) -> bool:
    return any("reserved_bytes" in row for row in found.points)


def _row(row: Mapping[str, Any], memory: Sequence[str]) -> list[str]:
    sizes = [f"{row['batch']:,}", f"{row['chunk']:,}"]
    if row.get("out_of_memory"):
        return [*sizes, NONE, "no memory", *[NONE] * (3 + len(memory))]
    said: list[tuple[str, Callable[[Any], str]]] = [
        ("keep", "{:,}".format),
        ("pairs_per_s", "{:,.0f}".format),
        ("seconds", seconds_text),
        ("spread", seconds_text),
        ("predicted_seconds", seconds_text),
        *((name, bytes_text) for name in memory),
    ]
    return [*sizes, *(words(row[name]) if name in row else NONE for name, words in said)]


def _predicted(found: Profile) -> Iterator[str]:
    pairs = (("time", "predicted_seconds", "seconds"), ("peak memory", "predicted_bytes", "peak_bytes"))
    for name, predicted, measured in pairs:
        errors = [row[predicted] / row[measured] - 1 for row in found.points if predicted in row and row.get(measured)]
        if errors:
            low, high = (f"{'+' if error >= 0 else '−'}{percent_text(abs(error))}" for error in (min(errors), max(errors)))
            yield f"predicted {name} is {low} to {high} off what was measured"
