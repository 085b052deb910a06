"""The noise of whole runs: measured while they train, compared with branches, and followed by a growing batch."""

from __future__ import annotations

import functools
import io
import json
import math
import random
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from small_runs import PAIRS, assert_equal, final, log_of, run_of, train, write_pairs
from small_towers import Bytes, prepare

from megabatch import config, measurements
from megabatch.measuring.noise import noise_report, noise_run
from megabatch.measuring.noise.branch import BranchOptions, branch
from megabatch.measuring.noise.probes import BATCHES, Probes
from megabatch.reporting.terminal import print_report
from megabatch.towers.tower import BuiltTower
from megabatch.training import checkpoint
from megabatch.training.build import assemble
from megabatch.training.distributed import ranks
from megabatch.training.loop import Training
from megabatch.training.noise.estimator import Micro, Moments, moments
from megabatch.training.schedules import step_schedule

pytestmark = pytest.mark.sampled(3)

# These runs name towers of the tests, which are trusted.
noise = functools.partial(noise_run.noise, trust_code=True)

CLASSIFY = ["loss.objective=classify", "data.label=label"]
RAMP = [
    *CLASSIFY, "batch.schedule=noise", "batch.start=8", "batch.size=32", "schedule.samples=1200", "schedule.shape=constant",
    "schedule.warmup=0", "checkpoint.every=10",
]  # fmt: skip


