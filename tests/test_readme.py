"""Examples in the documents run, their tables and numbers are those of the kept results, and their links exist."""

from __future__ import annotations

import doctest
import re
import statistics
import sys

import pytest
import torch

import megabatch.chunks.accumulate
import megabatch.chunks.cached
import megabatch.chunks.oom
import megabatch.losses.clip
import megabatch.losses.siglip
from benchmarks.batches import best_rates
from benchmarks.clocks import RESTS
from benchmarks.memory_accuracy.cases import of_row
from benchmarks.readme import ROOT, with_tables
from benchmarks.report import GRAPHED, is_option, is_ours, read_rows
from benchmarks.time_accuracy.cases import fresh_cases
from megabatch import config

README = (ROOT / "README.md").read_text()
BENCHMARKS = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
PAGES = ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))


def test_the_tables_are_those_of_the_kept_rows():
    for page in PAGES:
        assert with_tables(page.read_text()) == page.read_text(), page.name


def test_the_ratios_of_encoders_are_those_of_the_kept_rows():
    rows = {
        (row["case"], row["pairs"], row["chunk"], row["keep"]): row
        for row in read_rows(ROOT / "benchmarks/results/encoders-cuda.jsonl")
        if row["contestant"] == "megabatch"
    }

    def faster(chunk: int) -> float:
        return rows["chunks", 512, chunk, 0]["seconds"] / rows["chunks", 512, chunk, "auto"]["seconds"]

    plain = rows["contestants", 2048, 256, 0]
    more = rows["large", 65536, 256, 0]["peak_allocated_mib"] - plain["peak_allocated_mib"]
    text = BENCHMARKS
    assert f"{faster(256):.2f} times as fast as `keep=0` in chunks of 256, and {faster(64):.2f} times in chunks of 64" in text
    assert f"The peak of 65,536 pairs is {more / 1024:.1f} GiB above that of 2,048" in text


def test_the_speed_inside_sentence_transformers_is_that_of_the_kept_rows():
    rows = [row for row in read_rows(ROOT / "benchmarks/results/trainers-cuda.jsonl") if row["model"] == "bert-base"]
    theirs = {row["texts"]: row for row in rows if row["scheme"] == "theirs"}
    ratios = [theirs[row["texts"]]["step_s"] / row["step_s"] for row in rows if row["scheme"].startswith("ours")]
    assert f"BERT-base is {int(min(ratios))} to {int(max(ratios))} times as fast as with Sentence Transformers" in README
    for row in theirs.values():
        assert row["tokens"] / row["padded_tokens"] == pytest.approx(1 / 5, abs=0.02), "a fifth of the longest"


def loss_rows(loss, batch, dim=768, name="loss"):
    """The rows of the loss benchmark at one size, by implementation."""
    rows = read_rows(ROOT / f"benchmarks/results/{name}-cuda.jsonl")
    return {row["implementation"]: row for row in rows if (row["loss"], row["batch"], row["dim"]) == (loss, batch, dim)}


def test_the_memory_of_large_batches_is_that_of_the_kept_rows():
    rows, million = loss_rows("clip", 65536), loss_rows("clip", 2**20)
    rows["ours, 512 MiB"] = loss_rows("clip", 65536, name="loss-options")["ours, 512 MiB"]
    theirs, ours, small, largest = (
        row["extra_bytes"] / 2**30 for row in (rows["openclip"], rows["ours"], rows["ours, 512 MiB"], million["ours"])
    )
    text = " ".join(README.split())
    by_default = f"megabatch {ours:.1f} GiB by default on an H200 and {small:.2f} GiB with `workspace=2**29`"
    assert f"at 65,536 pairs OpenCLIP's loss takes {theirs:.0f} GiB above the inputs, {by_default}" in text
    needed = million["openclip"]["needed_bytes"] / 2**30
    seconds = million["ours"]["total_s"]
    assert f"1,048,576 pairs take {largest:.0f} GiB and {seconds:.1f} s; OpenCLIP would need {needed:,.0f} GiB" in text
    by_default, saving = (
        f"{rows['openclip']['total_s'] / row['total_s']:.1f} times as fast" for row in (rows["ours"], rows["ours, 512 MiB"])
    )
    assert (
        f"the loss is {by_default} as OpenCLIP, in {ours:.1f} GiB; with `workspace=2**29` it is {saving}, in {small:.2f} GiB"
        in BENCHMARKS
    )


