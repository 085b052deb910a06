"""Code that a run names is imported and called only if the command line or the calling program allows it."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megabatch import cli, config
from megabatch.measuring.fit import fit
from megabatch.measuring.noise import noise
from megabatch.measuring.profile import profile
from megabatch.measuring.sweep import sweep
from megabatch.measuring.sweep.runner import Processes
from megabatch.planning.planner import plan
from megabatch.towers import build_tower
from megabatch.training.inference import embed, evaluate, search
from megabatch.training.loop import train
from megabatch.training.optimizer import build_optimizer
from megabatch.trust import callables

# Writes a file when it is imported and another when it is called, and then ends the command with a ValueError.
HOSTILE = """
from pathlib import Path

Path({mark!r}).write_text("imported")

def run(*args, **kwargs):
    Path({mark!r}).write_text("called")
    raise ValueError("the callable ran")
"""
VERBS = ("train", "evaluate", "embed", "search", "fit", "profile", "noise", "sweep", "plan")
KEYS = ("x.name", "y.name", "optimizer.name")
# These do not build an optimizer, so none is called even with --trust-code.
WITHOUT_OPTIMIZER = ("evaluate", "embed", "search", "plan", "profile", "sweep")


class Hostile:
    """A folder with a module `hostile`, a run that names it at one key, and the folder of a trained run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = folder / "mark"
        (folder / "hostile.py").write_text(HOSTILE.format(mark=str(self.mark)))
        pairs = [{"query": f"question {number}", "positive": f"answer {number}"} for number in range(40)]
        (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        (folder / "texts.txt").write_text("a text\n")
        (folder / "trained" / "checkpoints" / "step-00000001").mkdir(parents=True)

    def write(self, key: str) -> config.Run:
        """Write both run.toml files with the hostile callable at a key."""
        table = {
            "out": str(self.folder / "out"),
            "data": {"source": str(self.folder / "pairs.jsonl")},
            "x": {"name": "text", "options": {"width": 16, "depth": 0}},
            "y": {"name": "text", "options": {"width": 16, "depth": 0}},
            "loss": {"dim": 8},
            "batch": {"size": 8, "chunk": 8},
            "schedule": {"epochs": 3},
            "watch": {"bar": False, "report": False},
        }
        run = config.build(table, [f"{key}=hostile:run"])
        for path in (self.folder / "run.toml", self.folder / "trained" / "run.toml"):
            path.write_text(config.as_toml(run))
        return run

    def arguments(self, verb: str) -> list[str]:
        file, trained, out = (str(self.folder / name) for name in ("run.toml", "trained", "out"))
        return {
            "train": ["train", file],
            "evaluate": ["evaluate", trained],
            "embed": ["embed", trained, str(self.folder / "texts.txt")],
            "search": ["search", trained, "a text"],
            "fit": ["fit", file, "--out", out],
            "profile": ["profile", file, "--out", out],
            "noise": ["noise", file, "--out", out],
            "sweep": ["sweep", file, "--batches", "8", "--out", out],
            "plan": ["plan", file, "--data", "1000"],
        }[verb]

    def call(self, verb: str, run: config.Run, **trust: bool) -> Any:
        """Call the verb as a Python function."""
        trained, out = self.folder / "trained", self.folder / "out"
        calls = {
            "train": lambda: train(run, **trust),
            "evaluate": lambda: evaluate(trained, **trust),
            "embed": lambda: embed(trained, [self.folder / "texts.txt"], self.folder / "e.safetensors", **trust),
            "search": lambda: search(trained, "a text", **trust),
            "fit": lambda: fit(run, out=out, **trust),
            "profile": lambda: profile(run, out=out, **trust),
            "noise": lambda: noise(run, out=out, **trust),
            "sweep": lambda: sweep(run, batches=[8], out=out, **trust),
            "plan": lambda: plan(run, data=1000, **trust),
        }
        return calls[verb]()


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    made = Hostile(tmp_path)
    monkeypatch.chdir(tmp_path)
    # Undo what a command appends to the search path, and unload the module.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, "hostile", raising=False)
    yield made
    sys.modules.pop("hostile", None)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_runs_code_of_a_file_without_the_switch(hostile, capsys, verb, key):
    hostile.write(key)
    # Importable, so that only the check prevents it from running.
    sys.path.append(str(hostile.folder))
    assert cli.main(hostile.arguments(verb)) == 2
    said = capsys.readouterr().err
    assert key in said and "hostile:run" in said and "--trust-code" in said
    assert not hostile.mark.exists() and not (hostile.folder / "out").exists()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_runs_it_with_the_switch_also_from_the_current_folder(hostile, capsys, verb):
    hostile.write("x.name")
    assert cli.main([*hostile.arguments(verb), "--trust-code"]) == 2
    assert "the callable ran" in capsys.readouterr().err
    assert hostile.mark.read_text() == "called"


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in WITHOUT_OPTIMIZER])
def test_an_optimizer_of_ones_own_runs_with_the_switch(hostile, capsys, verb):
    hostile.write("optimizer.name")
    assert cli.main([*hostile.arguments(verb), "--trust-code"]) == 2
    assert "the callable ran" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_python_functions_ask_for_trust_too(hostile, verb):
    run = hostile.write("y.name")
    sys.path.append(str(hostile.folder))
    with pytest.raises(ValueError, match=r"y.name is 'hostile:run'.*--trust-code"):
        hostile.call(verb, run)
    assert not hostile.mark.exists()
    with pytest.raises(ValueError, match="the callable ran"):
        hostile.call(verb, run, trust_code=True)


