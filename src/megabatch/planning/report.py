"""The report of a plan, and the files that a plan can be written to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .. import config
from ..files import check_file, write_text
from ..reporting.figures import Axis, Bars, Chart, Figure, Level, Points, Series
from ..reporting.format import Format, bytes_text, count_text, seconds_text, whole
from ..reporting.html import as_html
from ..reporting.markdown import as_markdown
from ..reporting.report import Code, Column, KeyNumber, Notes, Paragraph, Report, Section, Table
from .plan import BUDGET_GIVEN, Alternative, Plan

# Parts below this share of the whole are drawn together.
SMALLEST_PART = 0.01
# The share of a step spent on waiting for data from which a sentence says what to do, and the name of that part.
MUCH_WAITING, WAITING = 0.2, "waiting for data"
# The alternatives that a terminal shows, in this order, at most three of them.
ON_SCREEN = ("half the batch", "twice the GPUs", "what fits without chunks", "twice the batch", "half the chunk, nothing kept")


def headline(plan: Plan) -> str:
    """Return the answer in a sentence: the batch, how it is spread over GPUs and chunks, and the precision."""
    strategy = plan.strategy
    spread = f" = {strategy.ranks} {_device(plan)}s × {strategy.shard:,}" if strategy.ranks > 1 else ""
    chunks = "" if strategy.chunk >= strategy.shard else f", in chunks of {strategy.chunk:,}"
    kept = "" if strategy.accumulate or not chunks else f" ({strategy.keep} of {strategy.chunks} kept)"
    extra = ", checkpointing" if strategy.checkpointing else ""
    sharding = f", {strategy.sharding.upper()}" if strategy.ranks > 1 else ""
    return f"batch {plan.batch:,}{spread}{chunks}{kept}, {strategy.precision}{extra}{sharding}"


def answer(plan: Plan) -> list[str]:
    """Return the answer in three lines: the batch; the rate and the length; hours, cost and memory."""
    rate, warmup, updates = plan.number("learning rate"), plan.number("warm-up"), plan.alternatives[0].updates
    samples = "sequences" if plan.lm else "samples"
    spent = f"{hours_text(plan.hours)} on {plan.machine}"
    if plan.device_type != "cpu":
        spent += f", {_gpu_hours(plan.hours * plan.strategy.ranks)} GPU-hours"
    cost = f", cost {money_text(plan.alternatives[0].cost)}" if plan.price is not None else ""
    epochs = f"{plan.seen / max(1, plan.data):.3g}"
    return [
        headline(plan),
        f"learning rate {rate.value:g}, warm-up {warmup.value:,} of {updates:,} updates, {samples_text(plan.seen)} {samples} seen"
        f" ({epochs} epoch{'' if epochs == '1' else 's'}){_text_length(plan)}",
        f"{spent}{cost}; {bytes_text(plan.peak_bytes)} of {bytes_text(plan.device_bytes)} per {_device(plan)}",
    ]


def _text_length(plan: Plan) -> str:
    """Return the tokens of a text, which memory and time depend on."""
    if plan.text_length is None:
        return ""
    return f", {plan.text_length:,} tokens each (others: --text-length)"


def reasons(plan: Plan) -> list[str]:
    """Return why, in five short sentences, each with its confidence."""
    batch, rate, warmup = (plan.number(name) for name in ("batch", "learning rate", "warm-up"))
    usual = f"; {plan.usual[0]:,} to {plan.usual[1]:,} would do" if plan.usual and plan.usual[0] < plan.usual[1] else ""
    lines = [f"Batch ({batch.confidence}{usual}): {_clauses(batch.why)}."]
    if plan.pairs:
        lines.append(f"Negatives (high): {_negatives(plan)}")
    lines.append(f"Rate ({rate.confidence}): {_clauses(rate.why, 2)}. Warm-up ({warmup.confidence}): {_clauses(warmup.why)}.")
    lines.append(f"Memory ({plan.number('peak memory').confidence}): {_memory(plan)}")
    lines.append(_time(plan))
    length = plan.number("samples seen")
    if length.source == BUDGET_GIVEN:
        lines.append(f"Length ({length.confidence}): {_clauses(length.why)}.")
    return lines


def _time(plan: Plan) -> str:
    """Return the time of an update with its interval, its largest parts, and what to do if it is spent on waiting for data."""
    seconds, total = plan.number("seconds per step"), sum(plan.time.values())
    shares = {name: part / total for name, part in _largest(plan.time).items()}
    parts = ", ".join(f"{name} {share:.0%}" for name, share in list(shares.items())[:3] if share >= 0.005)
    # The number is shown as "0.61 s (0.42–0.9)" if it is a prediction.
    interval = [seconds_text(float(end)) for end in seconds.shown.partition(" (")[2].rstrip(")").split("–") if end]
    line = f"Time ({seconds.confidence}): {seconds_text(plan.seconds_per_step)} per update"
    line += (f" ({' to '.join(interval)})" if interval else "") + f", of which {parts}."
    if shares.get(WAITING, 0.0) > MUCH_WAITING and plan.run is not None:
        line += f" More worker processes (data.workers, {plan.run.data.workers} now) or smaller image files shorten it."
    return line


def _negatives(plan: Plan) -> str:
    """Return where a query's negatives come from, and how many accumulation would leave."""
    strategy = plan.strategy
    all_devices = "both" if strategy.ranks == 2 else f"all {strategy.ranks}"
    origin = f"from {all_devices} {_device(plan)}s" if strategy.ranks > 1 else "from the whole batch"
    sentence = f"{plan.negatives_per_query:,} per query, {origin}"
    if strategy.chunk < strategy.shard:
        accumulated = plan.negatives_of(strategy.ranks * strategy.chunk)
        sentence += (
            f"; gradient caching reaches them in chunks. Accumulating {strategy.chunks} micro-batches instead would leave"
            f" {accumulated:,}"
        )
    equal = next((number.value for number in plan.numbers if number.name == "colliding pairs per batch"), 0)
    if isinstance(equal, (int, float)) and equal >= 0.5:
        sentence += f". About {equal:,.0f} pairs of equal items in a batch are masked"
    return f"{sentence}."