def test_the_numbers_of_the_other_losses_are_those_of_the_kept_rows():
    rows = {
        (row["loss"], row["rows"], row["implementation"]): row
        for row in read_rows(ROOT / "benchmarks/results/other-losses-cuda.jsonl")
    }

    def ms(*key: str | int) -> str:
        return f"{1e3 * rows[key]['seconds']:.1f}"

    def gib(*key: str | int) -> float:
        return rows[key]["extra_bytes"] / 2**30

    text = " ".join((ROOT / "docs" / "losses.md").read_text().split())
    classes = [("classes", 8192, name) for name in ("megabatch", "cross_entropy")]
    ours, theirs = (f"{ms(*key)} ms and {gib(*key):.2g} GiB" for key in classes)
    assert f"with {64 * 8192:,} classes take {ours}, `cross_entropy` over the matrix {theirs}." in text
    late = [[ms("late interaction", n, name) for name in ("megabatch", "late-interaction-kernels")] for n in (2048, 512)]
    assert "({} against {} ms), as fast with 512 ({} against {} ms)".format(*late[0], *late[1]) in text
    distillation = [("distillation", 16384, name) for name in ("megabatch", "OpenCLIP")]
    assert "three times as fast as OpenCLIP at 16,384 pairs ({} against {} ms)".format(*(ms(*key) for key in distillation)) in text
    ours, theirs = (gib(*key) for key in distillation)
    assert f"in a fifteenth of the memory ({ours:.1f} against {theirs:.0f} GiB)" in text and 14 < theirs / ours < 16
    times = {
        name: [rows["Matryoshka", n, name]["seconds"] / rows["one width", n, "megabatch"]["seconds"] for n in (16384, 65536)]
        for name in ("megabatch", "megabatch, each width")
    }
    together, apart = times.values()
    assert "{:.1f} times as long as one at 16,384 rows and {:.1f} times at 65,536".format(*together) in text
    assert "they take {:.1f} and {:.1f} times as long".format(*apart) in text
    ours, theirs = (ms("spread-out", 65536, name) for name in ("megabatch", "formula"))
    assert f"{ours} ms at 65,536 rows, the formula with the matrix {theirs} ms" in text
    views = [("NT-Xent", 16384, name) for name in ("megabatch", "lightly")]
    assert (
        "27 times as fast as lightly at 16,384 samples, two views each (7.9 against 216 ms), in a twenty-third of the memory"
        in text
    )
    assert [round(1e3 * rows[key]["seconds"], 1 - place) for place, key in enumerate(views)] == [7.9, 216]
    assert round(rows[views[1]]["seconds"] / rows[views[0]]["seconds"]) == 27 and round(gib(*views[1]) / gib(*views[0])) == 23
    ours, theirs = (("SupCon", 16384, name) for name in ("megabatch", "pytorch-metric-learning"))
    faster = f"{rows[theirs]['seconds'] / rows[ours]['seconds']:.0f} times as fast as pytorch-metric-learning"
    assert f"{faster} at 16,384 samples ({ms(*ours)} against {ms(*theirs)} ms), in a sixteenth of the memory" in text
    assert 15.5 < gib(*theirs) / gib(*ours) < 16.5
    ours, theirs = (("GIST", 2048, name) for name in ("megabatch", "Sentence Transformers"))
    assert f"{1e3 * rows[theirs]['seconds']:.0f} ms and {gib(*theirs):.0f} GiB, megabatch {ms(*ours)} ms and" in text
    assert f"and {1024 * gib(*ours):.0f} MiB." in text
    failed = [("distillation", "OpenCLIP"), ("NT-Xent", "lightly"), ("SupCon", "pytorch-metric-learning")]
    for key in (("classes", 16384, "cross_entropy"), *((loss, 65536, name) for loss, name in failed)):
        assert "out of memory" in rows[key]["error"]


