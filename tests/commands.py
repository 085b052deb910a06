"""Command lines of megabatch, each run in a new process that has imported torch already, and how long tests wait for processes."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from world import fresh_processes

# Seconds that a test waits for another process before it fails. Only a hang should take so long, also on a loaded machine.
PATIENCE_S = 600.0


class Command:
    """A running `python -m megabatch` with these arguments; its output goes into files in the folder."""

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

    def wait(self) -> int:
        """Wait for the command; return its exit status, or minus the number of the signal that ended it."""
        self.process.join(PATIENCE_S)
        status = self.process.exitcode
        if status is None:
            self.process.kill()
            raise TimeoutError(f"still running after {PATIENCE_S} s: {self.stderr[-3000:]}")
        return status


def _run(arguments: list[str], files: tuple[Path, Path], cwd: Path | None) -> None:
    for number, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ["COLUMNS"] = "160"
    os.chdir(cwd or ".")
    sys.argv = ["megabatch", *arguments]
    runpy.run_module("megabatch", run_name="__main__", alter_sys=True)
