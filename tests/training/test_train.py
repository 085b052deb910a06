"""Whole trainings: the same result for any number of ranks and stops, and a clear error where a run cannot continue."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import signal
import sys
import time
import types

import pytest
import torch
from commands import Command
from PIL import Image
from small_runs import PAIRS, WORDS, assert_equal, final, log_of, run_of, stopping, train, write_pairs
from world import error_of

from megabatch import config
from megabatch.data.jsonl import JsonLines
from megabatch.training import checkpoint, distributed
from megabatch.training.evaluate import embed_source
from megabatch.training.inference import opened
from megabatch.training.loop import Training
from megabatch.training.signals import Stopped

pytestmark = pytest.mark.sampled(3)


@pytest.fixture
def pairs(tmp_path):
    return write_pairs(tmp_path / "pairs.jsonl", PAIRS)


def test_a_run_learns_and_leaves_its_files(pairs, tmp_path):
    out = train(run_of(pairs, tmp_path / "run", "schedule.steps=60", "optimizer.lr=0.05", "evaluate.every=20", "watch.report=true"))
    losses = [line["loss"] for line in log_of(out, "step")]
    assert len(losses) == 60 and losses[-1] < 0.8 * losses[0]
    result = json.loads((out / "result.json").read_text())
    assert result["steps"] == 60 and result["samples"] == 60 * 24 and result["parameters"] > 0 and result["peak_bytes"] > 0
    assert result["evaluation"]["pairs"] > 5 and result["chance"]["1"] == 1 / result["evaluation"]["pairs"]
    assert [line["step"] for line in log_of(out, "evaluation")] == [20, 40, 60]
    for name in ("run.toml", "environment.json", "contact.json", "curves.png", "report.html"):
        assert (out / name).stat().st_size > 0
    assert config.read(out / "run.toml").schedule.steps == 60


@pytest.mark.slow
def test_the_log_says_how_long_steps_wait_for_samples(pairs, tmp_path, monkeypatch):
    read, delay = JsonLines.read, 0.0

    def slow(self, *arguments):
        time.sleep(delay)
        return read(self, *arguments)

    monkeypatch.setattr(JsonLines, "read", slow)
    shares = []
    for delay in (0.0, 0.02):
        folder = train(run_of(pairs, tmp_path / f"slow {delay}"))
        shares.append(json.loads((folder / "result.json").read_text())["waiting_for_data"])
        assert all(0 < step["waiting_for_data"] < 1 for step in log_of(folder, "step"))
    assert shares[0] < shares[1]
    assert shares[1] > 0.5


@pytest.mark.slow
def test_a_planned_run_tells_what_its_tensors_took(pairs, tmp_path):
    """The plan predicts tensors; the whole process takes much more on a CPU."""
    plain = train(run_of(pairs, tmp_path / "plain", "schedule.steps=2"))
    assert json.loads((plain / "result.json").read_text())["step_bytes"] is None
    found = {}
    for rows in (24, 96):
        sizes = (f"batch.size={rows}", f"batch.chunk={rows}", "planned.peak_bytes=1000000")
        out = train(run_of(pairs, tmp_path / str(rows), "schedule.steps=2", "watch.report=true", *sizes))
        result = json.loads((out / "result.json").read_text())
        # Weights and two moments in fp32 are held, and a step allocates more.
        assert 12 * result["parameters"] < result["step_bytes"] < result["peak_bytes"] / 2
        found[rows] = result["step_bytes"]
    assert found[96] > found[24]
    assert "tensors of one step" in (out / "report.html").read_text()


OPTIONS = {
    "clip": [],
    "siglip": ["loss.objective=siglip"],
    "one tower for both": ["y.name=x"],
    "locked": ["x.locked=true"],
    "sgd": ["optimizer.name=sgd"],
    "an optimizer by name": ["optimizer.name=torch.optim:NAdam"],
    "average": ["optimizer.ema=0.9"],
    "growing batch": ["batch.schedule=steps", "batch.start=6"],
    "bf16": ["compute.precision=bf16"],
    "fp16": ["compute.precision=fp16"],
    "fp16, fused": ["compute.precision=fp16", "optimizer.options.fused=true"],
    "workers": ["data.workers=1"],
    "prefixes and spread": ["loss.dims=[32,16]", "loss.dim=32", "loss.spread_out=0.5"],
    "smoothing and dropping": ["loss.label_smoothing=0.1", "loss.drop_above=0.3", "loss.duplicates=positive"],
}


QUICK = ("average", "growing batch", "workers")


@pytest.mark.parametrize(
    "options",
    [pytest.param(o, id=name, marks=[pytest.mark.slow] * (name not in QUICK)) for name, o in OPTIONS.items()],
)
def test_stopped_and_resumed_is_bit_equal_to_never_stopped(pairs, tmp_path, options, monkeypatch):
    options = [*options, "x.options.dropout=0.2"]
    train(run_of(pairs, tmp_path / "whole", *options))
    stopping(monkeypatch, after=3)
    with pytest.raises(Stopped, match="after step 3") as stopped:
        train(run_of(pairs, tmp_path / "parts", *options))
    assert stopped.value.status == 128 + signal.SIGTERM
    monkeypatch.undo()
    train(run_of(pairs, tmp_path / "parts", *options))
    assert_equal(final(tmp_path / "whole"), final(tmp_path / "parts"))
    steps = [(line["step"], line["loss"]) for line in log_of(tmp_path / "parts", "step")]
    assert steps == [(line["step"], line["loss"]) for line in log_of(tmp_path / "whole", "step")]


def _train_as_rank(rank, size, pairs, out, options):
    train(run_of(pairs, out, *options))


RANK_OPTIONS = {
    "ddp": [],
    "siglip": ["loss.objective=siglip", "loss.bias=-3"],
    "one tower for both, prefixes and spread": ["y.name=x", "loss.dim=16", "loss.dims=[16,8]", "loss.spread_out=0.1"],
    "average and growing batch": ["optimizer.ema=0.9", "batch.schedule=linear", "batch.start=5"],
    "fsdp2": ["compute.sharding=fsdp2"],
    "fsdp2, fused": ["compute.sharding=fsdp2", "optimizer.options.fused=true"],
    "infonce": ["loss.objective=infonce", 'loss.directions=["x_to_y", "x_to_x", "y_to_y"]', "loss.hardness=2"],
    "nt_xent": ["loss.objective=nt_xent", "y.name=x"],
}


@pytest.mark.parametrize(
    "options",
    [pytest.param(o, id=name, marks=[pytest.mark.slow] * (name != "ddp")) for name, o in RANK_OPTIONS.items()],
)
def test_any_number_of_ranks_trains_to_the_same_parameters(world, pairs, tmp_path, options):
    alone = [option for option in options if "fsdp2" not in option]
    train(run_of(pairs, tmp_path / "1", *alone))
    for size in (2, 3):
        world.run(size, _train_as_rank, str(pairs), str(tmp_path / str(size)), options)
        assert_close_runs(tmp_path / "1", tmp_path / str(size))


def _train_on_node(rank, size, pairs, out, options):
    # Two nodes of two ranks each.
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    train(run_of(pairs, out, *options))


@pytest.mark.slow
def test_hybrid_sharding_trains_to_the_same_parameters(world, pairs, tmp_path):
    train(run_of(pairs, tmp_path / "1"))
    world.run(4, _train_on_node, str(pairs), str(tmp_path / "4"), ["compute.sharding=hsdp"])
    assert_close_runs(tmp_path / "1", tmp_path / "4")


def test_hybrid_sharding_needs_nodes_of_equal_size(monkeypatch):
    for local in ("", "3"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        with pytest.raises(ValueError, match=r'"hsdp", with 4 ranks and LOCAL_WORLD_SIZE (3|not set).*choose "fsdp2"'):
            distributed._nodes_and_ranks(distributed.Ranks(torch.device("cpu"), None, 0, 4))
    for local, expected in (("2", (2, 2)), ("4", (4,))):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        assert distributed._nodes_and_ranks(distributed.Ranks(torch.device("cpu"), None, 0, 4)) == expected


def assert_close_runs(a, b):
    """Compare parameters after six steps: summation order changes the last digits, and the division of Adam enlarges that."""
    for whole, parts in zip(log_of(a, "step"), log_of(b, "step"), strict=True):
        assert whole["batch"] == parts["batch"]
        assert whole["loss"] == pytest.approx(parts["loss"], rel=1e-4)
        assert whole["recall"] == pytest.approx(parts["recall"], abs=0.05)
    x, y = json.loads((a / "result.json").read_text()), json.loads((b / "result.json").read_text())
    assert x["evaluation"]["x_median_rank"] == pytest.approx(y["evaluation"]["x_median_rank"], rel=0.1)
    first, second = whole_tensors(a), whole_tensors(b)
    assert first.keys() == second.keys()
    for name in first:
        assert (first[name] - second[name]).abs().max() < 2e-4, name


def whole_tensors(out):
    """Return the parameters of a run's newest checkpoint, written by any number of ranks."""
    run = config.read(out / "run.toml", ["compute.sharding=ddp"])
    from megabatch.training.inference import opened

    with opened(out, trust_code=True) as parts:
        assert parts.run.out == run.out
        return {name: tensor.clone() for name, tensor in parts.model.state_dict().items()}


