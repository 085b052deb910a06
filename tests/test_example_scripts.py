"""Every example runs without a download, trains, and gives the same on several ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
# Examples whose libraries take seconds to import.
HEAVY = ("open_clip_train", "huggingface_trainer", "lightning_module")


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss'?:? '?([0-9.]+)", text)]


def test_the_ddp_example_learns(capsys):
    example("pytorch_ddp").main(["--batch", "64", "--chunk", "24", "--steps", "4"])
    found = losses(capsys.readouterr().out)
    assert len(found) == 4
    assert found[-1] < found[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HEAVY)
def test_the_example_of_a_library_learns(name, capsys):
    example(name).main(["--batch", "16", "--steps", "25"])
    found = losses(capsys.readouterr().out)
    assert found
    # Random pairs have a loss near log(16) = 2.77 before they are learned by heart.
    assert found[-1] < 2.7


@pytest.mark.slow
def test_ddp_and_fsdp2_on_two_ranks_train_alike():
    """Both build the same weights and data, so that every loss must be equal."""
    runs = [
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", EXAMPLES / f"{name}.py", "--batch", "64"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        for name in ("pytorch_ddp", "pytorch_fsdp2")
    ]
    ddp, fsdp2 = (losses(run.stdout) for run in runs)
    assert len(ddp) == 5
    assert ddp == fsdp2


def test_the_notebook_runs():
    notebook = json.loads((EXAMPLES / "large_batch.ipynb").read_text("utf-8"))
    names: dict[str, object] = {}
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(sources) > 3
    for source in sources:
        exec(compile(source, "large_batch.ipynb", "exec"), names)
    assert not any(cell.get("outputs") for cell in notebook["cells"])
