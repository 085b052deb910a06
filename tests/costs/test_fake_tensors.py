"""The faster fake tensors give the costs that torch's own give."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megabatch.costs import counting
from megabatch.costs.counting import Work, count_work
from megabatch.costs.fake_tensors import CachingFakeMode, fake_parameters
from megabatch.costs.memory import Prediction, Setup, predict_memory, step


class TokenModel(nn.Module):
    """A transformer with tied weights: embeddings, attention with dropout, normalisation, slices and gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(100, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 100, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.block(self.tokens(tokens))
        last = x[torch.arange(len(x)), tokens.argmax(1)]
        return self.head(last + x[:, 1:].mean(1) + x.select(1, 0).squeeze(1))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 5)
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(12, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0][:, -1]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "tokens": (TokenModel, lambda rows: torch.zeros(rows, 9, dtype=torch.int64)),
    "convolutions": (convolutions, lambda rows: torch.zeros(rows, 3, 15, 15)),
    "recurrent": (Recurrent, lambda rows: torch.zeros(rows, 5, 12)),
}
SETUPS = {
    "fp32": Setup(),
    "bf16, accumulated, sharded": Setup(precision="bf16", chunk=4, ranks=4, sharding="fsdp2", ema=True),
    "bf16, SGD": Setup(precision="bf16", optimizer="sgd"),
}


def costs(build: Callable[[], nn.Module], inputs: Callable[[int], Any], setup: Setup) -> tuple[Work, Prediction]:
    return count_work(build(), inputs, setup.precision), predict_memory(build, inputs, 8, setup)


@pytest.mark.parametrize("model", [pytest.param(name, marks=[pytest.mark.slow] * (name != "convolutions")) for name in MODELS])
def test_costs_are_those_of_torchs_own_fake_tensors(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = [costs(*MODELS[model], setup) for setup in SETUPS.values()]
    # A second time, when every result is remembered.
    assert [costs(*MODELS[model], setup) for setup in SETUPS.values()] == fast
    for module in (counting, step):
        monkeypatch.setattr(module, "CachingFakeMode", lambda: FakeTensorMode(allow_non_fake_inputs=True))
    assert [costs(*MODELS[model], setup) for setup in SETUPS.values()] == fast


def test_results_that_share_memory_or_have_values_are_not_remembered() -> None:
    with CachingFakeMode():
        x = torch.empty(4, 6)
        for _ in range(2):
            view, copy = x.view(6, 4), x.clone()
            assert view.untyped_storage()._cdata == x.untyped_storage()._cdata != copy.untyped_storage()._cdata
            assert x.add_(1) is x and x.relu().stride() == (6, 1) and x.t().relu().stride() == (1, 6)
            # The same shapes, other values.
            assert [torch.tensor(value).item() for value in (2.0, 3.0)] == [2.0, 3.0]
            numbers = torch.empty(3, dtype=torch.int64)
            assert (numbers.mul(2).dtype, numbers.mul(2.0).dtype) == (torch.int64, torch.float32)


def test_parameters_are_fake_in_the_context_only() -> None:
    model = TokenModel()
    before = list(model.parameters())
    with CachingFakeMode(), fake_parameters(model) as trainable:
        assert model.head.weight is model.tokens.weight and model.head.weight is not before[0]
        assert len(trainable) == len(before) == len(list(model.parameters()))
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True)) and model.head.weight is before[0]


@pytest.mark.slow
def test_open_clip_is_imported_for_a_plan_without_timm_and_stays_as_it_is_for_others() -> None:
    code = (
        "import sys\n"
        "from megabatch.towers.open_clip import own_dim\n"
        "assert own_dim('ViT-B-32') == 512\n"
        "assert not {'timm', 'transformers', 'open_clip'} & set(sys.modules)\n"
        "assert own_dim('ViT-B-16-SigLIP') == 768 and 'timm' in sys.modules\n"
        "from megabatch.towers.without_torchvision import import_open_clip\n"
        "assert import_open_clip().timm_model.timm is not None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
