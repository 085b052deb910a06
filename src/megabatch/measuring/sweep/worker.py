"""The worker process of one run of a sweep: `python -m megabatch.measuring.sweep.worker [--trust-code] FOLDER`.

It trains FOLDER/run.toml and prints the outcome as JSON in its last line. It exits when its parent does: the run must not continue
in a folder in which the next sweep will resume it.
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
    """Return the exit status: 0; 128 plus the signal's number if the run was stopped with a checkpoint; 1 if it failed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run = config.read(Path(folder) / "run.toml")
        _set_device(run.compute.device)
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
    """Exit when the parent does: standard input is a pipe that nobody writes to, and ends with the process at its other end."""
    # Not sys.stdin: a forked data worker would find its lock taken.
    while os.read(0, 1):
        continue
    os._exit(1)


def _set_device(name: str | None) -> None:
    """Make a device with an index the current one, on which kernels are launched."""
    device = torch.device("cpu" if name is None else name)
    if device.type != "cpu" and device.index is not None:
        torch.get_device_module(device).set_device(device)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[-1], trust_code="--trust-code" in sys.argv[1:-1]))
