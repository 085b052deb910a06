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


def permuted(*shape: int, order: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor of this shape whose dimensions lie in this order in memory."""
    places = [order.index(dim) for dim in range(len(shape))]
    return torch.empty([shape[dim] for dim in order], dtype=dtype).permute(places)


def operations(rows: int, order: tuple[int, ...]) -> list[Callable[[], Any]]:
    """Return operations whose results follow from those for other numbers of rows, on tensors with this order in memory."""
    x, contiguous = permuted(rows, 6, 8, order=order), torch.empty(rows, 6, 8, dtype=torch.bfloat16)
    wide, weight = x.float(), torch.empty(8)
    statistics = torch.empty(rows, 6, 1)
    both = [True] * 3
    aten = torch.ops.aten
    return [
        lambda: x + contiguous,
        lambda: contiguous + x,
        lambda: x * torch.empty(8, dtype=torch.bfloat16) + torch.empty(6, 8),
        lambda: torch.where(x > 0, x, wide),
        lambda: x.mul(2.0).to(torch.float32),
        lambda: x.clone(),
        lambda: x.clone(memory_format=torch.contiguous_format),
        lambda: aten.gelu_backward(contiguous, x),
        lambda: aten.native_layer_norm(wide, [8], weight, weight, 1e-5),
        lambda: aten.native_layer_norm_backward(wide, contiguous.float(), [8], statistics, statistics, weight, weight, both),
        lambda: x.sum([0], keepdim=True),
        lambda: x.sum([0, 1], keepdim=True),
        lambda: aten.mm(torch.empty(8, rows).t(), torch.empty(5, 8).t()),
        lambda: aten.addmm(weight, torch.empty(rows, 4), torch.empty(8, 4).t()),
        lambda: aten.bmm(wide, torch.empty(8, rows, 7).transpose(0, 1)),
        lambda: aten.select_backward(x[:, 0], [rows, 6, 8], 1, 0),
        lambda: aten.slice_backward(x[:, 1:], [rows, 6, 8], 1, 1, 6, 1),
        lambda: torch._foreach_sqrt([x, wide]),
        lambda: x.detach(),
    ]


def layouts(mode: FakeTensorMode, rows: int, order: tuple[int, ...]) -> list[Any]:
    with mode:
        results = [operation() for operation in operations(rows, order)]
        return [(t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes()) for each in results for t in as_list(each)]


def as_list(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_results_for_other_shapes_are_those_of_torchs_own_fake_tensors(order: tuple[int, ...]) -> None:
    layouts(CachingFakeMode(), 4, order)
    # Sizes of 1 and equal sizes, whose order in memory is ambiguous, and one that was not seen before.
    for rows in (1, 6, 5):
        assert layouts(CachingFakeMode(), rows, order) == layouts(FakeTensorMode(), rows, order)


@pytest.mark.slow
def test_a_prediction_does_not_import_the_compiler_and_leaves_it_working() -> None:
    code = (
        "import sys, torch\n"
        "from torch import nn\n"
        "from megabatch.costs.memory import Setup, predict_memory\n"
        "from megabatch.costs.without_dynamo import without_dynamo\n"
        "model = lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())\n"
        "predict_memory(model, lambda rows: torch.empty(rows, 8), 4, Setup(precision='bf16'))\n"
        "assert not [name for name in sys.modules if name == 'torch._dynamo']\n"
        "with without_dynamo():\n"
        "    from torch._dynamo import source\n"
        "    import torch._dynamo.eval_frame\n"
        "    assert torch._dynamo.source is source and sys.modules['torch._dynamo'] is torch._dynamo\n"
        "    assert torch._dynamo.eval_frame.__spec__.origin.endswith('eval_frame.py')\n"
        "assert torch._dynamo.config is sys.modules['torch._dynamo.config']\n"
        "optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)])\n"
        "optimizer.zero_grad()\n"
        "assert type(optimizer).zero_grad.__wrapped__.__dynamo_disable is not type(optimizer).zero_grad.__wrapped__\n"
        "assert torch.compile(lambda x: x + 1, backend='eager')(torch.zeros(2)).sum() == 2\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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


@pytest.mark.slow
def test_a_plan_imports_no_large_package_that_it_does_not_need() -> None:
    code = (
        "import sys\n"
        "from megabatch.planning.planner import plan\n"
        "plan('ViT-B-32', data='400M', gpu='A100', gpus=8)\n"
        "print(*{'torch._dynamo', 'triton', 'torchvision', 'timm', 'transformers', 'huggingface_hub'} & sys.modules.keys())\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.split() == []
