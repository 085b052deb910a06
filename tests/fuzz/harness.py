"""Run targets on inputs that a seed determines, in processes that may die: every failure is attributed to its input.

An input depends only on (seed, target, index), so that a failure can be replayed. Child processes work on ranges of indices, and
each writes to shared memory which input it works on and since when. One that takes too long is killed, one that dies is replaced,
and the range continues after the input that caused it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import mmap
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

# Limits of one input: CPU time, and memory beyond what the process has at its start.
LIMIT_S, LIMIT_BYTES = 5.0, 3 * 2**30
RANGE = 250
# Attempts and seconds for shrinking a failure.
TRIALS, SHRINKING_S = 400, 20.0
# The input that a child works on, when it began, and the CPU time used until then.
STATE = struct.Struct("qdd")


class Reached(BaseException):
    """Raised when all input was checked, instead of the work that follows. Not caught by `except Exception`."""


class Forbidden(BaseException):
    """An input made the program start a process or open a connection."""


@dataclass(frozen=True)
class Target:
    """One kind of input. make: creates an input from a random generator. run: processes it like the program, in an empty folder.

    share: of all inputs, relative to the others'. allowed: what it may raise.
    """

    name: str
    make: Callable[[random.Random], Any]
    run: Callable[[Any, Path], Any]
    share: float = 1.0
    allowed: tuple[type[BaseException], ...] = (ValueError,)


@dataclass
class Failure:
    """An input that broke a rule. where: the innermost line in the package, or the last one known."""

    target: str
    index: int
    kind: str
    where: str
    trace: str
    case: str = ""
    times: int = 1

    @property
    def key(self) -> tuple[str, str, str]:
        return self.target, self.kind, self.where


@dataclass
class Report:
    """The results of one target. Seconds are CPU time, because the machine may be busy."""

    inputs: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    slowest: int = -1
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Report) -> None:
        self.inputs += other.inputs
        self.seconds += other.seconds
        self.outcomes += other.outcomes
        if other.slowest_s > self.slowest_s:
            self.slowest_s, self.slowest = other.slowest_s, other.slowest
        for failure in other.failures:
            known = next((each for each in self.failures if each.key == failure.key), None)
            if known is None:
                self.failures.append(failure)
            else:
                known.times += failure.times


def case_of(target: Target, seed: int, index: int) -> Any:
    """Return the input with this index, always the same one."""
    return target.make(random.Random(f"{seed}/{target.name}/{index}"))


def ranges(targets: Sequence[Target], inputs: int, seed: int) -> list[tuple[int, int, int]]:
    """Return (number of the target, first index, end) of all work, with targets interleaved."""
    shares = [target.share for target in targets]
    counts = [int(inputs * share / sum(shares)) for share in shares]
    counts[0] += inputs - sum(counts)
    found = [(number, first, min(first + RANGE, count)) for number, count in enumerate(counts) for first in range(0, count, RANGE)]
    random.Random(seed).shuffle(found)
    return found


def fuzz(
    targets: Sequence[Target],
    inputs: int,
    seed: int,
    *,
    processes: int = 1,
    context: BaseContext | None = None,
    say: Callable[[str], None] = lambda line: None,
    limit_s: float = LIMIT_S,
    shrinking: bool = True,
    find: Callable[[], Sequence[Target]] | None = None,
) -> dict[str, Report]:
    """Run this many inputs over all targets and return the results by target; failures with their smallest known input.

    find: gives the same targets in a process that was not forked from this one; a function that can be pickled.
    """
    reports = {target.name: Report() for target in targets}
    pool = _Pool(targets, seed, context or multiprocessing.get_context("fork"), limit_s, find or (lambda: targets))
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(contextlib.closing(pool.start())) for _ in range(processes)]
        _go_through(pool, children, ranges(targets, inputs, seed), reports, inputs, say)
        for report in reports.values():
            for failure in report.failures:
                target = next(each for each in targets if each.name == failure.target)
                case = case_of(target, seed, failure.index)
                if shrinking:
                    case = shrunk(case, lambda smaller, t=target, f=failure: pool.fails_alike(children[0], t, f, smaller))
                failure.case = repr(case)
    return reports


def _go_through(
    pool: _Pool,
    children: Sequence[_Child],
    work: list[tuple[int, int, int]],
    reports: dict[str, Report],
    inputs: int,
    say: Callable[[str], None],
) -> None:
    began = said = time.monotonic()
    while work or any(child.range is not None for child in children):
        for child in children:
            if child.range is None and work:
                child.give(work.pop())
        wait([child.pipe for child in children if child.range is not None] + [child.process.sentinel for child in children], 0.25)
        for child in children:
            if child.range is None:
                continue
            number, _, end = child.range
            report, at = child.look()
            if report is not None:
                whole = reports[pool.targets[number].name]
                known = {failure.key for failure in whole.failures}
                whole.add(report)
                for failure in report.failures:
                    if failure.key not in known:
                        say(f"{failure.target}/{failure.index}: {failure.kind} at {failure.where}")
            if at is not None and at < end:
                work.append((number, at, end))
        now = time.monotonic()
        if now - said > 5:
            said = now
            done = sum(report.inputs for report in reports.values())
            failed = sum(len(report.failures) for report in reports.values())
            left = (now - began) * (inputs - done) / max(done, 1)
            rate = f"{done / (now - began):,.0f} a second, {left / 60:.0f} min left"
            say(f"{done:,} of {inputs:,} inputs, {rate}, {failed} kinds of failure")


class _Pool:
    def __init__(
        self, targets: Sequence[Target], seed: int, context: BaseContext, limit_s: float, find: Callable[[], Sequence[Target]]
    ) -> None:
        self.targets, self.seed, self.context, self.limit_s, self.find = targets, seed, context, limit_s, find

    def start(self) -> _Child:
        return _Child(self)

    def fails_alike(self, child: _Child, target: Target, failure: Failure, case: Any) -> bool:
        """Return whether another input fails at the same place in the same way."""
        child.give((self.targets.index(target), 0, 1), case)
        while child.range is not None:
            wait([child.pipe, child.process.sentinel], 0.25)
            report, _ = child.look()
            if report is not None:
                return any(found.key == failure.key for found in report.failures)
        return False


class _Child:
    """A process that works on one range at a time; restarted when it dies."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self._folder = Path(tempfile.mkdtemp(prefix="megabatch-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        self._state_file = open(self._folder / "state", "w+b")  # noqa: SIM115
        self._state_file.truncate(STATE.size)
        self._state = mmap.mmap(self._state_file.fileno(), STATE.size)
        self.range: tuple[int, int, int] | None = None
        self._start()

    def _start(self) -> None:
        here, there = self._pool.context.Pipe()
        arguments = (self._pool.find, self._pool.seed, there, str(self._folder), self._pool.limit_s)
        self.process: Any = self._pool.context.Process(target=_work, args=arguments, daemon=True)  # type: ignore[attr-defined]
        self.process.start()
        there.close()
        self.pipe = here

    def give(self, work: tuple[int, int, int], case: Any = None) -> None:
        self.range = work
        self._state[:] = STATE.pack(work[1], time.monotonic(), _cpu_seconds(self.process.pid))
        self.pipe.send((work, [] if case is None else [case]))

    def look(self) -> tuple[Report | None, int | None]:
        """Return a report and, if the range is not finished, the index to continue at."""
        assert self.range is not None
        if self.pipe.poll():
            try:
                report = self.pipe.recv()
            except EOFError:
                return self._died()
            self.range = None
            return report, None
        if not self.process.is_alive():
            return self._died()
        _, since, spent = STATE.unpack(self._state[:])
        waited = time.monotonic() - since if since else 0.0
        # On a busy machine a process may get no time: its own CPU time counts, and a much longer limit if it only waits.
        if waited > self._pool.limit_s and (
            _cpu_seconds(self.process.pid) - spent > self._pool.limit_s / 2 or waited > 4 * self._pool.limit_s
        ):
            # It writes its stack before it is killed.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.2)
            self.process.kill()
            return self._died(f"longer than {self._pool.limit_s:g} s")
        return None, None

    def _died(self, why: str | None = None) -> tuple[Report, int]:
        assert self.range is not None
        number, first, _ = self.range
        self.process.join()
        status = self.process.exitcode
        if why is None:
            why = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        index, _, _ = STATE.unpack(self._state[:])
        trace = (self._folder / "stack").read_text("utf-8", "replace")
        # faulthandler writes the innermost calls first.
        failure = Failure(self._pool.targets[number].name, index, why, _native_place(trace), "\n".join(trace.splitlines()[:12]))
        # Its counts for this range are lost, but the inputs were run.
        report = Report(index - first + 1, 0.0, 0.0, -1, Counter({"not counted": index - first, why: 1}), [failure])
        self.pipe.close()
        self.range = None
        self._start()
        return report, index + 1

    def close(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()
        self._state.close()
        self._state_file.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _work(find: Callable[[], Sequence[Target]], seed: int, pipe: Connection, folder: str, limit_s: float) -> None:
    """The main function of a child."""
    targets = find()
    with open(f"{folder}/state", "r+b") as file, open(f"{folder}/stack", "w") as stack:
        state = mmap.mmap(file.fileno(), STATE.size)
        faulthandler.enable(stack)
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
        place = Path(folder) / "input"
        # The previous one may have died and left files.
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        os.chdir(place)
        _limit_memory()
        guard = _Guard(folder)
        sys.addaudithook(guard)
        sys.stdin = open(os.devnull)  # noqa: SIM115
        # Like Python: standard error escapes what it cannot encode.
        with (
            open(os.devnull, "w") as out,
            open(os.devnull, "w", errors="backslashreplace") as err,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            while True:
                try:
                    (number, first, end), cases = pipe.recv()
                except EOFError:
                    return
                report = Report()
                for index in range(first, end):
                    state[:] = STATE.pack(index, time.monotonic(), time.process_time())
                    target = targets[number]
                    case = cases[0] if cases else case_of(target, seed, index)
                    _run_one(target, case, index, place, guard, report, limit_s)
                state[:] = STATE.pack(end, 0.0, 0.0)
                pipe.send(report)


def _run_one(target: Target, case: Any, index: int, place: Path, guard: _Guard, report: Report, limit_s: float) -> None:
    began = time.process_time()
    outcome, failure = outcome_of(target, case, index, place, guard)
    seconds = time.process_time() - began
    if seconds > limit_s and failure is None:
        failure = Failure(target.name, index, f"longer than {limit_s:g} s", "?", f"{seconds:.1f} s, then {outcome}")
    report.inputs += 1
    report.seconds += seconds
    report.outcomes[outcome] += 1
    if seconds > report.slowest_s:
        report.slowest_s, report.slowest = seconds, index
    if failure is not None:
        report.add(Report(failures=[failure]))


def outcome_of(target: Target, case: Any, index: int, place: Path, guard: _Guard | None = None) -> tuple[str, Failure | None]:
    """Run an input. Return "accepted" or the name of what it raised, and a failure if that is not allowed."""
    try:
        with guard or contextlib.nullcontext():
            target.run(case, place)
    except target.allowed as error:
        return type(error).__name__, None
    except Reached:
        return "accepted", None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        trace = traceback.format_exc()
        failure = Failure(target.name, index, type(error).__name__, _place(error), trace[-3000:])
        return type(error).__name__, failure
    finally:
        for entry in list(os.scandir(place)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)
    return "accepted", None


class _Guard:
    """An audit hook: while an input runs, nothing outside its folder is written, no process started, no connection opened."""

    FORBIDDEN = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "os.startfile")
    WRITING = (
        "os.mkdir",
        "os.rename",
        "os.remove",
        "os.rmdir",
        "os.symlink",
        "os.link",
        "os.truncate",
        "shutil.rmtree",
        "os.chmod",
    )

    def __init__(self, folder: str) -> None:
        self._folder = os.path.realpath(folder)
        self._on = False

    def __enter__(self) -> None:
        self._on = True

    def __exit__(self, *_: object) -> None:
        self._on = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, (str, bytes)) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self._check(path)
        elif event in self.WRITING:
            self._check(arguments[0])
        elif event in self.FORBIDDEN:
            raise Forbidden(event, *arguments[:1])

    def _check(self, path: Any) -> None:
        # A descriptor was checked when it was opened.
        if isinstance(path, int):
            return
        where = os.path.realpath(os.fsdecode(path))
        if where != os.devnull and not where.startswith(self._folder + os.sep):
            raise PermissionError(13, "not written while fuzzing", os.fsdecode(path))


