"""Samples that cannot be read: each is counted once, named, and skipped, whether it is trained on or held out."""

from __future__ import annotations

import io
import json
import math
import tarfile
from pathlib import Path

import pytest
import torch
from small_runs import PAIRS, assert_equal, final, log_of, run_of, stopping, train, write_pairs

from megabatch.cli import main
from megabatch.data.sampler import Order
from megabatch.measuring.noise.branch import BranchOptions, branch
from megabatch.measuring.noise.probes import Probes
from megabatch.training import checkpoint
from megabatch.training.build import assemble
from megabatch.training.distributed import ranks
from megabatch.training.inference import evaluate
from megabatch.training.loop import Training
from megabatch.training.signals import Stopped

BROKEN = "{"


def write_broken(path, broken, count=40, **more):
    """Write pairs as JSON lines; those with an index in `broken` are not valid JSON."""
    write_pairs(path, PAIRS[:count], **more)
    lines = path.read_text().splitlines()
    path.write_text("".join((BROKEN if number in broken else line) + "\n" for number, line in enumerate(lines)))
    return path


def result_of(out):
    return json.loads((Path(out) / "result.json").read_text())


def in_step(number, size, count=40, window=30):
    """Return the indices of the samples of a step, for a run on one file with nothing held out."""
    order = Order([count], window, 0)
    return {order.at(position)[1] for position in range(number * size, (number + 1) * size)}


def test_a_bad_sample_counts_once_over_all_epochs(tmp_path):
    pairs = write_broken(tmp_path / "pairs.jsonl", {3, 14, 15, 29})
    options = ["data.held_out=0", "schedule.epochs=4"]
    out = train(run_of(pairs, tmp_path / "run", *options, "data.max_bad=4"))
    assert result_of(out)["bad"] == 4
    assert sorted(line["key"] for line in log_of(out, "bad")) == [f"pairs.jsonl:{n}" for n in (15, 16, 30, 4)]
    with pytest.raises(Stopped, match=r"4 training samples cannot be read.*max_bad allows 3") as stopped:
        train(run_of(pairs, tmp_path / "strict", *options, "data.max_bad=3"))
    assert stopped.value.status == 1


