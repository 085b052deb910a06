"""Attention over short sequences: the results of PyTorch's function, which calls reach the kernels, and modules that use it."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F

import megabatch
from megabatch.towers import attention

kernels = pytest.importorskip("megabatch.towers.attention_kernels")
LENGTHS = [1, 17, 50, 64, 65, 77, 80, 100, 128, 197, 256, 257]


def heads(length: int, packed: bool = False, width: int = 64, **options: object) -> list[Tensor]:
    """Return q, k and v as transformers have them: views of (B, S, H, D) memory, with `packed` of one tensor for all three."""
    generator = torch.Generator().manual_seed(length)
    if packed:
        qkv = torch.randn(2, length, 3, 2, width, generator=generator)
        return [t.transpose(1, 2).detach().requires_grad_() for t in qkv.to(**options).unbind(2)]
    made = (torch.randn(2, length, 2, width, generator=generator).to(**options).transpose(1, 2) for _ in range(3))
    return [t.detach().requires_grad_() for t in made]


def results(function, inputs: list[Tensor], **options: object) -> list[Tensor]:
    output = function(*inputs, **options)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape)
    return [output.detach(), *torch.autograd.grad((output.float() * weights).sum(), inputs)]


def assert_close(found: list[Tensor], true: list[Tensor], tolerance: float) -> None:
    for name, a, b in zip(("output", "dq", "dk", "dv"), found, true, strict=True):
        error = float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-3))
        assert error < tolerance, (name, error)


@pytest.fixture
def on_cpu(monkeypatch):
    """Let the kernels take float32 on a CPU, where Triton's interpreter runs them."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is used without a GPU")
    monkeypatch.setattr(attention, "has_kernels", lambda device: True)
    monkeypatch.setattr(attention, "DTYPE", torch.float32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [pytest.param(n, marks=[pytest.mark.slow] if n > 128 else []) for n in LENGTHS])
def test_results_are_those_of_pytorch(length, causal, on_cpu):
    inputs = heads(length, packed=bool(length % 2))
    true = results(F.scaled_dot_product_attention, [t.detach().double().requires_grad_() for t in inputs], is_causal=causal)
    found = results(attention._attention, inputs, is_causal=causal)
    assert_close(found, true, 1e-5)
    # As PyTorch's kernels do: the next projection reads it without a copy.
    assert found[0].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("wrong", ["dv", "nan"])
def test_kernels_that_were_compiled_wrongly_raise_at_their_first_call(wrong, on_cpu, monkeypatch):
    backward = kernels.backward

    def miscompiled(*args: object) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = backward(*args)
        return (dq, dk, dv.flip(2)) if wrong == "dv" else (dq * torch.nan, dk, dv)

    monkeypatch.setattr(kernels, "backward", miscompiled)
    monkeypatch.setattr(kernels, "_checked", set())
    state = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"attention over 20 positions, as Triton .* compiles them, are wrong: d[qv] is off"):
            attention._attention(*heads(20))
    assert torch.equal(state, torch.get_rng_state())
    monkeypatch.setattr(kernels, "backward", backward)
    kernels._checked.clear()
    attention._attention(*heads(20))
    assert len(kernels._checked) == 1
    attention._attention(*heads(33))
    assert len(kernels._checked) == 1, "the same kernel"


def test_inputs_of_any_layout_are_read(on_cpu):
    inputs = heads(20)
    true = results(F.scaled_dot_product_attention, inputs)
    odd = [torch.empty(2, 2, 20, 67)[..., 1:65].copy_(t.detach()).requires_grad_() for t in inputs]
    transposed = [t.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for t in inputs]
    for other in (odd, transposed):
        assert not any(t.is_contiguous() for t in other)
        assert_close(results(attention._attention, other), true, 1e-5)


def test_a_given_scale_is_used(on_cpu):
    inputs = heads(20)
    assert_close(results(attention._attention, inputs, scale=0.3), results(F.scaled_dot_product_attention, inputs, scale=0.3), 1e-5)


def test_all_lengths_up_to_the_longest_have_a_tile():
    assert attention.LONGEST == kernels.LONGEST
    for length in range(1, attention.LONGEST + 1):
        for causal in (False, True):
            tile, tail = kernels.divide(length, causal)
            assert tile in kernels.FORWARD and tile in kernels.BACKWARD and length <= tile + tail
    with pytest.raises(ValueError, match="must have at most 257"):
        kernels.divide(258, False)