def test_the_times_with_the_host_are_those_of_the_kept_rows():
    rows = [row for row in read_rows(ROOT / "benchmarks/results/loss-cuda.jsonl") if "wall_s" in row and row["dim"] == 768]
    by_size = {(row["loss"], row["batch"], row["implementation"]): row for row in rows}

    def ratios(field: str, name: str, other: str, most: int) -> list[float]:
        sizes = ((loss, n) for loss, n, each in by_size if each == name and n <= most)
        return [by_size[loss, n, other][field] / by_size[loss, n, name][field] for loss, n in sizes]

    others = [row for row in rows if not is_ours(row)]
    assert all(row["wall_s"] > by_size[row["loss"], row["batch"], GRAPHED]["wall_s"] for row in others)
    assert "In a CUDA graph megabatch is faster than every other implementation at every size, for both losses" in BENCHMARKS
    assert all(row["wall_s"] > by_size[row["loss"], row["batch"], "ours"]["wall_s"] for row in others)
    assert "Without a graph it is faster than all others too." in BENCHMARKS
    graphed = ratios("wall_s", "ours, graphed", "full matrix", 4096)
    span = f"{min(graphed):.1f} to {max(graphed):.1f}"
    assert len(graphed) == 8 and f"{span} times as fast as the plain formula up to 4,096 pairs" in BENCHMARKS
    direct = ratios("wall_s", "ours, value_and_grad", "full matrix", 4096)
    span_of_direct = f"{min(direct):.1f} to {max(direct):.1f}"
    assert len(direct) == 8 and f"up to 4,096 pairs, and {span_of_direct} times without autograd" in BENCHMARKS
    assert f"is {span_of_direct} times as fast up to 4,096 pairs" in " ".join(README.split())
    log = " ".join((ROOT / "docs" / "log.md").read_text().split())
    assert f"({span} in the kept rows, which are of a later run)" in log
    ours, in_graph, plain, compiled = (
        by_size["clip", 65536, name]["wall_s"] for name in ("ours", "ours, graphed", "full matrix", "full matrix compiled")
    )
    times = (
        f"{plain / in_graph:.1f} times as fast as the plain formula and {compiled / in_graph:.1f} times as fast as the compiled one"
    )
    without = f"{plain / ours:.1f} and {compiled / ours:.1f} times without"
    assert f"At 65,536 pairs the softmax loss is {times} in a graph, {without}" in BENCHMARKS
    device = ratios("total_s", "ours", "full matrix compiled", 8192)
    assert f"takes {min(device):.1f} to {max(device):.1f} times as long as megabatch on the device alone" in BENCHMARKS
    ours, in_graph = (1e3 * by_size["clip", 16384, name]["wall_s"] for name in ("ours", "ours, graphed"))
    assert f"clip takes {ours:.1f} ms, and {in_graph:.1f} in a graph" in log
    kept = ratios("host_s", "ours", "ours, graphed", 4096)
    losses = " ".join((ROOT / "docs" / "losses.md").read_text().split())
    assert f"removes {100 * (1 - max(kept)):.0f} to {100 * (1 - min(kept)):.0f} % of the host's time up to 4,096 pairs" in losses
    kept = ratios("host_s", "ours", "ours, value_and_grad", 4096)
    span = f"{100 * (1 - max(kept)):.0f} to {100 * (1 - min(kept)):.0f} %"
    assert f"of the host's time up to 4,096 pairs, {span} are gone" in losses