def test_another_number_of_ranks_goes_on_with_the_same_data(world, pairs, tmp_path, monkeypatch):
    train(run_of(pairs, tmp_path / "whole"))
    stopping(monkeypatch, after=3)
    with pytest.raises(Stopped):
        train(run_of(pairs, tmp_path / "parts"))
    monkeypatch.undo()
    world.run(2, _train_as_rank, str(pairs), str(tmp_path / "parts"), [])
    assert_close_runs(tmp_path / "whole", tmp_path / "parts")


def test_killed_in_mid_run_and_resumed_is_bit_equal(pairs, tmp_path):
    # All in separate processes: settings of other tests in this process may change the order of a sum.
    whole, parts = (start_training(pairs, tmp_path, name) for name in ("whole", "parts"))
    wait_for(lambda: checkpoint.newest(tmp_path / "parts" / "checkpoints") is not None, parts)
    parts.process.kill()
    assert parts.wait() == -signal.SIGKILL
    step = checkpoint.read_metadata(checkpoint.newest(tmp_path / "parts" / "checkpoints"))["step"]
    assert 0 < step <= 40
    for command in (whole, start_training(pairs, tmp_path, "parts")):
        assert command.wait() == 0, command.stderr
    assert_equal(final(tmp_path / "whole"), final(tmp_path / "parts"))


