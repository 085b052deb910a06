"""The arithmetic of a sweep against numbers computed by hand, and its search on problems with a known best batch."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import random
import re
import threading
import time
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import PATIENCE_S
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from megabatch import config, measurements
from megabatch.data.sampler import Order, Subset
from megabatch.data.source import ALL_PIXELS, ImageRequests, Sample
from megabatch.measuring.sweep import sweep, sweep_report
from megabatch.measuring.sweep import sweep_runs as results
from megabatch.measuring.sweep.cases import (
    FAILED,
    Case,
    ChosenRate,
    Space,
    chosen_rate,
    length_of,
    middle_rate,
    needed_cases,
    remaining,
    rule_in_words,
    run_of,
)
from megabatch.measuring.sweep.outcome import RunOutcome, halves, seen
from megabatch.measuring.sweep.summary import Difference, Summary, difference, from_row, pareto, t_quantile
from megabatch.measuring.sweep.sweep_runs import checked_request
from megabatch.measuring.sweep.verdict import verdict
from megabatch.reporting.figures import save
from megabatch.reporting.html import as_html
from megabatch.reporting.terminal import print_report
from megabatch.training.run_folder import MARK
from megabatch.training.signals import Stopped

EVIL = "</ul><script>document.title='owned'</script>"


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Skip the figures, which take most of the time of a simulated sweep; the test of the files restores them."""
    monkeypatch.setattr(results, "write_report", lambda report, out: None)


def base_run(*overrides: str) -> config.Run:
    table = {
        "batch": {"size": 256},
        "optimizer": {"lr": 1e-3},
        "schedule": {"samples": 64 * 1024},
        "x": {"options": {"channels": 1}},
    }
    return config.build(table, overrides)


class Planted:
    """A training whose quality is known: highest at one batch, and at each batch at one rate.

    30 points at the best, less the squares of how many doublings batch and rate are away from it. Steps have a cost beside that
    of their samples, so that a larger batch is faster.
    """

    def __init__(self, batch: int = 256, factor: float = 1.0, noise: float = 0.001, fails=lambda run: False) -> None:
        self.batch, self.factor, self.noise, self.fails = batch, factor, noise, fails
        self.runs: list[config.Run] = []

    def __call__(self, run: config.Run) -> RunOutcome:
        self.runs.append(run)
        if self.fails(run):
            raise RuntimeError(f"no memory for {run.batch.size} {EVIL}")
        size, lr = run.batch.size, run.optimizer.lr
        best = 1e-3 * math.sqrt(size / 256) * self.factor
        luck = self.noise * random.Random(f"{size} {run.seed}").uniform(-1, 1)
        quality = 0.3 - 0.01 * math.log2(size / self.batch) ** 2 - 0.005 * math.log2(lr / best) ** 2 + luck
        steps = run.schedule.steps or math.ceil(run.schedule.samples / size)
        rate = 1000 * size / (size + 256)
        return RunOutcome(quality, quality, True, 500, quality + 0.1, 0.1, 1.0, steps * size / rate, rate, steps, steps * size)


def of(seconds: float, *qualities: float, batch: int = 64, **more) -> Summary:
    return Summary(batch, 1e-3, 0.1, qualities, (seconds,) * len(qualities), 100.0, 10, 640, pairs=500, **{"tried": 3, **more})


# Statistics


@pytest.mark.parametrize(("freedom", "wanted"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (10, 2.2281), (120, 1.9799)])
def test_quantiles_of_t_are_those_of_the_tables(freedom, wanted):
    assert t_quantile(freedom) == pytest.approx(wanted, abs=1e-4)


def test_the_interval_of_a_difference_is_welchs():
    # Variances 1 and 4, three values each: error √(1/3 + 4/3) = 1.29099, freedom (5/3)² / ((1/3)²/2 + (4/3)²/2) = 2.9412, at which
    # the quantile lies between those of 2 and 3.
    found = difference([1.0, 2.0, 3.0], [4.0, 6.0, 8.0])
    assert found.mean == -4
    assert found.half == pytest.approx(1.29099 * t_quantile(2.9412), rel=1e-4)
    assert 1.29099 * 3.1824 < found.half < 1.29099 * 4.3027
    assert not found.known


