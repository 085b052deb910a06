"""Optional packages: which feature needs which, how each is installed, and what does without it.

A feature that is used after hours of work asks for its packages before the work begins. They are imported, not only looked for:
one that is installed can still fail, such as a matplotlib that was built for another numpy.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import NamedTuple

from .config import Run


def _import_jinja2() -> None:
    import jinja2  # noqa: F401


def _import_matplotlib() -> None:
    import matplotlib.figure  # noqa: F401


def _import_pillow() -> None:
    import PIL.Image
    import PIL.ImageDraw
    import PIL.ImageFont  # noqa: F401


def _import_rich() -> None:
    import rich.console
    import rich.progress
    import rich.table  # noqa: F401


def _import_safetensors() -> None:
    import safetensors.torch  # noqa: F401


def _import_tensorboard() -> None:
    import torch.utils.tensorboard  # noqa: F401


def _import_wandb() -> None:
    import wandb  # noqa: F401


class Package(NamedTuple):
    """name: on PyPI. load: imports what is used of it. requirement: what to give to pip."""

    name: str
    load: Callable[[], None]
    requirement: str = "megabatch[train]"


# PyTorch depends on jinja2, so that it is missing only from a broken installation.
JINJA2 = Package("jinja2", _import_jinja2, "jinja2")
MATPLOTLIB = Package("matplotlib", _import_matplotlib)
PILLOW = Package("pillow", _import_pillow)
RICH = Package("rich", _import_rich)
SAFETENSORS = Package("safetensors", _import_safetensors)
TENSORBOARD = Package("tensorboard", _import_tensorboard)
WANDB = Package("wandb", _import_wandb, "wandb")


class Feature(NamedTuple):
    """name: as an error names it. without: the setting or option that does without the packages; None if there is none."""

    name: str
    packages: tuple[Package, ...]
    without: str | None = None


BAR = Feature("the progress bar", (RICH,), "watch.bar=false")
REPORT = Feature("the report of a run", (MATPLOTLIB, PILLOW, JINJA2), "watch.report=false")
TENSORBOARD_LOG = Feature("watch.tensorboard", (TENSORBOARD,), "watch.tensorboard=false")
WANDB_LOG = Feature("watch.wandb", (WANDB,), "watch.wandb=none")
FIGURES = Feature("the figure that is drawn", (MATPLOTLIB,))
HTML = Feature("a report in HTML", (MATPLOTLIB, JINJA2))
PLAN_PAGE = Feature("the HTML page of a plan", (MATPLOTLIB, JINJA2), "leaving out --html")
IMAGES = Feature("image data", (PILLOW,))
CONTACT_SHEET = Feature("a contact sheet", (MATPLOTLIB, PILLOW))
EMBEDDINGS_FILE = Feature("a file of embeddings", (SAFETENSORS,))


def of_run(run: Run, *, terminal: bool) -> list[Feature]:
    """Return the features that `megabatch train` uses for a run. terminal: whether it writes to one, on which a bar is drawn."""
    used = {
        BAR: run.watch.bar and terminal,
        TENSORBOARD_LOG: run.watch.tensorboard,
        WANDB_LOG: run.watch.wandb is not None,
        REPORT: run.watch.report,
    }
    return [feature for feature, is_used in used.items() if is_used]


def require(*features: Feature) -> None:
    """Import the packages of these features; one ValueError names all that cannot be imported, and what to do about each."""
    broken: dict[Package, str] = {}
    for package in dict.fromkeys(package for feature in features for package in feature.packages):
        try:
            package.load()
        # A package that was built for another version of its dependencies can raise anything while it is imported.
        except Exception as error:
            broken[package] = _reason(error)
    if not broken:
        return
    affected = [feature for feature in features if any(package in broken for package in feature.packages)]
    reasons = "; ".join(f"{package.name} {reason}" for package, reason in broken.items())
    needs = "; ".join(
        f"{feature.name} needs {' and '.join(package.name for package in feature.packages if package in broken)}{_without(feature)}"
        for feature in affected
    )
    requirements = " ".join(shlex.quote(requirement) for requirement in dict.fromkeys(p.requirement for p in broken))
    raise ValueError(f"{reasons}: {needs}. Install what is missing with: pip install {requirements}")


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return "is not installed"
    return f"cannot be imported ({type(error).__name__}: {error})"


def _without(feature: Feature) -> str:
    return "" if feature.without is None else f" ({feature.without} does without)"