def test_samples_with_equal_names_in_different_folders_are_counted_separately(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_broken(tmp_path / name / "pairs.jsonl", {5}, count=20)
    out = train(run_of(tmp_path / "{a,b}" / "pairs.jsonl", tmp_path / "run", "data.held_out=0", "schedule.epochs=3"))
    assert result_of(out)["bad"] == len(log_of(out, "bad")) == 2


def test_the_count_of_bad_samples_survives_a_resume(tmp_path, monkeypatch):
    pairs = write_broken(tmp_path / "pairs.jsonl", {3, 14, 15, 29})
    # 24 of 40 samples per step: the first two steps include all bad ones.
    options = ["data.held_out=0", "data.max_bad=4", "checkpoint.every=1"]
    train(run_of(pairs, tmp_path / "whole", *options))
    stopping(monkeypatch, after=3)
    with pytest.raises(Stopped, match="after step 3"):
        train(run_of(pairs, tmp_path / "parts", *options))
    monkeypatch.undo()
    facts = checkpoint.read_metadata(checkpoint.newest(tmp_path / "parts" / "checkpoints"))
    assert facts["unread"] == [[0, 3], [0, 14], [0, 15], [0, 29]]
    train(run_of(pairs, tmp_path / "parts", *options))
    assert result_of(tmp_path / "parts")["bad"] == len(log_of(tmp_path / "parts", "bad")) == 4
    assert_equal(final(tmp_path / "whole"), final(tmp_path / "parts"))


def _train_as_rank(rank, size, pairs, out, options):
    torch.set_num_threads(1)
    train(run_of(pairs, out, *options))


def test_ranks_count_together_and_skip_together(world, tmp_path):
    broken = in_step(1, 8) | {3}
    pairs = write_broken(tmp_path / "pairs.jsonl", broken)
    options = ["data.held_out=0", "batch.size=8", "schedule.epochs=2", f"data.max_bad={len(broken)}"]
    train(run_of(pairs, tmp_path / "1", *options))
    world.run(2, _train_as_rank, str(pairs), str(tmp_path / "2"), options)
    for out in (tmp_path / "1", tmp_path / "2"):
        assert result_of(out)["bad"] == len(log_of(out, "bad")) == len(broken)
        assert [line["step"] for line in log_of(out, "skipped")] == [2]
    losses = [[line["loss"] for line in log_of(tmp_path / name, "step")] for name in "12"]
    assert len(losses[0]) == 9
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


CONSTANT = ["data.held_out=0", "batch.size=8", "schedule.shape=constant", "schedule.warmup=0", "optimizer.ema=0.5"]


@pytest.mark.parametrize("objective", ["clip", "classify"])
def test_a_batch_without_readable_samples_is_a_step_without_an_update(tmp_path, objective, monkeypatch, capsys):
    broken = in_step(1, 8)
    labels = [pair[0].split()[0] for pair in PAIRS]
    pairs = write_broken(tmp_path / "pairs.jsonl", broken, label=labels)
    options = [*CONSTANT, *(["loss.objective=classify", "data.label=label"] if objective == "classify" else [])]
    train(run_of(pairs, tmp_path / "one", *options, steps=1))
    train(run_of(pairs, tmp_path / "two", *options, steps=2))
    assert_equal(final(tmp_path / "one"), final(tmp_path / "two"))
    assert "step 2: none of its 8 samples can be read; the weights were not updated" in capsys.readouterr().err
    assert result_of(tmp_path / "two")["steps"] == 2 and result_of(tmp_path / "two")["samples"] == 16

    out = train(run_of(pairs, tmp_path / "whole", *options, steps=4))
    assert [line["step"] for line in log_of(out, "step")] == [1, 3, 4]
    (skipped,) = log_of(out, "skipped")
    assert (skipped["step"], skipped["samples"], skipped["pairs"]) == (2, 16, 8)
    assert {line["key"] for line in log_of(out, "bad")} == {f"pairs.jsonl:{number + 1}" for number in broken}
    # Stopped at the skipped step, and resumed.
    stopping(monkeypatch, after=2)
    with pytest.raises(Stopped, match="after step 2"):
        train(run_of(pairs, tmp_path / "parts", *options, steps=4))
    monkeypatch.undo()
    train(run_of(pairs, tmp_path / "parts", *options, steps=4))
    assert_equal(final(out), final(tmp_path / "parts"))


def test_a_batch_without_readable_samples_counts_against_the_limit(tmp_path):
    pairs = write_broken(tmp_path / "pairs.jsonl", in_step(1, 8))
    with pytest.raises(Stopped, match=r"8 training samples cannot be read.*max_bad allows 7"):
        train(run_of(pairs, tmp_path / "run", *CONSTANT, "data.max_bad=7", steps=4))
    assert len(log_of(tmp_path / "run", "bad")) == 8


def test_measurements_continue_after_a_batch_without_readable_samples(tmp_path):
    """The first probe reads samples after those of the run, the first branch those after its checkpoint; both get a bad batch."""
    write_broken(tmp_path / "test.jsonl", set())
    pairs = write_broken(tmp_path / "pairs.jsonl", in_step(1, 8) | in_step(6, 8))
    options = [*CONSTANT, f"data.held_out={tmp_path / 'test.jsonl'}"]
    run = run_of(pairs, tmp_path / "run", *options, steps=5)
    with ranks(run.compute) as here:
        train(run_of(pairs, tmp_path / "first", *options, steps=1))
        begin = checkpoint.newest(tmp_path / "first" / "checkpoints")
        training = Training(assemble(run, here), tmp_path / "run")
        with Probes(training, window=8, last=2) as probes:
            for training.number in (1, 2):
                probes(None)
            # The second probe reads new batches, not the rest of those of the first one.
            assert len(probes.steps) == 1 and all(map(math.isfinite, probes.steps[0]))
        found = branch(training, begin, BranchOptions((8,), updates=3, repeats=1))
    assert [math.isfinite(each.loss) for each in found] == [True]


@pytest.mark.parametrize("workers", [0, 1])
def test_data_without_readable_samples_ends_the_run_and_names_them_in_the_log(tmp_path, workers):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"query": f"q{i}", "positive": ""}) + "\n" for i in range(20)))
    with pytest.raises(Stopped, match="none of the 20 training samples can be read"):
        train(run_of(path, tmp_path / "run", *CONSTANT, f"data.workers={workers}", steps=9))
    assert len(log_of(tmp_path / "run", "bad")) == 20