def test_one_seed_has_no_spread_and_equal_seeds_have_none_either():
    assert difference([0.3], [0.2, 0.25]) == Difference(pytest.approx(0.075), None)
    assert not difference([0.3], [0.2]).known
    assert difference([0.3, 0.3], [0.2, 0.2]).half == 0 and difference([0.3, 0.3], [0.2, 0.2]).known


# Which runs are needed


def test_rates_follow_the_root_of_the_batch_for_adam_and_the_batch_for_sgd():
    assert middle_rate(base_run(), 1024) == 2e-3
    assert middle_rate(base_run("optimizer.name=sgd"), 1024) == 4e-3
    assert middle_rate(base_run("optimizer.lr=0.0012345"), 256) == 0.0012345
    assert "and not at 8 and 8,192" in rule_in_words(base_run(), (8, 256, 8192))


def test_every_length_is_what_it_is_called():
    # 65,536 samples at 256 are 256 updates.
    assert length_of(base_run(), "samples", 1024) == {"samples": 65536}
    assert length_of(base_run("schedule.steps=256"), "samples", 1024) == {"samples": 65536}
    assert length_of(base_run(), "updates", 1024) == {"steps": 256}
    # 10 s at 1,000 pairs a second are 9.77 steps of 1,024; half a step is one.
    assert length_of(base_run(), "time", 1024, 10_000.0) == {"samples": 10240}
    assert length_of(base_run(), "time", 1024, 512.0) == {"samples": 1024}


def test_what_follows_from_a_batch_follows():
    base = base_run("optimizer.ema=0.99", "batch.schedule=linear", "batch.start=64", "evaluate.every=9")
    run = run_of(base_run("schedule.warmup=0.1"), Case(1024, 4e-3, 0.05, 7), {"samples": 65536}, Path("a"))
    assert (run.batch.size, run.optimizer.lr, run.optimizer.weight_decay, run.seed) == (1024, 4e-3, 0.05, 7)
    assert run.schedule.warmup == 0.1 and run.schedule.samples == 65536 and run.out == "a/runs/1024-0.004-decay0.05-7"
    assert not run.watch.bar and not run.watch.report and run.evaluate.every is None
    run = run_of(base, Case(1024, 4e-3, 0.1, 0), {"samples": 65536}, Path("a"))
    # The EMA covers as many samples; the ramp starts at the same fraction.
    assert run.optimizer.ema == pytest.approx(0.99**4) and run.batch.start == 256
    base = base_run("schedule.warmup=20")
    # The steps of Adam's warm-up stay, but are at most a fifth of the run: 12 of 64 steps.
    assert run_of(base, Case(1024, 4e-3, 0.1, 0), {"samples": 65536}, Path("a")).schedule.warmup == 12
    assert run_of(base, Case(1024, 4e-3, 0.1, 0), {"steps": 256}, Path("a")).schedule.warmup == 20
    assert run_of(base, Case(256, 1e-3, 0.1, 0), {"samples": 65536}, Path("a")).schedule.warmup == 20
    # SGD warms up over samples: 20 steps of 256 are 5 of 1,024.
    sgd = base_run("schedule.warmup=20", "optimizer.name=sgd")
    assert run_of(sgd, Case(1024, 4e-3, 0.1, 0), {"samples": 65536}, Path("a")).schedule.warmup == 5


def searched(space: Space, score) -> dict[Case, float]:
    scores: dict[Case, float] = {}
    while missing := needed_cases(space, scores):
        scores[missing[0]] = score(missing[0])
    return scores


SPACE = Space({64: 1e-3, 256: 2e-3}, (0.5, 1, 2), (0.1,), (0, 1, 2), extend=2)


def test_middle_rates_come_first_and_seeds_are_spent_on_the_best_alone():
    assert needed_cases(SPACE, {})[:2] == [Case(64, 1e-3, 0.1, 0), Case(256, 2e-3, 0.1, 0)]
    assert remaining(SPACE, {}) == 2 * 3 + 2 * 2
    best = {64: 1e-3, 256: 2e-3}
    scores = searched(SPACE, lambda case: -abs(math.log(case.lr / best[case.batch])))
    assert len(scores) == 2 * 3 + 2 * 2
    assert [case for case in scores if case.seed] == [Case(b, best[b], 0.1, seed) for b in (64, 256) for seed in (1, 2)]
    assert chosen_rate(SPACE, scores, 256) == ChosenRate(2e-3, 0.1, None, 0)
    # No seed is spent before every batch has its rates.
    known = {case: scores[case] for case in scores if case.seed == 0 and case != Case(256, 4e-3, 0.1, 0)}
    assert needed_cases(SPACE, known) == [Case(256, 4e-3, 0.1, 0), Case(64, 1e-3, 0.1, 1), Case(64, 1e-3, 0.1, 2)]
    # The middle rates of both batches came first.
    assert {case.batch for case in list(scores)[:2]} == {64, 256} and {case.lr for case in list(scores)[:2]} == {1e-3, 2e-3}


