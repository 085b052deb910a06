"""The command line and the report of `megabatch env`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import PATIENCE_S

import megabatch
from megabatch import cli, environment


def run_python(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, with `path` before everything it could import from elsewhere."""
    paths = [str(path)] if path is not None else []
    paths += [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=PATIENCE_S)


def test_module_runs_as_the_command():
    done = run_python("-m", "megabatch", "env", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["megabatch"] == megabatch.__version__
    assert report["torch"]["version"] == torch.__version__


def test_importing_the_cli_imports_no_optional_package(tmp_path):
    # Decoys that import without fail: the test must be able to fail where the packages themselves are not installed.
    for name in ("triton", "open_clip"):
        (tmp_path / f"{name}.py").touch()
    program = """
import sys, torch
before = set(sys.modules)
import megabatch.cli
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
    done = run_python("-c", program, path=tmp_path)
    assert done.returncode == 0, done.stderr
    imported = done.stdout.split()
    assert "megabatch" in imported
    assert not {"triton", "open_clip"} & set(imported)


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"megabatch {megabatch.__version__}\n"


def test_without_a_verb_it_prints_help(capsys):
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: megabatch")
    lines = printed.splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) < 80
    verbs = ["plan", "audit", "fit", "profile", "noise", "sweep", "train", "evaluate", "embed", "search", "env"]
    assert [line.split()[0] for line in lines if line.startswith("  ") and line[2] != "-"] == verbs


def test_unknown_verb_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["environ"])
    assert exit_.value.code == 2
    assert "environ" in capsys.readouterr().err


def test_value_error_becomes_one_line_without_traceback(capsys, monkeypatch):
    def refuse():
        raise ValueError("chunk=0: must be positive;\npass chunk=1 or more")

    monkeypatch.setattr(environment, "describe", refuse)
    assert cli.main(["env"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "megabatch: error: chunk=0: must be positive; pass chunk=1 or more\n"


def test_env_prints_the_text_of_the_report(capsys):
    assert cli.main(["env"]) == 0
    assert capsys.readouterr().out == environment.as_text(environment.describe()) + "\n"


def test_report_lists_the_cpu_and_the_tiles_it_would_use():
    cpu = environment.describe()["devices"][0]
    assert cpu["device"] == "cpu"
    assert cpu["backend"] == "eager"
    assert cpu["threads"] == torch.get_num_threads()


def test_report_repeats_what_a_launcher_announced(monkeypatch):
    for name in environment.LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert environment.describe()["distributed"]["launcher"] == {}
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    report = environment.describe()
    assert report["distributed"]["launcher"] == {"RANK": "1", "WORLD_SIZE": "4"}
    assert report["distributed"]["group"] is None
    assert "RANK=1 WORLD_SIZE=4" in environment.as_text(report)


def test_report_names_the_process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        report = environment.describe()
    finally:
        torch.distributed.destroy_process_group()
    assert report["distributed"]["group"] == {"backend": "gloo", "rank": 0, "world_size": 1}
    assert "gloo group, rank 0 of 1" in environment.as_text(report)


@pytest.mark.parametrize(("hip", "capability"), [(None, "9.0"), ("6.4", "gfx942")])
def test_report_lists_every_gpu(monkeypatch, hip, capability):
    gpu = SimpleNamespace(name="GPU", major=9, minor=0, gcnArchName="gfx942", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(environment, "backend_name", lambda device: f"tiles of {device.type}")
    entries = [device for device in environment.describe()["devices"] if device["device"].startswith("cuda")]
    common = {"name": "GPU", "capability": capability, "memory": 80 * 2**30, "backend": "tiles of cuda"}
    assert entries == [{"device": "cuda:0", **common}, {"device": "cuda:1", **common}]


def test_device_that_cannot_be_asked_is_reported_with_its_error(monkeypatch):
    def broken():
        raise RuntimeError("driver/library version mismatch")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    report = environment.describe()
    errors = {device["device"]: device["error"] for device in report["devices"] if "error" in device}
    assert errors == {"cuda": "RuntimeError: driver/library version mismatch"}
    assert "cuda: cannot be queried: RuntimeError: driver/library version mismatch" in environment.as_text(report)


def test_text_of_what_this_machine_may_lack():
    report = {
        **environment.describe(),
        "torch": {"version": "2.8.0", "cuda": "12.8", "rocm": None},
        "triton": "3.4.0",
        "devices": [
            {"device": "cpu", "name": None, "capability": "AVX2", "memory": None, "threads": 8, "backend": "eager"},
            {"device": "cuda:0", "name": "H100", "capability": "9.0", "memory": 80 * 2**30, "backend": "fused"},
        ],
        "peers": {"lightning": "2.5.0"},
        "distributed": {"available": False, "backends": [], "group": None, "launcher": {}},
    }
    lines = [line.split(maxsplit=1) for line in environment.as_text(report).splitlines()]
    assert ["PyTorch", "2.8.0, built for CUDA 12.8"] in lines
    assert ["Triton", "3.4.0"] in lines
    assert ["device", "cpu: unknown name, 8 threads, capability AVX2, unknown memory; eager tiles"] in lines
    assert ["device", "cuda:0: H100, capability 9.0, 80.0 GiB; fused tiles"] in lines
    assert ["peers", "lightning 2.5.0"] in lines
    assert ["distributed", "not in this build of PyTorch"] in lines
    assert ["launcher", "no variables"] in lines


MISTAKE = """[batch]
size = 8192
[schedule]
samples = 100_000_000
warmup = 0
"""


def test_audit_tells_the_mistake_and_its_status(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(MISTAKE)
    assert cli.main(["audit", str(file)]) == 0
    told = capsys.readouterr().out
    assert "warning: schedule.warmup" in told and "-warmup = 0" in told
    assert cli.main(["audit", str(file), "--fail-on", "warning", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["code"] == "no-warmup"


def test_audit_compares_files(tmp_path, capsys):
    for size in (8192, 131072):
        (tmp_path / f"{size}.toml").write_text(f"[batch]\nsize = {size}\n[schedule]\nsamples = 100_000_000\n")
    cli.main(["audit", str(tmp_path / "8192.toml"), str(tmp_path / "131072.toml"), "--data", "10M"])
    assert "same-settings-across-batches" in capsys.readouterr().out


@pytest.mark.slow
def test_plan_writes_a_file_that_train_reads(tmp_path, capsys):
    assert cli.main(["plan", "--json", "--out", str(tmp_path / "run.toml"), "--html", str(tmp_path / "plan.html")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"]["batch"]["size"] == 128
    assert cli.main(["train", str(tmp_path / "run.toml"), "--show"]) == 0
    assert f"peak_bytes = {found['peak_bytes']}" in capsys.readouterr().out
    assert (tmp_path / "plan.html").stat().st_size > 10_000


@pytest.mark.parametrize("arguments", [["--gpus", "0"], ["--memory=-3GiB"], ["no-such-model"], ["--batch", "1G"]])
def test_a_plan_for_nonsense_is_one_sentence(arguments, capsys):
    assert cli.main(["plan", *arguments]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize(("option", "ours"), [("--batch-size", "--per-gpu"), ("--gradient-checkpointing", "--checkpointing")])
def test_options_of_other_trainers_are_answered_with_ours(option, ours, capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", option, "512"])
    assert ours in capsys.readouterr().err


def test_a_plan_says_what_it_does_before_it_imports_torch_and_clears_the_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    # The planner is imported after the first words.
    monkeypatch.setitem(sys.modules, "megabatch.planning.planner", None)
    with pytest.raises(ImportError):
        cli.main(["plan", "ViT-B/32"])
    assert "ViT-B/32" in capsys.readouterr().err


def test_audit_of_nothing_is_one_sentence(tmp_path, capsys):
    assert cli.main(["audit", str(tmp_path / "nowhere.toml")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
