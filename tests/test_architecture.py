"""The house keeps its shape: imports point one way, and each optional package has one door."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "megabatch"

# Each room, and the rooms it may import from; within a room, everything may import everything. "." is __init__.py.
HOUSE = {
    ".": {"chunks", "losses", "measuring", "planning", "reference", "tiles"},
    "__main__": {"cli"},
    "cli": {
        ".",
        "config",
        "environment",
        "files",
        "measured",
        "measuring",
        "packages",
        "planning",
        "terminal",
        "training",
        "training.report",
    },
    "config": set(),
    "files": set(),
    "host_memory": set(),
    "packages": {"config"},
    "measured": {"files"},
    "terminal": set(),
    "environment": {".", "host_memory", "tiles"},
    "adapters": {"losses"},
    "training": {
        ".",
        "chunks",
        "config",
        "environment",
        "files",
        "host_memory",
        "losses",
        "packages",
        "training.checkpoint",
        "training.data",
        "training.evaluate",
        "training.noise",
        "training.report",
        "training.towers",
    },
    "planning": {
        "chunks",
        "config",
        "environment",
        "files",
        "host_memory",
        "losses",
        "measured",
        "packages",
        "terminal",
        "tiles",
        "training",
        "training.data",
        "training.report",
        "training.towers",
    },
    "measuring": {
        "chunks",
        "config",
        "environment",
        "files",
        "host_memory",
        "losses",
        "measured",
        "packages",
        "planning",
        "ring",
        "terminal",
        "training",
        "training.checkpoint",
        "training.data",
        "training.evaluate",
        "training.noise",
        "training.report",
        "training.towers",
    },
    "training.checkpoint": {"files"},
    "training.data": {"config", "packages"},
    "training.evaluate": {"tiles", "tiles.contract"},
    "training.noise": {"ring"},
    "training.report": {"config", "files", "packages", "training.evaluate"},
    "training.towers": {"config", "packages"},
    "chunks": {"host_memory", "losses", "ring"},
    "losses": {"ring", "tiles", "tiles.contract"},
    "ring": set(),
    "tiles": {"tiles.contract", "tiles.eager", "tiles.fused"},
    "tiles.eager": {"tiles.contract", "tiles.products"},
    "tiles.products": {"tiles.contract"},
    "tiles.fused": {"tiles.contract", "tiles.products"},
    "tiles.contract": set(),
    "reference": set(),
}
# What comes from outside, and the rooms that may let it in. The standard library may enter anywhere.
OUTSIDERS = {
    "torch": set(HOUSE),
    "triton": {"tiles.fused"},
    "open_clip": {"adapters", "training.towers"},
    "timm": {"training.towers"},
    "torchvision": {"training.towers"},
    "transformers": {"training.towers"},
    "huggingface_hub": {"training.towers"},
    "safetensors": {"packages", "training", "training.checkpoint", "training.towers"},
    "PIL": {"packages", "training", "training.data", "training.report", "training.towers"},
    "fontTools": {"training.data"},
    "datasets": {"training.data"},
    "pyarrow": {"training.data"},
    "matplotlib": {"measuring", "packages", "planning", "training.data", "training.report"},
    "psutil": {"host_memory"},
    "rich": {"measuring", "packages", "planning", "terminal", "training"},
    "argcomplete": {"cli"},
    "wandb": {"packages", "training"},
    "tomli": {"config", "planning"},
}
# Names that say nothing about what is inside.
EMPTY_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}


def room_of(module: str) -> str:
    """The room of a dotted name inside the package: the longest entry of HOUSE that holds it, or its first part."""
    parts = module.split(".") if module else ["."]
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in HOUSE), parts[0])


def imported_names(path: str, source: str) -> Iterator[str]:
    """Every imported dotted name: `from .contract import Tiles` in tiles/eager.py gives megabatch.tiles.contract.Tiles.

    Imports inside functions and under TYPE_CHECKING count: they are dependencies too.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # The directory of a file is its package, for tiles/__init__.py as for tiles/eager.py.
            package = ["megabatch", *path.split("/")[:-1]]
            base = package[: len(package) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)