def start_training(pairs, folder, name):
    options = ["schedule.steps=40", "checkpoint.every=5", "x.options.dropout=0.2", "compute.threads=1"]
    (folder / f"{name}.toml").write_text(config.as_toml(run_of(pairs, folder / name, *options)))
    return Command(folder / f"printed by {name}", "train", "--trust-code", folder / f"{name}.toml")


def wait_for(condition, command, seconds=600):
    end = time.monotonic() + seconds
    while not condition():
        assert command.process.is_alive(), command.stderr
        assert time.monotonic() < end
        time.sleep(0.005)


def test_out_of_memory_is_survived_with_smaller_chunks(pairs, tmp_path):
    options = ["x.name=small_towers:greedy", 'x.options={"limit": 5}', "batch.chunk=24"]
    with pytest.warns(UserWarning, match="chunk"):
        train(run_of(pairs, tmp_path / "capped", *options))
    train(run_of(pairs, tmp_path / "free"))
    capped, free = whole_tensors(tmp_path / "capped"), whole_tensors(tmp_path / "free")
    for name in free:
        assert torch.allclose(capped[name], free[name], atol=1e-5), name


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_samples(tmp_path):
    poisoned = [*PAIRS[:60], ("X marks the spot", "the spot"), *PAIRS[60:]]
    pairs = write_pairs(tmp_path / "pairs.jsonl", poisoned)
    options = ["x.name=small_towers:poisoned", "data.held_out=0", "checkpoint.every=1", "batch.size=10", "schedule.steps=30"]
    with pytest.raises(Stopped, match="the weights were not updated") as stopped:
        train(run_of(pairs, tmp_path / "run", *options))
    assert stopped.value.status == 1
    (told,) = (tmp_path / "run").glob("nonfinite-step-*.json")
    facts = json.loads(told.read_text())
    assert any(key.endswith(":61") for key in facts["keys"]) and len(facts["keys"]) == 10
    assert all(torch.isfinite(t).all() for t in final(tmp_path / "run").values())


def test_unreadable_samples_are_skipped_named_and_counted_up_to_a_limit(pairs, tmp_path):
    lines = pairs.read_text().splitlines()
    lines[10], lines[20], lines[30] = "{", '{"query": "alone"}', ""
    pairs.write_text("\n".join(lines) + "\n")
    out = train(run_of(pairs, tmp_path / "run", "data.held_out=0", "schedule.samples=100", "evaluate.every=2"))
    bad = log_of(out, "bad")
    assert json.loads((out / "result.json").read_text())["bad"] == len(bad) >= 2
    assert any(":11" in line["key"] for line in bad)
    with pytest.raises(Stopped, match=r"data\.max_bad allows 1"):
        train(run_of(pairs, tmp_path / "strict", "data.held_out=0", "data.max_bad=1", "schedule.samples=100"))