@pytest.mark.parametrize(
    ("factor", "found"),
    [
        (1, ChosenRate(1e-3, 0.1, None, 0)),
        # Twice the rule is the best requested rate, four times is better, and eight times shows that four is the best.
        (4, ChosenRate(4e-3, 0.1, None, 2)),
        (0.25, ChosenRate(2.5e-4, 0.1, None, 2)),
        (64, ChosenRate(8e-3, 0.1, "highest", 2)),
    ],
)
def test_the_search_goes_on_beyond_an_edge_and_says_when_it_gave_up_there(factor, found):
    space = dataclasses.replace(SPACE, middles={64: 1e-3})
    scores = searched(space, lambda case: -abs(math.log2(case.lr / (1e-3 * factor))))
    assert chosen_rate(space, scores, 64) == found
    assert len([case for case in scores if case.seed == 0]) == 3 + found.extended


def test_a_single_rate_has_no_edge_and_no_extension():
    space = Space({64: 1e-3}, (1,), (0.1,), (0,), extend=2)
    scores = searched(space, lambda case: 0.5)
    assert len(scores) == 1 and chosen_rate(space, scores, 64) == ChosenRate(1e-3, 0.1, None, 0)


def test_a_rate_that_fails_is_not_taken_and_is_an_edge_that_was_crossed():
    scores = searched(SPACE, lambda case: FAILED if case.lr > 1.5 * SPACE.middles[case.batch] else case.lr)
    assert chosen_rate(SPACE, scores, 64) == ChosenRate(1e-3, 0.1, None, 0)
    assert chosen_rate(SPACE, searched(SPACE, lambda case: FAILED), 64) is None
    assert len(searched(SPACE, lambda case: FAILED)) == 2 * 3


def test_equal_scores_leave_the_rule_as_it_is():
    scores = searched(SPACE, lambda case: 0.0)
    assert chosen_rate(SPACE, scores, 64) == ChosenRate(1e-3, 0.1, None, 0)


def test_other_decays_are_tried_at_the_best_rate():
    space = checked_request(
        base_run(), batches=[64], rates=(0.5, 1, 2), seeds=2, same="samples", decays=(1, 0, 3), extend=0, seconds=None
    ).space
    assert space.decays == (0.1, 0.0, 0.3)
    space = Space({64: 1e-3}, (0.5, 1, 2), (0.1, 0.0, 0.2), (0, 1), extend=0)
    scores = searched(space, lambda case: case.weight_decay - abs(math.log(case.lr / 1e-3)))
    assert chosen_rate(space, scores, 64) == ChosenRate(1e-3, 0.2, None, 0)
    assert len(scores) == 3 + 2 + 1 and Case(64, 1e-3, 0.2, 1) in scores


# The verdict


def test_the_verdict_has_the_numbers():
    small, large = of(2.1, 0.301, 0.302, 0.303, batch=256), of(1.0, 0.298, 0.299, 0.300, batch=1024)
    told = verdict([small, large], "samples")
    # Spreads of 0.1 points on three seeds each: 2.776 · √(0.01/3 + 0.01/3) = 0.2267.
    assert "Batch 1,024 loses 0.3 ± 0.2 points against 256 and is 2.1× faster." in told.sentences
    assert told.batch == 256
    assert told.headline == "Take batch 256 at a learning rate of 0.001: its held-out recall@1, 30.2 ± 0.1 %, is the best."
    assert "3 seeds" in " ".join(told.sentences)


