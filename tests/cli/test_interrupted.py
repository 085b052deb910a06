"""Ctrl-C, SIGTERM and a rank that dies, at any moment: one sentence, the right exit status, no traceback."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from commands import PATIENCE_S
from world import fresh_processes

from megabatch import config
from megabatch.data.loader import _interrupts_held
from megabatch.training import loop
from megabatch.training.distributed import is_lost_rank
from megabatch.training.loop import Training, train
from megabatch.training.signals import Stopped

TEXT = 'name = "text"\noptions = {width = 16, depth = 1, heads = 2, length = 24}\n'
RUN = f"""
out = "run"
[data]
source = "pairs.jsonl"
held_out = 0.2
[x]
{TEXT}
[y]
{TEXT}
[loss]
dim = 8
[batch]
size = 24
chunk = 8
[schedule]
steps = 30
[compute]
device = "cpu"
threads = 1
"""
MISTAKE = "[batch]\nsize = 8192\n[schedule]\nsamples = 100_000_000\nwarmup = 0\n"
# Approximate CPU seconds of a verb in a process that has imported torch already.
VERBS = {
    "plan": (["plan", "run.toml", "--data", "10k", "--gpu", "A100-80GB"], 1.5),
    "audit": (["audit", "audit.toml", "--json"], 0.2),
    "train": (["train", "run.toml", "data.workers=1", "evaluate.every=7"], 1.5),
    "fit": (["fit", "run.toml", "schedule.steps=2"], 1.5),
    "evaluate": (["evaluate", "trained"], 0.2),
    "search": (["search", "trained", "a query"], 0.2),
}
# The verbs that `make test` interrupts; the others are slow tests.
QUICK_VERBS = ("train", "search")


def write_files(folder: Path) -> Path:
    lines = (json.dumps({"query": f"query {n}", "positive": f"document {n}"}) for n in range(100))
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "run.toml").write_text(RUN)
    (folder / "audit.toml").write_text(MISTAKE)
    return folder


def small_run(folder: Path, *overrides: str) -> config.Run:
    write_files(folder)
    settings = [f"data.source={folder / 'pairs.jsonl'}", f"out={folder / 'run'}", "watch.bar=false", "watch.report=false"]
    return config.read(folder / "run.toml", [*settings, "schedule.steps=3", *overrides])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Create the files that the verbs read, and a trained run."""
    folder = tmp_path_factory.mktemp("interrupted")
    train(small_run(folder, f"out={folder / 'trained'}"))
    return folder


def _enter(
    files: tuple[Path, Path], cwd: Path, arguments: list[str], seconds: float, number: int, variables: dict[str, str]
) -> None:
    """Run the command in this process; after so many seconds of CPU time it and its workers get the signal."""
    from megabatch import __main__ as entry

    for descriptor, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    # This process was forked by a server, which would also start its workers.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(variables)
    os.chdir(cwd)
    os.setpgid(0, 0)
    sys.argv = ["megabatch", *arguments]
    install = entry.Signals.install

    def install_and_wait(signals: entry.Signals) -> None:
        install(signals)
        if seconds:
            signal.signal(
                signal.SIGPROF, lambda *_: os.killpg(0, number) if number == signal.SIGINT else os.kill(os.getpid(), number)
            )
            signal.setitimer(signal.ITIMER_PROF, seconds)

    entry.Signals.install = install_and_wait
    sys.exit(entry.main())


class Process:
    """A command line in a process that has imported torch already."""

    def __init__(
        self, folder: Path, cwd: Path, arguments: list[str], seconds: float = 0, number: int = signal.SIGINT, **variables: str
    ):
        folder.mkdir(exist_ok=True)
        self.files = folder / "stdout", folder / "stderr"
        self.process = fresh_processes().Process(target=_enter, args=(self.files, cwd, arguments, seconds, number, variables))
        self.process.start()

    def wait(self) -> tuple[int, str, list[str]]:
        """Return the exit status, standard output, and the lines of standard error without progress and what the batch is."""
        self.process.join(PATIENCE_S)
        status = self.process.exitcode
        self.process.kill()
        out, err = (path.read_text("utf-8") for path in self.files)
        return status, out, [line for line in err.splitlines() if " pairs · " not in line and not line.startswith("batch ")]


def assert_one_sentence(process: Process, number: int) -> bool:
    """Check the output; return whether the command was interrupted, since it may have finished before."""
    status, out, lines = process.wait()
    assert "Traceback" not in out and not any("Traceback" in line for line in lines), "\n".join(lines)
    if status == 0:
        assert not lines
        return False
    assert (status, len(lines)) == (128 + number, 1), (status, lines)
    assert "stopped by" in lines[0]
    return True