def _memory(plan: Plan) -> str:
    """Return what the memory of a GPU is used for, and why the chunk is as it is."""
    state = sum(plan.memory.get(name, 0) for name in ("weights", "gradients", "optimizer", "gradient buckets", "weight copies"))
    activations = plan.memory.get("activations", 0)
    rest = plan.peak_bytes - state - activations
    parts = [
        ("weights, gradients and optimizer", state),
        ("activations" + (" of a chunk" if plan.strategy.chunk < plan.strategy.shard else ""), activations),
        ("other", rest),
    ]
    used = ", ".join(f"{bytes_text(size)} {name}" for name, size in parts if size >= SMALLEST_PART * plan.peak_bytes)
    limit = f"limit {bytes_text(plan.limit_bytes)}; memory sets the chunk, not the batch"
    return f"{used}; {limit}."


def _clauses(why: str, count: int = 1) -> str:
    """Return a reason up to its first semicolon, or a later one.

    >>> _clauses("as many as fit; the others cost a forward pass")
    'as many as fit'
    """
    return "; ".join(why.split("; ")[:count]).rstrip(".")


def _device(plan: Plan) -> str:
    return "CPU" if plan.device_type == "cpu" else "GPU"


def hours_text(hours: float) -> str:
    """Return a duration of a run in the unit that people plan in.

    >>> hours_text(0.2), hours_text(31.4), hours_text(400), hours_text(153_423)
    ('12 min', '31.4 h', '16.7 days', '17.5 years')
    """
    if hours < 1:
        return seconds_text(3600 * hours) if hours < 1 / 60 else f"{60 * hours:.0f} min"
    if hours < 100:
        return f"{hours:.3g} h"
    days, years = hours / 24, hours / 24 / 365.25
    return f"{days:,.3g} days" if days < 1000 else f"{years:,.3g} years" if years < 1000 else f"{years:,.0f} years"


def samples_text(count: float) -> str:
    """Return a number of samples to three digits.

    >>> samples_text(42_276), samples_text(300_000_000), samples_text(1.28e9)
    ('42,276', '300 M', '1.28 B')
    """
    return count_text(count).replace(" G", " B")


def money_text(cost: float) -> str:
    """Return an amount of money in the unit of the given price.

    >>> money_text(0.1234), money_text(12.5), money_text(1300.4)
    ('0.12', '12.50', '1,300')
    """
    return f"{cost:,.0f}" if cost >= 100 else f"{cost:.2f}"


