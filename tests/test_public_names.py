"""The public names: one list for Python, `import *`, dir() and type checkers, imported at first use and fully typed."""

from __future__ import annotations

import ast
import inspect
import pickle
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest
import torch
from torch import Tensor

import megabatch
from megabatch.losses import clip, distill, indexed, maxsim, siglip, similarity
from megabatch.losses.autograd import WITH_EACH_BATCH

# Attributes of the package that are not in __all__: subpackages that users may reach without an import.
SUBPACKAGES = {"chunks", "losses"}


def test_the_package_is_imported_without_torch_and_lists_every_name():
    program = """
import sys, megabatch
assert set(megabatch.__all__) <= set(dir(megabatch))
for name in ("no_such_name", "training_", "__path_"):
    assert not hasattr(megabatch, name)
assert "torch" not in sys.modules
from megabatch import clip_loss
assert megabatch.reference.clip_loss is not clip_loss and megabatch.losses.clip_loss is clip_loss
assert megabatch.chunks.cached is megabatch.cached and "cached" in vars(megabatch)
assert "megabatch.planning" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_three_lists_of_public_names_agree():
    tree = ast.parse(Path(megabatch.__file__).read_text("utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)]
    # "from . import reference" shows the module itself, as the table does.
    shown = {alias.name: node.module or alias.name for node in block.body for alias in node.names}
    assert shown == {name: module for name, module in megabatch._MODULES.items() if name not in SUBPACKAGES}
    assert set(megabatch.__all__) == {*shown, "__version__"}
    assert all(megabatch._MODULES[name] == name for name in SUBPACKAGES)


def test_every_public_name_can_be_imported_and_pickled():
    for name in set(megabatch.__all__) - {"__version__"}:
        value = getattr(megabatch, name)
        assert isinstance(value, types.ModuleType) or pickle.loads(pickle.dumps(value)) is value


LOSSES = [
    (clip.clip_loss, clip.ClipLoss, clip.ClipOptions),
    (siglip.siglip_loss, siglip.SigLipLoss, siglip.SigLipOptions),
]


# These have no diagnostics, and therefore no overloads.
WITHOUT_DIAGNOSTICS = [
    (distill.distill_loss, distill.DistillLoss, distill.DistillOptions),
    (indexed.class_softmax_loss, indexed.ClassSoftmaxLoss, indexed.ClassSoftmaxOptions),
    (maxsim.maxsim_loss, maxsim.MaxSimLoss, maxsim.MaxSimOptions),
    (similarity.similarity_loss, similarity.SimilarityLoss, similarity.SimilarityOptions),
]


@pytest.mark.parametrize("function, module, options", [*LOSSES, *WITHOUT_DIAGNOSTICS])
def test_function_module_and_option_types_have_one_signature(function, module, options):
    signature = inspect.signature(function)
    keywords = {name: p for name, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY and name not in WITH_EACH_BATCH}
    assert dict(inspect.signature(module).parameters) == keywords
    # `diagnostics` decides between the overloads; all others are in the TypedDict, with the same types.
    assert set(options.__annotations__) == set(keywords) - {"diagnostics"}
    namespace = vars(sys.modules[function.__module__])
    types_of_options = typing.get_type_hints(options, namespace)
    assert types_of_options == {name: eval(keywords[name].annotation, namespace) for name in types_of_options}


@pytest.mark.parametrize("function, module, options", LOSSES)
def test_overloads_tell_type_checkers_that_diagnostics_change_the_result(function, module, options):
    # typing.get_overloads needs Python 3.11, so the source is read instead.
    tree = ast.parse(inspect.getsource(sys.modules[function.__module__]))
    overloads = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)
    ]
    results = ["Tensor", "tuple[Tensor, Diagnostics]", "Tensor | tuple[Tensor, Diagnostics]"]
    assert [ast.unparse(node.returns) for node in overloads] == results
    assert all(node.name == function.__name__ for node in overloads)


def test_a_module_without_diagnostics_returns_a_tensor():
    x = torch.randn(4, 3)
    assert isinstance(megabatch.ClipLoss()(x, x, 2.0), Tensor)
    loss, diagnostics = megabatch.ClipLoss(diagnostics=True)(x, x, 2.0)
    assert isinstance(loss, Tensor) and isinstance(diagnostics, megabatch.Diagnostics)