def test_an_override_that_names_code_needs_the_switch_as_well(hostile, capsys):
    hostile.write("x.weights")
    assert cli.main([*hostile.arguments("train"), "x.name=hostile:run"]) == 2
    assert "--trust-code" in capsys.readouterr().err and not hostile.mark.exists()


@pytest.mark.parametrize("grant", ["trust_code = true\n", "[compute]\ntrust_code = true\n", "[x]\ntrust_code = true\n"])
def test_a_file_cannot_grant_itself_trust(tmp_path, capsys, grant):
    (tmp_path / "run.toml").write_text(grant + "[schedule]\nsteps = 1\n")
    assert cli.main(["train", str(tmp_path / "run.toml")]) == 2
    assert "there is no key 'trust_code'" in capsys.readouterr().err
    assert cli.main(["train", "trust_code=true"]) == 2


def test_trust_is_not_left_in_the_folder_of_a_run(hostile):
    (hostile.folder / "friendly.py").write_text("from small_towers import text\n")
    sys.path.append(str(hostile.folder))
    hostile.write("x.weights")
    options = ["x.name=friendly:text", "x.weights=none", "y.name=friendly:text", "schedule.steps=1"]
    run = config.read(hostile.folder / "run.toml", options)
    folder = train(run, trust_code=True)
    sys.modules.pop("friendly")
    for path in folder.rglob("*"):
        assert not path.is_file() or b"trust_code" not in path.read_bytes(), path
    with pytest.raises(ValueError, match=r"friendly:text.*--trust-code"):
        evaluate(folder)
    assert evaluate(folder, trust_code=True)["pairs"] > 0


def test_a_trained_run_that_somebody_altered_is_refused(hostile):
    hostile.write("x.weights")
    run = config.read(hostile.folder / "run.toml", ["x.weights=none", "schedule.steps=1"])
    folder = train(run)
    assert evaluate(folder)["pairs"] > 0
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(text.replace('[y]\nname = "text"', '[y]\nname = "os:system"'))
    with pytest.raises(ValueError, match=r"y.name is 'os:system': it names code"):
        evaluate(folder)


def test_a_sweep_passes_trust_on_and_workers_do_not_import_from_the_current_folder_by_themselves(tmp_path, monkeypatch):
    started = []

    def popen(command, **options):
        started.append((command, options["env"]))
        raise OSError("not started")

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(sys, "path", ["", "/packages"])
    for trust in (False, True):
        with pytest.raises(OSError, match="not started"):
            Processes(trust_code=trust)(config.build(config.EMBEDDED, [f"out={tmp_path / 'run'}"]))
    (plain, environment), (trusted, _) = started
    assert "--trust-code" not in plain and trusted[-2:] == ["--trust-code", str(tmp_path / "run")]
    assert environment["PYTHONSAFEPATH"] == "1"
    assert environment["PYTHONPATH"].split(":") == [str(Path.cwd()), "/packages"]


