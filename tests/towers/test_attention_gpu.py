"""Attention over short sequences on a GPU: errors no larger than PyTorch's, under autocast, compiled, and in library towers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megabatch
from megabatch.towers import attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not attention.has_kernels(torch.device("cuda", 0)),
        reason="needs a Hopper GPU, and Triton 3.6",
    ),
]
LENGTHS = [2, 17, 50, 64, 65, 77, 80, 96, 100, 128, 197, 256, 257]


def heads(length: int, batch: int = 3, number: int = 5) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(length)
    made = (torch.randn(batch, length, number, 64, device="cuda", generator=generator) for _ in range(4))
    return [t.to(torch.bfloat16).transpose(1, 2) for t in made]


def results(function, inputs: list[Tensor], causal: bool) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    output = function(*leaves, is_causal=causal)
    return [output.detach(), *torch.autograd.grad(output, leaves, inputs[3])]


def errors(found: list[Tensor], true: list[Tensor]) -> list[float]:
    return [float((a.double() - b).abs().max() / b.abs().max().clamp(min=0.1)) for a, b in zip(found, true, strict=True)]


def test_one_key_has_all_the_attention():
    inputs = heads(1)
    output, dq, dk, dv = results(attention._attention, inputs, False)
    assert torch.equal(output, inputs[2]) and torch.equal(dv, inputs[3])
    assert max(float(t.abs().max()) for t in (dq, dk)) < 1e-3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_errors_are_no_larger_than_those_of_pytorch(length, causal):
    inputs = heads(length)
    true = results(F.scaled_dot_product_attention, [t.double() for t in inputs], causal)
    ours = errors(results(attention._attention, inputs, causal), true)
    theirs = errors(results(F.scaled_dot_product_attention, inputs, causal), true)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine < max(2 * other, 4e-3), (ours, theirs)


@pytest.mark.parametrize("length", [50, 77, 257])
def test_many_heads_do_not_disturb_each_other(length):
    inputs = heads(length, batch=300, number=4)
    everything = results(attention._attention, inputs, length == 77)
    for some in (slice(0, 2), slice(298, 300)):
        alone = results(attention._attention, [t[some] for t in inputs], length == 77)
        for a, b in zip(alone, everything, strict=True):
            assert torch.equal(a, b[some])


def layers(batch_first: bool) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 2, 256, dropout=0.0, batch_first=batch_first)
    return nn.Sequential(layer, copy.deepcopy(layer)).cuda()


def library_tower() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256, "num_hidden_layers": 2}
    config = transformers.CLIPVisionConfig(image_size=64, patch_size=8, **shape)
    return transformers.CLIPVisionModel(config).cuda()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.autocast("cuda", torch.bfloat16):
        output = model(x)
    output = output if isinstance(output, Tensor) else output.pooler_output
    output.float().square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


MODELS = {
    "batch first": (lambda: layers(True), (8, 50, 128), 50),
    "batch second": (lambda: layers(False), (50, 8, 128), 50),
    "transformers": (library_tower, (8, 3, 64, 64), 65),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("build", "shape", "length"), MODELS.values(), ids=MODELS)
@pytest.mark.filterwarnings("ignore")
def test_models_use_the_kernels_with_the_same_gradients(build, shape, length, compiled, calls):
    torch.compiler.reset()
    x = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    true = gradients(build(), x)
    model = megabatch.short_attention(build())
    if compiled:
        model.compile()
    found = gradients(model, x)
    assert set(calls) == {length}
    for a, b in zip(found, true, strict=True):
        assert float((a - b).norm()) <= 0.03 * float(b.norm()) + 1e-4
