"""One run of a sweep in a process of its own: `python -m megabatch.measuring.sweep.worker [--trust-code] FOLDER` trains
FOLDER/run.toml.

The last line that it prints is the outcome as JSON. It ends when whoever started it does: a run must not go on in a folder in which
the next sweep is going to take it up.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from dataclasses import asdict
from pathlib import Path

import torch

from ... import config
from ...training.loop import train
from ...training.signals import Stopped
from .outcome import assess


def main(folder: str, *, trust_code: bool = False) -> int:
    """The exit status: 0; 128 and the signal's number where the run was stopped with a checkpoint; 1 where it failed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run = config.read(Path(folder) / "run.toml")
        _take_device(run.compute.device)
        train(run, trust_code=trust_code)
        outcome = assess(Path(folder), trust_code=trust_code)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.status
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(outcome)), flush=True)
    return 0


def _end_with_parent() -> None:
    """Standard input is a pipe that nobody writes to: it ends when the process at its other end does."""
    # Not sys.stdin, whose lock a forked reader of data would find taken.
    while os.read(0, 1):
        continue
    os._exit(1)


def _take_device(name: str | None) -> None:
    """Makes a numbered device the current one, which kernels are launched on."""
    device = torch.device("cpu" if name is None else name)
    if device.type != "cpu" and device.index is not None:
        torch.get_device_module(device).set_device(device)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[-1], trust_code="--trust-code" in sys.argv[1:-1]))
