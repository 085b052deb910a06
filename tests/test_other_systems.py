"""macOS and Windows, imitated on Linux by removing what they lack."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import pickle
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil  # noqa: F401  (before os is changed, which it reads when it is imported)
import pytest
import torch
from torch import nn

import megabatch
from megabatch import cli, config, environment, files, host_memory
from megabatch.chunks.keep import free_bytes
from megabatch.costs.devices import cpu_device
from megabatch.data import open_source
from megabatch.measurements import Measured
from megabatch.measuring.fit import fit
from megabatch.measuring.fit.memory import Limit, ResidentTracker, limit_of
from megabatch.measuring.profile.curve import Size, judge, point
from megabatch.measuring.profile.quantities import Timed
from megabatch.measuring.profile.report import profile_report, sentences
from megabatch.measuring.rates import measure_rates
from megabatch.reporting.figures import save
from megabatch.reporting.history import read_history
from megabatch.reporting.run_report import curve_charts
from megabatch.training import checkpoint, memory
from megabatch.training.loop import train

MIB = 2**20
CPU = torch.device("cpu")


@pytest.fixture
def no_proc(monkeypatch, tmp_path):
    """Remove /proc and control groups."""
    monkeypatch.setattr(host_memory, "PROC", tmp_path / "no proc")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "no cgroups")


@pytest.fixture
def macos(monkeypatch, no_proc):
    monkeypatch.setattr(sys, "platform", "darwin")


@pytest.fixture
def windows(monkeypatch, no_proc):
    """Remove `resource`, sysconf, process groups and descriptors of folders; files and folders are stricter."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "resource", None)
    for name in ("sysconf", "O_DIRECTORY", "setpgrp", "getpgid", "getloadavg"):
        monkeypatch.delattr(os, name)
    monkeypatch.delattr(signal, "SIGKILL")
    # The module that locks files on Windows, which is imported only there.
    locking = SimpleNamespace(LK_NBLCK=2, LK_UNLCK=0, locking=lambda descriptor, mode, count: None)
    for module in [module for name, module in sys.modules.items() if name.startswith("megabatch.") and hasattr(module, "fcntl")]:
        monkeypatch.setattr(module, "msvcrt", locking, raising=False)
    # Windows cannot open folders, and Python deletes them differently there.
    monkeypatch.setattr(shutil, "_use_fd_functions", False)
    real = SimpleNamespace(rename=os.rename, fsync=os.fsync, open=os.open)

    def rename(old, new, **more):
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, "Cannot create a file when that file already exists", str(new))
        real.rename(old, new, **more)

    def fsync(descriptor):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real.fsync(descriptor)

    def opened(path, flags, *more, **named):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real.open(path, flags, *more, **named)

    for name, strict in (("rename", rename), ("fsync", fsync), ("open", opened)):
        monkeypatch.setattr(os, name, strict)


@pytest.fixture
def no_psutil(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)


@pytest.fixture(params=["macos", "windows"])
def system(request):
    request.getfixturevalue(request.param)
    return request.param


def run_of(folder: Path, *overrides: str) -> config.Run:
    """A very short run that does everything but draw its report."""
    source = folder / "pairs.jsonl"
    source.write_text("".join(json.dumps({"query": f"a {i}", "positive": f"the {i}"}) + "\n" for i in range(40)))
    tower = {"name": "text", "options": {"width": 8, "depth": 1, "heads": 1, "length": 8}}
    table = {
        "out": str(folder / "run"),
        "data": {"source": str(source), "held_out": 0.2, "window": 30},
        "x": tower,
        "y": tower,
        "loss": {"dim": 8},
        "batch": {"size": 8, "chunk": 4},
        "schedule": {"steps": 4},
        "checkpoint": {"every": 1, "keep": 2},
        "evaluate": {"large": [16]},
        "compute": {"device": "cpu"},
        "watch": {"bar": True, "report": False},
    }
    return config.build(table, overrides)


