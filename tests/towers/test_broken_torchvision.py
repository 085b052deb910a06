"""Towers work with a torchvision that does not match torch, because they do not use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from megabatch.config import Tower
from megabatch.towers import build_tower, without_torchvision

BROKEN = RuntimeError("operator torchvision::nms does not exist")
BERT = {
    "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "vocab_size": 258,
}  # fmt: skip
# In one process, because each library takes seconds to import. OpenCLIP imports both others, so it comes first.
PROGRAM = """
import sys
from megabatch import config
from megabatch.costs.models import encoders_of
from megabatch.towers import build_tower

print([name for name in ("torchvision", "timm", "open_clip", "transformers") if name in sys.modules])
plan = config.build({{"x": {{"name": "open_clip:ViT-L-14"}}, "y": {{"name": "open_clip:ViT-L-14"}}, "schedule": {{"steps": 1}}}})
print([sum(p.numel() for p in side.module.parameters()) // 10**6 for side in encoders_of(plan)])
print(build_tower(config.Tower("timm:test_vit"), 12, side="x").kind)
print(build_tower(config.Tower("transformers:" + {bert!r}), 12, side="y").kind)

import timm.data
from transformers.utils import is_torchvision_available

print("torchvision" in sys.modules, is_torchvision_available())
for use in (lambda: timm.data.create_transform(224), lambda: __import__("torchvision")):
    try:
        use()
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.fixture
def broken(monkeypatch):
    monkeypatch.setattr(without_torchvision, "error_of_import", lambda: BROKEN)


def loaded() -> dict[str, object]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torchvision"}


@pytest.mark.slow
def test_towers_of_all_libraries_are_built_without_it(tmp_path):
    (tmp_path / "torchvision").mkdir()
    # A submodule that was imported before the failure stays in sys.modules.
    (tmp_path / "torchvision" / "extension.py").touch()
    (tmp_path / "torchvision" / "__init__.py").write_text(f"from . import extension\nraise RuntimeError({str(BROKEN)!r})\n")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text(json.dumps(BERT))
    program = [sys.executable, "-c", PROGRAM.format(bert=str(tmp_path / "bert"))]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(program, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    unasked, parameters, timm, bert, asked, used, imported = ran.stdout.splitlines()
    assert unasked == "[]"
    # Parameters of the image tower and the text tower, in millions.
    assert parameters == "[304, 123]"
    assert (timm, bert) == ("image", "text")
    assert asked == "False False"
    # What does need torchvision raises, with the command that repairs it, and nothing else sees a placeholder.
    assert used.startswith("ImportError torchvision.transforms.") and without_torchvision.remedy() in used
    assert imported == f"RuntimeError {BROKEN}"


def test_placeholders_can_be_imported_and_subclassed_but_not_used(broken):
    before = loaded()
    with without_torchvision.placeholders():
        import torchvision.transforms.functional as functional
        from torchvision import transforms
        from torchvision.ops.misc import FrozenBatchNorm2d
        from torchvision.transforms import InterpolationMode

        class Own(transforms.ToTensor):
            pass

        assert not isinstance(torch.nn.Identity(), FrozenBatchNorm2d)
        assert len({InterpolationMode.NEAREST, InterpolationMode.BICUBIC, InterpolationMode.NEAREST}) == 2
        for use in (Own, FrozenBatchNorm2d, functional.resize):
            with pytest.raises(ImportError, match=r"torchvision cannot be imported \(operator torchvision::nms.*pip install"):
                use(3)
    assert loaded() == before


def test_a_torchvision_that_works_is_left_alone():
    torchvision = pytest.importorskip("torchvision")
    for context in (without_torchvision.placeholders, without_torchvision.hidden):
        with context():
            assert sys.modules["torchvision"] is torchvision


def test_imported_modules_are_restored_after_an_error(broken):
    before, finders = loaded(), list(sys.meta_path)
    with pytest.raises(KeyError), without_torchvision.placeholders():
        raise KeyError("the library failed in another way")
    assert loaded() == before and sys.meta_path == finders


@pytest.mark.parametrize(
    "version, command",
    [
        ("2.13.0+cpu", "pip install 'torchvision==0.28.*' --index-url https://download.pytorch.org/whl/cpu"),
        ("2.11.0+cu130", "pip install 'torchvision==0.26.*' --index-url https://download.pytorch.org/whl/cu130"),
        ("2.8.0", "pip install 'torchvision==0.23.*'"),
        ("2.12.0a0+git1f3c", "pip install 'torchvision==0.27.*'"),
        ("3.0.1", "Install the torchvision that was released with torch 3.0.1"),
    ],
)
def test_the_remedy_names_version_and_index(monkeypatch, version, command):
    monkeypatch.setattr(torch, "__version__", version)
    assert without_torchvision.remedy().endswith(command)


@pytest.mark.parametrize("library", ["timm", "open_clip"])
def test_a_library_that_still_fails_names_what_to_install(broken, monkeypatch, library):
    def fail():
        raise AttributeError("module 'torchvision' has no attribute '__version__'")

    monkeypatch.setattr(without_torchvision, f"import_{library}", fail)
    with pytest.raises(ValueError, match=f"{library} cannot be imported .*'torchvision==0.*vit, cnn and text need no package"):
        build_tower(Tower(f"{library}:any"), 12, side="x")
    monkeypatch.setattr(without_torchvision, "error_of_import", lambda: None)
    with pytest.raises(ValueError) as refused:
        build_tower(Tower(f"{library}:any"), 12, side="x")
    assert "pip install" not in str(refused.value)
