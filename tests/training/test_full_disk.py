"""A disk that is full at any write of a run: one error, nothing lost, and the same result once there is space again."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image
from small_runs import PAIRS, assert_equal, final, run_of, stopping, write_pairs

from megabatch import cli, config, files
from megabatch.reporting import run_report
from megabatch.training import checkpoint, run_folder
from megabatch.training.checkpoint import manifest
from megabatch.training.loop import train
from megabatch.training.signals import Stopped

SMALL = ["x.name=text", 'x.options={"width": 8, "buckets": 64}', "y.name=x", "checkpoint.every=2", "compute.threads=1"]


class Disk:
    """A fake disk below a folder. It counts operations that take space (files created, bytes written, names changed) and
    is full at the `full_at`-th of them; from then on or, if it does not stay full, at that one only."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.count, self.full_at, self.stays = folder, 0, 0, True
        # The files that were written to, each with the first write of its bytes.
        self.first_writes: dict[str, int] = {}
        real_open, real_os_open = io.open, os.open

        def opened(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
            if not set(mode) & set("wax+") or not self.holds(file):
                return real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
            self.take(file)
            raw = _File(self, file, mode.replace("t", ""))
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)

        def os_open(path, flags, *args, **options):
            if flags & os.O_CREAT and self.holds(path) and not os.path.exists(path):
                self.take(path)
            return real_os_open(path, flags, *args, **options)

        monkeypatch.setattr(builtins, "open", opened)
        monkeypatch.setattr(io, "open", opened)
        monkeypatch.setattr(os, "open", os_open)
        for name in ("write", "fsync"):
            self._count(monkeypatch, name, lambda descriptor: True)
        for name in ("mkdir", "rename", "replace"):
            self._count(monkeypatch, name, self.holds)

    def holds(self, path):
        return not isinstance(path, int) and os.path.abspath(os.fsdecode(path)).startswith(f"{self.folder}{os.sep}")

    def take(self, path=None):
        """Count one more write; raise OSError if there is no space for it."""
        self.count += 1
        if self.full_at and (self.count == self.full_at or (self.stays and self.count > self.full_at)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), None if path is None else os.fsdecode(path))

    def _count(self, monkeypatch, name, concerns):
        real = getattr(os, name)

        def call(first, *args, **options):
            if concerns(first):
                self.take()
            return real(first, *args, **options)

        monkeypatch.setattr(os, name, call)