def log_of(out: Path, event: str) -> list[dict]:
    lines = (json.loads(line) for line in (out / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def test_psutil_agrees_with_proc(monkeypatch, tmp_path):
    told = {name: getattr(host_memory, name)() for name in ("total", "available", "resident")}
    monkeypatch.setattr(host_memory, "PROC", tmp_path)
    monkeypatch.delattr(os, "sysconf")
    for name, expected in told.items():
        assert getattr(host_memory, name)() == pytest.approx(expected, rel=0.1), name


def test_without_psutil_memory_is_unknown(system, no_psutil):
    assert host_memory.available() is None and host_memory.resident() is None and not host_memory.reset_peak()
    # The standard library provides both on macOS, and neither on Windows.
    for told in (host_memory.total(), host_memory.peak_resident()):
        assert (told is None) == (system == "windows")


def test_the_unit_of_the_peak_depends_on_the_system(macos, monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=5 * MIB))
    assert host_memory.peak_resident() == 5 * MIB
    monkeypatch.setattr(sys, "platform", "freebsd14")
    assert host_memory.peak_resident() == 5 * MIB * 1024


@pytest.mark.parametrize(
    "line, folder, names",
    [
        ("0::/job/step", "job", host_memory.CGROUP_V2),
        ("4:memory:/job/step", "memory/job", host_memory.CGROUP_V1),
        # A container that sees the path of the host.
        ("0::/docker/4f2a", "", host_memory.CGROUP_V2),
    ],
)
def test_the_limit_of_any_control_group_above_the_process_counts(monkeypatch, tmp_path, line, folder, names):
    limit, used, cache = names
    monkeypatch.setattr(host_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "cgroup")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"3:pids:/\n{line}\n")
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\nHugePages_Total: 0\n")
    assert host_memory.available() == 8000 * 1024
    group = tmp_path / "cgroup" / folder
    group.mkdir(parents=True)
    (group / limit).write_text("5000000\n")
    (group / used).write_text("3000000\n")
    assert host_memory.available() == 2000000
    # The kernel drops page cache when memory is needed.
    (group / "memory.stat").write_text(f"anon 1\n{cache} 1500000\n")
    assert host_memory.available() == 3500000
    (group / limit).write_text("max\n")
    assert host_memory.available() == 8000 * 1024


def test_a_reset_that_a_sandbox_ignores_is_detected(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "PROC", tmp_path)
    (tmp_path / "self").mkdir()
    status = tmp_path / "self" / "status"
    status.write_text("VmHWM: 90000 kB\nVmRSS: 50000 kB\n")
    assert not host_memory.reset_peak()
    status.write_text("VmHWM: 50004 kB\nVmRSS: 50000 kB\n")
    assert host_memory.reset_peak()


def test_keep_auto_works_with_psutil(system):
    encode = megabatch.cached(nn.Linear(4, 2), chunk=2, keep="auto")
    for _ in range(2):
        encode(torch.randn(8, 4)).sum().backward()
    assert encode.kept == 4


def test_keep_auto_without_psutil_raises_at_once(system, no_psutil):
    encode = megabatch.cached(nn.Linear(4, 2), chunk=2, keep="auto")
    with pytest.raises(ValueError, match=r"keep=\"auto\" on a CPU.*pip install psutil, or pass a number"):
        encode(torch.randn(8, 4))


def test_a_run_completes(system, tmp_path, capsys):
    run = run_of(tmp_path, "planned.peak_bytes=1000000")
    out = train(run)
    result = json.loads((out / "result.json").read_text())
    assert result["steps"] == 4 and result["step_bytes"] > 0
    # The peak of a process comes from psutil on Windows and from the standard library on macOS.
    assert (result["peak_bytes"] is None) == (system == "windows")
    assert [path.name for path in checkpoint.available(out / "checkpoints")] == ["step-00000003", "step-00000004"]
    drawn = [panel.title for panel in curve_charts(read_history(out / "log.jsonl"))]
    assert ("memory in use" in drawn) == (system == "macos") and "loss" in drawn
    printed = capsys.readouterr().err
    assert "one step at 16 pairs" in printed and ("memory unknown" in printed) == (system == "windows")
    assert not log_of(out, "note")[0]["text"].startswith("batch.keep")
    # It can be resumed.
    (out / "checkpoints" / "step-00000004").rename(tmp_path / "lost")
    train(run)
    assert checkpoint.newest(out / "checkpoints").name == "step-00000004"


def test_a_run_without_psutil_keeps_no_chunks_and_reports_it_once(system, no_psutil, tmp_path):
    out = train(run_of(tmp_path))
    (kept,) = [note["text"] for note in log_of(out, "note") if "batch.keep" in note["text"]]
    assert "no chunk is kept" in kept and "pip install psutil" in kept


