"""Whole plans: numbers, reasons, alternatives and the files they become. Memory is predicted by a formula."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_works import Stated, small_work
from torch import nn

from megabatch import config
from megabatch.costs.counting import Call, Pass, Work
from megabatch.costs.memory import PeakMemory
from megabatch.costs.strategy import Strategy
from megabatch.planning.estimator import Tools
from megabatch.planning.plan import KEYS, Plan
from megabatch.planning.planner import plan
from megabatch.planning.reading import ReadingRate
from megabatch.planning.report import as_toml, headline, plan_report, reasons, screen, write
from megabatch.planning.sides import both_sides
from megabatch.planning.workload import Workload, workload
from megabatch.recipes import updates_needed
from megabatch.reporting.markdown import as_markdown
from megabatch.reporting.terminal import print_report

VIT_L = (small_work(162e9, 0.74e9, 1.8e9, 729, 304_000_000), small_work(13.3e9, 0.084e9, 0.66e9, 370, 124_000_000))


def predict(request, run, work, machine):
    """Return a memory model: 16 bytes per parameter, and a graph in proportion to the bytes that a forward pass moves."""
    parameters = sum(tower.parameters for tower in work.towers)
    row = 0.4 * sum(tower.forward.bytes for tower in work.towers)

    def predicted(strategy):
        state = 16 * parameters // strategy.owners
        graph = int(row * (0.15 if strategy.checkpointing else 1) * strategy.chunk)
        kept = 0 if strategy.accumulate else max(0, min(strategy.keep, strategy.chunks) - 1) * graph
        embeddings = strategy.shard * run.loss.dim * 24
        parts = {"state": state, "activations": graph + kept, "embeddings": embeddings}
        peak = sum(parts.values())
        return Stated(
            max(peak, int(1.2 * state)),
            int(1.03 * max(peak, int(1.2 * state))),
            parts,
            "backward",
            {"backward": peak, "optimizer step": int(1.2 * state)},
        )

    return predicted


def test_backward_grows_with_the_chunk_also_where_the_optimizer_step_is_the_peak_at_few_rows():
    # 100 GB of state, 1 MB of graph per row: the peak is in the optimizer step at 32 and 64 rows, and in backward at a million.
    def predicted(strategy):
        phases = {"backward": 10**6 * strategy.chunk, "optimizer step": 10**11}
        return Stated(max(phases.values()), max(phases.values()), {}, "", phases)

    peaks = PeakMemory(predicted)
    assert peaks(Strategy(1, 64, 64)) == 10**11
    assert peaks(Strategy(1, 10**6, 10**6)) == 10**12


def test_a_memory_model_below_a_traced_step_is_raised_to_it():
    peaks = PeakMemory(lambda strategy: Stated(strategy.chunk**2, strategy.chunk**2, {}, "", {"backward": strategy.chunk**2}))
    strategy = Strategy(1, 1024, 1024)
    assert peaks(strategy) < 1024**2
    assert peaks.correct(strategy, 1024**2)
    assert peaks(strategy) >= 1024**2
    assert not peaks.correct(strategy, 1024**2)


def counted(request, run, precision, machine):
    return Workload(VIT_L, (nn.Identity(), nn.Identity()), (lambda rows: rows, lambda rows: rows))


TOOLS = Tools(counted, predict)
# The towers are built in, so their work can be counted.
SMALL = Tools(workload, predict)
MEDICAL = {"data": "10M", "epochs": 30, "gpu": "8xA100-80GB", "source": "shards/{0000..0999}.tar"}


@pytest.fixture(scope="module")
def medical():
    return plan("ViT-L/14", tools=TOOLS, **MEDICAL)


def test_the_batch_comes_from_the_problem_and_the_chunk_from_memory(medical):
    # 300 M seen / (976 · 150 ** 0.488 = 11,267 updates) = 26,626 at most; the middle of it and 4,096 is 10,443, near 8,192.
    assert medical.batch == 8_192
    assert medical.number("steps").value == 36_622
    small, large = (plan("ViT-L/14", tools=TOOLS, **{**MEDICAL, "gpu": gpu}) for gpu in ("8xA100-40GB", "8xH200"))
    assert small.batch == large.batch == medical.batch
    assert small.strategy.chunk < medical.strategy.chunk < large.strategy.chunk


def test_the_plan_fits_and_its_numbers_agree(medical):
    strategy, run = medical.strategy, medical.run
    assert strategy.shard * strategy.ranks == medical.batch == run.batch.size
    assert medical.peak_bytes <= medical.limit_bytes == int(0.8 * medical.device_bytes)
    assert (run.batch.chunk, run.batch.keep) == (strategy.chunk, strategy.keep)
    assert (run.planned.peak_bytes, run.planned.seconds_per_step) == (medical.peak_bytes, medical.seconds_per_step)
    assert sum(medical.time.values()) == pytest.approx(medical.seconds_per_step)
    assert sum(medical.memory.values()) == medical.peak_bytes
    assert run.schedule.samples == 300_000_000
    assert run.loss.duplicates == "mask"
    assert all(number.why and number.source and number.confidence for number in medical.numbers)


def test_alternatives_stand_beside_the_plan_with_what_they_cost(medical):
    ways = {way.name: way for way in medical.alternatives}
    chosen = ways["the plan"]
    assert ways["half the batch"].updates == pytest.approx(2 * chosen.updates, abs=1)
    assert ways["twice the batch"].batch == 2 * medical.batch
    assert ways["one GPU more"].gpus == 9
    assert ways["one GPU more"].batch % 9 == 0
    assert ways["twice the GPUs"].hours < 0.6 * chosen.hours
    assert ways["half the chunk, nothing kept"].peak_bytes < chosen.peak_bytes
    assert chosen.cost == pytest.approx(8 * chosen.hours)
    # The batch if memory decided it: far fewer negatives, and little time saved.
    trap = ways["what fits without chunks"]
    assert trap.batch < 4096 and trap.peak_bytes <= medical.limit_bytes
    assert trap.hours > 0.6 * chosen.hours


def test_a_price_makes_the_cost_money():
    way = plan("ViT-L/14", tools=TOOLS, price=2.5, **MEDICAL).alternatives[0]
    assert way.cost == pytest.approx(2.5 * 8 * way.hours)


def test_changes_name_numbers(medical):
    changes = "\n".join(medical.changes)
    assert "75,000,000 samples seen: a batch of 4,096" in changes
    assert "locked" in changes and "half the memory" in changes


def convolutional(request, run, precision, machine):
    """Count convolutions, in the memory format of the run, beside element-wise operations."""
    kind = "direct convolution" if run.compute.channels_last else "convolution"
    costs = Pass((Call(kind, 5e9, 1e8, 0.0), Call("elementwise", 0.0, 5e8, 0.0)))
    return Workload((Work(costs, costs, 10**6, 10**6),) * 2, (nn.Identity(),) * 2, (lambda rows: rows,) * 2)


def test_changes_name_what_compiling_and_the_memory_format_would_bring():
    asked = {"data": "10M", "gpu": "H200", "batch": 4096}
    slow = Tools(convolutional, predict, lambda run, towers: ReadingRate(1.0, "slowly"))
    fast = slow._replace(reading=lambda run, towers: ReadingRate(0.0, "in no time"))
    planned = plan("cnn + text", **asked, tools=fast)
    changes = "\n".join(planned.changes)
    assert re.search(r"With compute.compile: at most [12]\.\d\d times as fast, .* take \d\d% of the step", changes)
    assert re.search(r"With compute.channels_last: [12]\.\d\d times as fast", changes)
    both = dataclasses.replace(planned.run, compute=config.Compute(compile=True, channels_last=True))
    assert "With compute." not in "\n".join(plan(both, **asked, tools=fast).changes)
    waiting = "\n".join(plan("cnn + text", **asked, tools=slow).changes)
    assert "With compute." not in waiting, "the step waits for data"
    assert "data.decode" not in waiting, "these towers do not let the device decode"
    decoded = slow._replace(
        reading=lambda run, towers: ReadingRate(*((0.0, "", 1e-9) if run.data.decode == "device" else (1.0, "")))
    )
    assert re.search(
        r'With data.decode="device", .*: [\d.]+ times as fast', "\n".join(plan("cnn + text", **asked, tools=decoded).changes)
    )
    assert "data.decode" not in "\n".join(plan("cnn + text", **asked, tools=fast).changes)


def test_gradients_in_bf16_are_named_where_they_bring_time_and_kept_where_the_run_asks_for_them(medical):
    # One gigabit per second between the GPUs: most of a step is the exchange of gradients.
    slow = {**MEDICAL, "interconnect": "1GbE", "nodes": 8}
    plain = plan("ViT-L/14", tools=TOOLS, **slow)
    assert re.search(r'With compute.gradient_exchange="bf16": 1\.[5-9]\d times as fast', "\n".join(plain.changes))
    assert "gradient_exchange" not in "\n".join(medical.changes) + as_toml(plain)
    asked = dataclasses.replace(plain.run, compute=dataclasses.replace(plain.run.compute, gradient_exchange="bf16"))
    result = plan(asked, tools=TOOLS, **slow)
    assert result.strategy.gradient_exchange == result.run.compute.gradient_exchange == "bf16"
    assert result.time["gradients' exchange"] == pytest.approx(plain.time["gradients' exchange"] / 2, rel=0.01)
    assert "gradient_exchange" not in "\n".join(result.changes) and 'gradient_exchange = "bf16"' in as_toml(result)
    assert Plan.from_json(result.as_json()) == result


@pytest.mark.parametrize(("objective", "exchange"), [("clip", "bf16"), ("classify", None)])
def test_a_classifier_that_must_be_sharded_does_not_keep_gradients_in_bf16(objective, exchange):
    large = (small_work(16e12, 40e9, 40e9, 1000, 7_000_000_000),)
    tools = Tools(lambda request, run, precision, machine: Workload(large, (nn.Identity(),), (lambda rows: rows,)), predict)
    asked = config.build(config.EMBEDDED, [f"loss.objective={objective}", "compute.gradient_exchange=bf16", "evaluate.large=[]"])
    result = plan(asked, data="10M", gpu="8xH100", batch=4096, tools=tools)
    assert (result.run.compute.sharding, result.run.compute.gradient_exchange) == ("fsdp2", exchange)
    assert ("compute.gradient_exchange: bf16 → none" in result.edits) == (exchange is None)


def test_a_model_that_must_be_sharded_does_not_keep_channels_last():
    large = (small_work(16e12, 40e9, 40e9, 1000, 7_000_000_000),)
    tools = Tools(lambda request, run, precision, machine: Workload(large, (nn.Identity(),), (lambda rows: rows,)), predict)
    asked = config.build(config.EMBEDDED, ["compute.channels_last=true", "evaluate.large=[]"])
    result = plan(asked, data="10M", gpu="8xH100", batch=4096, tools=tools)
    assert (result.run.compute.sharding, result.run.compute.channels_last) == ("fsdp2", None)
    assert "compute.channels_last: True → none" in result.edits


def test_several_nodes_shard_inside_each_node():
    # 16 bytes of state for each of 7 billion parameters do not fit on one GPU of 80 GiB, but on the eight of a node.
    large = (small_work(16e12, 40e9, 40e9, 1000, 7_000_000_000),)
    tools = Tools(lambda request, run, precision, machine: Workload(large, (nn.Identity(),), (lambda rows: rows,)), predict)
    one, four = (plan("x:y", objective="lm", data="1B", gpu=f"{n}xH100", tools=tools).strategy for n in (8, 32))
    assert (one.sharding, one.owners) == ("fsdp2", 8) and (four.sharding, four.owners) == ("hsdp", 8)


def test_a_model_whose_weights_do_not_fit_is_refused_before_its_step_is_traced():
    large = (small_work(16e12, 40e9, 40e9, 1000, 70_000_000_000),)

    def untraced(request, run, work, machine):
        return lambda strategy: pytest.fail("a step was traced")

    tools = Tools(lambda request, run, precision, machine: Workload(large, (nn.Identity(),), (lambda rows: rows,)), untraced)
    for gpu, remedy in (("H100", "more devices"), ("4xH100", "tensor parallelism")):
        with pytest.raises(ValueError, match=rf"the model takes at least \d+\.\d GiB.*{remedy}"):
            plan("x:y", objective="lm", data="1B", gpu=gpu, tools=tools)


@pytest.mark.usefixtures("without_law")
def test_without_arguments_the_embedded_default_on_this_machine():
    result = plan(tools=SMALL)
    # The run is short: its samples allow a few hundred updates of several hundred samples, not of 4,096.
    embedded = config.build(config.EMBEDDED)
    assert 2**-0.5 <= result.batch * updates_needed(embedded.schedule.samples) / embedded.schedule.samples <= 2**0.5
    assert result.batch < 4096
    # The rate was tuned at the batch of the embedded run; a plan rounds it to two digits.
    growth = result.batch / embedded.batch.size
    assert result.run.optimizer.lr == pytest.approx(embedded.optimizer.lr * growth**0.5, rel=0.05)
    assert result.run.x.name == "cnn"
    assert any("4,096" in note for note in result.notes)


def test_a_batch_that_is_given_is_kept_and_judged():
    trap = plan("ViT-L/14", tools=TOOLS, batch=512, **MEDICAL)
    assert trap.batch == 512
    assert any("4,096" in warning for warning in trap.warnings)


def test_supervised_and_fine_tuned_models_accumulate_and_language_models_have_no_file():
    result = plan("vit", objective="supervised", data="1.2M", gpu="H200", tools=SMALL, classes=10)
    assert result.run.loss.objective == "classify"
    assert result.strategy.accumulate and "recomputation" not in result.time
    assert result.run.optimizer.betas[1] == 0.999
    assert plan("vit", objective="finetune", data=10_000, gpu="H200", tools=SMALL).batch == 32
    result = plan("x:y", objective="lm", data="1B", gpu="8xH100", tools=TOOLS)
    assert result.run is None
    with pytest.raises(ValueError, match="cannot be written as a run"):
        as_toml(result)
    assert Plan.from_json(result.as_json()) == result


def test_a_locked_tower_is_locked_in_the_file():
    result = plan("ViT-L/14", tools=TOOLS, start="locked", **MEDICAL)
    assert result.run.x.locked and not result.run.y.locked
    assert result.batch > 2 * 8_192


def test_sigmoid_stops_where_its_negatives_stop_paying():
    result = plan("ViT-L/14", tools=TOOLS, loss="siglip", **{**MEDICAL, "data": "1B"})
    assert (result.batch, result.run.loss.objective, result.run.loss.label_smoothing) == (32_768, "siglip", 0.0)


def test_a_plan_writes_only_keys_that_its_loss_and_optimizer_use():
    few = {**MEDICAL, "data": "500k"}
    clip, siglip = (plan("ViT-L/14", tools=TOOLS, loss=loss, **few) for loss in ("clip", "siglip"))
    assert "label smoothing" in [number.name for number in clip.numbers] and clip.run.loss.label_smoothing == 0.1
    assert "label smoothing" not in [number.name for number in siglip.numbers] and siglip.run.loss.label_smoothing == 0.0
    sgd = plan("ViT-L/14", tools=TOOLS, optimizer="sgd", **few).run
    assert (sgd.optimizer.name, sgd.optimizer.betas) == ("sgd", config.DEFAULTS.optimizer.betas)
    own = config.build({"optimizer": {"name": "sgd", "momentum": 0.5}, "schedule": {"steps": 9}})
    adamw = plan(own, tools=TOOLS, optimizer="adamw", **few).run
    assert (adamw.optimizer.name, adamw.optimizer.momentum) == ("adamw", config.DEFAULTS.optimizer.momentum)


@given(st.sampled_from(["T4", "8xV100", "2xL4", "64xH100", "3xA100-40GB"]), st.integers(10_000, 10**9), st.floats(0.5, 50))
@settings(max_examples=40, deadline=None)
def test_every_plan_is_consistent_and_comes_back_from_its_files(gpu, data, epochs):
    result = plan("ViT-L/14", tools=TOOLS, gpu=gpu, data=data, epochs=epochs)
    assert (
        result.strategy.shard * result.strategy.ranks == result.batch == result.run.batch.size <= max(data, result.strategy.ranks)
    )
    assert result.peak_bytes <= result.limit_bytes
    assert result.strategy.precision == ("fp16" if gpu in ("T4", "8xV100") else "bf16")
    assert Plan.from_json(result.as_json()) == result
    assert config.build(json.loads(result.as_json())["run"]) == result.run


def test_the_file_is_what_train_reads(medical, tmp_path):
    path = write(medical, tmp_path / "new" / "run.toml")
    assert config.read(path) == medical.run
    with pytest.raises(ValueError, match="must end in"):
        write(medical, tmp_path / "plan.txt")


def test_terminal_and_markdown_show_every_number(medical):
    from rich.console import Console

    out = io.StringIO()
    report = plan_report(medical)
    print_report(report, Console(file=out, width=400))
    markdown = as_markdown(report)
    for number in medical.numbers:
        assert number.shown in out.getvalue() and number.name in markdown
    assert "8,192" in headline(medical)


def test_the_page_is_whole_escaped_and_loads_nothing(tmp_path):
    hostile = plan("ViT-L/14", tools=TOOLS, **{**MEDICAL, "source": "<script>alert(1)</script>&.tar"})
    # Everything on the page is escaped.
    markup = {"why": "<script>", "source": "<script>", "shown": "<script>"}
    hostile = dataclasses.replace(
        hostile,
        machine="<script>",
        numbers=tuple(number._replace(**markup) for number in hostile.numbers),
        alternatives=tuple(way._replace(name=f"<script>{way.name}") for way in hostile.alternatives),
        notes=("<script>",),
        changes=("<script>",),
    )
    text = write(hostile, tmp_path / "plan.html").read_text("utf-8")
    assert "<script" not in text and "&lt;script&gt;" in text
    assert not re.search(r'(src|href)="(?!data:image/png)', text)
    assert "default-src" in text
    # Three figures, each in the colors of light and dark pages.
    assert text.count("data:image/png;base64,") == 6
    assert "8,192" in text and "what fits without chunks" in text


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"memory": "-80GiB"}, "memory is '-80GiB'"),
        ({"gpus": 0}, "gpus is 0"),
        ({"gpu": "Voodoo 2"}, "no such device is known"),
        ({"batch": 20_000, "data": 10_000}, "batch is 20,000 and data is 10,000"),
        ({"batch": 1000}, "must be a multiple"),
        ({"data": None}, "data is not given"),
        ({"colour": "blue"}, "unexpected keyword argument 'colour'"),
        ({"gpu": "V100", "precision": "bf16"}, "has fp32, fp16"),
        ({"gpu": None, "memory": "1GiB"}, "take more or larger devices"),
        ({"base_lr": "fast"}, "base_lr is 'fast'"),
    ],
)
def test_wrong_arguments_raise_with_the_reason(asked, complaint):
    request = {"data": "10M", "epochs": 30, "gpu": "A100-80GB", "gpus": 7}
    with pytest.raises(ValueError, match=complaint):
        plan("ViT-L/14", tools=TOOLS, **{**request, **asked})


def test_an_unknown_model_is_named():
    with pytest.raises(ValueError, match="there is no tower 'resnetty'"):
        plan("resnetty", data="1M", gpu="H200", tools=SMALL)


def test_hours_and_money_decide_the_samples_seen():
    asked = {"data": "10M", "gpu": "8xA100-80GB", "source": "a.csv"}
    free = plan("ViT-L/14", tools=TOOLS, **asked)
    day = plan("ViT-L/14", tools=TOOLS, hours=24, **asked)
    week = plan("ViT-L/14", tools=TOOLS, hours=48, **asked)
    assert 0.9 * 24 < day.hours <= 24 and 0.9 * 48 < week.hours <= 48 < free.hours
    assert day.seen < week.seen < free.seen and day.run.schedule.samples == day.seen
    # 8 GPUs at 2.5 for 24 hours are 480.
    money = plan("ViT-L/14", tools=TOOLS, budget=480, price=2.5, **asked)
    assert money.seen == day.seen and 0.9 * 480 < money.alternatives[0].cost <= 480
    # More than the usual epochs are not planned, and samples that are given stay, with a warning.
    assert plan("ViT-L/14", tools=TOOLS, hours=10_000, **asked).seen == free.seen
    given = plan("ViT-L/14", tools=TOOLS, hours=24, epochs=30, **asked)
    assert given.seen == free.seen and any("24 h" in text for text in given.warnings)
    with pytest.raises(ValueError, match="single step"):
        plan("ViT-L/14", tools=TOOLS, hours=1e-6, **asked)


def test_hours_that_nobody_waits_for_are_a_warning():
    slow = plan("ViT-L/14", tools=TOOLS, gpu="cpu", data="10M", epochs=30, source="a.csv")
    assert slow.hours > 365 * 24 and any("years" in text for text in slow.warnings)
    assert not plan("ViT-L/14", tools=TOOLS, **MEDICAL).warnings


def test_a_batch_per_gpu_is_that_of_all_gpus_together():
    assert plan("ViT-L/14", tools=TOOLS, per_gpu=512, **MEDICAL).batch == 4096
    with pytest.raises(ValueError, match="give one of the two"):
        plan("ViT-L/14", tools=TOOLS, per_gpu=512, batch=4096, **MEDICAL)


def test_a_slow_network_between_nodes_takes_time():
    one, several, fast = (
        plan("ViT-L/14", tools=TOOLS, batch=4096, **MEDICAL, **nodes).seconds_per_step
        for nodes in ({}, {"nodes": 4, "interconnect": "1GbE"}, {"nodes": 4, "interconnect": "XDR"})
    )
    assert one <= fast < several
    for wrong in ({"nodes": 3}, {"interconnect": "string"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
            plan("ViT-L/14", tools=TOOLS, **MEDICAL, **wrong)


def test_a_start_from_weights_is_written_as_a_value_to_fill_in():
    without = {key: value for key, value in MEDICAL.items() if key != "source"}
    starts = {start: plan("ViT-L/14", tools=TOOLS, start=start, **without).run for start in ("scratch", "pretrained", "locked")}
    assert list(config.unfilled(starts["scratch"])) == ["data.source"]
    assert list(config.unfilled(starts["pretrained"])) == ["data.source", "x.weights", "y.weights"]
    # The text tower beside a locked image tower learns from random weights.
    assert list(config.unfilled(starts["locked"])) == ["data.source", "x.weights"] and starts["locked"].x.locked
    tuned = plan("ViT-L/14", tools=TOOLS, objective="finetune", **without)
    assert {"x.weights", "y.weights"} <= config.unfilled(tuned.run).keys()
    # OpenCLIP's own width, so that no random projection stands behind trained towers.
    assert tuned.run.loss.dim == 768 and tuned.run.data.workers > 0
    for key in config.unfilled(tuned.run):
        assert key in tuned.comments[""]


@pytest.mark.slow
def test_a_runs_own_file_keeps_what_it_says_and_its_data_are_counted(tmp_path):
    (tmp_path / "pairs.csv").write_text("query,document\n" + "".join(f"q{i},d{i}\n" for i in range(600)), encoding="utf-8")
    text = {"name": "text", "options": {"width": 32, "depth": 1, "heads": 2}}
    own = {
        "data": {"source": str(tmp_path / "pairs.csv"), "x": "query", "y": "document", "held_out": 0.5},
        "x": text,
        "y": text,
        "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.02},
        "batch": {"size": 64},
        "schedule": {"epochs": 7, "warmup": 9},
    }
    given = config.build(own)
    result = plan(given, tools=SMALL)
    # Half of the rows are held out, by a hash of each.
    assert 200 < result.data < 400 and result.seen == 7 * result.data
    run = result.run
    assert (run.optimizer.name, run.optimizer.weight_decay, run.schedule.warmup) == ("sgd", 0.02, 9)
    assert (run.schedule.epochs, run.schedule.samples, run.data, run.x) == (7, None, given.data, given.x)
    # SGD's rate grows in proportion to the batch, from the rate and the batch of the file.
    assert run.optimizer.lr == pytest.approx(0.1 * run.batch.size / 64, rel=0.05)
    assert any(line.startswith("batch.size: 64 →") for line in result.edits) == (run.batch.size != 64)
    same = plan(given, tools=SMALL, batch=64)
    assert same.run.optimizer.lr == 0.1 and not any(line.startswith(("optimizer", "schedule")) for line in same.edits)
    # Steps are a length too: as many samples as they take at the file's batch.
    steps = plan(config.build({**own, "schedule": {"steps": 10}}), tools=SMALL, optimizer="adamw")
    assert steps.seen == 640 and steps.run.optimizer.name == "adamw"
    with pytest.raises(ValueError, match="data is not given, and"):
        plan(config.build({**own, "data": {"source": str(tmp_path / "nowhere.csv")}}), tools=SMALL)


def test_the_answer_fits_one_screen_and_says_what_the_plan_says(medical):
    for result in (medical, plan("ViT-L/14", tools=TOOLS, price=2.0, start="locked", **MEDICAL)):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            print_report(screen(result), width=80)
        lines = out.getvalue().splitlines()
        assert max(map(len, lines)) <= 80 and len(lines) <= 48
        text = " ".join(" ".join(lines).split())
        strategy, rate = result.strategy, result.run.optimizer.lr
        for part in (
            f"batch {result.batch:,}",
            f"{strategy.shard:,}",
            f"learning rate {rate:g}",
            f"{result.negatives_per_query:,}",
        ):
            assert part in text
        # The words of other trainers, and the published trainings beside it.
        assert f"per_device_train_batch_size={strategy.shard}" in text and f"mini_batch_size={strategy.chunk}" in text
        assert all(other.name in text for other in result.others) and result.others


@pytest.fixture
def on_screen():
    """Print a plan as the command line does, and return its lines."""

    def lines(result):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            print_report(screen(result), width=80)
        return out.getvalue().splitlines()

    return lines


@pytest.mark.parametrize("asked", [{"gpu": "cpu"}, {"gpu": "512xA100", "nodes": 64, "seen": "39B"}, {"gpu": "MI300X"}], ids=str)
def test_no_line_of_an_answer_is_longer_than_a_screen(asked, on_screen):
    lines = on_screen(plan("ViT-L/14", tools=TOOLS, data="2B", **asked))
    assert max(map(len, lines)) <= 80
    # One row for each batch and number of devices, and neither GPUs nor GPU-hours of a CPU.
    rows = [line.split()[-6:-3] for line in lines[1 + next(i for i, line in enumerate(lines) if "Alternatives" in line) :]]
    assert len({tuple(row) for row in rows if row}) == len([row for row in rows if row])
    assert ("GPU" in " ".join(lines)) == (asked["gpu"] != "cpu")


def test_alternatives_of_one_batch_are_shown_once(medical, on_screen):
    half = next(way for way in medical.alternatives if way.name == "half the batch")
    ways = tuple(half._replace(name=way.name) if way.name.startswith("what fits") else way for way in medical.alternatives)
    text = "\n".join(on_screen(dataclasses.replace(medical, alternatives=ways)))
    assert "half the batch" in text and "without chunks" not in text and "without chunks" in "\n".join(on_screen(medical))


def test_a_run_within_a_budget_is_not_warned_of_it():
    """Tracing the chosen chunk may raise the memory model, so that chunks become smaller and steps slower."""

    def underestimated(request, run, work, machine):
        model = predict(request, run, work, machine)

        def predicted(strategy):
            found = model(strategy)
            return found if strategy.chunk <= 64 else found._replace(reserved_bytes=3 * found.reserved_bytes)

        return predicted

    for hours in (24, 48):
        result = plan("ViT-L/14", tools=TOOLS._replace(predict=underestimated), data="400M", gpu="8xA100-80GB", hours=hours)
        assert result.hours <= hours and not any("allowed" in text for text in result.warnings)


def test_only_what_a_trainer_can_train_is_written_in_its_words(medical):
    assert "OpenCLIP" in medical.identity and "OpenCLIP" not in dataclasses.replace(medical, open_clip=False).identity


def test_two_views_of_an_image_share_a_tower_and_are_no_clip():
    views = plan("resnet50", tools=TOOLS, loss="nt_xent", data="1.28M", gpu="8xA100-80GB")
    assert views.run.y.name == "x" and not views.open_clip and not views.others
    assert views.negatives_per_query == 2 * views.batch - 2
    assert not any("CLIP" in text for text in views.warnings) and views.number("learning rate").confidence == "low"


def test_published_language_models_are_compared_in_tokens(on_screen):
    result = plan("gpt2", tools=TOOLS, objective="lm", data="10B", text_length=512, gpu="8xA100-80GB")
    assert result.text_length == 512
    other = next(other for other in result.others if other.name.startswith("GPT-2 124M, FineWeb"))
    row = next(line for line in on_screen(result) if other.name in line)
    assert f"{other.batch * other.length / 1e3:.3g} k" in row


def test_sequences_are_not_longer_than_a_language_model_reads():
    asked = {"tools": TOOLS, "objective": "lm", "data": "10B", "gpu": "8xA100-80GB"}
    bert, gpt2 = (plan(name, **asked) for name in ("transformers:bert-base-uncased", "gpt2"))
    assert bert.text_length == 512 and gpt2.text_length == 1024
    # Samples are sequences: of half the length, there are twice as many.
    assert bert.data == 10**10 // 512 == 2 * gpt2.data
    for wanted in ({"text_length": 513}, {"length": 513}):
        with pytest.raises(ValueError, match=r"length is 513: .*bert-base-uncased.* 512 or less"):
            plan("bert-base-uncased", **asked, **wanted)
    assert plan("bert-base-uncased", **asked, length=128).text_length == 128


def test_a_language_model_that_is_fine_tuned_on_pairs_is_said_to_be_one():
    asked = {"tools": TOOLS, "objective": "finetune", "data": "50k", "gpu": "8xA100-80GB"}
    assert any("--objective lm" in text for text in plan("gpt2", **asked).warnings)
    assert not any("--objective lm" in text for text in plan("bert-base-uncased", **asked).warnings)


def test_lora_is_not_advised_to_those_who_use_it():
    asked = {"tools": TOOLS, "objective": "lm", "data": "20M", "gpu": "RTX3060", "memory": "1GiB"}
    for rank, word in ((None, "LoRA"), (16, "QLoRA")):
        with pytest.raises(ValueError, match=rf"[^Q]{word}") as raised:
            plan("gpt2", lora=rank, **asked)
        assert ("QLoRA" in str(raised.value)) == (rank is not None)


def test_accumulation_is_named_with_the_negatives_that_it_would_leave(medical):
    strategy = medical.strategy
    assert medical.negatives_per_query == medical.batch - 1
    assert strategy.chunk < strategy.shard
    assert any(f"{strategy.ranks * strategy.chunk - 1:,}" in reason for reason in reasons(medical))
    mined = plan("ViT-L/14", tools=TOOLS, objective="finetune", negatives=7, batch=1024, **MEDICAL)
    assert mined.negatives_per_query == 8 * 1024 - 1


def test_warnings_come_before_the_answer():
    poor = plan("ViT-L/14", tools=TOOLS, **{**MEDICAL, "data": "100k", "epochs": 5})
    assert poor.warnings
    first = next(block for section in screen(poor).sections for block in section.blocks)
    assert first.warning and poor.warnings[0] in first.text
    assert all(text in plan_report(poor).warning for text in poor.warnings)


def test_the_written_file_has_the_reason_of_every_planned_value(medical):
    lines = as_toml(medical).splitlines()
    table = config.as_table(medical.run)
    for number in medical.numbers:
        if number.name in KEYS:
            section, _, key = KEYS[number.name].partition(".")
            if key in table[section]:
                index = lines.index(f"{key} = {config._literal(table[section][key])}", lines.index(f"[{section}]"))
                assert lines[index - 1].startswith("# "), number.name


@pytest.mark.parametrize(
    ("asked", "ours"),
    [
        ({"batch_size": 512}, "per_gpu"),
        ({"per_device_train_batch_size": 8}, "per_gpu"),
        ({"gradient_checkpointing": True}, "checkpointing"),
    ],
)
def test_arguments_of_other_trainers_are_answered_with_ours(asked, ours):
    with pytest.raises(ValueError, match=f"is called {ours} here"):
        plan("ViT-L/14", tools=TOOLS, **MEDICAL, **asked)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hours", 0),
        ("budget", 500),
        ("negatives", -1),
        ("image_size", 4),
        ("text_length", 0),
        ("lora", 0),
        ("nodes", 0),
        ("hours", float("nan")),
    ],
)
def test_questions_that_make_no_sense_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name} is"):
        plan("ViT-L/14", tools=TOOLS, **MEDICAL, **{name: value})


def test_a_shared_tower_computes_both_sides_and_hard_negatives_are_encoded_too():
    tower = small_work(100.0, 10.0, 4.0, 5, 1_000)
    forward = lambda works: sum(call.times * call.flops for work in works for call in work.forward.calls)  # noqa: E731
    assert both_sides((tower,), pairs=False) == (tower,)
    both = both_sides((tower,), pairs=True)
    assert forward(both) == 2 * forward((tower,)) and sum(work.parameters for work in both) == tower.parameters
    # A query, its document and seven negatives.
    assert forward(both_sides((tower, tower), pairs=True, negatives=7)) == 9 * forward((tower,))
    asked = {"objective": "finetune", "batch": 1024, **MEDICAL}
    few, many = (plan("ViT-L/14", tools=TOOLS, negatives=k, **asked) for k in (0, 7))
    assert many.seconds_per_step > 1.3 * few.seconds_per_step and many.run.data.negatives.startswith(config.FILL_IN)
