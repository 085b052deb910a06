"""Weights from a local file into a tower. Reading them executes nothing that is in the file."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .projection import Fitted

# Where programs that save more than weights put them.
NESTS = ("state_dict", "model_state_dict", "model")
# So many names are listed.
LISTED = 3


def load_weights(module: nn.Module, path: str | Path) -> None:
    """Fills the module from a safetensors file, or from a state dict that `torch.save` wrote.

    The file holds this tower's weights, or those of the library that the encoder comes from, under that library's names; a
    projection to the wanted width stays fresh then. ValueError where names or shapes are not those of the module.
    """
    state = _read(Path(path))
    expected = module.state_dict()
    candidates = [state]
    if isinstance(module, Fitted):
        candidates.append(module.library_weights(state))
    state = min(candidates, key=lambda candidate: len(expected.keys() ^ candidate.keys()))
    wrong = {
        "missing": sorted(expected.keys() - state.keys()),
        "unexpected": sorted(state.keys() - expected.keys()),
        "of another shape": sorted(
            f"{name} {tuple(state[name].shape)}, not {tuple(expected[name].shape)}"
            for name in expected.keys() & state.keys()
            if state[name].shape != expected[name].shape
        ),
    }
    if any(wrong.values()):
        found = "; ".join(f"{what}: {_some(names)}" for what, names in wrong.items() if names)
        raise ValueError(f"weights {path} do not fit the tower: {found}. Give the name and the options that they were saved with")
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"weights {path} cannot be copied into the tower ({error})") from error


def _some(names: list[str]) -> str:
    rest = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"weights {path}: there is no such file")
    state = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    for nest in NESTS:
        if isinstance(state, dict) and isinstance(state.get(nest), dict):
            state = state[nest]
            break
    if not isinstance(state, dict) or not all(isinstance(name, str) and _is_dense(value) for name, value in state.items()):
        raise ValueError(f"weights {path}: holds no state dict, which is a dict of dense tensors by name")
    # Saved from inside DistributedDataParallel.
    wrapped = bool(state) and all(name.startswith("module.") for name in state)
    return {name.removeprefix("module."): value for name, value in state.items()} if wrapped else state


def _is_dense(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return not (value.is_nested or value.is_quantized or value.is_meta)


def _read_safetensors(path: Path) -> Any:
    try:
        from safetensors.torch import load_file
    except ModuleNotFoundError as error:
        raise ValueError(f"weights {path} needs safetensors: pip install 'megabatch[train]'") from error
    try:
        return load_file(path)
    except Exception as error:
        # What a damaged file raises depends on where the damage is: SafetensorError, OSError, KeyError for an unknown dtype.
        raise ValueError(f"weights {path}: cannot be read as safetensors ({type(error).__name__}: {error})") from error


def _read_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"weights {path}: is no file of torch.save, or holds more than tensors and is refused, since reading it could execute"
            " code; save the state_dict() alone, best as safetensors"
        ) from error
    except Exception as error:
        # The unpickler raises whatever a damaged file leads it into: RuntimeError, EOFError, OSError, UnicodeDecodeError, KeyError.
        raise ValueError(
            f"weights {path}: cannot be read as a state dict of torch.save ({type(error).__name__}: {error});"
            " name a .safetensors or .pt file"
        ) from error