@pytest.mark.parametrize("objective", ["clip", "classify"])
def test_held_out_samples_that_cannot_be_read_are_counted_and_named(tmp_path, objective, capsys):
    labels = [pair[0].split()[0] for pair in PAIRS]
    pairs = write_broken(tmp_path / "pairs.jsonl", set(), label=labels)
    held_out = write_broken(tmp_path / "test.jsonl", {2, 5, 7}, count=20, label=labels)
    options = [f"data.held_out={held_out}", "evaluate.every=2", "data.max_bad=0"]
    options += ["loss.objective=classify", "data.label=label"] if objective == "classify" else ["watch.report=true"]
    out = train(run_of(pairs, tmp_path / "run", *options, steps=4))
    assert "3 of 20 held-out samples cannot be read" in capsys.readouterr().err
    bad = log_of(out, "bad")
    assert {line["key"] for line in bad} == {f"test.jsonl:{n}" for n in (3, 6, 8)} and len(bad) == 3
    assert {line["split"] for line in bad} == {"held-out"}
    result = result_of(out)
    assert result["bad"] == 0
    assert (result["evaluation"]["bad"], result["evaluation"]["pairs"]) == (3, 17)
    assert [line["bad"] for line in log_of(out, "evaluation")] == [3, 3]
    if objective == "clip":
        assert "3 held-out samples could not be read" in (out / "report.html").read_text()

    found = evaluate(out, trust_code=True)
    assert (found["bad"], found["pairs"]) == (3, 17)
    assert {entry["key"] for entry in found["unreadable"]} == {f"test.jsonl:{n}" for n in (3, 6, 8)}
    main(["evaluate", "--trust-code", str(out)])
    printed = capsys.readouterr().out
    assert "3 of 20 held-out samples could not be read" in printed and "test.jsonl:6: line is not valid JSON" in printed


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["clip", "classify"])
def test_held_out_data_without_readable_samples_does_not_end_the_training(tmp_path, objective, capsys):
    labels = [pair[0].split()[0] for pair in PAIRS]
    pairs = write_broken(tmp_path / "pairs.jsonl", set(), label=labels)
    held_out = tmp_path / "test.jsonl"
    held_out.write_text('{"query": "q", "positive": "", "label": ""}\n' * 5)
    options = [f"data.held_out={held_out}", "evaluate.every=2"]
    options += ["loss.objective=classify", "data.label=label"] if objective == "classify" else ["watch.report=true"]
    out = train(run_of(pairs, tmp_path / "run", *options, steps=3))
    assert "5 of 5 held-out samples cannot be read" in capsys.readouterr().err
    assert result_of(out)["evaluation"] is None and len(log_of(out, "bad")) == 5
    assert (out / "report.html").exists() == (objective == "clip")
    with pytest.raises(ValueError, match=r"none of 5 held-out samples can be read; the first one: test\.jsonl:"):
        evaluate(out, trust_code=True)