def test_classification_accumulates_and_reports_accuracy(tmp_path):
    labels = [pair[0].split()[0] for pair in PAIRS]
    pairs = write_pairs(tmp_path / "pairs.jsonl", PAIRS, label=labels)
    options = ["loss.objective=classify", "data.label=label", "schedule.steps=80", "optimizer.lr=0.03"]
    out = train(run_of(pairs, tmp_path / "run", *options))
    found = json.loads((out / "result.json").read_text())["evaluation"]
    assert found["accuracy"] > 0.3 and log_of(out, "step")[-1]["accuracy"] > 0.3
    with pytest.raises(ValueError, match=r"data\.label"):
        train(run_of(pairs, tmp_path / "none", "loss.objective=classify"))


@pytest.mark.slow
def test_each_sample_has_its_own_hard_negatives(tmp_path):
    negatives = [["something else", "nothing"][: i % 3] for i in range(len(PAIRS))]
    pairs = write_pairs(tmp_path / "pairs.jsonl", PAIRS, negatives=negatives)
    common = ("loss.objective=infonce", "data.negatives=negatives", "loss.duplicates=negative")
    variants = {
        "all": (),
        "own": ("loss.in_batch=false",),
        "weighted": ("loss.hardness=5", "loss.hardness_on=hard"),
        "sides": ('loss.directions=["x_to_y", "y_to_y"]',),
    }
    for name, options in variants.items():
        train(run_of(pairs, tmp_path / name, *common, *options))
    first = {name: log_of(tmp_path / name, "step")[0]["loss"] for name in variants}
    # Fewer candidates, a larger weight of hard ones, more candidates.
    assert first["own"] < first["all"] < first["sides"]
    assert first["weighted"] != first["all"]


def test_hard_negatives_join_the_documents(tmp_path):
    negatives = [["something else", "nothing"][: i % 3] for i in range(len(PAIRS))]
    pairs = write_pairs(tmp_path / "pairs.jsonl", PAIRS, negatives=negatives)
    with_them = train(run_of(pairs, tmp_path / "with", "data.negatives=negatives"))
    without = train(run_of(pairs, tmp_path / "without", "data.negatives=false"))
    assert log_of(with_them, "step")[0]["loss"] > log_of(without, "step")[0]["loss"]


def test_another_configuration_does_not_go_on_with_a_run(pairs, tmp_path):
    train(run_of(pairs, tmp_path / "run"))
    with pytest.raises(ValueError, match=r"optimizer\.lr was 0\.01, is 0\.02.*--fresh"):
        train(run_of(pairs, tmp_path / "run", "optimizer.lr=0.02"))
    train(run_of(pairs, tmp_path / "run", "batch.chunk=5", "watch.tensorboard=true"))
    train(run_of(pairs, tmp_path / "run", "optimizer.lr=0.02"), fresh=True)
    assert len(log_of(tmp_path / "run", "step")) == 6


@pytest.mark.parametrize("source", ["{folder}/pairs.jsonl", "{folder}/*.jsonl", "{folder}/{{more,pairs}}.jsonl"])
def test_training_data_are_not_held_out_too(tmp_path, source):
    pairs, _ = write_pairs(tmp_path / "pairs.jsonl", PAIRS), write_pairs(tmp_path / "more.jsonl", PAIRS)
    with pytest.raises(ValueError, match=r"data\.held_out is .*pairs\.jsonl too.*other files"):
        train(run_of(source.format(folder=tmp_path), tmp_path / "run", f"data.held_out={pairs}"))


@pytest.mark.parametrize("stop", [None, 3], ids=["finished", "stopped"])
@pytest.mark.parametrize("which", ["training", "held_out"])
def test_a_run_does_not_go_on_with_data_of_another_size(pairs, tmp_path, monkeypatch, which, stop):
    other = write_pairs(tmp_path / "other.jsonl", PAIRS[:30])
    run = run_of(pairs, tmp_path / "run", f"data.held_out={other}")
    if stop is None:
        train(run)
    else:
        stopping(monkeypatch, after=stop)
        with pytest.raises(Stopped):
            train(run)
        monkeypatch.undo()
    before = log_of(run.out, "step")
    changed, counts = (pairs, "100, are 80") if which == "training" else (other, "30, are 80")
    write_pairs(changed, PAIRS[:80])
    with pytest.raises(ValueError, match=f"{which.replace('_', ' ')} samples were {counts}.*--fresh"):
        train(run)
    assert log_of(run.out, "step") == before
    train(run, fresh=True)


