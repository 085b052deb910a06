"""Load weights from a local file into a tower, without executing anything that is in the file."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megabatch import packages

from .tower import ProjectedEncoder, StateDict

# Keys under which training programs save the state dict beside other things.
NESTED_KEYS = ("state_dict", "model_state_dict", "model")
# Names that an error lists.
LISTED = 3


def load_weights(module: nn.Module, path: str | Path) -> None:
    """Load a safetensors file, or a state dict that `torch.save` wrote, into the module.

    The file holds the weights of this tower, or those of the library that the encoder comes from, under that library's names; a
    projection to the embedding width then keeps its random weights. ValueError if names or shapes are not those of the module.
    """
    state = _read(Path(path))
    expected = module.state_dict()
    candidates = [state]
    if isinstance(module, ProjectedEncoder):
        candidates.append(module.library_weights(state))
    state = min(candidates, key=lambda candidate: len(expected.keys() ^ candidate.keys()))
    mismatches = {
        "missing": sorted(expected.keys() - state.keys()),
        "unexpected": sorted(state.keys() - expected.keys()),
        "different shape": sorted(
            f"{name} {tuple(state[name].shape)}, not {tuple(expected[name].shape)}"
            for name in expected.keys() & state.keys()
            if state[name].shape != expected[name].shape
        ),
    }
    if any(mismatches.values()):
        details = "; ".join(f"{what}: {_first_names(names)}" for what, names in mismatches.items() if names)
        raise ValueError(f"weights {path} do not fit the tower: {details}. Give the name and options that they were saved with")
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"weights {path} cannot be copied into the tower ({error})") from error


def _first_names(names: list[str]) -> str:
    rest = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _read(path: Path) -> StateDict:
    if not path.is_file():
        raise ValueError(f"weights {path}: there is no such file")
    state = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    for key in NESTED_KEYS:
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
            break
    if not isinstance(state, dict) or not all(isinstance(name, str) and _is_dense(value) for name, value in state.items()):
        raise ValueError(f"weights {path}: does not hold a state dict, a dict of dense tensors by name")
    # DistributedDataParallel adds this prefix.
    is_ddp = bool(state) and all(name.startswith("module.") for name in state)
    return {name.removeprefix("module."): value for name, value in state.items()} if is_ddp else state


def _is_dense(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return not (value.is_nested or value.is_quantized or value.is_meta)


def _read_safetensors(path: Path) -> Any:
    packages.require(packages.WEIGHTS_FILE)
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except Exception as error:
        # A damaged file can raise SafetensorError, OSError, KeyError for an unknown dtype, and more.
        raise ValueError(f"weights {path}: cannot be read as safetensors ({type(error).__name__}: {error})") from error


def _read_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"weights {path}: is not a file of torch.save, or holds more than tensors and is refused, because reading it could"
            " execute code; save the state_dict() alone, best as safetensors"
        ) from error
    except Exception as error:
        # For a damaged file, the unpickler can raise RuntimeError, EOFError, OSError, UnicodeDecodeError, KeyError and more.
        raise ValueError(
            f"weights {path}: cannot be read as a state dict of torch.save ({type(error).__name__}: {error});"
            " name a .safetensors or .pt file"
        ) from error
