"""The report of `megabatch profile`: time and memory against the batch or the chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...evidence import steps_factor
from ...measurements import Measured, Profile
from ...objectives import OBJECTIVES
from ...reporting.figures import Axis, Chart, Figure, Series
from ...reporting.format import bytes_text, change_text, seconds_text, whole
from ...reporting.report import KeyNumber, Notes, Report, Section, Table
from .quantities import PREDICTED_RATE, QUANTITIES, Quantity, columns

# From so many sizes on, only every second one is labelled.
CROWDED = 10
# Sizes that ran out of memory have this instead of a rate.
OUT_OF_MEMORY = "no memory"


def profile_report(measured: Measured) -> Report:
    """Return the report of a profile."""
    profile = profile_of(measured)
    x, y = measured.run["x"]["name"], measured.run["y"]["name"]
    towers = f"{x} and {y}" if OBJECTIVES[measured.run["loss"]["objective"]].contrastive else x
    title = f"{towers}, time and memory against the {profile.against}"
    best = next(row for row in _ran(profile) if row[profile.against] == profile.best)
    rows = [{**row, "pairs_per_s": OUT_OF_MEMORY} if row.get("out_of_memory") else row for row in profile.points]
    return Report(
        title=f"{title} · megabatch profile",
        subject=f"{measured.device}, {measured.run['compute']['precision']}, PyTorch {measured.torch}, {measured.date}",
        headline=title,
        numbers=[
            KeyNumber(f"best {profile.against}", profile.best),
            KeyNumber("samples per second", best["pairs_per_s"]),
            KeyNumber("one step", best["seconds"], seconds_text),
        ],
        sections=[
            Section("Every size", [Table(columns(profile.points), rows)]),
            Section("", [Notes(list(sentences(measured)))]),
            Section("The curve", [_figure(profile)]),
        ],
    )


def sentences(measured: Measured) -> Iterator[str]:
    """Yield what follows from the curve, with the numbers."""
    profile = profile_of(measured)
    size, ran = profile.against, {row[profile.against]: row for row in _ran(profile)}
    best, enough = ran[profile.best], ran[profile.enough]
    rate = f"{best['pairs_per_s']:,.0f} samples/s, {seconds_text(best['seconds'])} per step"
    yield f"the best rate is at {size} {profile.best:,}: {rate}"
    if profile.enough != profile.best:
        memory = ""
        if "peak_bytes" in enough and "peak_bytes" in best:
            memory = f", and takes {bytes_text(enough['peak_bytes'])} instead of {bytes_text(best['peak_bytes'])}"
        yield f"{size} {profile.enough:,} is within 5 % of it{memory}"
    if profile.knee is not None:
        yield f"the knee of the curve is at {profile.knee:,}: below it the rate grows with the {size}, above it hardly"
    if profile.soonest is not None and profile.critical is not None:
        seconds, factor = ran[profile.soonest]["seconds"], steps_factor(profile.soonest, profile.critical)
        yield (
            f"with a critical batch of {profile.critical:,.0f} a target is reached first at batch {profile.soonest:,}: steps ∝ 1 +"
            f" {profile.critical:,.0f}/{profile.soonest:,} = {factor:.3g}, times {seconds_text(seconds)}"
        )
    failed = _out_of_memory(profile)
    if failed is not None:
        yield f"{size} {failed:,} ran out of memory: the curve ends there"
    if profile.reading_per_s is not None:
        yield f"the loader reads {profile.reading_per_s:,.0f} samples/s; steps were timed on batches that had been read before"
    if not any("peak_bytes" in row for row in ran.values()):
        yield "this device does not report its memory"
    yield from _errors(profile)
    yield from profile.notes


def profile_of(measured: Measured) -> Profile:
    """Return the profile of a measurement of one."""
    if not isinstance(measured.found, Profile):
        raise ValueError(f"this is a measurement of {measured.kind!r}, not of 'profile'; give the measured.json of that verb")
    return measured.found


def _errors(profile: Profile) -> Iterator[str]:
    """Yield the errors of the predictions."""
    pairs = (("time", "predicted_seconds", "seconds"), ("peak memory", "predicted_bytes", "peak_bytes"))
    for name, predicted, measured in pairs:
        errors = [row[predicted] / row[measured] - 1 for row in profile.points if predicted in row and row.get(measured)]
        if errors:
            yield f"predicted {name} is {change_text(min(errors))} to {change_text(max(errors))} off what was measured"


def _figure(profile: Profile) -> Figure:
    """Return a chart for each quantity that has one and was measured at every size; tensors' memory only if nothing is reserved."""
    ran = _ran(profile)
    measured = {each.key for each in QUANTITIES if all(each.key in row for row in ran)}
    charted = [each for each in QUANTITIES if each.chart and each.key in measured and each.replaced_by not in measured]
    charts = [_chart(profile, quantity) for quantity in charted]
    return Figure(charts, f"samples per second and memory against the {profile.against}", "profile.png", size=(5.25, 3.7))


def _chart(profile: Profile, quantity: Quantity) -> Chart:
    rows, against = _ran(profile), profile.against
    points = [(row[against], row[quantity.key]) for row in rows]
    series = [Series(points, "measured")]
    predictions = [{**row, PREDICTED_RATE: _predicted_rate(row)} for row in rows]
    predicted = [(row[against], row[quantity.predicted]) for row in predictions if row.get(quantity.predicted) is not None]
    if quantity.key == "pairs_per_s":
        # The spread is of seconds: the rate at both ends of it.
        band = [tuple(row["batch"] / (row["seconds"] + side * row["spread"]) for side in (1, -0.999)) for row in rows]
        series = [Series(points, "measured", band=[(low, high) for low, high in band])]
        series += [_marks(profile, dict(points))]
    series.append(Series(predicted, "predicted", "dashed", color=2))
    failed = _out_of_memory(profile)
    ends = "" if failed is None else f"; out of memory at {failed:,}"
    sizes = [size for size, _ in points]
    labels = {size: whole(size) if len(sizes) < CROWDED or place % 2 == 0 else "" for place, size in enumerate(sizes)}
    highest = max(value for _, value in (*points, *predicted))
    x = Axis(f"{against}{ends}", scale="log2", ticks=labels, low=min(sizes) / 1.4, high=max(sizes) * 1.4)
    y = Axis(format=quantity.format, low=0, high=1.25 * highest)
    return Chart(quantity.chart, series, x, y, value=quantity.format(max(value for _, value in points)))


def _marks(profile: Profile, rates: Mapping[int, float]) -> Series:
    """Return a ring and a name at each size that stands out; a size can have several names."""
    names: dict[int, list[str]] = {}
    enough = None if profile.enough == profile.best else profile.enough
    marks = (("knee", profile.knee), ("within 5 %", enough), ("best", profile.best), ("soonest", profile.soonest))
    for name, size in marks:
        if size is not None:
            names.setdefault(size, []).append(name)
    points = [(size, rates[size]) for size in names]
    return Series(points, style="rings", color=1, texts=[",\n".join(texts) for texts in names.values()], size=10)


def _predicted_rate(row: Mapping[str, Any]) -> float | None:
    return row["batch"] / row["predicted_seconds"] if "predicted_seconds" in row else None


def _ran(profile: Profile) -> list[Mapping[str, Any]]:
    return [row for row in profile.points if "seconds" in row]


def _out_of_memory(profile: Profile) -> int | None:
    return next((row[profile.against] for row in profile.points if row.get("out_of_memory")), None)