def test_checkpoints_that_do_not_count_the_samples_are_resumed(pairs, tmp_path, monkeypatch):
    train(run_of(pairs, tmp_path / "whole"))
    metadata = Training.metadata
    counts = {"training_samples", "held_out_samples"}
    monkeypatch.setattr(Training, "metadata", lambda self: {k: v for k, v in metadata(self).items() if k not in counts})
    stopping(monkeypatch, after=3)
    with pytest.raises(Stopped):
        train(run_of(pairs, tmp_path / "parts"))
    monkeypatch.undo()
    train(run_of(pairs, tmp_path / "parts"))
    assert_equal(final(tmp_path / "whole"), final(tmp_path / "parts"))


@pytest.mark.parametrize("objective", ["clip", "siglip", "nt_xent"])
def test_a_contrastive_batch_of_one_pair_is_refused(world, pairs, tmp_path, objective):
    run = run_of(pairs, tmp_path / "run", f"loss.objective={objective}", "batch.size=2")
    for batch in ({"size": 1}, {"size": 1, "per_device": 1}):
        alone = dataclasses.replace(run, batch=dataclasses.replace(run.batch, **batch))
        with pytest.raises(ValueError, match=r"batch\.size is 1: must be at least 2 .*raise it"):
            train(alone)
    if objective != "nt_xent":
        run_of(pairs, tmp_path / "run", f"loss.objective={objective}", "batch.size=1", "data.negatives=negatives")
    world.run(2, _train_as_rank, str(pairs), str(tmp_path / "run"), [f"loss.objective={objective}", "batch.per_device=1"])


def test_a_batch_of_one_sample_is_classified(pairs, tmp_path):
    run_of(pairs, tmp_path / "run", "loss.objective=classify", "data.label=label", "batch.size=1")


def several_documents(path, **more):
    """Write pairs in which each query has four documents."""
    return write_pairs(path, [(query, f"{n} of {document}") for query, document in PAIRS[:30] for n in range(4)], **more)


def test_documents_of_one_query_are_no_negatives_on_any_number_of_ranks(world, tmp_path):
    # Hard negatives, too, may be documents of other rows of the batch, on any rank.
    negatives = [[f"{n} of {PAIRS[(i // 4 + 1) % 30][1]}" for n in range(i % 3)] for i in range(120)]
    pairs = several_documents(tmp_path / "pairs.jsonl", negatives=negatives)
    options = ["data.negatives=negatives", "batch.size=96"]
    train(run_of(pairs, tmp_path / "1", *options))
    for size in (2, 3):
        world.run(size, _train_as_rank, str(pairs), str(tmp_path / str(size)), options)
        assert_close_runs(tmp_path / "1", tmp_path / str(size))
    train(run_of(pairs, tmp_path / "all", *options, "loss.duplicates=negative"))
    assert log_of(tmp_path / "1", "step")[0]["loss"] < log_of(tmp_path / "all", "step")[0]["loss"]


def test_the_loss_counts_a_query_and_its_documents_as_one(pairs, tmp_path):
    # Documents that all differ, of queries that are all equal: no row has a negative.
    pairs = write_pairs(tmp_path / "one.jsonl", [("what is it", document) for _, document in PAIRS])
    out = train(run_of(pairs, tmp_path / "run", "data.held_out=0"))
    assert {step["loss"] for step in log_of(out, "step")} == {0}


