"""Optional packages: which feature needs which package, how to install it, and which setting avoids it.

Features that are used at the end of long work check their packages before the work begins. Packages are imported, not only looked
up: one that is installed can still fail, such as a matplotlib that was built for another numpy.
"""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Callable
from typing import NamedTuple

from .config import Run


def _import_jinja2() -> None:
    import jinja2  # noqa: F401


def _import_matplotlib() -> None:
    import matplotlib.figure  # noqa: F401


def _find_matplotlib_fonts() -> None:
    import fontTools.ttLib  # noqa: F401

    # Its fonts are read without importing it.
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("there is no matplotlib, whose fonts are drawn", name="matplotlib")


def _import_pyarrow() -> None:
    import pyarrow.ipc
    import pyarrow.parquet  # noqa: F401


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


def _import_torchvision() -> None:
    import torchvision.io  # type: ignore[import-untyped]  # noqa: F401


def _import_wandb() -> None:
    import wandb  # noqa: F401


def _import_yaml() -> None:
    import yaml  # noqa: F401


class Package(NamedTuple):
    """An optional package.

    name: on PyPI. load: imports the parts that are used. in_extra: whether the extra of the feature that needs it installs it.
    """

    name: str
    load: Callable[[], None]
    in_extra: bool = True


# PyTorch depends on jinja2, so that it is missing only from a broken installation.
JINJA2 = Package("jinja2", _import_jinja2, in_extra=False)
MATPLOTLIB = Package("matplotlib", _import_matplotlib)
MATPLOTLIB_FONTS = Package("matplotlib", _find_matplotlib_fonts)
PYARROW = Package("pyarrow", _import_pyarrow)
PILLOW = Package("pillow", _import_pillow)
RICH = Package("rich", _import_rich)
SAFETENSORS = Package("safetensors", _import_safetensors)
TENSORBOARD = Package("tensorboard", _import_tensorboard)
TORCHVISION = Package("torchvision", _import_torchvision, in_extra=False)
WANDB = Package("wandb", _import_wandb, in_extra=False)
PYYAML = Package("pyyaml", _import_yaml)


class Feature(NamedTuple):
    """A feature that needs optional packages.

    name: how an error names it. without: the setting or option that avoids the packages; None if there is none.
    extra: the extra in pyproject.toml that installs the packages.
    """

    name: str
    packages: tuple[Package, ...]
    without: str | None = None
    extra: str = "train"

    def requirement(self, package: Package) -> str:
        """Return what pip must install for a package of this feature."""
        return f"megabatch[{self.extra}]" if package.in_extra else package.name


BAR = Feature("the progress bar", (RICH,), "watch.bar=false")
REPORT = Feature("the report of a run", (MATPLOTLIB, PILLOW, JINJA2), "watch.report=false")
TENSORBOARD_LOG = Feature("watch.tensorboard", (TENSORBOARD,), "watch.tensorboard=false")
WANDB_LOG = Feature("watch.wandb", (WANDB,), "watch.wandb=none")
FIGURES = Feature("drawing a figure", (MATPLOTLIB,))
HTML = Feature("a report in HTML", (MATPLOTLIB, JINJA2))
PLAN_PAGE = Feature("the HTML page of a plan", (MATPLOTLIB, JINJA2), "leaving out --html", extra="plan")
IMAGES = Feature("image data", (PILLOW,), extra="data")
DEVICE_DECODING = Feature("decoding JPEGs on the device", (TORCHVISION,), 'data.decode="workers"')
GLYPHS = Feature("the built-in data 'glyphs'", (MATPLOTLIB_FONTS, PILLOW), extra="data")
ARROW = Feature("reading Parquet and Arrow files", (PYARROW,), extra="data")
CONTACT_SHEET = Feature("a contact sheet", (MATPLOTLIB, PILLOW))
WEIGHTS_FILE = Feature("a safetensors file of weights", (SAFETENSORS,))
YAML = Feature("reading a YAML file", (PYYAML,), extra="audit")
EMBEDDINGS_FILE = Feature("a file of embeddings", (SAFETENSORS,))


def of_run(run: Run, *, terminal: bool) -> list[Feature]:
    """Return the features that `megabatch train` uses for a run. terminal: whether it writes to a terminal, which shows a bar."""
    used = {
        BAR: run.watch.bar and terminal,
        TENSORBOARD_LOG: run.watch.tensorboard,
        WANDB_LOG: run.watch.wandb is not None,
        REPORT: run.watch.report,
    }
    return [feature for feature, is_used in used.items() if is_used]


def require(*features: Feature) -> None:
    """Import the packages of these features. One ValueError names all that cannot be imported, with the remedy for each."""
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
    requirements = dict.fromkeys(f.requirement(package) for f in affected for package in f.packages if package in broken)
    command = " ".join(["pip install", *map(shlex.quote, requirements)])
    raise ValueError(f"{reasons}: {needs}. Install what is missing with: {command}")


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return "is not installed"
    return f"cannot be imported ({type(error).__name__}: {error})"


def _without(feature: Feature) -> str:
    return "" if feature.without is None else f" ({feature.without} avoids it)"