def complaints(path: str, source: str) -> list[str]:
    """What is wrong with the file at `path` (relative to the package, with slashes), a sentence each."""
    module = path.removesuffix(".py").removesuffix("__init__").rstrip("/").replace("/", ".")
    room = room_of(module)
    found = [f"{path}: the name {part!r} says nothing" for part in module.split(".") if part in EMPTY_NAMES]
    if room not in HOUSE:
        return [*found, f"{path}: no room of HOUSE; add {room!r} with what it may import"]
    for name in imported_names(path, source):
        origin, _, inside = name.partition(".")
        if origin == "megabatch":
            # `from megabatch import __version__` takes a name of __init__.py, `from megabatch import losses` a room.
            target = room_of(inside) if room_of(inside) in HOUSE or "." in inside else "."
            if target != room and target not in HOUSE[room]:
                found.append(f"{path}: {room!r} may not import {target!r} ({name})")
        elif origin not in sys.stdlib_module_names and room not in OUTSIDERS.get(origin, ()):
            found.append(f"{path}: {room!r} may not import {origin!r}, which is not ours ({name})")
    if "import_module(" in source or "__import__(" in source:
        found.append(f"{path}: a computed import cannot be checked; write an import statement, late ones in a function")
    return found


def test_every_file_keeps_to_the_house():
    files = sorted(PACKAGE.rglob("*.py"))
    assert PACKAGE / "config.py" in files
    found = [c for file in files for c in complaints(file.relative_to(PACKAGE).as_posix(), file.read_text("utf-8"))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("losses/clip.py", "import math\nimport torch.nn.functional as F\nfrom megabatch.tiles import backend_for"),
        ("losses/clip.py", "from ..ring import tour\nfrom ..tiles.contract import Pairs\nfrom .siglip import x"),
        ("tiles/__init__.py", "from . import eager\ndef late():\n    from megabatch.tiles import fused"),
        ("tiles/eager.py", "from .contract import Tiles"),
        ("tiles/fused/launch.py", "import triton\nfrom ..contract import Tiles\nfrom .kernels.sums import merge_kernel"),
        ("tiles/fused/gradients.py", "from ..products import units"),
        ("tiles/fused/kernels/stats.py", "import triton.language as tl\nfrom .sums import put"),
        ("adapters/open_clip.py", "from open_clip.loss import ClipLoss\nfrom megabatch.losses import clip_loss"),
        ("__init__.py", "from megabatch.losses import clip_loss\nfrom . import reference\n__version__ = '0'"),
        ("cli/__init__.py", "from .. import __version__, environment\nfrom . import planning"),
    ],
)
def test_checker_accepts_what_the_house_allows(path, source):
    assert complaints(path, source) == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("ring.py", "from megabatch.losses import clip_loss", "'ring' may not import 'losses'"),
        ("ring.py", "from . import tiles", "'ring' may not import 'tiles'"),
        ("ring.py", "import megabatch", "'ring' may not import '.'"),
        ("reference.py", "import megabatch.ring", "'reference' may not import 'ring'"),
        ("losses/clip.py", "from megabatch.tiles.eager import softmax_stats", "'losses' may not import 'tiles.eager'"),
        ("losses/clip.py", "from ..tiles import eager", "'losses' may not import 'tiles.eager'"),
        ("losses/clip.py", "def late():\n    from .. import cli", "'losses' may not import 'cli'"),
        ("losses/clip.py", "from megabatch import __version__", "'losses' may not import '.'"),
        ("losses/clip.py", "from megabatch.training.loop import run", "'losses' may not import 'training'"),
        ("training/data/order.py", "from ..loop import train", "'training.data' may not import 'training'"),
        ("training/towers/vit.py", "from ..data import open_source", "'training.towers' may not import 'training.data'"),
        ("config.py", "from .training import loop", "'config' may not import 'training'"),
        ("tiles/contract.py", "from .eager import positives", "'tiles.contract' may not import 'tiles.eager'"),
        ("__init__.py", "from .adapters import open_clip", "'.' may not import 'adapters'"),
        ("tiles/eager.py", "import triton", "'tiles.eager' may not import 'triton'"),
        ("tiles/__init__.py", "def late():\n    import triton", "'tiles' may not import 'triton'"),
        ("tiles/products.py", "from .fused import launch", "'tiles.products' may not import 'tiles.fused'"),
        ("tiles/fused/gradients.py", "from ..eager import finish", "'tiles.fused' may not import 'tiles.eager'"),
        ("losses/clip.py", "from ..tiles.fused.launch import Launch", "'losses' may not import 'tiles.fused'"),
        ("losses/clip.py", "import open_clip", "'losses' may not import 'open_clip'"),
        ("reference.py", "import numpy as np", "'reference' may not import 'numpy'"),
        ("tiles/__init__.py", "import importlib\nimportlib.import_module('triton')", "computed import"),
        ("losses/utils.py", "", "'utils' says nothing"),
        ("gradients.py", "", "no room of HOUSE"),
    ],
)
def test_checker_refuses_what_the_house_forbids(path, source, complaint):
    found = complaints(path, source)
    assert len(found) == 1
    assert complaint in found[0]