@pytest.mark.parametrize("verb", [verb if verb in QUICK_VERBS else pytest.param(verb, marks=pytest.mark.slow) for verb in VERBS])
def test_a_signal_at_any_moment_is_one_sentence(verb, folder, tmp_path):
    _interrupt_at_random(verb, folder, tmp_path, times=2)


@pytest.mark.soak
@pytest.mark.parametrize("verb", VERBS)
def test_many_signals_at_any_moment_are_one_sentence(verb, folder, tmp_path):
    _interrupt_at_random(verb, folder, tmp_path, times=25)


def _interrupt_at_random(verb: str, folder: Path, tmp_path: Path, times: int) -> None:
    arguments, seconds = VERBS[verb]
    moments = random.Random(f"{verb} {times}")
    hit = 0
    for n in range(times):
        number = moments.choice([signal.SIGINT, signal.SIGTERM])
        cwd = tmp_path / str(n)
        cwd.mkdir()
        write_files(cwd)
        (cwd / "trained").symlink_to(folder / "trained")
        moment = moments.uniform(0.001, seconds)
        hit += assert_one_sentence(Process(cwd / "printed", cwd, arguments, moment, number), number)
    assert hit, "no command was interrupted: the moments are too late"


def has_handler(pid: int) -> bool:
    """Return whether a process handles SIGTERM, which Python by itself does not."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize(("delay", "number"), [(0.0, signal.SIGINT), (0.3, signal.SIGTERM), (0.8, signal.SIGINT)])
def test_a_signal_while_modules_are_imported_is_one_sentence(delay, number):
    process = subprocess.Popen(
        [sys.executable, "-m", "megabatch", "plan"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + PATIENCE_S
    while not has_handler(process.pid):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.001)
    time.sleep(delay)
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    name = signal.Signals(number).name
    assert (process.returncode, out, err) == (128 + number, "", f"megabatch: stopped by {name} before the command was finished\n")


# Code that handles an interrupt badly, as some libraries do. `interrupt` sends SIGINT to the process itself.
BAD_MANNERS = {
    "swallow it": "try:\n    interrupt()\nexcept BaseException:\n    pass\nreturn 0, None",
    "turn it into another exception": "try:\n    interrupt()\nexcept BaseException:\n    raise ImportError('broken')",
    "turn it into an error message": "try:\n    interrupt()\nexcept BaseException:\n    return 2, 'megabatch: error: broken'",
    "lose it in a finalizer": "class A:\n    def __del__(self):\n        interrupt()\nA()\ntime.sleep(9)\nreturn 0, None",
    "raise it inside exec": "exec('interrupt()', globals())",
    "swallow it in an import": "import swallowing\ntime.sleep(9)\nreturn 0, None",
    "go on until it comes again": "entry.PATIENCE = 0.1\nwhile True:\n    try:\n        interrupt()\n        time.sleep(0.2)\n"
    "    except BaseException:\n        time.sleep(0.2)",
    "end with exit": "try:\n    interrupt()\nexcept BaseException:\n    sys.exit(0)",
}
PROGRAM = """
import os, signal, sys, time, types
import megabatch
import megabatch.__main__ as entry

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100):
        pass

def run():
    BODY