def test_the_shares_of_whole_steps_are_those_of_the_kept_rows():
    rows = read_rows(ROOT / "benchmarks/results/whole-steps-cuda.jsonl")
    compiled = [row for row in rows if row["case"]["model"] == "l14" and row["case"]["optimizations"][-1:] == ["layers"]]
    whole, *in_chunks = (round(100 * row["useful_share"]) for row in compiled)
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    sentence = f"reaches {whole} % of the rate of a large product without chunks, and {in_chunks[0]} to {in_chunks[1]} % in chunks"
    assert sentence in text
    short = {
        model: [
            round(100 * row["useful_share"])
            for row in rows
            if row["case"]["model"] == model and "attention" in row["case"]["optimizations"]
        ]
        for model in ("l14", "b32")
    }
    (whole, *in_chunks), small = short.values()
    assert f"reaches {whole} %, and {in_chunks[0]} to {in_chunks[1]} % in chunks, ViT-B/32 {small[0]} % and {small[1]} %" in text
    bert = [row for row in rows if row["case"]["model"] == "bert" and "layers" in row["case"]["optimizations"]]
    whole, *in_chunks = (round(100 * row["useful_share"]) for row in bert)
    assert f"BERT-base {whole} % and {in_chunks[0]} to {in_chunks[1]} %" in text


def test_the_speed_of_short_attention_is_that_of_the_kept_rows():
    rows = read_rows(ROOT / "benchmarks/results/attention-cuda.jsonl")
    seconds = {(row["length"], row["implementation"]): row["forward_s"] + row["backward_s"] for row in rows}
    ratios = [s / seconds[length, "megabatch"] for (length, name), s in seconds.items() if name == "PyTorch's choice"]
    text = " ".join((ROOT / "docs" / "encoders.md").read_text().split())
    assert f"they are {min(ratios):.1f} to {max(ratios):.1f} times as fast, forward and backward" in text
    worst = max(row["error"] for row in rows if row["implementation"] == "megabatch")
    assert f"at most {worst:.0e} of the largest entry".replace("e-0", "e-") in text
    steps = {
        (row["case"]["model"], row["case"]["optimizations"][-1]): row["seconds"]
        for row in read_rows(ROOT / "benchmarks/results/whole-steps-cuda.jsonl")
        if row["case"]["chunk"] is None and row["case"]["optimizations"]
    }
    large, small = (f"{1 - steps[model, 'attention'] / steps[model, 'layers']:.0%}".replace("%", " %") for model in ("l14", "b32"))
    assert f"ViT-L/14 takes {large} less time, of ViT-B/32 {small}" in text


def test_the_speed_of_reading_is_that_of_the_kept_rows():
    rows = {row["pipeline"]: row for row in read_rows(ROOT / "benchmarks/results/feeding-cuda.jsonl")}
    decoded, usual = rows["megabatch, decoded on the device"], rows["megabatch"]
    text = " ".join((ROOT / "docs" / "training.md").read_text().split())
    assert f"a core feeds {decoded['speed_up']:.0f} times as many pairs" in text
    assert f"{decoded['workers']} workers {decoded['loader_speed_up']:.1f} times as many" in text
    assert f"{usual['speed_up']:.1f} times as many, and {usual['workers']} workers {usual['loader_speed_up']:.1f} times" in text
    mean, most = (f"{decoded[f'device_{kind}_difference']:.{digits}f}" for kind, digits in (("mean", 1), ("most", 0)))
    assert f"that was {mean} of 255 levels in the mean and {most} at most" in text


def test_the_batches_and_rates_that_were_predicted_are_counted_right():
    text = (ROOT / "docs" / "study.md").read_text()
    found = [
        re.findall(rf"{kind} within the tolerance: (\d+) of (\d+)", text.split("## Confirmation")[1])
        for kind in ("Planned batches", "Predicted rates")
    ]
    (right, batches), (right_rates, rates) = ([sum(int(pair[place]) for pair in pairs) for place in (0, 1)] for pairs in found)
    assert right_rates == rates and f"{right} of {batches} batches and all {rates} rates" in text


def test_the_blind_predictions_are_those_of_the_kept_rows():
    rows = read_rows(ROOT / "benchmarks/results/time-blind-cuda.jsonl")
    within = [sum(abs(row[field]) <= 0.2 + 1e-9 for row in rows) for field in ("error", "error_here")]
    text = " ".join((ROOT / "docs" / "planning.md").read_text().split())
    assert f"{within[0]} of {len(rows)} within 20 %, {within[1]} of {len(rows)} with the host's rate" in text