def test_within_the_noise_the_fastest_is_taken_and_nothing_is_claimed():
    small, large = of(2.1, 0.300, 0.303, 0.306, batch=256), of(1.0, 0.298, 0.301, 0.304, batch=1024)
    told = verdict([small, large], "samples", "accuracy")
    # 2.776 · √(0.09/3 + 0.09/3) = 0.68 points; 0.2 lower on average, so up to 0.88 may be lost.
    assert told.batch == 1024
    assert told.headline.endswith("the best, that of 256, and it is 2.1× faster.")
    assert told.sentences[0] == "Batch 1,024 instead of 256 may lose up to 0.9 points."
    assert "Batch 1,024 does not differ significantly from 256 (0.2 points lower, ± 0.7) and is 2.1× faster." in told.sentences
    assert not re.search("loses|gains", " ".join(told.sentences))
    # A batch that is slower and no better is not taken.
    assert verdict([small, of(4.2, *large.qualities, batch=64)], "samples").batch == 256
    # With the same time nothing is faster.
    assert verdict([small, large], "time").batch == 256


def test_one_seed_says_that_no_spread_is_known():
    told = verdict([of(2.0, 0.30, batch=256), of(1.0, 0.29, batch=1024)], "samples")
    words = " ".join(told.sentences)
    assert told.batch == 256 and "spread is unknown" in words and "±" not in words + told.headline
    assert "Batch 1,024 comes out 1.0 points lower than 256 and is 2.0× faster." in words


def test_a_difference_that_is_claimed_looks_larger_than_its_interval():
    # Means 0.24 points apart, half 2.776 · √(2 · 0.01/3) = 0.2267: one digit would read 0.2 ± 0.2.
    told = verdict([of(1.0, 0.3010, 0.3020, 0.3030), of(1.0, 0.2986, 0.2996, 0.3006, batch=128)], "samples")
    assert "Batch 128 loses 0.24 ± 0.23 points against 64 and is not significantly faster or slower." in told.sentences


def test_caveats_are_part_of_the_verdict():
    edge = of(1.0, 0.30, 0.31, edge="highest", extended=2, processes=2, lost=(4096,), apart=False)
    worse = of(1.0, 0.10, batch=128, failed=1)
    words = " ".join(verdict([edge, worse], "samples").sentences)
    assert "2 further rates were tried" in words and "still the highest that was tried; a higher one may be better" in words
    assert "No run finished at batch 4,096" in words and "Batch 128: 1 of 2 seeds failed" in words
    assert "One rate was tried at each batch" in " ".join(verdict([of(1.0, 0.3, tried=1)], "samples").sentences)
    assert "2 runs at a time shared the machine" in words and "the same 500 held-out pairs" in words


def test_a_batch_with_failed_seeds_is_not_taken():
    shaky, steady = of(1.0, 0.5, 0.5, failed=1), of(1.0, 0.3, 0.31, batch=128)
    assert verdict([shaky, steady], "samples").batch == 128
    assert verdict([shaky], "samples").batch == 64


shares = st.floats(0.01, 0.99)
summaries = st.lists(
    st.tuples(st.floats(0.1, 100), st.lists(shares, min_size=1, max_size=4)), min_size=1, max_size=4
).map(lambda found: [of(seconds, *qualities, batch=2**n) for n, (seconds, qualities) in enumerate(found)])  # fmt: skip


@given(summaries)
@settings(max_examples=100, deadline=None)
def test_no_difference_is_claimed_that_is_smaller_than_its_interval(found):
    told = verdict(found, "samples")
    best = max(found, key=lambda each: (each.mean, -each.seconds))
    by_batch = {f"{each.batch:,}": each for each in found}
    for sentence in told.sentences:
        claim = re.match(r"Batch ([\d,]+) (loses|gains) ([\d.]+) ± ([\d.]+) points", sentence)
        if claim:
            apart = difference(by_batch[claim[1]].qualities, best.qualities)
            assert apart.half is not None and abs(apart.mean) > apart.half and float(claim[3]) > float(claim[4])
    taken = next(each for each in found if each.batch == told.batch)
    assert taken is best or (not difference(taken.qualities, best.qualities).known and taken.seconds < best.seconds)


def test_the_pareto_front_has_what_nothing_beats_in_both():
    a, b, c, d = of(1, 0.1, batch=8), of(2, 0.3, batch=4), of(3, 0.2, batch=2), of(4, 0.4, batch=1)
    assert pareto([d, c, b, a]) == [a, b, d]
    assert pareto([of(2, 0.1, batch=16), a]) == [a]