@pytest.fixture
def pairs(tmp_path):
    """Create texts that name their class."""
    return write_pairs(tmp_path / "pairs.jsonl", PAIRS, label=[pair[0].split()[0] for pair in PAIRS])


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Create texts with random classes: the gradients soon are pure noise, and every batch is below the critical one."""
    draws = random.Random(0)
    folder = tmp_path_factory.mktemp("drawn")
    return write_pairs(folder / "drawn.jsonl", PAIRS, label=[draws.choice("ab") for _ in PAIRS])


@pytest.fixture(scope="module")
def whole(drawn):
    """Train a run on random classes whose batch follows the noise, without interruption; return its folder."""
    return train(run_of(drawn, drawn.parent / "whole", *RAMP))


def training_of(run, folder, here):
    folder.mkdir(exist_ok=True)
    return Training(assemble(run, here), folder)


def batches_of(out):
    return [line["batch"] for line in log_of(out, "step")]


def notes_of(out):
    return [line["text"] for line in log_of(out, "note")]


def test_a_run_sees_the_gradients_of_its_micro_batches(pairs, tmp_path):
    """Compared with gradients of the same rows, one micro-batch at a time."""
    run = run_of(pairs, tmp_path / "run", *CLASSIFY, "batch.size=20", "batch.chunk=8")
    with ranks(run.compute) as here:
        training = training_of(run, tmp_path / "run", here)
        model, objective = training.parts.model, training.parts.objective
        (batch,) = training.parts.shuffled().batches([(0, 20)])
        own = []
        # 20 rows in 8 micro-batches: of 3 rows each, the last of 2.
        for x, labels in zip(batch.x.split(3), batch.labels.split(3), strict=True):
            torch.nn.functional.cross_entropy(model(x), labels).backward()
            own.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
            model.zero_grad()
        shares = [3 / 20] * 6 + [2 / 20]
        whole = sum(share * each for share, each in zip(shares, own, strict=True))
        squares = [float(each.square().sum()) for each in own]
        truth = moments([Micro(s, round(20 * a), a) for s, a in zip(squares, shares, strict=True)], float(whole.square().sum()))
        noise_scale = objective.measure_noise()
        training.step(training.schedule[0], batch)
        # fp32 sums in another order.
        assert noise_scale.steps[-1] == pytest.approx(truth, rel=1e-3)
        objective.stop_measuring_noise()
        training.step(training.schedule[0], batch)
        assert len(noise_scale.steps) == 1 and objective.noise is None


def test_a_batch_of_pure_noise_doubles_to_the_top_and_its_rate_follows(whole):
    batches = batches_of(whole)
    assert sum(batches) == 1200 and sorted(set(batches[:-1])) == [8, 16, 32] and batches[:20] == [8] * 20
    rates = {line["batch"]: line["lr"] for line in log_of(whole, "step")[:-1]}
    assert rates == pytest.approx({8: 0.01 * math.sqrt(8 / 32), 16: 0.01 * math.sqrt(16 / 32), 32: 0.01})
    first, second = notes_of(whole)
    at = batches.index(16)
    assert (at, batches.index(32)) == (20, 51), "what tests of resumption go by"
    assert f"after step {at} the batch grows from 8 to 16: critical batch" in first and "from 16 to 32" in second


def test_at_the_top_nothing_is_measured_any_more(drawn, whole, tmp_path):
    run = run_of(drawn, tmp_path / "run", *RAMP)
    with ranks(run.compute) as here:
        training = training_of(run, tmp_path / "run", here)
        assert training.parts.objective.noise is training.ramp.noise
        training.load(checkpoint.newest(whole / "checkpoints"))
        assert training.parts.objective.noise is None
        assert [step.pairs for step in training.schedule] == batches_of(whole)


def test_a_batch_above_the_critical_one_stays(pairs, tmp_path):
    """At first all samples have similar gradients, and the critical batch is small."""
    out = train(run_of(pairs, tmp_path / "run", *RAMP, "batch.start=32", "batch.size=64", "schedule.samples=1280"))
    assert batches_of(out) == [32] * 40 and notes_of(out) == []


def test_decisions_rest_on_the_lower_end(drawn, tmp_path):
    """With a planted critical batch of 36, 8 and 16 double as soon as allowed, and 32 does not, since it may be too large."""
    run = run_of(drawn, tmp_path / "run", *RAMP, "batch.size=256", "schedule.samples=4000")
    with ranks(run.compute) as here:
        training = training_of(run, tmp_path / "run", here)
        ramp, reasons, draws = training.ramp, [], random.Random(0)
        for training.number in range(1, 61):
            ramp.noise.steps.append(Moments(36.0, 1 + draws.gauss(0, 0.4)))
            reasons.append(ramp.decide(training.number))
        found = ramp.noise.estimate()
        assert found.steps == 20 and found.low < 32 < found.critical
        assert ramp.doubled == [20, 40] and ramp.size == 32 and len(list(filter(None, reasons))) == 2
        assert [step.pairs for step in ramp.schedule()[18:42]] == [8] * 2 + [16] * 20 + [32] * 2


class Killed(Exception):
    pass


# Resumed from step 20, after which the batch doubled; from between the two doublings; from after the last.
@pytest.mark.parametrize("after", [24, 48, 64])
def test_killed_and_resumed_is_bit_equal_to_never_stopped(drawn, whole, tmp_path, monkeypatch, after):
    before = Training.step

    def dying(self, *args):
        if self.number == after:
            raise Killed
        return before(self, *args)

    monkeypatch.setattr(Training, "step", dying)
    with pytest.raises(Killed):
        train(run_of(drawn, tmp_path / "parts", *RAMP))
    monkeypatch.undo()
    saved = checkpoint.newest(tmp_path / "parts" / "checkpoints")
    assert checkpoint.read_metadata(saved)["step"] == after // 10 * 10 < after
    train(run_of(drawn, tmp_path / "parts", *RAMP))
    assert_equal(final(whole), final(tmp_path / "parts"))


def _train_as_rank(rank, size, pairs, out, options):
    train(run_of(pairs, out, *options))


@pytest.mark.slow
def test_ranks_decide_alike_and_as_one_process(world, drawn, whole, tmp_path):
    world.run(2, _train_as_rank, str(drawn), str(tmp_path / "2"), RAMP)
    assert batches_of(tmp_path / "2") == batches_of(whole)


class Tired(Bytes):
    """Runs out of memory once, in its third forward with gradients."""

    calls = 0

    def forward(self, codes):
        self.calls += torch.is_grad_enabled()
        if self.calls == 3:
            self.calls += 1
            raise torch.OutOfMemoryError("out of memory, for once")
        return super().forward(codes)


def tired(dim=8):
    return BuiltTower(Tired(dim), prepare, "text")


def test_of_a_step_that_is_repeated_only_the_last_attempt_counts(pairs, tmp_path):
    seen = []
    for name in ("text", "tired"):
        options = [*CLASSIFY, f"x.name={'small_towers' if name == 'text' else 'test_noise_run'}:{name}", "batch.chunk=20"]
        run = run_of(pairs, tmp_path / name, *options)
        with ranks(run.compute) as here, pytest.warns(UserWarning, match="chunk") if name == "tired" else nullcontext():
            training = training_of(run, tmp_path / name, here)
            noise_scale = training.parts.objective.measure_noise()
            (batch,) = training.parts.shuffled().batches([(0, 20)])
            training.step(training.schedule[0], batch)
            seen.append(list(noise_scale.steps))
    assert seen[0] == seen[1] and len(seen[0]) == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["loss.objective=clip"], "another loss with more negatives.*steps, linear or exponential"),
        (["loss.objective=siglip"], "negatives"),
        (["schedule.steps=10"], "schedule.samples or schedule.epochs"),
        (["compute.sharding=fsdp2"], "fsdp2"),
        (["batch.start=1"], "at least 2"),
        (["batch.start=none"], "batch.start is None"),
    ],
)
def test_batches_that_cannot_follow_the_noise_are_refused(overrides, words):
    table = {"loss": {"objective": "classify"}, "schedule": {"samples": 1000}, "batch": {"schedule": "noise", "start": 8}}
    config.build(table)
    with pytest.raises(ValueError, match=words):
        config.build(table, overrides)


def test_doublings_change_what_follows_and_nothing_before():
    table = {"batch": {"schedule": "noise", "start": 10, "size": 80, "lr_rule": "none"}, "loss": {"objective": "classify"}}
    run = config.build({**table, "schedule": {"samples": 600, "warmup": 0.1, "shape": "constant"}})
    never, twice = step_schedule(run, 1000), step_schedule(run, 1000, [4, 20])
    assert [s.pairs for s in never] == [10] * 60
    assert [s.pairs for s in twice] == [10] * 4 + [20] * 16 + [40] * 6
    assert twice[:4] == never[:4] and sum(s.pairs for s in twice) == 600
    # A tenth of the 60 steps that a run without doublings has.
    assert [s.rate for s in twice[:8]] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 1, 1])


def test_probes_compare_gradients_of_whole_batches(pairs, tmp_path):
    run = run_of(pairs, tmp_path / "run", "batch.size=16", steps=6)
    with ranks(run.compute) as here:
        training = training_of(run, tmp_path / "run", here)
        model, objective = training.parts.model, training.parts.objective
        # After the samples of the run, one batch after another.
        own = []
        for batch in training.parts.shuffled().batches([(6 * 16 + 16 * place, 16) for place in range(BATCHES)]):
            objective.step(batch)
            own.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
            model.zero_grad()
        mean = sum(own) / BATCHES
        covariance = sum(float((each - mean).square().sum()) for each in own) / (BATCHES - 1)
        signal = float(mean.square().sum()) - covariance / BATCHES
        with Probes(training, window=8, last=6) as probes:
            training.number = 1
            probes(None)
        (found,) = probes.steps
        assert found == pytest.approx((16 * covariance, signal), rel=1e-3)
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the encoder contains batch normalisation")
@pytest.mark.parametrize("tower", ["small_towers:text", "small_towers:normed"])
def test_probes_do_not_change_a_contrastive_run(pairs, tmp_path, tower):
    options = [f"x.name={tower}", f"y.name={tower}", "schedule.steps=8"]
    train(run_of(pairs, tmp_path / "plain", *options))
    result = noise(run_of(pairs, "nowhere", *options), window=8, out=tmp_path / "probed")
    assert_equal(final(tmp_path / "plain"), final(tmp_path / "probed"))
    assert result.found.coupled and len(result.found.course) == 8 - 3


class Brittle(torch.optim.SGD):
    """Destroys the weights above a learning rate of 0.015."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(3.0 if group["lr"] > 0.015 else 1.0)