def test_the_ratios_of_options_are_those_of_the_kept_rows():
    rows = loss_rows("clip", 65536, name="loss-options")
    times = [rows[f"ours, {option}"]["total_s"] / rows["ours"]["total_s"] for option in ("ids", "label smoothing", "diagnostics")]
    sentence = (
        "with ids, label smoothing or diagnostics the softmax loss takes {:.2f}, {:.2f} and {:.2f} times as long at 65,536 pairs"
    )
    assert sentence.format(*times) in BENCHMARKS
    text = " ".join((ROOT / "docs" / "losses.md").read_text().split())
    eight = rows["ours, int8"]["total_s"] / rows["ours, 512 MiB"]["total_s"]
    assert f"With int8 it takes {eight:.2f} times as long as without in the same 512 MiB" in text
    both = *rows.values(), *loss_rows("siglip", 65536, name="loss-options").values()
    softmax, sigmoid = (row["matrix_product_tflops"] for row in both if row["implementation"] == "ours")
    rates = [row["matrix_product_tflops"] for row in both if is_option(row) and row["implementation"] != GRAPHED]
    beside = f"at {softmax:.0f} TFLOP/s beside the softmax loss without options and at {sigmoid:.0f} beside the sigmoid loss"
    assert f"{beside}, at {min(rates):.0f} to {max(rates):.0f} beside those with options" in text
    assert f"differences of up to {100 * (max(rates) / softmax - 1):.0f} % may be the clock" in text


def clocks(rest):
    """The rows of a rest between steps, by implementation."""
    return {row["implementation"]: row for row in read_rows(ROOT / "benchmarks/results/clocks-cuda.jsonl") if row["rest"] == rest}


def speed(rows, name):
    return rows["openclip"]["total_s"] / rows[name]["total_s"]


def test_what_is_said_of_clocks_is_in_the_kept_rows():
    text = " ".join((ROOT / "docs" / "log.md").read_text().split())
    ours, eight = "ours, 512 MiB", "ours, int8"
    slow, fast = clocks(0.0), clocks(0.25)
    assert f"products beside ours run at {fast[ours]['matrix_product_tflops']:.0f}, and it is {speed(fast, ours):.2f} times" in text
    alone = "take {:.1f} ms and the loss takes {:.1f}".format(*(1e3 * slow[name]["total_s"] for name in ("products", ours)))
    assert alone in text
    # What the log says of its aim is so.
    assert speed(fast, ours) > 3.3 > speed(slow, ours) and "The aim was 3.3 times OpenCLIP's speed at 65,536 × 768" in text
    assert min(speed(clocks(rest), eight) for rest in RESTS) > 3.3
    times = f"{speed(slow, ours):.2f} times as fast where the GPU never rests, {speed(fast, ours):.2f} times where it rests"
    assert f"with that workspace, the loss is {times}" in BENCHMARKS
    assert f"{speed(slow, eight):.2f} and {speed(fast, eight):.2f} times." in BENCHMARKS
    # "As long" is to within two hundredths.
    assert all(abs(row["products"]["total_s"] / row[ours]["total_s"] - 1) < 0.02 for row in map(clocks, RESTS))


def test_the_ratio_of_errors_is_that_of_the_kept_rows():
    rows = [row for row in read_rows(ROOT / "benchmarks/results/errors-cuda.jsonl") if row["dtype"] == "bfloat16"]
    off = {(row["title"], row["loss"], row["scale"]): row["errors"]["gradient"] for row in rows}
    openclip = "OpenCLIP, bfloat16 autocast"
    ratios = {place: off[(openclip, *place[1:])] / error for place, error in off.items() if place[0] != openclip}
    assert {place[0] for place in ratios} == {f"megabatch, bfloat16{variant}" for variant in ("", " int8", " all saved")}
    assert (
        f"errors {min(ratios.values()):.0f} to {max(ratios.values()):.0f} times smaller than OpenCLIP's under autocast"
        in BENCHMARKS
    )


