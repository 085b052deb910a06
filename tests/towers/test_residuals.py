"""The residual stream in bf16: where it is rounded, what stays as it was, and how far gradients are from those in fp32."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import megabatch
from megabatch.costs.cuda_dispatch import dispatch_as_cuda
from megabatch.towers import without_torchvision
from megabatch.towers.repeats import equal_blocks, few_blocks

# A stream in bf16 on a CPU, whose norms have weights in fp32.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2}


class Block(nn.Module):
    """A residual block. after: the norm follows the sum, as in BERT. scaled: LayerScale. as_tuple: of what forward returns."""

    def __init__(self, norm: Callable[[int], nn.Module], *, after: bool, scaled: bool, as_tuple: bool) -> None:
        super().__init__()
        self.norm, self.linear = norm(16), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.full((16,), 0.5)) if scaled else None
        self.after, self.as_tuple = after, as_tuple

    def forward(self, hidden_states: Tensor, *more: object) -> Any:
        # Smooth: signs near 0 that rounding changes would change gradients as a whole.
        update = F.gelu(self.linear(hidden_states if self.after else self.norm(hidden_states)))
        if self.scale is not None:
            update = update * self.scale
        output = hidden_states + update
        output = self.norm(output) if self.after else output
        return (output, *more, None) if self.as_tuple else output


class Tower(nn.Module):
    """Blocks between embeddings with positions in fp32 and a mean. by_name: blocks are called by keyword. half: a bf16 stream."""

    def __init__(
        self,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        *,
        after: bool = False,
        scaled: bool = False,
        as_tuple: bool = False,
        by_name: bool = False,
        half: bool = False,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.embed, self.positions = nn.Linear(8, 16), nn.Parameter(torch.randn(5, 16))
        self.blocks = nn.ModuleList(Block(norm, after=after, scaled=scaled, as_tuple=as_tuple) for _ in range(6))
        self.by_name, self.half, self.checkpointing = by_name, half, checkpointing

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        x = x + (self.positions.to(x.dtype) if self.half else self.positions)
        for block in self.blocks:
            if self.checkpointing:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(hidden_states=x) if self.by_name else block(x)
            x = x[0] if isinstance(x, tuple) else x
        return x.mean(1)


def tower(**options: Any) -> Tower:
    torch.manual_seed(0)
    return Tower(**options)


INPUTS = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))


def outcome(model: nn.Module, inputs: Tensor = INPUTS, dtype: torch.dtype | None = torch.bfloat16) -> list[Tensor]:
    """Return the output of a model under autocast to a dtype, and the gradients of its parameters; None is no autocast."""
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        output = model(inputs)
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
    (output.float() * weights).sum().backward()
    return [output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def error(found: list[Tensor], true: list[Tensor]) -> float:
    """Return the norm of all differences as a share of the norm of all true values."""
    ours, theirs = (torch.cat([t.double().flatten() for t in tensors]) for tensors in (found, true))
    return float((ours - theirs).norm() / theirs.norm())


def dtypes(model: nn.Module, inputs: Tensor = INPUTS, dtype: torch.dtype = torch.bfloat16) -> list[tuple[torch.dtype, torch.dtype]]:
    """Return the dtypes in which each block is computed: of what its forward takes and returns."""
    seen = []

    def spied(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            first = args[0] if args else kwargs["hidden_states"]
            seen.append((first.dtype, (output[0] if isinstance(output, tuple) else output).dtype))
            return output

        return run

    (run,) = equal_blocks(model)
    for block in run.blocks:
        block.forward = spied(block.forward)
    with torch.autocast("cpu", dtype):
        model(inputs)
    for block in run.blocks:
        del block.forward
    return seen


def clip_vision() -> tuple[nn.Module, Tensor]:
    pytest.importorskip("transformers")
    with without_torchvision.hidden():
        from transformers import CLIPVisionConfig, CLIPVisionModel
    torch.manual_seed(0)
    model = CLIPVisionModel(CLIPVisionConfig(**SHAPE, image_size=16, patch_size=8))
    return _Output(model, "pooler_output"), torch.randn(4, 3, 16, 16)


def bert() -> tuple[nn.Module, Tensor]:
    pytest.importorskip("transformers")
    with without_torchvision.hidden():
        from transformers import BertConfig, BertModel
    torch.manual_seed(0)
    config = BertConfig(**SHAPE, vocab_size=50, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return _Output(BertModel(config), "last_hidden_state"), torch.randint(0, 50, (4, 6))


def timm_vit(**options: Any) -> tuple[nn.Module, Tensor]:
    pytest.importorskip("timm")
    timm = without_torchvision.import_timm()
    torch.manual_seed(0)
    shape = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "depth": 6, "num_classes": 0}
    return timm.create_model("vit_tiny_patch16_224", **shape, **options), torch.randn(4, 3, 16, 16)


def timm_vit_with_layer_scale() -> tuple[nn.Module, Tensor]:
    return timm_vit(init_values=0.5)


class _Output(nn.Module):
    """One output of a model of transformers."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)[self.name]