import builtins
builtins.interrupt = interrupt
megabatch.cli = sys.modules["megabatch.cli"] = types.SimpleNamespace(run=run)
sys.exit(entry.main())
"""


def run_command(body: str, path: Path) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.replace("BODY", body.replace("\n", "\n    "))
    (path / "swallowing.py").write_text("try:\n    interrupt()\nexcept BaseException:\n    pass\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, env=env)


@pytest.mark.parametrize("manners", BAD_MANNERS)
def test_an_interrupt_is_not_lost_where_code(manners, tmp_path):
    done = run_command(BAD_MANNERS[manners], tmp_path)
    expected = "megabatch: stopped by SIGINT before the command was finished\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", expected)


def test_a_signal_after_the_end_leaves_the_status(tmp_path):
    done = run_command("import atexit\natexit.register(interrupt)\nprint('answer')\nreturn 3, 'megabatch: error: why'", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (3, "answer\n", "megabatch: error: why\n")


def test_other_exceptions_keep_their_traceback(tmp_path):
    done = run_command("raise RuntimeError('a mistake of ours')", tmp_path)
    assert done.returncode == 1 and "Traceback" in done.stderr and "a mistake of ours" in done.stderr


def test_a_forked_process_leaves_the_interrupt_to_its_parent(tmp_path):
    body = "child = os.fork()\nif not child:\n    interrupt()\n    os._exit(7)\nreturn os.waitpid(child, 0)[1] >> 8, None"
    done = run_command(body, tmp_path)
    assert (done.returncode, done.stderr) == (7, "")


def test_processes_started_for_reading_never_see_an_interrupt():
    shown = [sys.executable, "-c", "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with pytest.raises(KeyboardInterrupt):
        with _interrupts_held():
            # To this thread: a signal that other threads of the process may handle is not held back.
            signal.raise_signal(signal.SIGINT)
            found = subprocess.run(shown, capture_output=True, text=True, timeout=PATIENCE_S).stdout
        pytest.fail("the interrupt was lost")
    assert found == "True\n"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_a_signal_in_the_last_step_stops_the_run_before_its_report(tmp_path, monkeypatch):
    save = Training.save

    def interrupted(training, watch):
        os.kill(os.getpid(), signal.SIGTERM)
        save(training, watch)

    run = small_run(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Training, "save", interrupted)
        with pytest.raises(Stopped, match="after the last step") as stopped:
            train(run)
    assert stopped.value.status == 143 and not (tmp_path / "run" / "result.json").exists()
    assert json.loads((train(run) / "result.json").read_text())["steps"] == 3


def test_a_signal_while_the_report_is_written_is_obeyed_at_once(tmp_path, monkeypatch):
    run = small_run(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "finish", lambda *arguments: (os.kill(os.getpid(), signal.SIGINT), pytest.fail("ignored")))
        with pytest.raises(KeyboardInterrupt):
            train(run)
    assert json.loads((train(run) / "result.json").read_text())["steps"] == 3


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def has_taken_a_step(out: Path) -> bool:
    return (out / "log.jsonl").exists() and '"step"' in (out / "log.jsonl").read_text()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_whose_peer_dies_says_so_in_one_sentence(victim, tmp_path):
    write_files(tmp_path)
    arguments = ["train", "run.toml", "schedule.steps=100000", "watch.report=false"]
    announced = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        Process(tmp_path / f"rank {n}", tmp_path, arguments, RANK=str(n), LOCAL_RANK=str(n), OMP_NUM_THREADS="1", **announced)
        for n in range(2)
    ]
    end = time.monotonic() + PATIENCE_S
    while not has_taken_a_step(tmp_path / "run"):
        assert all(rank.process.is_alive() for rank in ranks) and time.monotonic() < end
        time.sleep(0.02)
    os.kill(ranks[victim].process.pid, signal.SIGKILL)
    assert ranks[victim].wait()[0] == -signal.SIGKILL
    status, out, lines = ranks[1 - victim].wait()
    assert (status, out, len(lines)) == (1, "", 1), lines
    assert f"rank {1 - victim}: another rank has died or left" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_rank_of_torchrun_prints_a_traceback_when_one_is_stopped(number, tmp_path):
    write_files(tmp_path)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--redirects=3",
        "--log-dir=logs",
    ]
    settings = ["schedule.steps=100000", "watch.report=false"]
    command = [*launcher, "-m", "megabatch", "train", "run.toml", *settings]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + PATIENCE_S
    while not has_taken_a_step(tmp_path / "run"):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), number)
    assert process.wait(120) != 0
    printed = [path.read_text() for path in sorted((tmp_path / "logs").rglob("stderr.log"))]
    assert len(printed) == 2 and not any("Traceback" in text for text in printed), printed
    # The first rank has said what the batch is.
    lines = [line for text in printed for line in text.splitlines() if not line.startswith("batch ")]
    assert len(lines) == (1 if number == signal.SIGKILL else 2), printed


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:7361"), True),
        (RuntimeError("[pair.cc:537] Read error [127.0.0.1]:725: Connection reset by peer."), True),
        (RuntimeError("[unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"), True),
        (dist.DistBackendError("NCCL error in: remote process exited or there was a network error"), True),
        (dist.DistStoreError("wait timeout after 300000ms, keys: /0"), True),
        (RuntimeError("[pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_only_a_lost_connection_is_taken_for_a_lost_rank(error, lost):
    assert is_lost_rank(error) is lost


def test_without_ranks_no_error_is_taken_for_a_lost_rank():
    from megabatch.training.distributed import ranks

    with pytest.raises(RuntimeError, match="timed out"), ranks(config.Compute(device="cpu")):
        raise RuntimeError("the request timed out")