def test_what_it_says_of_predicted_time_is_in_the_kept_rows():
    rows = read_rows(ROOT / "benchmarks/results/time-cuda.jsonl")
    fresh = set(fresh_cases())
    off = [abs(row["blind_s"] / row["seconds"] - 1) for row in rows if of_row(row) in fresh]
    within = sum(error <= 0.2 for error in off)
    said = f"of {len(off)} steps of models that were held back, {within} came out within 20 %"
    assert f"{said}, {100 * statistics.median(off):.0f} % in the median" in BENCHMARKS
    table = (ROOT / "docs/planning.md").read_text().split("<!-- inf-cl -->")[1].split("<!-- end -->")[0]
    cells = [line.split("|")[3:5] for line in table.splitlines()[3:]]
    ratios = [float(predicted) / float(published) for published, predicted in cells if published.strip() != "–"]
    assert len(ratios) == 4 and max(abs(ratio - 1) for ratio in ratios) <= 0.04
    assert "published steps on eight A800 come out within 4 %" in BENCHMARKS


def test_what_it_says_of_predicted_memory_is_in_the_kept_rows():
    rows = [row for row in read_rows(ROOT / "benchmarks/results/memory-cuda.jsonl") if row.get("kind") != "limit"]
    off = sorted(abs(row["error"]) for row in rows)
    models = len({row["model"] for row in rows})
    numbers = f"off by {statistics.median(off):.2%} in the median and {off[-1]:.1%} at worst".replace("%", " %")
    for text in (BENCHMARKS, " ".join(README.split())):
        assert f"ver {len(rows)} steps of {models} models on an H200 the p" in text and numbers in text


def test_what_it_says_of_the_batch_is_in_the_kept_rows():
    best = {each.batch: each.recalls for each in best_rates(read_rows(ROOT / "benchmarks/results/batches-cuda.jsonl"))}
    assert "64 and 512 end alike, and from 4,096 on too few updates are left" in BENCHMARKS
    assert min(best[64]) <= max(best[512]) and min(best[512]) <= max(best[64])
    assert max(best[4096]) < min(best[512]) and max(best[16384]) < min(best[4096])


@pytest.mark.slow
def test_the_examples_of_measuring_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fitted, noise = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "measuring.md").read_text(), re.DOTALL)
    exec(fitted, {})
    assert capsys.readouterr().out == "1000 1\n" and (tmp_path / "chunk.json").exists()
    exec(noise, {})
    assert "critical" in capsys.readouterr().out


def test_the_example_of_the_readme_runs():
    example, *_ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(example, names)
    assert names["scale"].grad.isfinite() and all(p.grad.isfinite().all() for p in names["tower"].parameters())


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 130


def test_the_readme_has_no_relative_links_on_pypi():
    """The build replaces them: PyPI shows the README without the repository around it."""
    settings = config.tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"][
        "fancy-pypi-readme"
    ]
    text = README
    for each in settings["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) > 8 and all(target.startswith("https://") for target in targets)
    assert re.search(r"!\[[^]]*\]\(https://raw", text)


def test_links_and_images_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            file = page.parent / name if name else page
            assert file.exists(), target
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE) if anchor else []
            # As GitHub makes anchors of headings.
            anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert not anchor or anchor in anchors, target


def test_the_examples_in_docstrings_run():
    torch.manual_seed(0)
    losses = megabatch.losses.clip, megabatch.losses.siglip
    # By their names in sys.modules: the package offers functions that are called as their modules.
    chunks = (sys.modules[f"megabatch.chunks.{name}"] for name in ("cached", "accumulate", "oom"))
    for module in (*losses, *chunks):
        functions = [f for f in vars(module).values() if getattr(f, "__module__", "") == module.__name__ and f.__doc__]
        parser, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
        tests = [t for f in functions for t in parser.find(f, f.__name__, globs={}) if t.examples]
        assert tests
        for test in tests:
            assert runner.run(test).failed == 0
