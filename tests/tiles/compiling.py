"""For tests that compile kernels without a device."""

from __future__ import annotations

import os
import subprocess
import sys


def compiled_apart(program: str) -> list[str]:
    """Return the words that a program prints in a process that does not interpret kernels, and so can compile them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.split()