def test_recall_is_that_of_images_with_any_of_their_captions(tmp_path):
    rng = random.Random(0)
    rows = []
    for number in range(40):
        colour = tuple(rng.choice((0, 128, 255)) for _ in range(3))
        Image.new("RGB", (8, 8), colour).save(tmp_path / f"{number}.png")
        rows += [f"{number}.png,{word} of {number}" for word in WORDS[: 2 + number % 4]]
    (tmp_path / "pairs.csv").write_text("image,caption\n" + "\n".join(rows) + "\n")
    options = ["x.name=small_towers:patches", "data.held_out=0.5"]
    out = train(run_of(tmp_path / "pairs.csv", tmp_path / "run", *options, steps=3))
    result = json.loads((out / "result.json").read_text())
    found = result["evaluation"]
    with opened(out, trust_code=True) as parts:
        embedded = embed_source(parts, parts.held_out, 1000)
        owners = [parts.held_out.read(*place).x_image for place in embedded.at]
    z = embedded.x @ embedded.y.T
    images = [owners.index(owner) for owner in owners]
    first = sorted(set(images))
    assert found["pairs"] == len(owners) > 1.5 * len(first) > 15
    assert result["chance"]["1"] == pytest.approx(1 / len(first))
    for k in (1, 5, 10):
        # Of different images, and of captions of other images, those at least as similar as the best that is right.
        text_hits = [sum(bool(z[i, j] >= z[images[j], j]) for i in first if i != images[j]) < k for j in range(len(owners))]
        assert found["y_to_x"][str(k)] == pytest.approx(sum(text_hits) / len(owners))
        image_hits = 0
        for i in first:
            best = max(float(z[i, j]) for j in range(len(owners)) if images[j] == i)
            image_hits += sum(float(z[i, j]) >= best for j in range(len(owners)) if images[j] != i) < k
        assert found["x_to_y"][str(k)] == pytest.approx(image_hits / len(first))
    assert 0 < found["y_to_x"]["5"] < 1


def test_large_steps_leave_the_weights_alone(pairs, tmp_path):
    train(run_of(pairs, tmp_path / "plain"))
    out = train(run_of(pairs, tmp_path / "large", "evaluate.large=[48, 200]"))
    flat = json.loads((out / "result.json").read_text())["flat"]
    assert [step["pairs"] for step in flat] == [48, 200] and all(step["chunk"] == 8 for step in flat)
    assert_equal(final(tmp_path / "plain"), final(out))


def test_weights_and_biases_hears_of_steps_and_evaluations(pairs, tmp_path, monkeypatch):
    told = []

    class Stub:
        def log(self, numbers, step):
            told.append((step, numbers))

        def finish(self):
            told.append("finished")

    module = types.ModuleType("wandb")
    module.init = lambda **options: Stub()
    monkeypatch.setitem(sys.modules, "wandb", module)
    train(run_of(pairs, tmp_path / "run", "watch.wandb=project", "evaluate.every=3"))
    assert [entry[0] for entry in told[:-1]] == [1, 2, 3, 3, 4, 5, 6, 6] and told[-1] == "finished"
    assert "held-out/x_to_y@1" in told[3][1] and "train/loss" in told[0][1]


def test_what_is_not_installed_is_named(pairs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"watch\.wandb needs wandb .*pip install wandb"):
        train(run_of(pairs, tmp_path / "run", "watch.wandb=project"))


def _error_as_rank(rank, size, pairs, out, options):
    return error_of(lambda: train(run_of(pairs, out, *options)))


def test_batch_norm_that_cannot_be_synchronised_is_refused(world, pairs, tmp_path):
    options = ["x.name=small_towers:normed", "compute.sync_batchnorm=true"]
    for message in world.run(2, _error_as_rank, str(pairs), str(tmp_path / "run"), options):
        assert "on GPUs only" in message


def test_a_full_disk_stops_the_run_and_keeps_the_last_checkpoint(pairs, tmp_path, monkeypatch):
    save = checkpoint.save

    def full(folder, step, *args, **options):
        if step > 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        return save(folder, step, *args, **options)

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(OSError, match="No space left"):
        train(run_of(pairs, tmp_path / "run", "checkpoint.every=2"))
    assert checkpoint.newest(tmp_path / "run" / "checkpoints").name.endswith("2")
    monkeypatch.undo()
    train(run_of(pairs, tmp_path / "run", "checkpoint.every=2"))
    assert len({line["step"] for line in log_of(tmp_path / "run", "step")}) == 6


def test_threads_are_those_of_the_run_for_its_time_alone(pairs, tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train(run_of(pairs, tmp_path / "run", "compute.threads=1", "schedule.steps=1"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_scale_is_clamped(pairs, tmp_path):
    out = train(run_of(pairs, tmp_path / "run", "loss.max_scale=5", "schedule.steps=3"))
    assert all(line["scale"] <= 5 + 1e-5 for line in log_of(out, "step"))
