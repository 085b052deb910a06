"""Imports point one way, no two modules import each other, and each optional package is imported in few places."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "megabatch"

# Modules that import little and may be imported by every layer above `tiles`.
FOUNDATION = {
    "batch_law", "config", "environment", "evidence", "files", "host_memory", "measurements", "objectives", "optimizers",
    "packages", "published", "recall", "recipes", "reference", "version", "vocabulary",
}  # fmt: skip
# Each package or module of the package, and what it may import; "." is __init__.py. Read from the bottom to the top.
MAY_IMPORT = {
    ".": {"audit", "chunks", "costs", "losses", "measuring", "planning", "reference", "towers", "version"},
    "__main__": {"cli"},
    "cli": FOUNDATION | {"audit", "costs", "measuring", "planning", "reporting", "training"},
    "adapters": {"audit", "chunks", "losses", "measuring", "ring", "towers", "training"},
    "measuring": FOUNDATION | {"chunks", "costs", "data", "losses", "planning", "reporting", "ring", "towers", "trust", "training"},
    "planning": FOUNDATION | {"costs", "data", "reporting", "towers", "trust"},
    "audit": {"config", "evidence", "files", "objectives", "optimizers", "packages", "recipes", "reporting"},
    "training": FOUNDATION | {"chunks", "data", "losses", "reporting", "ring", "tiles", "tiles.contract", "towers", "trust"},
    "costs": FOUNDATION | {"tiles.panels", "towers"},
    "reporting": FOUNDATION,
    "trust": {"config", "towers"},
    "towers": FOUNDATION | {"towers.attention_kernels"},
    "towers.attention_kernels": set(),
    "data": FOUNDATION,
    "chunks": {"host_memory", "losses", "ring"},
    "losses": {
        "ring",
        "tiles",
        "tiles.contract",
        "tiles.distill",
        "tiles.maxsim",
        "tiles.one_piece",
        "tiles.products",
        "tiles.scores",
    },
    "tiles": {"tiles.contract", "tiles.distill", "tiles.eager", "tiles.fused", "tiles.maxsim", "tiles.one_piece"},
    "tiles.eager": {"tiles.contract", "tiles.products", "tiles.softplus"},
    "tiles.one_piece": {"tiles.contract", "tiles.products", "tiles.softplus"},
    "tiles.distill": {"tiles.contract", "tiles.products"},
    "tiles.maxsim": {"tiles.contract"},
    "tiles.scores": {"tiles.contract"},
    "tiles.products": {"tiles.contract"},
    "tiles.softplus": {"tiles.products"},
    "tiles.fused": {"tiles.contract", "tiles.distill", "tiles.panels", "tiles.products"},
    "tiles.contract": set(),
    "tiles.panels": set(),
    "ring": set(),
    "environment": {"host_memory", "tiles", "version"},
    "measurements": {"files"},
    "packages": {"config"},
    "config": {"objectives", "optimizers", "vocabulary"},
    "batch_law": set(),
    "evidence": set(),
    "files": set(),
    "host_memory": set(),
    "objectives": set(),
    "optimizers": set(),
    "published": {"objectives", "optimizers"},
    "recall": set(),
    "recipes": {"batch_law", "evidence", "objectives", "optimizers", "published"},
    "reference": set(),
    "version": set(),
    "vocabulary": set(),
}
# Packages of others, and where they may be imported. The standard library may be imported anywhere.
THIRD_PARTY = {
    "torch": set(MAY_IMPORT),
    "triton": {"tiles.fused", "towers.attention_kernels"},
    "open_clip": {"adapters", "towers"},
    "sentence_transformers": {"adapters"},
    "tqdm": {"adapters"},
    "timm": {"towers"},
    "torchvision": {"data", "packages", "towers"},
    "transformers": {"adapters", "towers"},
    "lightning": {"adapters"},
    "pytorch_lightning": {"adapters"},
    "open_clip_train": {"adapters"},
    "huggingface_hub": {"towers"},
    "safetensors": {"packages", "training", "towers"},
    "PIL": {"data", "packages", "reporting", "towers", "training"},
    "simplejpeg": {"data"},
    "fontTools": {"data", "packages"},
    "datasets": {"data"},
    "pyarrow": {"data", "packages"},
    "matplotlib": {"data", "packages", "reporting"},
    "jinja2": {"packages", "reporting"},
    "psutil": {"host_memory"},
    "rich": {"packages", "reporting", "training"},
    "argcomplete": {"cli"},
    "wandb": {"packages", "training"},
    "yaml": {"audit", "packages"},
    "tomli": {"audit", "config"},
    "typing_extensions": {"losses"},
}
# Names that say nothing about what is inside.
EMPTY_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}


def part_of(module: str) -> str:
    """Return the longest entry of MAY_IMPORT that holds this dotted name, or its first component."""
    parts = module.split(".") if module else ["."]
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in MAY_IMPORT), parts[0])


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
    """Return what is wrong with the file at `path` (relative to the package, with slashes), one sentence each."""
    module = path.removesuffix(".py").removesuffix("__init__").rstrip("/").replace("/", ".")
    room = part_of(module)
    found = [f"{path}: the name {part!r} says nothing" for part in module.split(".") if part in EMPTY_NAMES]
    if room not in MAY_IMPORT:
        return [*found, f"{path}: not in MAY_IMPORT; add {room!r} with what it may import"]
    for name in imported_names(path, source):
        origin, _, inside = name.partition(".")
        if origin == "megabatch":
            # `from megabatch import __version__` takes a name of __init__.py, `from megabatch import losses` a package.
            target = part_of(inside) if part_of(inside) in MAY_IMPORT or "." in inside else "."
            if target != room and target not in MAY_IMPORT[room]:
                found.append(f"{path}: {room!r} may not import {target!r} ({name})")
        elif origin not in sys.stdlib_module_names and room not in THIRD_PARTY.get(origin, ()):
            found.append(f"{path}: {room!r} may not import {origin!r}, which is not ours ({name})")
    # The table of public names in __init__.py is computed, and compared with import statements by a test.
    if path != "__init__.py" and ("import_module(" in source or "__import__(" in source):
        found.append(f"{path}: a computed import cannot be checked; write an import statement, late ones in a function")
    return found


def test_every_file_imports_only_what_it_may():
    files = sorted(PACKAGE.rglob("*.py"))
    assert PACKAGE / "config.py" in files
    found = [c for file in files for c in complaints(file.relative_to(PACKAGE).as_posix(), file.read_text("utf-8"))]
    assert not found, "\n" + "\n".join(found)


def import_graph(files: dict[str, str]) -> dict[str, set[str]]:
    """Return the modules that each module imports. files: the source of each, by path relative to the package."""
    names = {path.removesuffix(".py").removesuffix("__init__").rstrip("/").replace("/", "."): path for path in files}
    graph = {}
    for module, path in names.items():
        inside = [name.partition(".")[2] for name in imported_names(path, files[path]) if name.partition(".")[0] == "megabatch"]
        graph[module] = {name if name in names else name.rpartition(".")[0] for name in inside} - {module}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        reach[start] = seen
    groups = {tuple(sorted({a} | {b for b in reach[a] if a in reach.get(b, ())})) for a in graph if a in reach[a]}
    return [list(group) for group in sorted(groups)]


def test_no_two_modules_import_each_other():
    files = {file.relative_to(PACKAGE).as_posix(): file.read_text("utf-8") for file in PACKAGE.rglob("*.py")}
    # Public names are imported from __init__.py by users only.
    assert circles(import_graph(files)) == []


def test_a_circle_is_found_also_for_types():
    files = {"a.py": "from .b import B", "b.py": "if TYPE_CHECKING:\n    from .c import C", "c.py": "def f():\n    from . import a"}
    assert circles(import_graph(files)) == [["a", "b", "c"]]


def test_a_class_name_occurs_once_in_the_package():
    files: dict[str, list[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        # Adapters have the names of the classes that they replace.
        if "adapters" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(file.relative_to(PACKAGE).as_posix())
    assert {name: places for name, places in files.items() if len(places) > 1} == {}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("losses/clip.py", "import math\nimport torch.nn.functional as F\nfrom megabatch.tiles import backend_for"),
        ("losses/clip.py", "from ..ring import tour\nfrom ..tiles.contract import Pairs\nfrom .siglip import x"),
        ("tiles/__init__.py", "from . import eager\ndef late():\n    from megabatch.tiles import fused"),
        ("tiles/eager.py", "from .contract import Tiles"),
        ("tiles/fused/launch.py", "import triton\nfrom ..contract import Tiles\nfrom .tile import tile_at"),
        ("tiles/fused/gradient_panels.py", "from ..products import units"),
        ("tiles/fused/hopper/pipeline.py", "import triton.language as tl\nfrom ..tile import tile_at"),
        ("adapters/open_clip.py", "from open_clip.loss import ClipLoss\nfrom megabatch.losses import clip_loss"),
        ("__init__.py", "from megabatch.losses import clip_loss\nfrom . import reference"),
        ("cli/__init__.py", "from .. import environment\nfrom ..version import __version__\nfrom . import planning"),
    ],
)
def test_checker_accepts_what_is_allowed(path, source):
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
        ("data/sampler.py", "from ..training.loop import train", "'data' may not import 'training'"),
        ("towers/vit.py", "from ..data import open_source", "'towers' may not import 'data'"),
        ("config.py", "from .training import loop", "'config' may not import 'training'"),
        ("tiles/contract.py", "from .eager import positives", "'tiles.contract' may not import 'tiles.eager'"),
        ("__init__.py", "from .adapters import open_clip", "'.' may not import 'adapters'"),
        ("tiles/eager.py", "import triton", "'tiles.eager' may not import 'triton'"),
        ("tiles/__init__.py", "def late():\n    import triton", "'tiles' may not import 'triton'"),
        ("tiles/products.py", "from .fused import launch", "'tiles.products' may not import 'tiles.fused'"),
        ("tiles/fused/gradient_panels.py", "from ..eager import finish", "'tiles.fused' may not import 'tiles.eager'"),
        ("losses/clip.py", "from ..tiles.fused.launch import Launch", "'losses' may not import 'tiles.fused'"),
        ("losses/clip.py", "import open_clip", "'losses' may not import 'open_clip'"),
        ("reference.py", "import numpy as np", "'reference' may not import 'numpy'"),
        ("tiles/__init__.py", "import importlib\nimportlib.import_module('triton')", "computed import"),
        ("losses/utils.py", "", "'utils' says nothing"),
        ("gradients.py", "", "not in MAY_IMPORT"),
    ],
)
def test_checker_refuses_what_is_not_allowed(path, source, complaint):
    found = complaints(path, source)
    assert len(found) == 1
    assert complaint in found[0]
