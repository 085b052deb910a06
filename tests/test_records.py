"""A choice is one record: few files of the package name a loss, an optimizer, a tower library or a data format.

Files that compare a name are files to touch when another one is added. Documentation may name them: docstrings do not count.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from megabatch import objectives, optimizers
from megabatch.data import FORMATS
from megabatch.towers import LIBRARIES

PACKAGE = Path(__file__).parents[1] / "src" / "megabatch"


class Record(NamedTuple):
    """A kind of choice: its names, and how many files of the package may hold one of them as a string.

    foreign: files that hold the same string with another meaning, which a new choice does not touch.
    """

    kind: str
    names: tuple[str, ...]
    most: int
    foreign: frozenset[str] = frozenset()


# Where the audit names the tools whose files it reads.
TOOLS = frozenset({"audit/tools.py", *(f"audit/readers/{name}.py" for name in ("open_clip", "run", "transformers"))})
RECORDS = (
    # The record, the file of the loss, its export by losses/ and by the package. Elsewhere, published.py lists what others used,
    # and ms-swift's command line has a loss "infonce" too.
    *(
        Record(
            "loss", tuple(n for n in (name, spec.function) if n), 4, frozenset({"published.py", "audit/readers/trainer_command.py"})
        )
        for name, spec in objectives.OBJECTIVES.items()
    ),
    # OpenCLIP's command line has an optimizer "adamw" too.
    *(Record("optimizer", (name,), 2, frozenset({"audit/readers/open_clip.py", "published.py"})) for name in optimizers.OPTIMIZERS),
    # The table and the file of the library or format. Elsewhere, config.py names the defaults, environment.py packages of a bug
    # report, towers/known.py models of libraries, and the audit the tools whose files it reads, and towers with random weights (it
    # does not import torch; a test compares its list with the libraries). OpenCLIP has optional dependencies, which a plan imports
    # only if it needs them. "text" is also the kind of a sample.
    *(
        Record(
            "tower library",
            (name, f"{name}:"),
            2,
            TOOLS | {"config.py", "environment.py", "towers/known.py", "towers/open_clip.py"},
        )
        for name in LIBRARIES
        if name != "text"
    ),
    # "folder" is also an argument of the command line, "table" a block of a report.
    *(
        Record("data format", (name,), 2, frozenset({"cli/training.py", "config.py", "planning/request.py", "reporting/report.py"}))
        for name in FORMATS
    ),
)


def string_literals(source: str) -> set[str]:
    """Return the strings of a file that are values, without docstrings."""
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in documentation)
    return {node.value for node in constants if isinstance(node.value, str)}


@functools.cache
def literals_by_file(package: Path) -> dict[str, set[str]]:
    """Return the string literals of each file of a package."""
    files = sorted(package.rglob("*.py"))
    return {file.relative_to(package).as_posix(): string_literals(file.read_text("utf-8")) for file in files}


def files_naming(names: Iterable[str], package: Path = PACKAGE) -> list[str]:
    """Return the files that hold one of the names as a string."""
    return [file for file, literals in literals_by_file(package).items() if literals & set(names)]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{record.kind}-{record.names[0]}")
def test_few_files_name_a_choice(record):
    files = [file for file in files_naming(record.names) if file not in record.foreign]
    assert files, "the record itself names it"
    assert len(files) <= record.most, f"{len(files)} files name the {record.kind} {record.names[0]!r}: {', '.join(files)}"


def test_docstrings_and_comments_do_not_count():
    assert string_literals('"""clip"""\n# "clip"\nx: "siglip" = 1\nif y == "sgd":\n    "adamw"') == {"siglip", "sgd"}


def test_a_comparison_is_found(tmp_path):
    (tmp_path / "planner.py").write_text('def choose(loss):\n    return 1 if loss in ("clip", "siglip") else 2\n')
    assert files_naming(["siglip"], tmp_path) == ["planner.py"]