MODELS = [clip_vision, bert, timm_vit, timm_vit_with_layer_scale]


@pytest.mark.parametrize("make", MODELS)
def test_models_have_a_bf16_stream_in_their_blocks_alone_and_gradients_close_to_before(make):
    plain, inputs = make()
    model = megabatch.bf16_residuals(copy.deepcopy(plain))
    assert {taken for taken, _ in dtypes(plain, inputs)} == {torch.float32}
    assert {taken for taken, _ in dtypes(model, inputs)} == {torch.bfloat16}
    true, usual, found = outcome(plain, inputs, None), outcome(plain, inputs), outcome(model, inputs)
    assert [t.dtype for t in found] == [t.dtype for t in usual]
    # A rounding of 2^-9 for each of 12 sums and of the gradients on the way back.
    assert error(found, usual) < 0.05
    assert 0 < error(found, true) < 0.05 and error(usual, true) > 0
    assert_equal(outcome(model, inputs, None), outcome(plain, inputs, None))


def test_openclip_keeps_a_bf16_stream_of_its_own():
    pytest.importorskip("open_clip")
    open_clip = without_torchvision.import_open_clip()
    torch.manual_seed(0)
    shape = {"image_size": 16, "patch_size": 8, "width": 32, "layers": 6, "heads": 2, "mlp_ratio": 2.0, "output_dim": 8}
    plain, inputs = open_clip.transformer.VisionTransformer(**shape), torch.randn(4, 3, 16, 16)
    model = megabatch.bf16_residuals(copy.deepcopy(plain))
    assert set(dtypes(plain, inputs)) == {(torch.bfloat16, torch.bfloat16)}
    for dtype in (torch.bfloat16, torch.float16, None):
        assert_equal(outcome(model, inputs, dtype), outcome(plain, inputs, dtype))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize(
    "options",
    [{}, {"after": True}, {"scaled": True}, {"as_tuple": True}, {"by_name": True}, {"by_name": True, "as_tuple": True}],
    ids=["before", "after", "LayerScale", "tuple", "keyword", "keyword and tuple"],
)
def test_blocks_of_each_kind_have_a_bf16_stream(options, norm):
    plain, model = tower(norm=norm, **options), megabatch.bf16_residuals(tower(norm=norm, **options))
    # On CUDA autocast computes norms in fp32 and returns that.
    with dispatch_as_cuda():
        seen, usual, found = dtypes(model), outcome(plain), outcome(model)
    returned = torch.float32 if options.get("scaled") else torch.bfloat16
    assert seen == [(torch.bfloat16, returned)] * 6
    assert [t.dtype for t in found] == [t.dtype for t in usual] and found[0].dtype == torch.float32
    assert 0 < error(found, usual) < 0.05
    assert 0 < error(found, outcome(plain, dtype=None)) < 0.05


@pytest.mark.parametrize("after", [False, True])
def test_a_stream_that_is_bf16_already_does_not_change(after):
    plain, model = tower(half=True, after=after), megabatch.bf16_residuals(tower(half=True, after=after))
    with dispatch_as_cuda():
        assert_equal(outcome(model), outcome(plain))


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_nothing_changes_without_autocast_to_bf16(dtype):
    plain, model = tower(), megabatch.bf16_residuals(tower())
    # Also after a call under autocast to bf16.
    for _ in range(2):
        assert_equal(outcome(model, dtype=dtype), outcome(plain, dtype=dtype))
        outcome(model)