def test_a_summary_comes_back_from_its_row():
    each = of(1.5, 0.1, 0.3, edge="lowest", lost=(8,))
    row = json.loads(json.dumps(each.as_row()))
    assert from_row(row) == each
    assert (row["mean"], row["seconds"]) == (0.2, 1.5) and row["spread"] == pytest.approx(math.sqrt(0.02))


# Held-out pairs


class Grouped:
    """A source of one shard, whose samples differ by their group only."""

    def __init__(self, groups: list[str]) -> None:
        self.groups, self.lengths = groups, [len(groups)]

    def read(self, shard: int, index: int, requests: ImageRequests = ALL_PIXELS) -> Sample:
        return Sample(str(index), "", "")

    def group(self, shard: int, index: int) -> str:
        return self.groups[index]

    def label(self, shard: int, index: int) -> None:
        return None


def test_held_out_pairs_are_halved_in_whole_groups():
    source = Grouped([f"group {index % 40}" for index in range(200)])
    first, second = halves(source, limit=1000)
    names = [{part.group(0, index) for index in range(part.lengths[0])} for part in (first, second)]
    assert not names[0] & names[1] and len(names[0] | names[1]) == 40
    assert first.lengths[0] == second.lengths[0] == 100
    # The same pairs, whatever the order they are stored in.
    turned = halves(Subset(source, [array("q", reversed(range(200)))]), 200)
    assert {turned[0].group(0, index) for index in range(100)} == names[0]
    assert halves(Grouped(["one"] * 200), 200) is None and halves(Grouped([str(n) for n in range(20)]), 20) is None
    # The limit is for both halves together.
    assert sum(sum(part.lengths) for part in halves(source, 50)) == 50


def test_the_gap_is_measured_on_pairs_that_were_trained_on():
    source, run = Grouped([f"group {index % 40}" for index in range(200)]), base_run("data.window=50", "seed=3")
    parts = SimpleNamespace(training=source, run=run)
    order = Order([200], 50, 3)
    met = {order.at(position) for position in range(60)}
    few = seen(parts, samples=60, pairs=20)
    assert 20 <= sum(few.lengths) < 25 and {(0, index) for index in few.indices[0]} <= met
    assert {(0, index) for index in seen(parts, samples=60, pairs=500).indices[0]} == met
    # After an epoch all samples were seen, and groups are whole: five samples each.
    assert sum(seen(parts, samples=200, pairs=23).lengths) == 25 and sum(seen(parts, samples=999, pairs=500).lengths) == 200


# Whole sweeps of a known problem


@pytest.mark.parametrize("best", [64, 256, 4096])
def test_the_planted_batch_is_found(best, tmp_path):
    train = Planted(best, factor=2.0)
    result = sweep(base_run(), batches=[64, 256, 1024, 4096], out=tmp_path, train=train, say=lambda line: None)
    assert (result.kind, result.found.batch) == ("sweep", best)
    # The best rate is twice the rule, the highest requested: one further rate shows that it is the best.
    assert result.found.lr == pytest.approx(2e-3 * math.sqrt(best / 256), rel=0.01)
    assert [row["extended"] for row in result.found.rows] == [1, 1, 1, 1]
    assert all(row["edge"] is None and row["tried"] == 4 for row in result.found.rows)
    # Rates by the first seed, the other two at the best: (3 + 1 + 2) runs of four batches.
    assert len(train.runs) == 24
    assert {run.schedule.samples for run in train.runs} == {65536}