@pytest.fixture
def brittle(pairs, monkeypatch):
    """Create a run at batch 4 that breaks if its rate is too high, and record the steps that are taken."""
    taken = []
    before = Training.step
    monkeypatch.setattr(Training, "step", lambda self, step, batch: taken.append((self.number, step)) or before(self, step, batch))
    options = [*CLASSIFY, "batch.size=4", "optimizer.name=test_noise_run:Brittle", "schedule.shape=constant", "schedule.warmup=0"]
    run = run_of(pairs, "nowhere", *options, "evaluate.limit=20", steps=40)
    # Figures take longer than this run.
    monkeypatch.setattr(noise_run, "write_report", lambda report, out: None)
    return run, taken


def test_branches_find_the_planted_limit(brittle, tmp_path):
    """The rate is 0.01 at batch 4 and grows with the root: 0.0141 at batch 8 is right, 0.02 at batch 16 too much."""
    run, taken = brittle
    result = noise(run, steps=10, branch=[16, 8], out=tmp_path / "out")
    assert result.found.branch == 8
    rows = json.loads((tmp_path / "out" / "branches.json").read_text())
    assert [row["batch"] for row in rows] == [4, 8, 16] and [row["fine"] for row in rows] == [True, True, False]
    # From the same step on, each batch sees the same samples once, and repeats see others.
    branched = [step for number, step in taken if number == 10]
    assert len(branched) == 3 * (32 + 16 + 8) and len(taken) == 10 + len(branched)
    for size in (4, 8, 16):
        steps = [step for step in branched if step.pairs == size]
        assert [step.first for step in steps] == list(range(40, 40 + 3 * 128, size))
        assert {step.rate for step in steps} == {math.sqrt(size / 4)}


def test_updates_repeats_and_tolerance_are_respected(brittle, tmp_path):
    run, taken = brittle
    result = noise(run, steps=10, branch=[16], updates=2, repeats=1, tolerance=1e9, out=tmp_path / "out")
    # Destroyed weights are worse, and the tolerance allows it here.
    assert result.found.branch == 16
    assert len([step for number, step in taken if number == 10]) == 2 + 8