def test_the_current_folder_can_be_imported_from_only_with_the_switch(hostile, capsys):
    arguments = ["plan", "hostile:run", "--objective", "lm", "--data", "1B", "--gpu", "H100"]
    assert cli.main(arguments) == 2
    assert "--trust-code" in capsys.readouterr().err and not hostile.mark.exists()
    assert cli.main([*arguments, "--trust-code"]) == 2
    assert hostile.mark.read_text() == "called"


@pytest.mark.parametrize(
    ("name", "is_code"),
    [
        ("vit", False),
        ("timm:vit_tiny_patch16_224", False),
        ("open_clip:ViT-B-32", False),
        ("transformers:folder", False),
        ("timm.models:create_model", True),
        ("transformers.pipelines:pipeline", True),
        (" timm:vit", True),
        (":", True),
        ("os:system", True),
    ],
)
def test_models_of_libraries_are_no_code(name, is_code):
    run = config.build({"x": {"name": name}, "schedule": {"steps": 1}})
    assert callables(run) == ({"x.name": name} if is_code else {})


@pytest.mark.parametrize(
    ("name", "is_code"),
    [
        ("sgd", False),
        ("torch.optim:NAdam", False),
        ("torch.optim:lr_scheduler.LambdaLR", True),
        ("torch:load", True),
        ("torch.optim.adam:Adam", True),
        ("torch.optim:", True),
    ],
)
def test_optimizers_of_pytorch_are_no_code(name, is_code):
    run = config.build({"optimizer": {"name": name}, "schedule": {"steps": 1}})
    assert callables(run) == ({"optimizer.name": name} if is_code else {})


def test_a_name_under_torch_optim_that_is_no_optimizer_is_not_called():
    for name in ("torch.optim:lr_scheduler", "torch.optim:Missing", "torch.optim:annotations"):
        with pytest.raises(ValueError, match=r"optimizer.name is"):
            build_optimizer(nn.Linear(2, 2), config.Optimizer(name))


LOADING = [
    {"pretrained": True},
    {"pretrained": "openai"},
    {"checkpoint_path": "weights.pt"},
    {"cache_dir": "/tmp"},
    {"pretrained_cfg": {"file": "weights.pt"}},
    {"pretrained_cfg_overlay": {"url": "https://example.org/weights.pt"}},
]


@pytest.mark.parametrize("options", [*LOADING, {"pretrained_strict": False}])
def test_options_that_make_timm_load_something_are_refused(options):
    pytest.importorskip("timm")
    with pytest.raises(ValueError, match="weights"):
        build_tower(config.Tower("timm:vit_tiny_patch16_224", options), 8, side="x")


@pytest.mark.parametrize("name", ["hf-hub:someone/model", "hf_hub:someone/model", "local-dir:folder"])
def test_names_that_make_timm_load_something_are_unknown_models(name):
    pytest.importorskip("timm")
    with pytest.raises(ValueError, match="has no model"):
        build_tower(config.Tower(f"timm:{name}"), 8, side="x")


@pytest.mark.parametrize(
    "options",
    [
        *LOADING,
        {"load_weights_only": False},
        {"weights_only": False},
        {"pretrained_image_path": "weights.pt"},
        {"text_cfg": {"hf_model_name": "someone/model"}},
        {"vision_cfg": {"timm_model_name": "hf-hub:someone/model"}},
        {"vision_cfg": {"timm_model_pretrained": True}},
    ],
)
def test_options_that_make_open_clip_load_something_are_refused(options):
    pytest.importorskip("open_clip")
    with pytest.raises(ValueError, match="weights"):
        build_tower(config.Tower("open_clip:ViT-B-32", options), 8, side="x")


def test_code_in_a_folder_of_transformers_is_never_run(tmp_path, hostile):
    pytest.importorskip("transformers")
    code = (hostile.folder / "hostile.py").read_text() + "\nclass Config: pass\nclass Model: pass\n"
    (tmp_path / "evil.py").write_text(code)
    for table in (
        {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}},
        {"model_type": "bert", "hidden_size": 8, "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}},
    ):
        (tmp_path / "config.json").write_text(json.dumps(table))
        with pytest.raises(ValueError):
            build_tower(config.Tower(f"transformers:{tmp_path}"), 8, side="x")
        assert not hostile.mark.exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_folder_of_transformers_cannot_ask_for_kernels_from_the_network(tmp_path, key):
    pytest.importorskip("transformers")
    table = {"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(table))
    assert build_tower(config.Tower(f"transformers:{tmp_path}"), 8, side="y").kind == "text"
    (tmp_path / "config.json").write_text(json.dumps({**table, key: "someone/kernel"}))
    with pytest.raises(ValueError, match="attention 'someone/kernel'"):
        build_tower(config.Tower(f"transformers:{tmp_path}"), 8, side="y")


class Pickled:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.mark, "called")


