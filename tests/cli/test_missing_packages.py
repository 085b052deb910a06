"""A missing package is named before any work begins, with the command that installs it and the setting that avoids it."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from megabatch import cli, config, packages
from megabatch.data import open_source
from megabatch.measuring.fit import fit
from megabatch.measuring.noise import noise
from megabatch.measuring.profile import profile
from megabatch.measuring.sweep import sweep
from megabatch.training import inference, loop
from megabatch.training.loop import train

OPTIONAL = (
    "rich", "matplotlib", "PIL", "fontTools", "safetensors", "tensorboard", "psutil", "pyarrow", "datasets", "wandb",
    "timm", "open_clip", "torchvision", "transformers", "tokenizers",
)  # fmt: skip


@pytest.fixture
def absent(monkeypatch):
    """Make packages impossible to import: Python raises ModuleNotFoundError for modules that are None in sys.modules."""
    before = set(sys.modules)

    def take_away(*names):
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            monkeypatch.setitem(sys.modules, name, None)
        # An earlier test may have imported it, and a loaded module of torch does not import tensorboard again.
        for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
            monkeypatch.delitem(sys.modules, name)
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    yield take_away
    # Modules that were imported meanwhile may be incomplete.
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in OPTIONAL:
            del sys.modules[name]


def table_of(folder: Path) -> dict:
    source = folder / "pairs.jsonl"
    source.write_text("".join(json.dumps({"query": f"a {i}", "positive": f"the {i}"}) + "\n" for i in range(40)))
    tower = {"name": "text", "options": {"width": 8, "depth": 1, "heads": 1, "length": 8}}
    return {
        "out": str(folder / "run"),
        "data": {"source": str(source), "held_out": 0.2},
        "x": tower,
        "y": tower,
        "loss": {"dim": 8},
        "batch": {"size": 8, "chunk": 4},
        "schedule": {"steps": 2},
        "compute": {"device": "cpu"},
        "watch": {"bar": False, "report": False},
    }


@pytest.fixture
def no_work(monkeypatch):
    """Fail if anything is read, built or trained."""

    def work(*args, **kwargs):
        raise AssertionError("work has begun")

    monkeypatch.setattr(loop, "ranks", work)
    monkeypatch.setattr("megabatch.training.distributed.ranks", work)
    monkeypatch.setattr("megabatch.measuring.sweep.sweep_runs.checked_request", work)


@pytest.mark.parametrize(
    "setting, package, installs",
    [
        ("watch.report=true", "matplotlib", "'megabatch[train]'"),
        ("watch.report=true", "PIL", "'megabatch[train]'"),
        ("watch.tensorboard=true", "tensorboard", "'megabatch[train]'"),
        ("watch.wandb=project", "wandb", "wandb"),
    ],
)
def test_train_checks_first_what_its_end_needs(absent, no_work, tmp_path, setting, package, installs):
    absent(package)
    with pytest.raises(ValueError) as refused:
        train(config.build(table_of(tmp_path), [setting]))
    name = {"PIL": "pillow"}.get(package, package)
    key = setting.partition("=")[0]
    assert f"{name} is not installed" in str(refused.value) and f"({key}=" in str(refused.value)
    assert str(refused.value).endswith(f"pip install {installs}")
    assert not (tmp_path / "run").exists()


def test_the_progress_bar_is_needed_only_on_a_terminal(absent, no_work, tmp_path, monkeypatch):
    absent("rich")
    run = config.build(table_of(tmp_path), ["watch.bar=true"])
    with pytest.raises(AssertionError, match="work has begun"):
        train(run)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with pytest.raises(ValueError, match=r"the progress bar needs rich \(watch\.bar=false avoids it\)"):
        train(run)


def test_all_missing_packages_are_named_at_once(absent, no_work, tmp_path):
    absent("matplotlib", "PIL", "wandb")
    with pytest.raises(ValueError) as refused:
        train(config.build(table_of(tmp_path), ["watch.report=true", "watch.wandb=project"]))
    text = str(refused.value)
    assert "the report of a run needs matplotlib and pillow (watch.report=false avoids it)" in text
    assert text.endswith("pip install wandb 'megabatch[train]'")


def test_extras_install_the_packages_of_their_features():
    extras = config.tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]
    features = [value for value in vars(packages).values() if isinstance(value, packages.Feature)]
    assert len(features) > 5
    for feature in features:
        for package in feature.packages:
            assert (package.name in extras[feature.extra]) == package.in_extra, (feature.name, package.name)


def test_a_broken_package_is_distinguished_from_a_missing_one(monkeypatch):
    def load():
        raise AttributeError("module 'numpy' has no attribute 'core'")

    broken = packages.Feature("the figure", (packages.MATPLOTLIB._replace(load=load),))
    with pytest.raises(ValueError, match=r"matplotlib cannot be imported .AttributeError: module 'numpy' has no"):
        packages.require(broken)


@pytest.mark.parametrize("measure", [fit, profile, noise, lambda run, out: sweep(run, batches=[8], out=out)])
def test_a_measurement_checks_first_what_its_report_needs(absent, no_work, tmp_path, measure):
    absent("matplotlib")
    with pytest.raises(ValueError, match=r"a report in HTML needs matplotlib. Install"):
        measure(config.build(table_of(tmp_path)), out=tmp_path / "out")


def test_plan_checks_first_what_its_page_needs(absent, monkeypatch, tmp_path, capsys):
    absent("matplotlib")
    monkeypatch.setattr("megabatch.planning.planner.plan", lambda **asked: pytest.fail("a plan was made"))
    assert cli.main(["plan", "vit + text", "--json", "--html", str(tmp_path / "plan.html")]) == 2
    assert "the HTML page of a plan needs matplotlib (leaving out --html avoids it)" in capsys.readouterr().err


def test_embed_checks_first_what_its_file_needs(absent, monkeypatch, tmp_path):
    absent("safetensors")
    monkeypatch.setattr(inference, "opened", lambda *args, **kwargs: pytest.fail("a run was opened"))
    with pytest.raises(ValueError, match="a file of embeddings needs safetensors"):
        inference.embed(tmp_path, [], tmp_path / "out")


def test_search_checks_first_what_its_contact_sheet_needs(absent, monkeypatch, tmp_path):
    absent("matplotlib")

    @contextmanager
    def opened(*args, **kwargs):
        yield SimpleNamespace(x=SimpleNamespace(kind="image"), y=SimpleNamespace(kind="text"))

    monkeypatch.setattr(inference, "opened", opened)
    monkeypatch.setattr(inference, "_check_pairs", lambda parts: None)
    monkeypatch.setattr(inference, "embed_source", lambda *args: pytest.fail("the held-out pairs were embedded"))
    with pytest.raises(ValueError, match="a contact sheet needs matplotlib"):
        inference.search(tmp_path, "a text")


def test_opening_image_data_needs_pillow(absent, tmp_path):
    absent("PIL")
    (tmp_path / "pairs.csv").write_text("image,text\na.png,a\n")
    with pytest.raises(ValueError, match="image data needs pillow"):
        open_source(config.Data(source=str(tmp_path / "pairs.csv")))


def test_a_run_of_texts_needs_nothing_but_torch(absent, tmp_path, capsys):
    """It is trained, evaluated, resumed and searched."""
    absent(*OPTIONAL)
    path = tmp_path / "run.toml"
    path.write_text(config.as_toml(config.build(table_of(tmp_path))))
    assert cli.main(["train", str(path)]) == 0
    assert cli.main(["train", str(path), "evaluate.limit=4"]) == 0
    assert cli.main(["evaluate", str(tmp_path / "run")]) == 0
    assert "recall@1" in capsys.readouterr().out
    assert cli.main(["search", str(tmp_path / "run"), "a 3", "-k", "2"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split() == ["similarity", "answer", "from"] and len(rows) >= 3