def mask(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: ((q, k, v, mask(q.shape[2])), {}),
        lambda q, k, v: ((q, k, v), {"dropout_p": 0.1}),
        lambda q, k, v: ((q, k[:, :, :5], v[:, :, :5]), {}),
        lambda q, k, v: ((q[0], k[0], v[0]), {}),
        lambda q, k, v: ((q.double(), k.double(), v.double()), {}),
        lambda q, k, v: ((q[..., :32], k[..., :32], v[..., :32]), {}),
        lambda q, k, v: (tuple(F.pad(t, (0, 0, 0, 250)) for t in (q, k, v)), {}),
        lambda q, k, v: (tuple(F.pad(t, (0, 0, 0, 130)) for t in (q, k, v)), {}),
        lambda q, k, v: ((q, k[:, :1], v[:, :1]), {"enable_gqa": True}),
        lambda q, k, v: ((q, k, v), {"scale": -1.0}),
        lambda q, k, v: ((q[:0], k[:0], v[:0]), {}),
    ],
    ids=[
        "mask",
        "dropout",
        "fewer keys",
        "no batch",
        "float64",
        "narrow",
        "long",
        "padded by PyTorch alike",
        "grouped heads",
        "negative scale",
        "empty",
    ],
)
def test_other_calls_are_left_to_pytorch(change, on_cpu):
    args, options = change(*heads(8))
    assert attention._attention(*args, **options) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_of_other_kinds_are_left_to_pytorch(on_cpu):
    q, k, v = (t.detach() for t in heads(8))
    assert attention._attention(q, k, v) is not None

    class Other(Tensor):
        pass

    assert attention._attention(q.as_subclass(Other), k, v) is None
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.randn(n, 2, 64) for n in (3, 5)], layout=layout).transpose(1, 2)
        assert attention._attention(nested, nested, nested) is None
    with FakeTensorMode():
        fake = torch.empty(2, 2, 8, 64, device="cuda")
        assert attention._attention(fake, fake, fake) is None
    with forward_ad.dual_level():
        assert attention._attention(q, k, v) is None
    called = torch.vmap(lambda a: torch.zeros(()) if attention._attention(a, k, v) is None else torch.ones(()))
    assert not called(torch.stack([q, q])).any()


@pytest.mark.parametrize(
    "change",
    [
        {"need_weights": True},
        {"is_causal": True},
        {"attn_mask": torch.zeros(20, 20)},
        {"key_padding_mask": torch.zeros(2, 20, dtype=torch.bool)},
        {"dropout_p": 0.1},
        {"add_zero_attn": True},
        {"bias_k": torch.zeros(1, 1, 128)},
        {"use_separate_proj_weight": True, "q_proj_weight": torch.zeros(128, 128)},
        {"static_k": torch.zeros(4, 20, 64)},
        {"num_heads": 4},
    ],
    ids=lambda change: next(iter(change)),
)
def test_multi_head_attention_with_more_is_left_to_pytorch(change, on_cpu):
    module = nn.MultiheadAttention(128, 2)
    x = torch.randn(20, 2, 128)
    inputs = {
        "embed_dim": 128,
        "heads": 2,
        "weight": module.in_proj_weight,
        "bias": module.in_proj_bias,
        "out_weight": module.out_proj.weight,
    }
    inputs |= {"bias_k": None, "bias_v": None, "add_zero_attn": False, "dropout_p": 0.0, "out_bias": module.out_proj.bias}
    inputs |= {"need_weights": False, "average_attn_weights": True, "is_causal": False}
    output = attention._multi_head_attention(x, x, x, **inputs)[0]
    torch.testing.assert_close(output, module(x, x, x, need_weights=False)[0])
    assert output.is_contiguous()
    change = {"heads" if name == "num_heads" else name: value for name, value in change.items()}
    assert attention._multi_head_attention(x, x, x, **inputs | change) is None
    assert attention._multi_head_attention(x, x.clone(), x, **inputs) is None


def test_rows_that_are_too_far_apart_are_copied():
    far = torch.empty_strided((2, 2, 20, 64), (64, 64, 2**28, 1), device="meta")
    near = torch.empty(2, 2, 20, 64, device="meta")
    assert kernels._aligned(far).stride() == (20 * 128, 64, 128, 1) and kernels._aligned(near) is near