def screen(plan: Plan) -> Report:
    """Return the short report for a terminal: warnings, the answer, why, what others did, and three alternatives."""
    first, *rest = answer(plan)
    _, *tools = plan.identity.rstrip(".").split(". ")
    ways = [way for name in ON_SCREEN for way in plan.alternatives if way.name == name]
    if plan.device_type == "cpu":
        ways = [way for way in ways if way.gpus == plan.strategy.ranks]
    # Half the batch may be what fits without chunks.
    different: dict[tuple[int, int], Alternative] = {}
    for way in ways:
        different.setdefault((way.batch, way.gpus), way)
    chosen = list(different.values())[:3]
    sections = [
        *([Section("", [Paragraph(f"Warning: {text}", warning=True) for text in plan.warnings])] if plan.warnings else []),
        Section("", [Paragraph(line) for line in (first, *rest)]),
        Section("The same batch in other trainers", [Notes([f"{tool}." for tool in tools])]),
        Section("Why", [Notes(reasons(plan))]),
        *([Section("What others did", [_others(plan)])] if plan.others else []),
        *([Section("Alternatives", [_alternatives(plan, chosen, brief=True)])] if chosen else []),
        *([Section("Changed in the run's file", [Notes(plan.edits)])] if plan.edits else []),
    ]
    return Report(title=first, subject="", headline="", sections=sections)


def plan_report(plan: Plan) -> Report:
    """Return everything about a plan: what the screen shows, figures, every number with its source, notes, and the run's file."""
    strategy = plan.strategy
    _, *tools = plan.identity.rstrip(".").split(". ")
    file = [] if plan.run is None else [Section("The file that `megabatch train` runs", [Code(as_toml(plan), detail=True)])]
    return Report(
        title=f"batch {plan.batch:,} · {plan.machine} · megabatch plan",
        subject=plan.machine,
        headline=headline(plan),
        warning=" ".join(plan.warnings),
        numbers=[
            KeyNumber("batch", plan.batch),
            KeyNumber("GPUs", strategy.ranks),
            KeyNumber("per GPU", strategy.shard),
            KeyNumber("chunk", strategy.chunk),
            KeyNumber("memory", plan.peak_bytes, bytes_text),
            KeyNumber("one update", plan.seconds_per_step, seconds_text),
            KeyNumber("updates", plan.alternatives[0].updates),
            KeyNumber("the run", plan.hours, hours_text),
            *([KeyNumber("cost", plan.alternatives[0].cost, money_text)] if plan.price is not None else []),
        ],
        sections=[
            Section("", [Paragraph(line) for line in answer(plan)[1:]]),
            Section("The same batch in other trainers", [Notes([f"{tool}." for tool in tools])]),
            Section("Why", [Notes(reasons(plan))]),
            *([Section("What others did", [_others(plan)])] if plan.others else []),
            Section("Alternatives", [_alternatives(plan, plan.alternatives)]),
            Section("Memory and time", _figures(plan)),
            Section("Every number, and why", [_numbers(plan)]),
            *(
                Section(title, [Notes(lines)])
                for title, lines in (
                    ("Notes", plan.notes),
                    ("What would change the answer", plan.changes),
                    ("Changed in the run's file", plan.edits),
                )
                if lines
            ),
            *file,
        ],
    )


def as_toml(plan: Plan) -> str:
    """Return the file that `megabatch train` runs, with the reason of each planned value above it."""
    if plan.run is None:
        raise ValueError(f"this plan cannot be written as a run: {without_run(plan)} It can be written as .json, .md or .html")
    return config.as_toml(plan.run, plan.comments)


def without_run(plan: Plan) -> str:
    """Return why `megabatch train` cannot run a plan, and where its numbers belong."""
    if plan.lora is None:
        return "`megabatch train` trains encoders and classifiers, no language models. Give the numbers to your own trainer."
    return (
        f"lora is {plan.lora}, and a run's file has no adapters: `megabatch train` would train all weights, at a rate for adapters."
        f' Give the numbers to a trainer with peft\'s LoraConfig(r={plan.lora}, target_modules="all-linear"): by model.add_adapter'
        " in Sentence Transformers, by get_peft_model for the Trainer of Hugging Face."
    )


def write(plan: Plan, path: str | Path) -> Path:
    """Write the plan in the format that the suffix of `path` names: .toml (the run), .json (everything), .html or .md."""
    path = Path(path)
    text = _writer(path)(plan)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return path


def check_target(path: str | Path, name: str) -> None:
    """Raise ValueError where `write` could not write a plan to `path`; `name` is what the message calls the path."""
    _writer(Path(path))
    check_file(path, name, make_folder=True)


def _writer(path: Path) -> Callable[[Plan], str]:
    writers: dict[str, Callable[[Plan], str]] = {
        ".toml": as_toml,
        ".json": Plan.as_json,
        ".md": lambda plan: as_markdown(plan_report(plan), detail=False),
        ".html": lambda plan: as_html(plan_report(plan)),
    }
    if path.suffix not in writers:
        raise ValueError(f"{path}: the name must end in one of {', '.join(writers)}, which selects the format")
    return writers[path.suffix]