def _cpu_seconds(process: int) -> float:
    """Return the CPU time that a process has used so far."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _limit_memory() -> None:
    """Make allocations of more than LIMIT_BYTES beyond the current size raise MemoryError."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + LIMIT_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _place(error: BaseException) -> str:
    """Return the innermost line in the package in the traceback of an exception, or its innermost line anywhere."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "megabatch" in frame.filename and "fuzz" not in frame.filename]
    if not frames:
        return "?"
    frame = (ours or frames)[-1]
    return f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.name}"


def _native_place(trace: str) -> str:
    """Return the same from the output of faulthandler."""
    frames = re.findall(r'File "([^"]+)", line \d+ in (\S+)', trace)
    ours = [frame for frame in frames if "megabatch" in frame[0] and "/fuzz/" not in frame[0]]
    file, function = (ours or frames or [("?", "?")])[0]
    return f"{'/'.join(Path(file).parts[-3:])}:{function}"


def shrunk(case: Any, fails: Callable[[Any], bool]) -> Any:
    """Return a smaller input that still fails, found by omitting parts and simplifying values, or the input itself."""
    end, trials = time.monotonic() + SHRINKING_S, 0
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(case):
            trials += 1
            if trials > TRIALS or time.monotonic() > end:
                return case
            if fails(smaller):
                case, progress = smaller, True
                break
    return case


def _smaller(case: Any) -> Iterator[Any]:
    """Yield inputs that are simpler than this one, the simplest first."""
    if isinstance(case, (bytes, str, list, tuple)):
        length = len(case)
        size = length // 2
        while size:
            for at in range(0, length, size):
                yield case[:at] + case[at + size :]
            size //= 2 if size > 8 or length < 64 else size
        if isinstance(case, (list, tuple)):
            for at, entry in enumerate(case):
                for smaller in _smaller(entry):
                    yield type(case)((*case[:at], smaller, *case[at + 1 :]))
    elif isinstance(case, dict):
        for key in case:
            yield {other: entry for other, entry in case.items() if other != key}
        for key, entry in case.items():
            for smaller in _smaller(entry):
                yield {**case, key: smaller}
    elif dataclasses.is_dataclass(case) and not isinstance(case, type):
        for entry in dataclasses.fields(case):
            for smaller in _smaller(getattr(case, entry.name)):
                yield dataclasses.replace(case, **{entry.name: smaller})


def replayed(target: Target, seed: int, index: int) -> tuple[Any, str, Failure | None]:
    """Return the input with this index, its result in this process, and the failure if it was one."""
    case = case_of(target, seed, index)
    with tempfile.TemporaryDirectory(prefix="megabatch-fuzz-") as folder:
        place, before = Path(folder) / "input", os.getcwd()
        place.mkdir()
        os.chdir(place)
        try:
            return case, *outcome_of(target, case, index, place)
        finally:
            os.chdir(before)
