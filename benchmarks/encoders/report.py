"""Rows of encoders as text: a line of progress, a table for the terminal, a table for the docs."""

from __future__ import annotations

from benchmarks.measure import Row
from benchmarks.report import TITLES, device_name, reason, three_digits

HEADERS = (
    "case",
    "contestant",
    "pairs",
    "chunk",
    "keep",
    "seconds",
    "pairs/s",
    "peak MiB",
    "reserved MiB",
    "useful",
    "hardware",
    "gradient error",
)


def table(rows: list[Row]) -> list[tuple[str, ...]]:
    """Return the cells under HEADERS, one tuple per measured row."""
    return [
        (
            row["case"],
            row["contestant"],
            f"{row['pairs']:,}",
            f"{row['chunk'] or ''}",
            keep_text(row),
            three_digits(row["seconds"]),
            three_digits(row["pairs"] / row["seconds"]),
            three_digits(row["peak_allocated_mib"]),
            "" if row["peak_reserved_mib"] is None else three_digits(row["peak_reserved_mib"]),
            f"{row['useful_share']:.1%}",
            f"{row['hardware_share']:.1%}",
            f"{next(iter(row['errors'].values())):.1e}",
        )
        for row in rows
    ]


def keep_text(row: Row) -> str:
    """Return the value of keep and, for "auto", how many chunks of images and of texts were kept."""
    if row["keep"] == "auto" and row.get("kept"):
        return f"auto: {row['kept']['image']} + {row['kept']['text']}"
    return "" if row["keep"] is None else str(row["keep"])


def markdown(rows: list[Row]) -> str:
    """Return the Markdown table of the rows, and its caption."""
    lines = [
        "| step | pairs | chunk | keep | seconds | peak MiB | useful | hardware |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        name = row["contestant"] + (", compiled" if row["compiled"] else "")
        name = f"**{name}**" if row["contestant"] == TITLES["ours"] else name
        if "seconds" in row:
            numbers = f"{three_digits(row['seconds'])} | {three_digits(row['peak_allocated_mib'])}"
            numbers += f" | {row['useful_share']:.0%} | {row['hardware_share']:.0%}"
        else:
            numbers = f"{_short_reason(row)} | | |"
        lines.append(f"| {name} | {row['pairs']:,} | {row['chunk'] or ''} | {keep_text(row)} | {numbers} |")
    return "\n".join([*lines, "", caption(rows)])


def caption(rows: list[Row]) -> str:
    """Return the caption: what a step is, the machine, the versions, the date, and the meaning of the numbers."""
    measured = [row for row in rows if "seconds" in row]
    if not measured:
        raise ValueError("no row holds a measurement: run `python -m benchmarks.encoders` first")
    row, machine = measured[0], measured[0]["machine"]
    # Compiled towers are checked in bf16 only, at a batch that fits only in chunks.
    precision, exact = ("float32", "float64") if "float32" in row["errors"] else ("bfloat16", "a two-pass step in float32")
    worst = max(each["errors"][precision] for each in measured)
    # Rows of one contestant share the check, so the last of them represents all.
    factors = {each["contestant"]: each["scale_factor"] for each in measured if "float32" in each["errors"]}
    wrong = [f"{factor:.1f} times too large in {name}" for name, factor in factors.items() if factor and factor > 1.1]
    scale = f" The gradient of the scale was {', '.join(wrong)}." if wrong else ""
    return (
        f"A whole training step of {row['model']}, bf16 autocast, AdamW, inputs in host memory, on {device_name(machine)} with "
        f"torch {machine['torch']} and transformers {machine['transformers']}, {machine['date'][:10]}. The peak includes weights, "
        f"gradients and optimizer state. Shares are of the rate of a large matrix product ({row['matmul_flops_per_s'] / 1e12:,.3g} "
        f"TFLOP/s): useful counts forward and backward once, hardware also what is computed again. Before anything was timed, "
        f"encoder gradients in {precision}, of {row['check_pairs']} pairs, were off from {exact} by at most {worst:.0e}.{scale}"
    )


def what(row: Row) -> str:
    chunk = "" if row["chunk"] is None else f", chunk {row['chunk']}"
    keep = "" if row["keep"] is None else f", keep {keep_text(row)}"
    return f"{row['contestant']}{', compiled' if row['compiled'] else ''}, {row['pairs']:,} pairs{chunk}{keep}"


def outcome(row: Row) -> str:
    if "seconds" not in row:
        return reason(row)
    kept = f", {keep_text(row)} kept" if row["keep"] == "auto" else ""
    cost = f"{three_digits(row['seconds'])} s, {three_digits(row['peak_allocated_mib'])} MiB{kept}"
    shares = f"{row['useful_share']:.1%} useful, {row['hardware_share']:.1%} hardware"
    factor = "none" if row["scale_factor"] is None else f"{row['scale_factor']:.3f} of the true one"
    return f"{cost}, {shares}; gradient {off(row['errors'])}, of the scale {factor}"


def off(errors: dict[str, float]) -> str:
    return "off by " + ", ".join(f"{error:.0e} in {precision}" for precision, error in errors.items())


def _short_reason(row: Row) -> str:
    if row.get("right") is False:
        return "refused: wrong gradient"
    return "out of memory" if row.get("error") == "out of memory" else "failed"