def test_without_the_kernels_pytorch_computes():
    assert attention._attention(*heads(8)) is None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(128, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


def block() -> nn.Module:
    torch.manual_seed(0)
    return Block()


def test_a_model_uses_the_kernels_in_forward_alone(on_cpu, calls):
    plain, model = block(), megabatch.short_attention(block())
    x = torch.randn(2, 20, 128)
    plain(x).square().sum().backward()
    model(x).square().sum().backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert calls == [20]
    F.scaled_dot_product_attention(*heads(8))
    assert calls == [20]
    with pytest.raises(AssertionError):
        model(torch.randn(2, 20, 127))
    F.scaled_dot_product_attention(*heads(8))
    assert calls == [20], "the mode ends when forward raises"


def test_copies_and_pickles_use_the_kernels_once(on_cpu, calls):
    model = megabatch.short_attention(megabatch.short_attention(block()))
    x = torch.randn(2, 8, 128)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        each(x)
    assert calls == [8, 8, 8]
    assert model.state_dict().keys() == block().state_dict().keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_models_and_blocks_use_the_kernels(whole, on_cpu, calls):
    torch.compiler.reset()
    model = megabatch.short_attention(nn.Sequential(block(), block()))
    plain = nn.Sequential(block(), block())
    for module in [model] if whole else model:
        # The hooks of a whole model are outside of its graph.
        module.compile(fullgraph=not whole, backend="aot_eager")
    x = torch.randn(2, 20, 128)
    plain(x).square().sum().backward()
    for _ in range(2):
        model.zero_grad()
        model(x).square().sum().backward()
    assert calls == [20] * 4
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.slow
def test_chunks_of_a_cached_step_use_the_kernels_when_they_are_recomputed(on_cpu, calls):
    def gradients(model: nn.Module, chunk: int | None) -> list[Tensor]:
        x = torch.randn(8, 6, 128, generator=torch.Generator().manual_seed(0))

        def encode(rows: Tensor) -> Tensor:
            return F.normalize(model(rows).mean(1), dim=-1)

        encode = encode if chunk is None else megabatch.cached(encode, chunk=chunk)
        embeddings = encode(x)
        megabatch.clip_loss(embeddings, embeddings.detach(), 10.0).backward()
        return [p.grad for p in model.parameters()]

    true = gradients(block(), None)
    assert not calls
    found = gradients(megabatch.short_attention(block()), 4)
    assert len(calls) == 4, "two chunks, forward and again in backward"
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b)


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from megabatch.towers import attention_kernels as kernels

POINTERS = {name: "*bf16" for name in ("q", "k", "v", "o", "do", "dq", "dk", "dv")} | {"lse": "*fp32", "last": "*fp32"}
for length, causal in ((77, True), (257, False)):
    tile, tail = kernels.divide(length, causal)
    full = tail > 0 or length == tile
    shape = dict(KEYS=tile, QUERIES=tile, D=64, T=tail, FULL=full, CAUSAL=causal, ONE=length == tile + 1)
    for kernel, launches in ((kernels.attention_kernel, kernels.FORWARD), (kernels.attention_backward_kernel, kernels.BACKWARD)):
        launch = launches[tile]
        values = shape | {"BLOCK": launch.block}
        numbers = {"scale": "fp32", "factor": "fp32"}
        kinds = {name: "constexpr" if name in values else (POINTERS | numbers).get(name, "i32") for name in kernel.arg_names}
        constants = {(place,): values[name] for place, name in enumerate(kernel.arg_names) if name in values}
        aligned = {
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(kernel.arg_names)
            if kinds[name] == "i32" and name not in ("heads", "length") or kinds[name].startswith("*")
        }
        options = dict(num_warps=launch.warps, num_stages=launch.stages)
        made = compile(ASTSource(kernel, kinds, constants, aligned), target=GPUTarget("cuda", 90, 32), options=options)
        print(length, made.metadata.shared)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_hopper_and_fit_its_shared_memory():
    # In a process of its own: Triton decides at its import whether kernels are interpreted.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(sizes) == 4 and max(sizes) <= 227 * 1024


def test_what_is_no_module_is_refused():
    with pytest.raises(ValueError, match=r"must be a torch\.nn\.Module"):
        megabatch.short_attention(F.scaled_dot_product_attention)


def test_the_operators_are_right_for_pytorch(on_cpu):
    inputs = [t.detach() for t in heads(8)]
    torch.library.opcheck(torch.ops.megabatch.short_attention.default, (*inputs, False, 0.125))
