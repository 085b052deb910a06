"""Command lines of megabatch, each run in a process of its own that need not import torch first."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from world import fresh_processes


class Command:
    """`python -m megabatch` with these arguments, under way; what it prints goes into files of the folder."""

    def __init__(self, folder: Path, *arguments: Any, cwd: Path | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self._files = folder / "stdout", folder / "stderr"
        self.process = fresh_processes().Process(target=_run, args=([*map(str, arguments)], self._files, cwd))
        self.process.start()

    @property
    def stdout(self) -> str:
        return self._files[0].read_text("utf-8")

    @property
    def stderr(self) -> str:
        return self._files[1].read_text("utf-8")

    def wait(self, seconds: float = 240) -> int:
        """The exit status of the command, or less than zero: the signal that ended it."""
        self.process.join(seconds)
        status = self.process.exitcode
        if status is None:
            self.process.kill()
            raise TimeoutError(f"still running after {seconds} s: {self.stderr[-3000:]}")
        return status


def _run(arguments: list[str], files: tuple[Path, Path], cwd: Path | None) -> None:
    for number, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ["COLUMNS"] = "160"
    os.chdir(cwd or ".")
    sys.argv = ["megabatch", *arguments]
    runpy.run_module("megabatch", run_name="__main__", alter_sys=True)