def write_shard(path, numbers, broken=None):
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            for side, text in zip(("q.txt", "a.txt"), PAIRS[number], strict=True):
                info = tarfile.TarInfo(f"{number:03d}.{side}")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text.encode()))
    if broken is not None:
        # Each member is one block of header and one block of data.
        data = bytearray(path.read_bytes())
        data[broken * 4 * 512] ^= 1
        path.write_bytes(data)
    return path


SHARDS = ["data.x=q.txt", "data.y=a.txt", "batch.size=8"]


@pytest.mark.parametrize("held_out", [0, 0.3, 0.6])
def test_a_damaged_shard_is_reported_whatever_is_held_out(tmp_path, held_out, capsys):
    write_shard(tmp_path / "a.tar", range(40), broken=2)
    write_shard(tmp_path / "b.tar", range(40, 70))
    out = train(run_of(tmp_path / "*.tar", tmp_path / "run", *SHARDS, f"data.held_out={held_out}", steps=2))
    printed = capsys.readouterr().err
    assert "damaged: a.tar: the header at byte 4096 is broken" in printed
    assert "2 samples can be read, at least 38 are lost (the undamaged files hold 30)" in printed
    (damage,) = log_of(out, "damage")
    assert (damage["file"], damage["read"], damage["lost"]) == ("a.tar", 2, 38)
    assert result_of(out)["bad"] == 38 and len(result_of(out)["damage"]) == 1
    # Lost samples count from the start.
    with pytest.raises(Stopped, match=r"38 training samples cannot be read.*max_bad allows 37; damaged: a\.tar"):
        train(run_of(tmp_path / "*.tar", tmp_path / "strict", *SHARDS, f"data.held_out={held_out}", "data.max_bad=37", steps=2))
    assert log_of(tmp_path / "strict", "damage") and not log_of(tmp_path / "strict", "step")


def test_many_damaged_shards_take_few_lines_on_the_terminal_and_all_are_in_the_log(tmp_path, capsys):
    for number in range(13):
        write_shard(tmp_path / f"{number:02d}.tar", range(number * 3, number * 3 + 3), broken=2)
    out = train(run_of(tmp_path / "*.tar", tmp_path / "run", *SHARDS, steps=1))
    lines = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert len(lines) == 11 and "3 more damaged files" in lines[-1]
    assert len(log_of(out, "damage")) == 13


def test_damage_of_a_held_out_source_is_reported_and_does_not_count(tmp_path, capsys):
    write_shard(tmp_path / "train.tar", range(40))
    write_shard(tmp_path / "test.tar", range(40, 60), broken=10)
    options = [*SHARDS, f"data.held_out={tmp_path / 'test.tar'}", "data.max_bad=0"]
    out = train(run_of(tmp_path / "train.tar", tmp_path / "run", *options, steps=1))
    assert "damaged: test.tar" in capsys.readouterr().err
    assert result_of(out)["bad"] == 0
    main(["evaluate", "--trust-code", str(out)])
    assert "damaged: test.tar" in capsys.readouterr().out


def test_a_run_can_be_evaluated_and_resumed_after_columns_of_negatives_were_added(tmp_path, monkeypatch):
    negatives = [["something else"]] * len(PAIRS)
    pairs = write_pairs(tmp_path / "pairs.jsonl", PAIRS)
    stopping(monkeypatch, after=2)
    with pytest.raises(Stopped, match="after step 2"):
        train(run_of(pairs, tmp_path / "run", steps=4))
    monkeypatch.undo()
    write_pairs(tmp_path / "pairs.jsonl", PAIRS, negatives=negatives)
    assert evaluate(tmp_path / "run", trust_code=True)["pairs"] > 5
    with pytest.raises(ValueError, match=r"data\.negatives=false to leave them out"):
        train(run_of(pairs, tmp_path / "run", steps=4))
    train(run_of(pairs, tmp_path / "run", "data.negatives=false", steps=4))
    assert len(log_of(tmp_path / "run", "step")) == 4