def _numbers(plan: Plan) -> Table:
    columns = [
        Column("name", "", kind="word"),
        Column("shown", "value", kind="word"),
        Column("why", "why", kind="text"),
        Column("source", "source", kind="text"),
        Column("confidence", "confidence", kind="word"),
    ]
    return Table(columns, [number._asdict() for number in plan.numbers])


def _others(plan: Plan) -> Table:
    tokens = plan.lm
    columns = [
        Column("name", "", kind="text"),
        Column("batch", "tokens a step" if tokens else "batch", samples_text if tokens else whole),
        Column("seen", "tokens seen" if tokens else "seen", samples_text),
        Column("lr", "rate", lambda rate: f"{rate:g}"),
        Column("warmup", "warm-up", whole),
        Column("source", "source", kind="text", detail=True),
    ]
    rows = []
    for other in plan.others:
        row = other._asdict()
        row["name"] += f" ({other.optimizer})" if other.optimizer else ""
        if tokens:
            # Sequences of different lengths cannot be compared.
            row |= {name: row[name] * other.length for name in ("batch", "seen") if row[name] is not None}
        rows.append(row)
    return Table(columns, rows)


def _alternatives(plan: Plan, ways: Sequence[Alternative], *, brief: bool = False) -> Table:
    columns = [
        Column("name", "", kind="word"),
        Column("batch", "batch", whole),
        Column("gpus", f"{_device(plan)}s", whole),
        *([] if brief else [Column("chunk", "chunk", whole), Column("keep", "kept", whole)]),
        Column("peak_bytes", "memory", bytes_text),
        *([] if brief else [Column("seconds_per_step", "one update", seconds_text)]),
        Column("updates", "updates", whole),
        Column("hours", "the run", hours_text),
        Column("cost", "cost", money_text) if plan.price is not None else Column("cost", f"{_device(plan)}-hours", _gpu_hours),
    ]
    # A screen has 80 columns.
    short = {"what fits without chunks": "without chunks"} if brief else {}
    return Table(columns, [{**way._asdict(), "name": short.get(way.name, way.name)} for way in ways])


def _gpu_hours(hours: float) -> str:
    return f"{hours:,.3g}" if hours < 1000 else f"{hours:,.0f}" if hours < 1e7 else samples_text(hours)


def _figures(plan: Plan) -> list[Figure]:
    """Return memory and time against the batch, and what they are made of."""
    peaks = [(batch, peak) for batch, peak, _ in plan.curve]
    highest = max(peak for _, peak in peaks)
    levels = [
        Level(plan.device_bytes, f"memory of the device: {bytes_text(plan.device_bytes)}"),
        Level(plan.limit_bytes, f"usable: {bytes_text(plan.limit_bytes)}"),
    ]
    title, high = "peak memory of a GPU, with the best chunk at each batch", 1.15 * plan.device_bytes
    if highest < plan.limit_bytes / 8:
        # At the scale of the device the curve would be a line at zero.
        title, high, levels = f"peak memory; {bytes_text(plan.device_bytes)} are there", 1.3 * highest, []
    memory = _curve(plan, title, peaks, Axis(format=bytes_text, low=0, high=high), levels)
    seconds = [(batch, seconds) for batch, _, seconds in plan.curve]
    time = _curve(plan, "predicted time of a step", seconds, Axis(format=seconds_text, scale="log2"))
    parts = [Bars("memory", _largest(plan.memory), bytes_text), Bars("time of a step", _largest(plan.time), seconds_text)]
    return [
        Figure([memory], "peak memory against the batch, with the device's limit"),
        Figure([time], "seconds per step against the batch"),
        Figure(parts, "the parts of memory and time", size=(3.6, 3.4)),
    ]


def _curve(plan: Plan, title: str, points: Points, y: Axis, levels: list[Level] | None = None) -> Chart:
    chosen = next(point for point in points if point[0] == plan.batch)
    format: Format = y.format
    ring = Series([chosen], style="rings", texts=[format(chosen[1])], offset=(0, 12), size=11)
    x = Axis("batch", scale="log2", ticks={batch: whole(batch) for batch, _ in points})
    return Chart(title, [Series(points), ring], x, y, levels or [])


def _largest(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the parts, largest first, small ones together."""
    total = sum(parts.values())
    large = {name: part for name, part in parts.items() if part >= SMALLEST_PART * total}
    rest = total - sum(large.values())
    ordered = dict(sorted(large.items(), key=lambda item: -item[1]))
    return {**ordered, "the rest": rest} if rest > 0 else ordered