class _File(io.FileIO):
    """A file on that disk. As on a real disk, a write that fits in part returns how much it wrote, and the next one fails."""

    def __init__(self, disk, file, mode):
        super().__init__(file, mode)
        self.disk, self.failing = disk, None

    def write(self, data):
        if self.failing is not None:
            error, self.failing = self.failing, None
            raise error
        self.disk.first_writes.setdefault(os.fsdecode(self.name), self.disk.count + 1)
        try:
            self.disk.take(self.name)
        except OSError as error:
            if len(data) < 2 or self.disk.count > self.disk.full_at:
                raise
            self.failing = error
            return super().write(memoryview(data)[: len(data) // 2])
        return super().write(data)


@pytest.fixture
def pairs(tmp_path):
    return write_pairs(tmp_path / "pairs.jsonl", PAIRS)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        yield Disk(tmp_path / "disk", patch)


class Case:
    """A run that is started repeatedly from the same folder, each time with space for one more write."""

    def __init__(self, tmp_path, disk, pairs, capsys, *options, begin, fresh=False):
        self.disk, self.capsys, self.folder, self.begin = disk, capsys, tmp_path / "disk" / "run", begin
        self.writes, self.first_writes = 0, []
        self.arguments = ["train", str(tmp_path / "run.toml"), *(["--fresh"] if fresh else [])]
        run = run_of(pairs, self.folder, *SMALL, *options, steps=4)
        (tmp_path / "run.toml").write_text(config.as_toml(run))
        self.expected = final(train(run_of(pairs, tmp_path / "expected", *SMALL, "watch.report=false", steps=4)))

    def start(self, full_at, stays=True):
        """Start the run with space for so many writes less one, then go on with all the space it wants.

        Returns whether the disk was full.
        """
        disk, folder = self.disk, self.folder
        disk.full_at = 0
        shutil.rmtree(folder, ignore_errors=True)
        if self.begin is not None:
            shutil.copytree(self.begin, folder)
            (folder / "notes.txt").write_text("mine") if "--fresh" not in self.arguments else None
        before = checkpoint.newest(folder / "checkpoints")
        self.capsys.readouterr()
        disk.count, disk.full_at, disk.stays, disk.first_writes = 0, full_at, stays, {}
        status = cli.main(self.arguments)
        self.writes, self.first_writes = disk.count, sorted(disk.first_writes.values())
        full, disk.full_at = disk.count >= disk.full_at > 0, 0
        printed = self.capsys.readouterr().err
        if full and status == 0:
            # A checkpoint that could not be deleted is deleted by the next save: this is no error.
            assert not stays
        elif full:
            assert status == 1 and len(printed.splitlines()) == 1, (full_at, printed)
            assert "No space left on device" in printed
        self._is_intact(before)
        assert cli.main([argument for argument in self.arguments if argument != "--fresh"]) == 0
        assert_equal(final(folder), self.expected)
        self._is_intact(before)
        events = [json.loads(line) for line in (folder / "log.jsonl").read_bytes().splitlines()]
        assert {event["step"] for event in events if event["event"] == "step"} == {1, 2, 3, 4}
        return full

    def _is_intact(self, before):
        """Check that every file is complete, old or new, that checkpoints can be read, and that the user's files exist."""
        if not self.folder.exists():
            return
        mine = self.begin is not None and "--fresh" not in self.arguments
        assert run_folder.foreign(self.folder) == (["notes.txt"] if mine else [])
        for path in self.folder.iterdir():
            if run_folder.TEMPORARY.fullmatch(path.name):
                continue
            if path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".png":
                with Image.open(path) as image:
                    image.load()
            elif path.suffix == ".toml":
                config.read(path)
            elif path.suffix == ".html":
                assert path.read_text().endswith("</html>\n")
            elif path.suffix == ".txt":
                assert path.read_text() == "mine"
        newest = checkpoint.newest(self.folder / "checkpoints")
        if mine:
            assert newest is not None and newest.name >= before.name
        for path in checkpoint.available(self.folder / "checkpoints"):
            found = manifest.read(path)
            manifest.check_sizes(path, found)
            for name, file in found.files.items():
                manifest.check_sum(path, name, file)


def stopped(pairs, folder, monkeypatch):
    """A run that was stopped after two of four steps."""
    with monkeypatch.context() as patch:
        stopping(patch, after=2)
        with pytest.raises(Stopped):
            train(run_of(pairs, folder, *SMALL, steps=4))
    return folder


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_first_write_of_any_file_costs_nothing(tmp_path, disk, pairs, capsys, monkeypatch):
    begin = stopped(pairs, tmp_path / "stopped", monkeypatch)
    case = Case(tmp_path, disk, pairs, capsys, begin=begin)
    assert not case.start(0)
    # The mark (written through a descriptor), then environment.json, the log, a checkpoint's two files, the result.
    numbers = [1, *case.first_writes, case.writes]
    assert len(numbers) >= 7
    for number in numbers:
        assert case.start(number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begin", "stays"),
    [
        pytest.param("nothing", True, marks=pytest.mark.soak),
        ("a stopped run", True),
        pytest.param("a stopped run", False, marks=pytest.mark.soak),
        pytest.param("a finished run", True, marks=pytest.mark.soak),
        pytest.param("a finished run, and --fresh", True, marks=pytest.mark.soak),
    ],
)
def test_a_disk_that_is_full_at_any_write_costs_nothing(tmp_path, disk, pairs, capsys, monkeypatch, begin, stays):
    """stays: whether the disk is full from that write on, or only at that write."""
    fresh = begin.endswith("--fresh")
    options = []
    if begin == "nothing":
        folder = None
    elif begin == "a stopped run":
        folder = stopped(pairs, tmp_path / "stopped", monkeypatch)
    else:
        folder = train(run_of(pairs, tmp_path / "finished", *SMALL, steps=4))
        if not fresh:
            # Figures and the report follow; drawing all of them would take minutes.
            options = ["watch.report=true"]
            monkeypatch.setattr(run_report, "curve_charts", lambda history: [])
    case = Case(tmp_path, disk, pairs, capsys, *options, begin=folder, fresh=fresh)
    number = 1
    while case.start(number, stays):
        number += 1
    assert number > 20


def _full_on_first(rank, size, pairs, out):
    """Return the error of each rank when the first one cannot write."""
    real = files.os.replace

    def full(*paths):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files.os.replace = full if rank == 0 else real
    try:
        train(run_of(pairs, out, *SMALL, steps=4))
    except OSError as error:
        return str(error)
    finally:
        files.os.replace = real


def test_every_rank_hears_that_the_first_one_cannot_write(world, pairs, tmp_path):
    assert world.run(2, _full_on_first, str(pairs), str(tmp_path / "run")) == ["[Errno 28] No space left on device"] * 2


def test_the_imitated_disk_tears_files_and_fails(tmp_path, disk):
    """Check that the tests above can fail: a file that is written in place is torn."""
    disk.full_at = 2
    with pytest.raises(OSError, match="No space left"):
        (tmp_path / "disk" / "result.json").write_text("0123456789")
    assert (tmp_path / "disk" / "result.json").read_bytes() == b"01234"
    disk.full_at, disk.count = 4, 0
    with pytest.raises(OSError, match="No space left"):
        files.write_text(tmp_path / "disk" / "result.json", "0123456789")
    disk.full_at = 0
    assert (tmp_path / "disk" / "result.json").read_bytes() == b"01234"
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["result.json"]
