"""The benchmark of the losses: wrong results are refused or marked, exact results agree with the formula, tables and figures."""

from __future__ import annotations

import itertools
import json
import math
import mmap
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import check, clocks, errors, figures, loss, memory, peers, readme, report
from benchmarks import measure as measuring
from benchmarks.measure import Case, Row, measure, needed_bytes, run_case, share
from megabatch import reference

MIB = 2**20


def one_direction(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.cross_entropy(scale * x @ y.T, torch.arange(len(x)))


def lost_negatives(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    half = torch.arange(len(x)) < len(x) // 2
    logits = (scale * x @ y.T).masked_fill(half[:, None] != half, -torch.inf)
    labels = torch.arange(len(x))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def constant_scale(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return reference.clip_loss(x, y, scale.detach() + 0 * scale)


def not_a_number(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return reference.clip_loss(x, y, scale) * torch.nan


def measured(batch: int, implementation: str, seconds: float, mib: float, **more: object) -> Row:
    machine = {"cpu": "a processor", "threads": 2, "torch": "2.13.0", "date": "2026-11-15T00:00:00", "memory_bytes": 2**30}
    row = {"loss": "clip", "implementation": implementation, "batch": batch, "dim": 8, "dtype": "float32", "device": "cpu"}
    times = {f"{part}_s": seconds for part in ("forward", "backward", "total")}
    return row | times | {"extra_bytes": int(mib * MIB), "errors": {"gradient": 1e-6}, "machine": machine} | more


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    too_large = measured(512, "openclip", 0, 0, skipped="needs about 9 GiB, 1 GiB are free", needed_bytes=9 * 2**30)
    too_large = {key: value for key, value in too_large.items() if not key.endswith("_s")}
    rows = [measured(256, "ours", 2.0, 4), measured(256, "openclip", 3.0, 16), measured(512, "ours", 8.0, 5), too_large]
    report.write_rows(tmp_path / "rows.jsonl", rows)
    return tmp_path / "rows.jsonl"


@pytest.mark.slow
def test_a_case_in_its_own_process_gives_times_memory_and_errors() -> None:
    row = run_case(Case("clip", "ours", batch=256, dim=64, repeats=2))
    assert "error" not in row and row["right"] and row["runs"] == 2
    assert 0 < row["forward_min_s"] <= row["forward_s"] <= row["forward_max_s"]
    assert row["total_s"] >= row["backward_s"]
    assert 0 <= row["extra_bytes"] < 256 * MIB
    assert set(row["errors"]) == {"value", "gradient", "scale"}
    assert row["machine"]["torch"] == torch.__version__


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ours", "formula", "full matrix"])
@pytest.mark.parametrize("kind", check.LOSSES)
def test_right_implementations_pass_with_repeated_rows(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.measure.DISTINCT", 96)
    row = measure(Case(kind, name, batch=250, dim=32, repeats=0))
    assert row.get("right"), row
    assert row["distinct_pairs"] == 96 and "total_s" in row


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [one_direction, lost_negatives, constant_scale, not_a_number])
def test_a_wrong_result_is_refused_and_not_timed(wrong: peers.LossCall) -> None:
    row = measure(Case("clip", f"{__name__}:{wrong.__name__}", batch=256, dim=64))
    assert row["error"].startswith("wrong result")
    assert not any(key.endswith("_s") for key in row) and "extra_bytes" not in row


def test_a_wrong_result_of_another_package_is_timed_and_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = peers.Peer("other", "clip", lambda: lost_negatives, "torch", timed_if_wrong=True)
    monkeypatch.setattr(peers, "PEERS", (*peers.PEERS, other))
    wrong = measure(Case("clip", "other", batch=64, dim=32, repeats=1))
    assert wrong["right"] is False and "error" not in wrong and wrong["total_s"] > 0 and wrong["version"] == torch.__version__
    rows = [measure(Case("clip", "ours", batch=64, dim=32, repeats=1)), wrong]

    off = f"gradient off by {wrong['errors']['gradient']:.0e}"
    text = report.markdown(rows)
    assert f"{off} |" in text and "disagree with the formula" in text and "Every other result agreed" in text
    # Its error is stated separately, not as the rounding error of a correct result.
    assert "(other)" not in text and "(megabatch)" in text
    assert report.table(rows)[1][-1].endswith("(wrong)") and not report.table(rows)[0][-1].endswith("(wrong)")
    assert [line.split(":")[0] for line in report.wrong(rows)] == ["clip, other, N = 64"]
    rows = [row | {"matrix_product_tflops": 700.0} for row in rows]
    figures.draw([row | share(row) for row in rows], tmp_path / "wrong.png")


@pytest.mark.parametrize(("kind", "smoothing"), [("clip", 0.0), ("clip", 0.1), ("siglip", 0.0)])
def test_the_exact_result_is_that_of_the_full_formula(kind: str, smoothing: float) -> None:
    torch.manual_seed(0)
    pairs = [F.normalize(torch.randn(20, 16, dtype=torch.float64), dim=1) for _ in range(2)]
    index = torch.cat([torch.arange(20), torch.randint(20, (33,))])
    x, y = (tensor[index].requires_grad_() for tensor in pairs)
    scale, bias = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (7.0, -3.0))
    smoothed = {"label_smoothing": smoothing}
    value = reference.clip_loss(x, y, scale, **smoothed) if kind == "clip" else reference.siglip_loss(x, y, scale, bias)
    value.backward()

    rows = torch.tensor([0, 13, 25, 50])
    counted = check.Pairs(*pairs, torch.bincount(index).double())
    exact = check.answer(kind, counted, index[rows], 7.0, -3.0, chunk=6, smoothing=smoothing)
    scalars = [None if leaf.grad is None else float(leaf.grad) for leaf in (scale, bias)]
    errors = check.errors(check.Result(value.item(), x.grad[rows], y.grad[rows], *scalars), exact)
    # float64 on both sides: only rounding remains.
    assert max(errors.values()) < 1e-13, errors


def test_a_case_that_cannot_fit_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**20)
    case = Case("clip", "full matrix", batch=1024, dim=8)
    row = measure(case)
    assert row["skipped"].startswith("needs about") and row["needed_bytes"] >= 4 * 4 * 1024**2
    assert "total_s" not in row
    assert needed_bytes(peers.find("ours", "clip"), case) < 2**20


@pytest.mark.slow
def test_a_process_that_dies_or_takes_too_long_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dying.py").write_text("import os\ndef loss(*_): os.kill(os.getpid(), 9)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "signal 9" in run_case(Case("clip", "dying:loss", batch=16, dim=8))["error"]
    assert "stopped after" in run_case(Case("clip", "ours", batch=16, dim=8), timeout_s=0.01)["error"]


@pytest.mark.parametrize("resets", [True, False])
def test_the_peak_is_measured_although_memory_was_freed(resets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not resets:
        monkeypatch.setattr(memory, "_reset_high_water_mark", lambda: False)

    def work() -> None:
        # Pages directly from the system: an allocator might reuse freed memory.
        with mmap.mmap(-1, 64 * MIB) as block:
            for page in range(0, 64 * MIB, 4096):
                block[page] = 1
            # Long enough for the sampling fallback.
            time.sleep(0.05)

    assert 60 * MIB < memory.peak_of(work, "cpu").extra_bytes < 80 * MIB


def test_absent_packages_are_named_and_unknown_ones_refused() -> None:
    absent = peers.Peer("none", "clip", lambda: reference.clip_loss, "no_such_package")
    assert peers.unavailable(absent, "cpu") == "no_such_package is not installed"
    with pytest.raises(ValueError, match="must be one of ours, openclip"):
        peers.find("nobody", "clip")


@pytest.mark.slow
@pytest.mark.parametrize(
    "peer", [peer for peer in peers.PEERS if peer.name.startswith("ours, ")], ids=lambda peer: f"{peer.name}, {peer.loss}"
)
def test_options_of_ours_are_right_and_run_if_selected(peer: peers.Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(Case(peer.loss, peer.name, batch=64))["unavailable"] == "megabatch runs on CUDA only"
    monkeypatch.setattr(peers, "PEERS", (replace(peer, cuda_only=False),))
    dtype = "bfloat16" if peer.name == "ours, int8" else "float32"
    row = measure(Case(peer.loss, peer.name, batch=64, dim=32, dtype=dtype, repeats=0))
    assert row.get("right"), row

    def named(*only: str) -> list[str]:
        options = loss._parser().parse_args(["--losses", peer.loss, *only])
        return [case.implementation for case in loss._cases(options)]

    assert set(named()) == ({peer.name} if peer.by_default else set()) and set(named("--only", f"{peer.name}")) == {peer.name}


def test_names_that_contain_a_comma_can_be_listed() -> None:
    names = ["ours", "ours, ids", "ours, label smoothing", "openclip", "module:function"]
    assert loss._names(",".join(names)) == names


class FakeEvent:
    """A fake CUDA event: each recorded one takes the next of the given milliseconds."""

    clock: Iterator[float]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = next(self.clock)

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


@pytest.fixture
def fake_events(monkeypatch: pytest.MonkeyPatch) -> type[FakeEvent]:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return FakeEvent


def test_steps_on_cuda_are_timed_without_the_matrix_products_between_them(fake_events: type[FakeEvent]) -> None:
    # Two matrix products, forward and backward of three steps; the first is a warm-up.
    fake_events.clock = iter([0, 90, 91, 99, 100, 104, 106, 114, 120, 128, 131, 139])
    batch = measuring._inputs(Case("clip", "formula", batch=8, dim=4), 8)
    steps, tflops = measuring._enqueued(peers.find("formula", "clip").load(), batch, 2, measuring.SUSTAINED_S, size=16)
    assert steps == [(0.002, 0.008), (0.003, 0.008)]
    assert tflops == pytest.approx(2 * 16**3 / 0.003 / 1e12)  # two matrix products in the median of 4 and 8 ms


def test_after_a_rest_a_step_and_matrix_products_of_equal_flops_are_timed(
    fake_events: type[FakeEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    monkeypatch.setattr(measuring.time, "sleep", rests.append)
    monkeypatch.setattr(torch.cuda, "_sleep", rests.append)
    monkeypatch.setattr(measuring, "_factors", lambda size, device: (torch.ones(1, 1), torch.ones(1, 1)))
    monkeypatch.setattr(measuring, "PRODUCT_SIZE", 4)
    measuring._rested_product_tflops.cache_clear()
    # Three steps of 5, 9 and 7 ms, and three times the matrix products, of 2, 4 and 3 ms.
    fake_events.clock = iter([0, 5, 100, 109, 200, 207, 300, 302, 400, 404, 500, 503])
    case = Case("clip", "formula", batch=8, dim=4)
    row = measuring._after_a_rest(case, peers.find("formula", "clip").load(), measuring._inputs(case, 8), 3)
    assert row["rested_s"] == 0.007 and rests == [measuring.REST_S, measuring.HEAD_START_CYCLES] * 6
    products = 8 * 8**2 * 4 // (2 * 4**3)
    assert row["rested_product_tflops"] == pytest.approx(products * 2 * measuring.PRODUCT_SIZE**3 / 0.003 / 1e12)


def test_the_time_with_the_host_ends_when_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[float] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(waiting.pop() if waiting else 0))
    batch = measuring._inputs(Case("clip", "formula", batch=8, dim=4), 8)
    formula = peers.find("formula", "clip").load()

    def call(*leaves: Tensor) -> Tensor:
        waiting.append(0.05)
        return formula(*leaves)

    (row,) = measuring.with_the_host([measuring.Step(call, batch, 3)])
    assert row["host_s"] < 0.05 <= row["wall_s"] and row["wall_s"] - row["host_s"] >= 0.05


def test_steps_of_one_size_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def device(case: Case) -> tuple[Row, measuring.Step]:
        def call(x: Tensor, *_: Tensor) -> Tensor:
            order.append((case.batch, case.implementation))
            return x.sum()

        batch = measuring._inputs(case, case.batch)
        return measured(case.batch, case.implementation, 1.0, 1) | {"right": True}, measuring.Step(call, batch, 7)

    monkeypatch.setattr(loss, "measure_device", device)
    only = ["--losses", "clip", "--only", "ours,full matrix", "--sizes", "8,16", "--in-process"]
    assert loss.main([*only, "--out", str(tmp_path / "rows.jsonl")]) == 0
    # The first turn is not timed.
    turns = [tuple(order[place : place + 2]) for place in range(0, len(order), 2)]
    assert [sorted(turn) for turn in turns] == [[(batch, "full matrix"), (batch, "ours")] for batch in (8, 16) for _ in range(8)]
    assert len(set(turns)) == 4
    assert all(0 < row["host_s"] <= row["wall_s"] for row in report.read_rows(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(("runs", "turns"), [(1, 9), (4, 12), (5, 12), (34, 50), (50, 50)])
def test_steps_with_fewer_runs_are_spread_over_the_turns(runs: int, turns: int) -> None:
    where = [turn for turn in range(1, turns + 1) if measuring._takes_part(turn, runs, turns)]
    assert len(where) == runs
    gaps = [later - earlier for earlier, later in itertools.pairwise([0, *where])]
    assert max(gaps) - min(gaps) <= 1


def test_a_step_that_runs_out_of_memory_beside_others_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    batch = measuring._inputs(Case("clip", "formula", batch=8, dim=4), 8)

    def too_large(*leaves: Tensor) -> Tensor:
        raise torch.OutOfMemoryError

    found = measuring.with_the_host(
        [measuring.Step(too_large, batch, 2), measuring.Step(peers.find("formula", "clip").load(), batch, 2)]
    )
    assert found[0] == {} and found[1].keys() == {"host_s", "wall_s"}


def test_the_share_counts_only_useful_flops() -> None:
    row = {"loss": "clip", "batch": 1000, "dim": 100, "total_s": 1e-3, "matrix_product_tflops": 2.0}
    assert share(row) == {"useful_flop": 8 * 10**8, "share": pytest.approx(0.4)}
    assert share(row | {"loss": "siglip"})["useful_flop"] == 6 * 10**8
    rested = share(row | {"rested_s": 0.5e-3, "rested_product_tflops": 3.2})
    assert rested["share"] == pytest.approx(0.4) and rested["rested_share"] == pytest.approx(0.5)


@pytest.mark.parametrize(("device", "batch", "warm_up"), [("cpu", 4096, 128), ("cuda", 65536, 65536), ("cuda", 2**20, 32768)])
def test_large_batches_warm_up_at_a_smaller_size(device: str, batch: int, warm_up: int) -> None:
    assert measuring._warm_up_batch(Case("clip", "ours", batch=batch, device=device)) == warm_up


def test_cpu_steps_of_one_size_take_turns_after_a_step_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def find(name: str, kind: str) -> peers.Peer:
        def call(x: Tensor, *_: Tensor) -> Tensor:
            order.append(name)
            return x.sum()

        return peers.Peer(name, kind, lambda: call, "torch")

    monkeypatch.setattr(peers, "find", find)
    rows = measuring.in_turn([Case("clip", name, batch=8, dim=4, repeats=2) for name in ("a", "b")])
    assert order == ["a", "b"] * 3
    assert all(row["runs"] == 2 and 0 < row["total_min_s"] <= row["total_s"] <= row["total_max_s"] for row in rows)


@pytest.mark.slow
def test_rows_of_a_cpu_have_times_in_turn_and_keep_their_own_if_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    options = [
        "--losses",
        "clip",
        "--only",
        "ours,full matrix",
        "--sizes",
        "64",
        "--dim",
        "32",
        "--repeats",
        "2",
        "--out",
        str(out),
    ]
    assert loss.main(options) == 0
    rows = report.read_rows(out)
    assert [row["implementation"] for row in rows] == ["ours", "full matrix"]
    assert all(row["in_turn"] and row["runs"] == 2 and row["extra_bytes"] and row["right"] for row in rows)
    monkeypatch.setattr(loss, "run_in_turn", lambda cases, timeout_s: (None, "ended by signal 9"))
    assert loss.main(options) == 0
    assert "ended by signal 9" in capsys.readouterr().out
    assert all("in_turn" not in row and row["total_s"] > 0 for row in report.read_rows(out))


@pytest.mark.slow
def test_rows_of_several_runs_are_combined(tmp_path: Path) -> None:
    def run(*more: str) -> list[tuple[int, int]]:
        options = ["--losses", "clip", "--only", "ours", "--repeats", "1", "--in-process", "--out", str(tmp_path / "rows.jsonl")]
        assert loss.main([*options, *more]) == 0
        return [(row["batch"], row["dim"]) for row in report.read_rows(tmp_path / "rows.jsonl")]

    assert run("--sizes", "8,16", "--dim", "4,8") == [(8, 4), (8, 8), (16, 4), (16, 8)]
    assert run("--sizes", "8,32", "--dim", "8", "--append") == [(8, 4), (16, 4), (16, 8), (8, 8), (32, 8)]
    assert run("--sizes", "8", "--dim", "8") == [(8, 8)]


def test_after_a_failed_kernel_each_case_runs_in_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = []

    def failing(case: Case) -> tuple[Row, None]:
        places.append("here")
        return {**asdict(case), "error": "AcceleratorError: an illegal memory access"}, None

    def fresh(case: Case, timeout_s: float) -> Row:
        places.append("fresh")
        return measured(case.batch, "ours", 1.0, 1) | {"right": True}

    monkeypatch.setattr(loss, "measure_device", failing)
    monkeypatch.setattr(loss, "run_case", fresh)
    options = ["--losses", "clip", "--only", "ours", "--sizes", "8,16,32", "--in-process", "--out", str(tmp_path / "rows.jsonl")]
    assert loss.main(options) == 1
    assert places == ["here", "fresh", "fresh"]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Rows as measured on a GPU: two widths, options, and a peer with a wrong result."""
    machine = {"gpu": "NVIDIA H200", "torch": "2.11.0", "date": "2026-11-15T00:00:00", "memory_bytes": 2**37}
    gpu = {"dtype": "bfloat16", "device": "cuda", "right": True, "tolerance": 0.1, "machine": machine}

    def shared_row(kind: str, name: str, batch: int, dim: int, ms: float, **more: object) -> Row:
        row = measured(batch, name, ms / 1000, 512) | gpu | {"loss": kind, "dim": dim} | more
        row |= {"matrix_product_tflops": 700.0}
        if batch < 2**20:
            row |= {"rested_s": ms / 1000 / 1.25, "rested_product_tflops": 800.0}
        return row | share(row)

    wrong = {"right": False, "errors": {"gradient": 0.9, "scale": 0.01}, "version": "25.1.1"}
    rows = [
        shared_row("clip", "openclip", 65536, 768, 127, version="3.3.0"),
        shared_row("clip", "cut-cross-entropy", 65536, 768, 1500, **wrong),
        shared_row("siglip", "ours", 65536, 768, 31),
        shared_row("clip", "ours", 65536, 768, 40),
        shared_row("clip", "ours", 65536, 1024, 52),
        shared_row("clip", "ours", 8192, 768, 0.7, wall_s=1.2e-3, host_s=1e-3),
        shared_row("clip", "ours", 2**20, 768, 10_600, wall_s=10.7, host_s=5.2, warm_up=False),
        gpu | {"loss": "clip", "implementation": "openclip", "batch": 2**20, "dim": 768, "needed_bytes": 2**43, "skipped": "large"},
        shared_row("clip", "ours, ids", 65536, 768, 42),
        shared_row("clip", "ours, graphed", 8192, 768, 0.0784, wall_s=0.9e-3, host_s=0.5e-3),
        shared_row("clip", "ours, value_and_grad", 8192, 768, 0.0784, wall_s=0.8e-3, host_s=0.2e-3),
        shared_row("siglip", "ours, diagnostics", 65536, 768, 62),
    ]
    report.write_rows(tmp_path / "shared.jsonl", rows)
    return tmp_path / "shared.jsonl"


def test_rows_with_shares_as_markdown(shared: Path) -> None:
    lines = report.markdown(report.read_rows(shared)).splitlines()
    assert lines[0] == f"| {' | '.join(report.SHARES_HEADERS)} |"
    times = "**0.700 ms** | 84 % |  | **0.560 ms** | 92 % | "
    assert lines[2] == f"| 8,192 | 768 | **megabatch** | {times} | 512 MiB |"
    times = "**40.0 ms** | 94 % | 3.17× | **32.0 ms** | 103 % | 3.17×"
    assert lines[3] == f"| 65,536 | 768 | **megabatch** | {times} | 512 MiB |"
    assert lines[4].startswith("| 65,536 | 768 | OpenCLIP | 127 ms | 30 % | 1.00× | 102 ms |")
    assert lines[5].startswith("| 65,536 | 768 | Cut Cross-Entropy (gradient off by 9e-01) | 1.50 s | 3 % | 0.08× | 1.20 s |")
    assert lines[7] == "| 1,048,576 | 768 | **megabatch** | **10.6 s** |  |  |  |  |  | 512 MiB |"
    assert lines[8] == "| 1,048,576 | 768 | OpenCLIP | needs 8,192 GiB |  |  |  |  |  |  |"
    assert "with torch 2.11.0, OpenCLIP 3.3.0, Cut Cross-Entropy 25.1.1, 2026-11-15." in lines[-1]
    assert "700 TFLOP/s; percentages are shares of their rate, counting 8·N²·D (clip) and 6·N²·D (siglip) operations" in lines[-1]
    assert "as many operations after the same rest, which ran at 800 TFLOP/s" in lines[-1]
    assert not any("ids" in line or "diagnostics" in line for line in lines)


def test_tables_of_parts_of_a_file(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "ROOT", shared.parent)
    options = readme._table(f"{shared.name}#options").splitlines()
    assert options[2:4] == [
        "| clip | 65,536 | 768 | ids | 42.0 ms | 1.05× |",
        "| siglip | 65,536 | 768 | diagnostics | 62.0 ms | 2.00× |",
    ]
    times = readme._table(f"{shared.name}#times").splitlines()
    assert times[0] == "| loss | implementation | 8,192 |"
    assert times[2:5] == [
        "| clip | megabatch | 1.20 (1.00, 0.700) |",
        "| clip | megabatch, in a CUDA graph | 0.900 (0.500, 0.078) |",
        "| clip | megabatch, in a CUDA graph, without autograd | **0.800** (0.200, 0.078) |",
    ]
    siglip = readme._table(f"{shared.name}#siglip")
    assert siglip.count("**megabatch**") == 1 and "8·N²·D" not in siglip and "D = 768" in siglip


def test_rows_with_shares_are_shown_and_drawn(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert loss.main(["--redraw", str(shared)]) == 0
    assert shared.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "of cuBLAS" in printed and "94.2%" in printed and "103.1%" in printed and "9.0e-01 (wrong)" in printed
    assert "timed, but wrong: clip, Cut Cross-Entropy, N = 65,536: gradient off by 9.0e-01, 1.0e-01 allowed" in printed


def test_gradient_errors_on_clustered_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "errors.jsonl"
    size = ["--batch", "128", "--dim", "32", "--scales", "20,100", "--out", str(out)]
    with pytest.raises(SystemExit):
        errors.main([*size, "--draws", "0"])
    assert errors.main([*size, "--draws", "1"]) == 0
    first = report.read_rows(out)
    assert errors.main([*size, "--draws", "2"]) == 0
    rows = report.read_rows(out)
    # The first draw is the same as before: it is part of the root mean square and of the largest of two.
    for one, both in zip(first, rows, strict=True):
        assert one["largest_errors"].items() == one["errors"].items()
        for name, error in one["errors"].items():
            mean, largest = both["errors"][name], both["largest_errors"][name]
            assert max(error, mean) <= largest
            assert largest == error or mean == pytest.approx(math.sqrt((error**2 + largest**2) / 2))
    assert len(rows) == 2 * sum(len(errors.contestants("cpu", loss)) for loss in check.LOSSES)
    assert all(0.5 < row["value"] < 8 for row in rows if row["loss"] == "clip")
    # Gradients have the precision of the embeddings, which alone causes errors of up to its unit roundoff.
    for name, allowed in (("bfloat16", 2**-8), ("float16", 2**-11), ("float32", 1e-5)):
        gradient_errors = [row["errors"]["gradient"] for row in rows if row["implementation"] == "ours" and row["dtype"] == name]
        assert gradient_errors and max(gradient_errors) < allowed
    assert {"bias" in row["errors"] for row in rows if row["loss"] == "siglip"} == {True}

    monkeypatch.setattr(readme, "ROOT", tmp_path)
    lines = readme._table("errors.jsonl#errors").splitlines()
    starts = [f"| {kind} | {scale} | " for kind in check.LOSSES for scale in (20, 100)]
    assert all(line.startswith(start) for line, start in zip(lines[2:6], starts, strict=True))
    assert lines[2].count("**") == 6 and lines[2].count(" | ") == 7
    assert "over 2 draws of 128 pairs in clusters of 16, D = 32" in lines[-1]


def test_kept_rows_can_be_drawn(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert loss.main(["--redraw", str(kept)]) == 0
    assert kept.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "1.50×" in printed and "25.0%" in printed
    assert "OpenCLIP, N = 512: needs about 9 GiB" in printed


def test_kept_rows_as_markdown(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert loss.main(["--markdown", str(kept)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| loss | batch | megabatch | OpenCLIP |"
    assert lines[2] == "| clip | 256 | **2.00 s, 4.00 MiB** | 3.00 s, 16.0 MiB |"
    assert lines[3] == "| clip | 512 | **8.00 s, 5.00 MiB** | needs 9 GiB |"


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure for minutes")
@pytest.mark.parametrize(
    ("arguments", "message"), [([], "no CUDA device"), (["--kinds", "int8"], "kinds int8: choose among bfloat16")]
)
def test_block_sizes_are_not_tuned_without_a_gpu(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    tune = pytest.importorskip("benchmarks.tune")
    with pytest.raises(SystemExit):
        tune.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure for a minute")
def test_clocks_are_not_measured_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        clocks.main([])
    assert "no CUDA device" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        clocks.main(["--batch", "1"])
    assert "--batch is 1: clocks are seen in steps that fill a device, of 1,024 pairs or more" in capsys.readouterr().err


def test_a_row_of_clocks_compares_times_after_the_same_rest() -> None:
    times = {"ours, 512 MiB": (0.04, 0.03), "ours, int8": (0.03, 0.024), "products": (0.05, 0.031), "openclip": (0.12, 0.12)}
    rows = [
        {"implementation": name, "rest": rest, "total_s": s, "matrix_product_tflops": 799.6 if rest and name == "products" else 700}
        for name, both in times.items()
        for rest, s in zip((0.0, 0.5), both, strict=True)
    ]
    first, second = clocks.table(rows)
    beside = "700 TFLOP/s"
    assert first == ("0", "40.0 ms", beside, "30.0 ms", beside, "50.0 ms", beside, "120.0 ms", beside, "3.00×", "4.00×")
    assert (second[0], second[5:7], second[-2:]) == ("0.5", ("31.0 ms", "800 TFLOP/s"), ("4.00×", "5.00×"))


def test_panels_of_matrix_products_cover_every_pair_once() -> None:
    seen = torch.zeros(5, 5)
    for rows, columns in clocks._panels(5, side=2):
        seen[rows, columns] += 1
    assert bool((seen == 1).all())


def test_tuned_block_sizes_replace_only_those_of_the_same_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune = pytest.importorskip("benchmarks.tune")
    monkeypatch.setattr(tune.tuned_configs, "TUNED", tmp_path / "tuned_configs.json")
    (tmp_path / "tuned_configs.json").write_text('{"blocks": [], "pipelines": []}')
    place = {"kernel": "stats", "kind": "bfloat16", "width": 768}
    for device, m in (("A", 64), ("B", 64), ("A", 128)):
        tune._write({"blocks": [{**place, "device": device, "m": m}], "pipelines": []})
    tune._write({"blocks": [], "pipelines": [{**place, "device": "A", "lag": 4}]})
    kept = json.loads((tmp_path / "tuned_configs.json").read_text())
    assert sorted((entry["device"], entry["m"]) for entry in kept["blocks"]) == [("A", 128), ("B", 64)]
    assert [(entry["device"], entry["lag"]) for entry in kept["pipelines"]] == [("A", 4)]
    assert all(entry["date"] and entry["torch"] == torch.__version__ for entry in (*kept["blocks"], *kept["pipelines"]))