def damaged_weights(folder: Path) -> dict[str, Path]:
    """Files that are not weights, each for another reason."""
    from safetensors.torch import save_file

    folder.mkdir()
    tower = build_tower(config.Tower("text", {"width": 16, "depth": 0}), 8, side="y")
    save_file(tower.module.state_dict(), folder / "whole.safetensors")
    whole = (folder / "whole.safetensors").read_bytes()
    torch.save(tower.module.state_dict(), folder / "whole.pt")
    (folder / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    (folder / "header.safetensors").write_bytes(whole[:4])
    (folder / "text.safetensors").write_text("not weights")
    (folder / "empty.safetensors").write_bytes(b"")
    (folder / "empty.pt").write_bytes(b"")
    (folder / "cut.pt").write_bytes((folder / "whole.pt").read_bytes()[:-100])
    (folder / "pickle.pt").write_bytes(pickle.dumps(Pickled(folder / "mark")))
    torch.save({"weight": Pickled(folder / "mark")}, folder / "code.pt")
    torch.save({1: torch.zeros(2)}, folder / "numbers.pt")
    torch.save({"weight": torch.zeros(2, 2).to_sparse()}, folder / "sparse.pt")
    (folder / "folder.safetensors").mkdir()
    (folder / "unreadable.safetensors").write_bytes(whole)
    (folder / "unreadable.safetensors").chmod(0)
    paths = {path.name: path for path in folder.iterdir() if not path.name.startswith("whole")}
    return paths | {"passwd": Path("/etc/passwd"), "missing": folder / "missing.pt"}


def test_weights_that_are_none_are_one_sentence_and_execute_nothing(tmp_path):
    folder = tmp_path / "weights"
    for name, path in damaged_weights(folder).items():
        if name == "unreadable.safetensors" and path.stat().st_uid == 0:
            # Permissions do not apply to root.
            continue
        tower = config.Tower("text", {"width": 16, "depth": 0}, weights=str(path))
        with pytest.raises(ValueError, match=r"^tower y: weights ") as caught:
            build_tower(tower, 8, side="y")
        assert str(path) in str(caught.value), name
    assert not (folder / "mark").exists()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("adamw", {"foo": 1}, "AdamW .*there is no 'foo'; it takes amsgrad, "),
        ("sgd", {"foo": 1}, "SGD .*there is no 'foo'; it takes dampening, "),
        ("adamw", {"amsgrad": "no"}, "AdamW .*amsgrad must be true or false"),
        ("adamw", {"fused": "yes", "foreach": True}, "AdamW"),
        ("adamw", {"lr": 1}, "set it as optimizer.lr"),
        ("adamw", {"weight_decay": 1}, "set it as optimizer.weight_decay"),
        ("adamw", {"capturable": True}, "AdamW"),
        ("adamw", {"differentiable": True}, "AdamW"),
        ("sgd", {"dampening": "much"}, "SGD"),
        ("sgd", {"nesterov": True, "dampening": 0.5}, "SGD .*Nesterov"),
        ("torch.optim:NAdam", {"foo": 1}, "NAdam .*there is no 'foo'"),
        ("torch.optim:LBFGS", {}, "LBFGS"),
    ],
)
def test_options_that_an_optimizer_does_not_take_are_named_before_the_first_step(name, options, said):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=rf"optimizer.options .*{said}"):
        build_optimizer(model, config.Optimizer(name, options=options))


def test_options_that_an_optimizer_takes_reach_it():
    optimizer = build_optimizer(nn.Linear(2, 2), config.Optimizer("adamw", options={"amsgrad": True, "foreach": False}))
    assert optimizer.defaults["amsgrad"] is True and optimizer.defaults["foreach"] is False
    assert not optimizer.state