def test_a_branch_starts_from_the_checkpoint_each_time(pairs, tmp_path):
    """The weights, optimizer and counters of earlier branches make no difference."""
    run = run_of(pairs, tmp_path / "run", *CLASSIFY, "batch.size=8", "checkpoint.every=5", steps=10)
    train(run)
    with ranks(run.compute) as here:
        training = training_of(run, tmp_path / "other", here)
        saved = checkpoint.available(tmp_path / "run" / "checkpoints")[0]
        found = branch(training, saved, BranchOptions((16,), updates=2, repeats=2))
        again = branch(training, saved, BranchOptions((16,), updates=2, repeats=2))
    assert found == again and [row.batch for row in found] == [8, 16] and found[0].loss != found[1].loss


def test_the_measurement_starts_from_a_checkpoint(pairs, tmp_path):
    options = [*CLASSIFY, "batch.size=16", "checkpoint.every=10"]
    out = train(run_of(pairs, tmp_path / "run", *options, steps=20))
    saved = checkpoint.available(out / "checkpoints")[0]
    result = noise(run_of(pairs, "nowhere", *options, steps=20), steps=6, checkpoint=saved, out=tmp_path / "out")
    assert [point["step"] for point in result.found.course] == [14, 15, 16]
    losses = {line["step"]: line["loss"] for line in log_of(out, "step")}
    assert all(line["loss"] == pytest.approx(losses[line["step"]], rel=1e-5) for line in log_of(tmp_path / "out", "step"))


@pytest.mark.parametrize(
    ("options", "arguments", "words"),
    [
        ([], {"steps": 3}, "must be at least 4, and the run has 6 left"),
        ([], {"steps": 7}, "the run has 6 left"),
        ([], {"steps": 6, "branch": [48]}, "one of which branches need"),
        (["data.held_out=0"], {"steps": 4, "branch": [48]}, "compared by held-out loss"),
        ([], {"steps": 4, "branch": [0]}, "batches of at least 1"),
        ([], {"steps": 4, "branch": [48], "updates": 0}, "updates is 0 and repeats is 3: both must be at least 1"),
        ([], {"steps": 4, "branch": [48], "tolerance": -0.1}, "tolerance is -0.1"),
        (["batch.size=1", *CLASSIFY], {}, "only 0 steps could be measured"),
    ],
)
def test_what_cannot_be_measured_is_refused(pairs, tmp_path, options, arguments, words):
    with pytest.raises(ValueError, match=words):
        noise(run_of(pairs, "nowhere", *options), out=tmp_path / "out", **arguments)


def test_another_measurement_is_not_shown_as_noise():
    other = measurements.Measured(measurements.Fit(4, None), {}, "cpu", "2")
    with pytest.raises(ValueError, match="a measurement of 'fit'"):
        noise_report(other)


def _measured_as_rank(rank, size, pairs, out, options):
    found = noise(run_of(pairs, "nowhere", *options), out=Path(out)).found
    return found.critical, found.low, found.high


@pytest.mark.slow
@pytest.mark.parametrize("options", [CLASSIFY, ["compute.sharding=fsdp2"]], ids=["micro-batches", "probes of a sharded run"])
def test_ranks_measure_what_one_process_measures(world, pairs, tmp_path, options):
    alone = _measured_as_rank(0, 1, pairs, tmp_path / "1", options if "fsdp2" not in options[0] else [])
    first, second = world.run(2, _measured_as_rank, str(pairs), str(tmp_path / "2"), options)
    assert first == second
    # Rounding of fp32 sums, enlarged by six steps of Adam.
    assert first == pytest.approx(alone, rel=0.02)


@pytest.mark.slow
def test_the_embedded_default_in_small_settings(tmp_path):
    settings = ["batch.size=16", "batch.chunk=16", "x.options.width=8", "y.options.width=16", "y.options.depth=1"]
    run = config.build(config.EMBEDDED, [*settings, "evaluate.limit=64", "data.workers=0", "watch.bar=false", "loss.dim=16"])
    result = noise(run, steps=16, window=16, branch=[32], out=tmp_path)
    assert measurements.read(tmp_path / "measured.json") == result
    found = result.found
    assert found.batch == 16 and found.coupled and 0 < found.low <= found.critical <= found.high and found.branch in (16, 32)
    assert [point["step"] for point in found.course] == [8, 10, 12, 14, 16]
    for name in ("noise.png", "branches.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    assert "what more negatives would gain" in page and "Branches" in page
    assert "<script" not in page and 'src="http' not in page
    from rich.console import Console

    shown = io.StringIO()
    print_report(noise_report(result), Console(file=shown, width=200))
    assert "ritical batch" in shown.getvalue() and "lost nothing" in shown.getvalue()