@pytest.mark.slow
def test_every_file_is_written_and_read_back(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("megabatch.reporting.figures.DPI", 40)
    said = []
    fails = lambda run: run.batch.size == 4096 or run.optimizer.lr == 2e-3  # noqa: E731
    result = sweep(base_run(), batches=[64, 256, 4096], out=tmp_path, train=Planted(fails=fails), say=said.append)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == len(said) == 5 + 5 + 3
    failed = [row for row in rows if row["error"]]
    assert {(row["batch"], row["lr"]) for row in failed} == {(256, 2e-3), (4096, 2e-3), (4096, 4e-3), (4096, 8e-3)}
    assert all(row["quality"] is None and "no memory" in row["error"] for row in failed)
    assert [row["batch"] for row in result.found.rows] == [64, 256] and result.found.rows[0]["lost"] == [4096]
    assert re.fullmatch(r"\[13 of 13, \d+ s\] batch .*", said[-1])

    read = measurements.read(tmp_path / "measured.json")
    assert (read.found.batch, read.run) == (256, config.as_table(base_run())) and len(read.found.rows) == 2
    assert shown(read) == shown(result)
    assert "No run finished at batch 4,096" in shown(read) and "Take batch 256 at a learning rate of 0.001" in shown(read)
    html = (tmp_path / "report.html").read_text()
    assert "<script>" not in html and "&lt;script&gt;" in html and "http" not in html.replace("http-equiv", "")
    assert as_html(sweep_report(read, rows)) == html
    with Image.open(tmp_path / "sweep.png") as drawn:
        assert drawn.width == 480 and len(drawn.getcolors(2**20)) > 50


def shown(result: measurements.Measured) -> str:
    from rich.console import Console

    console = Console(width=200, file=io.StringIO())
    print_report(sweep_report(result), console)
    return console.file.getvalue()


def test_if_every_run_failed_the_error_is_raised_and_stored(tmp_path):
    with pytest.raises(ValueError, match=r"every run of the sweep failed; .*rows.jsonl.*RuntimeError: no memory for 64"):
        sweep(base_run(), batches=[64], out=tmp_path, train=Planted(fails=lambda run: True), say=lambda line: None)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3


def test_rates_are_chosen_on_other_pairs_than_are_reported(tmp_path):
    def train(run):
        # On the pairs for choosing, 0.5 is better than 1 and 2; on the reported pairs it is the worst.
        rank = {5e-4: 0, 1e-3: 1, 2e-3: 2}.get(run.optimizer.lr, 9)
        return RunOutcome(quality=0.1 + 0.1 * rank, choosing=0.9 - 0.1 * rank, apart=True, seconds=1.0, steps=1, pairs_per_s=1.0)

    result = sweep(base_run(), batches=[256], seeds=[3, 5], extend=0, out=tmp_path, train=train, say=lambda line: None)
    assert result.found.lr == 5e-4 and result.found.rows[0]["qualities"] == [0.1, 0.1]


def test_the_same_updates_are_the_same_steps(tmp_path):
    train = Planted()
    sweep(base_run(), batches=[64, 1024], same="updates", seeds=1, out=tmp_path, train=train, say=lambda line: None)
    assert {(run.schedule.steps, run.schedule.samples) for run in train.runs} == {(256, None)}


def test_the_same_time_is_what_the_pilots_measured(tmp_path):
    train = Planted(fails=lambda run: run.batch.size == 8192)
    result = sweep(base_run(), batches=[64, 1024, 8192], same="time", seeds=1, out=tmp_path, train=train, say=lambda line: None)
    # 65,536 samples at 256, which does 500 a second, are 131.07 s. At 64: 200 a second, 26,214 samples, 410 steps (409.6).
    # At 1,024: 800 a second, 104,858 samples, 102 steps (102.4).
    steps = {row["batch"]: row["steps"] for row in result.found.rows}
    assert steps == {64: 410, 1024: 102}
    assert all(row["seconds"] == pytest.approx(131.07, rel=0.01) for row in result.found.rows)
    assert result.found.rows[0]["lost"] == [8192]
    assert (tmp_path / "pilots" / "256" / "outcome.json").exists()
    rows, drawn = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()], io.BytesIO()
    (figure,) = sweep_report(result, rows).figures()
    save(figure, drawn)
    assert Image.open(drawn).width == 1920
    # Pilots are not repeated either: another speed would change the length of every run.
    before = len(train.runs)
    sweep(base_run(), batches=[64, 1024], same="time", seeds=1, out=tmp_path, train=train, say=lambda line: None)
    assert len(train.runs) == before
    sweep(base_run(), batches=[64], same="time", seconds=10, seeds=1, out=tmp_path / "b", train=train, say=lambda line: None)
    assert train.runs[-1].schedule.samples == 64 * 31


def test_finished_runs_are_not_repeated_and_failed_ones_are_tried_again(tmp_path):
    stops = Planted(fails=lambda run: run.optimizer.lr == 2e-3)
    sweep(base_run(), batches=[256], seeds=2, out=tmp_path, train=stops, say=lambda line: None)
    again = Planted()
    result = sweep(base_run("compute.threads=3"), batches=[256], seeds=3, out=tmp_path, train=again, say=lambda line: None)
    assert [(run.optimizer.lr, run.seed) for run in again.runs] == [(2e-3, 0), (1e-3, 2)]
    assert len(result.found.rows[0]["qualities"]) == 3