def test_a_checkpoint_of_the_same_step_replaces_the_one_before(windows, tmp_path):
    for number in (1.0, 2.0):
        path = checkpoint.save(tmp_path, 7, {"w": torch.full((3,), number)}, {}, keep=1)
    found = {"w": torch.zeros(3)}
    checkpoint.load(path, found)
    assert found["w"].tolist() == [2, 2, 2] and [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_files_are_replaced(windows, tmp_path):
    for text in ("before", "after"):
        files.write_text(tmp_path / "result.json", text)
    assert (tmp_path / "result.json").read_text() == "after"


def test_fit_samples_memory_if_the_peak_cannot_be_reset(system):
    with ResidentTracker() as seen:
        before = host_memory.resident()
        # So large that what the system pages out of this process meanwhile does not matter, and long enough to be sampled.
        x = torch.ones(64 * MIB)
        for _ in range(5):
            x.sin_()
        del x
    assert 160 * MIB < seen.bytes - before < 400 * MIB
    assert limit_of(CPU, None, 0.0) == Limit(
        pytest.approx(host_memory.resident() + host_memory.available() / 2, rel=0.1), "measured"
    )


def test_a_chunk_is_found(system):
    model = nn.Linear(4, 2)
    found = megabatch.find_chunk(lambda rows: model(torch.randn(rows, 4)).sum().backward(), state=[model], cap=4)
    assert found.size == 4 and found.limit_bytes > 0 and found.trials[0].peak_bytes > 0


def test_fit_without_psutil_names_what_to_install(system, no_psutil, tmp_path):
    with pytest.raises(ValueError, match=r"cannot be measured on this CPU.*pip install psutil"):
        fit(run_of(tmp_path), out=tmp_path / "fit")


def test_env_describes_the_machine(system, no_psutil, capsys):
    assert cli.main(["env"]) == 0
    assert ("unknown memory" in capsys.readouterr().out) == (system == "windows")
    assert (environment.describe()["devices"][0]["memory"] is None) == (system == "windows")


def test_a_plan_reports_that_the_memory_is_assumed(windows, no_psutil):
    assert cpu_device().source.startswith("8 GiB of memory,")
    with pytest.raises(ValueError, match="memory of this machine cannot be read"):
        measure_rates(CPU, seconds=1e-3)


def test_a_device_without_memory_statistics_is_supported(monkeypatch):
    """Apple's GPUs report no peak and no limit."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    mps = torch.device("mps")
    memory.reset_peak(mps)
    assert memory.peak(mps) is None
    with pytest.raises(ValueError, match='keep="auto" on mps'):
        free_bytes(mps)


def test_a_profile_of_such_a_device_has_no_memory():
    timed = Timed((0.1, 0.2, 0.3), None, None, keep=0)
    found = judge([point(Size(batch, 8), timed, 1, None) for batch in (8, 16)], "batch", None, None)
    run = config.as_table(config.build({"schedule": {"steps": 1}}))
    measured = Measured(replace(found, enough=8), run, "Apple M4", "2.13.0", "2026-01-01")
    assert any("within 5 %" in sentence for sentence in sentences(measured))
    report = profile_report(measured)
    assert not {"peak_bytes", "reserved_bytes"} & {column.key for table in report.tables() for column in table.visible_columns()}
    assert "this device does not report its memory" in report.notes()
    (figure,) = report.figures()
    drawn = io.BytesIO()
    save(figure, drawn)
    assert drawn.getvalue().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.csv", "glyphs"])
def test_a_source_can_be_sent_to_spawned_processes(name, tmp_path):
    run_of(tmp_path)
    (tmp_path / "pairs.csv").write_text("query,positive\n" + "".join(f"a {i},the {i}\n" for i in range(9)))
    sides = {"x": "image", "y": "text"} if name == "glyphs" else {"x": "text", "y": "text"}
    source = open_source(config.Data(source="glyphs" if name == "glyphs" else str(tmp_path / name)), **sides)
    before, after = source.read(0, 3), pickle.loads(pickle.dumps(source)).read(0, 3)
    assert (before.key, before.y) == (after.key, after.y)