def test_a_model_in_bf16_does_not_change():
    plain, model = tower().bfloat16(), megabatch.bf16_residuals(tower()).bfloat16()
    for dtype in (None, torch.bfloat16):
        assert_equal(outcome(model, INPUTS.bfloat16(), dtype), outcome(plain, INPUTS.bfloat16(), dtype))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_checkpointed_blocks_are_computed_again_as_before(half, after):
    options = {"half": half, "after": after}
    model, other = (megabatch.bf16_residuals(tower(**options, checkpointing=value)) for value in (False, True))
    with dispatch_as_cuda():
        expected = outcome(model)
        assert_equal(outcome(other), expected)
        with torch.autocast("cpu", torch.bfloat16):
            output = other(INPUTS)
        # A call without autocast between forward and backward.
        other(INPUTS)
        other.zero_grad()
        (output.float() * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
        assert_equal([p.grad for p in other.parameters()], expected[1:])


@pytest.mark.parametrize("keep", [0, 1])
def test_chunks_of_a_cached_step_have_the_gradients_of_one_step(keep):
    def gradients(model: nn.Module, chunk: int | None) -> list[Tensor]:
        encode = model if chunk is None else megabatch.cached(model, chunk=chunk, keep=keep)
        with torch.autocast("cpu", torch.bfloat16):
            embeddings = F.normalize(encode(INPUTS), dim=-1)
            megabatch.clip_loss(embeddings, embeddings.detach().flip(1), 10.0).backward()
        return [p.grad for p in model.parameters()]

    whole, chunks = (gradients(megabatch.bf16_residuals(tower()), chunk) for chunk in (None, 2))
    # Two chunks add their gradients in another order, of products rounded to bf16.
    assert error(chunks, whole) < 0.02


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_compiled_blocks_and_towers_have_no_graph_break(whole, after):
    torch.compiler.reset()
    eager, model = (megabatch.bf16_residuals(tower(after=after)) for _ in range(2))
    graphs = []

    def backend(module: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        graphs.append(sum(node.op == "call_function" and node.target is F.linear for node in module.graph.nodes))
        return module.forward

    for module in [model] if whole else model.blocks:
        module.compile(fullgraph=True, backend=backend)
    for _ in range(2):
        found = outcome(model)
    assert_equal(found, outcome(eager))
    # Blocks share one graph. The casts at both ends of the stream are graphs of their own.
    assert [products for products in graphs if products] == ([7] if whole else [1])


def test_copies_and_pickles_have_streams_of_their_own_and_a_second_call_changes_nothing():
    model = megabatch.bf16_residuals(tower())
    expected = outcome(model)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert megabatch.bf16_residuals(model) is model
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert model.state_dict().keys() == tower().state_dict().keys()
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_equal(outcome(other), expected)
        streams = {id(hook.__self__) for m in other.modules() for hook in m._forward_pre_hooks.values()}
        streams |= {id(hook.__self__) for m in other.modules() for hook in m._forward_hooks.values()}
        assert len(streams) == 1
    assert set(dtypes(copy.deepcopy(megabatch.bf16_residuals(tower())))) == {(torch.bfloat16, torch.bfloat16)}


def test_blocks_are_as_equal_as_before_and_a_few_of_them_have_the_same_stream():
    model = megabatch.bf16_residuals(tower())
    runs = equal_blocks(model)
    assert [(run.first, run.count) for run in runs] == [(0, 6)]
    with few_blocks(runs), torch.autocast("cpu", torch.bfloat16):
        assert len(model.blocks) == 4 and model(INPUTS).dtype == torch.float32


@pytest.mark.parametrize(
    "model",
    [nn.Linear(4, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), nn.Sequential(*(nn.LayerNorm(4) for _ in range(5)))],
    ids=["one layer", "no norms", "five blocks"],
)
def test_a_model_without_equal_blocks_is_refused(model):
    with pytest.raises(ValueError, match=r"no run of equal blocks.* at least 6 of them with norms.*leave it out"):
        megabatch.bf16_residuals(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_is_no_module_is_refused():
    with pytest.raises(ValueError, match=r"must be a torch\.nn\.Module"):
        megabatch.bf16_residuals(F.layer_norm)


def test_blocks_that_take_the_stream_by_another_name_are_warned_about():
    class Named(nn.TransformerEncoderLayer):
        def forward(self, *, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Named(16, 2, 32, batch_first=True) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x=x)
            return x

    model = megabatch.bf16_residuals(Model())
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="bf16_residuals has no effect on a Named"):
        model(torch.randn(2, 3, 16))