def test_a_folder_of_another_run_is_refused(tmp_path):
    sweep(base_run(), batches=[256], seeds=1, out=tmp_path, train=Planted(), say=lambda line: None)
    with pytest.raises(ValueError, match=r"256-0.001-0 has a run with other settings: schedule.samples was 65536, is 1024"):
        sweep(base_run("schedule.samples=1024"), batches=[256], seeds=1, out=tmp_path, train=Planted(), say=lambda line: None)


def test_runs_are_distributed_over_worker_slots(tmp_path, monkeypatch):
    meeting, at_once = threading.Barrier(2, timeout=PATIENCE_S), []

    class Train(Planted):
        def __call__(self, run):
            at_once.append(run.compute)
            meeting.wait()
            return super().__call__(run)

    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    monkeypatch.setattr("megabatch.environment.device_name", lambda device: f"a {device.type}")
    options = {"batches": [64, 256], "rates": (1,), "seeds": 2, "train": Train(), "say": lambda line: None}
    result = sweep(base_run(), devices=["cuda:0", "cuda:1"], out=tmp_path / "a", **options)
    assert [compute.threads for compute in at_once] == [4] * 4
    assert sorted(compute.device for compute in at_once) == ["cuda:0"] * 2 + ["cuda:1"] * 2
    assert result.found.rows[0]["processes"] == 2 and result.device == "a cuda"
    at_once.clear()
    sweep(base_run("compute.threads=3"), jobs=2, out=tmp_path / "b", **options)
    assert [(compute.device, compute.threads) for compute in at_once] == [(None, 1)] * 4


def test_a_signal_stops_the_sweep_and_what_it_runs(tmp_path, monkeypatch):
    class Train(Planted):
        stopped = False

        def __call__(self, run):
            signs[0].number = 15
            while not self.stopped:
                time.sleep(0.01)
            return RunOutcome(error="stopped")

        def stop(self):
            self.stopped = True

    from megabatch.training.signals import StopSign

    signs: list[StopSign] = []
    enter = StopSign.__enter__
    monkeypatch.setattr(StopSign, "__enter__", lambda self: signs.append(self) or enter(self))
    with pytest.raises(Stopped, match="the same command resumes") as stopped:
        sweep(base_run(), batches=[64], out=tmp_path, train=Train(), say=lambda line: None)
    assert stopped.value.status == 143 and not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batches": []}, "batches is []"),
        ({"batches": [64, 64]}, "must list batches, each once"),
        ({"batches": [0]}, "batches is [0]"),
        ({"rates": (0,)}, "factors above 0"),
        ({"seeds": 0}, "seeds is ()"),
        ({"same": "epochs"}, "one of samples, updates, time"),
        ({"decays": (-1,)}, "none of them negative"),
        ({"extend": -1}, "extend is -1"),
        ({"seconds": 5}, 'same="time"'),
        ({"jobs": 0}, "jobs is 0"),
        ({"run": base_run("data.held_out=0")}, "hold some pairs out"),
    ],
)
def test_what_cannot_be_met_is_refused(options, words, tmp_path):
    options = {"run": base_run(), "batches": [64], "out": tmp_path, "train": Planted(), **options}
    with pytest.raises(ValueError, match=re.escape(words)):
        sweep(options.pop("run"), **options)


def test_torchrun_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="without torchrun"):
        sweep(base_run(), batches=[64], out=tmp_path, train=Planted())


def test_a_damaged_outcome_file_is_named(tmp_path):
    folder = tmp_path / "runs" / "256-0.001-0"
    folder.mkdir(parents=True)
    (folder / "outcome.json").write_text("[]")
    (tmp_path / MARK).touch()
    with pytest.raises(ValueError, match=r"outcome.json is not the outcome of a run"):
        sweep(base_run(), batches=[256], out=tmp_path, train=Planted(), say=lambda line: None)


def test_only_a_sweep_is_shown():
    with pytest.raises(ValueError, match="of 'fit', not of 'sweep'"):
        sweep_report(measurements.Measured(measurements.Fit(8, None), {}, "cpu", "2"))
