"""The losses compute what PyTorch would compute, or raise: nothing unsupported silently gives a number."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from cases import embeddings
from torch import nn

import megabatch
from megabatch import reference
from megabatch.adapters import open_clip as adapter
from megabatch.losses import checks
from megabatch.losses.batch import _value


def clip(x, y, scale=5.0, bias=-2.0, module=megabatch, **options):
    return module.clip_loss(x, y, scale, **options)


def siglip(x, y, scale=5.0, bias=-2.0, module=megabatch, **options):
    return module.siglip_loss(x, y, scale, bias, **options)


def one_direction(x, y):
    return megabatch.infonce_loss(x, y, 5.0)


def both_directions(x, y):
    return megabatch.infonce_loss(x, y, 5.0, directions=("x_to_y", "y_to_x"), partition="separate")


losses = pytest.mark.parametrize("loss", [clip, siglip])

# At the first use of forward mode, PyTorch compiles decompositions with functions that it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


# --- Tensors that are modified in place between forward and backward ---


def tensors(loss) -> dict[str, torch.Tensor]:
    """Return every tensor argument of a loss; the embeddings and scalars require gradients."""
    x, y = embeddings(12, width=6)
    arguments = {"x": x, "y": y, "scale": torch.tensor(5.0).double(), "bias": torch.tensor(-2.0).double()}
    if loss is clip:
        del arguments["bias"]
    arguments = {name: nn.Parameter(t) for name, t in arguments.items()}
    return arguments | {"ids": torch.arange(12) // 2, "weights": torch.linspace(0.5, 2.0, 12).double()}


ARGUMENTS = [(loss, name) for loss in (clip, siglip) for name in tensors(loss)]


@pytest.mark.parametrize("loss, name", ARGUMENTS)
@pytest.mark.parametrize("duplicates", ["mask", "positive"])
def test_an_argument_overwritten_before_backward_is_named_or_does_not_matter(loss, name, duplicates):
    arguments = tensors(loss)
    parameters = [t for t in arguments.values() if t.requires_grad]
    expected = torch.autograd.grad(loss(**arguments, duplicates=duplicates, module=reference), parameters)
    value = loss(**arguments, duplicates=duplicates)
    with torch.no_grad():
        arguments[name].copy_(arguments[name].flip(0) + 1)
    # The sigmoid loss computes its gradient in forward, except for the embeddings and the scale; weights are not read again.
    if name == "weights" or (name == "ids" and loss is siglip):
        found = torch.autograd.grad(value, parameters)
        assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-14) for a, b in zip(found, expected, strict=True))
    else:
        with pytest.raises(RuntimeError, match=rf"^{name} has been modified by an inplace operation.*pass {name}.clone\(\)"):
            torch.autograd.grad(value, parameters)


def test_an_optimizer_step_between_forward_and_backward_is_refused():
    x, y = embeddings(6)
    scale = nn.Parameter(torch.tensor(5.0).double())
    optimizer = torch.optim.SGD([scale], lr=0.1)
    first, second = (megabatch.clip_loss(x, y, scale) for _ in range(2))
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="scale has been modified by an inplace operation"):
        second.backward()


@losses
def test_a_second_backward_through_a_freed_graph_has_the_usual_error_even_after_a_step(loss):
    x, y = embeddings(6)
    scale = nn.Parameter(torch.tensor(5.0).double())
    value = loss(x, y, scale)
    value.backward()
    torch.optim.SGD([scale], lr=0.1).step()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        value.backward()


def test_embeddings_overwritten_through_another_name_are_refused_too():
    buffer, y = embeddings(6)
    y.requires_grad_()
    loss = megabatch.clip_loss(buffer[:], y, 5.0)
    buffer.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_ids_that_were_copied_may_be_overwritten():
    x, y = (t.requires_grad_() for t in embeddings(6))
    ids = torch.arange(12) // 2
    expected = torch.autograd.grad(megabatch.clip_loss(x, y, 5.0, ids=ids[::2].clone()), x)
    value = megabatch.clip_loss(x, y, 5.0, ids=ids[::2])
    ids.zero_()
    assert torch.equal(*torch.autograd.grad(value, x), *expected)


# --- Transforms of torch.func, and forward-mode AD ---

TRANSFORMS = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "linearize": lambda f, x: torch.func.linearize(f, x),
}


@losses
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("argument", ["x", "y", "scale"])
def test_a_transform_of_torch_func_is_refused_with_an_alternative(loss, transform, argument):
    x, y = embeddings(5)
    arguments = {"x": x, "y": y, "scale": torch.tensor(5.0).double()}
    words = "is (inside a transform of torch.func.*torch.autograd.grad|a dual tensor of forward-mode AD).*megabatch.reference"
    with pytest.raises(ValueError, match=f"^{argument} {words}"):
        transform(lambda t: loss(**arguments | {argument: t}), arguments[argument])


@losses
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("argument", ["x", "y", "scale", "weights"])
def test_forward_mode_is_refused(loss, argument, requires_grad):
    x, y = (t.requires_grad_(requires_grad) for t in embeddings(5))
    arguments = {"x": x, "y": y, "scale": torch.tensor(5.0).double(), "weights": torch.ones(5).double()}
    with forward_ad.dual_level():
        t = arguments[argument]
        arguments[argument] = forward_ad.make_dual(t.detach(), torch.ones_like(t))
        with pytest.raises(ValueError, match=rf"{argument} is a dual tensor of forward-mode AD.*megabatch.reference"):
            loss(**arguments)


@losses
def test_a_batch_of_gradients_and_a_dual_gradient_are_refused(loss):
    x, y = (t.requires_grad_() for t in embeddings(5))
    with pytest.raises(RuntimeError, match="takes one plain gradient"):
        torch.autograd.grad(loss(x, y), x, torch.ones(3).double(), is_grads_batched=True)
    with pytest.raises(RuntimeError, match="takes one plain gradient"):
        torch.autograd.functional.jacobian(lambda t: loss(t, y), x, vectorize=True)
    value = loss(x, y)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="takes one plain gradient"):
        torch.autograd.grad(value, x, forward_ad.make_dual(torch.ones_like(value), torch.ones_like(value)))


@losses
def test_what_needs_first_derivatives_of_plain_tensors_only_works(loss):
    x, y = embeddings(5)
    tower = nn.Linear(8, 8).double()
    weights = {name: p.detach().clone().requires_grad_() for name, p in tower.named_parameters()}
    found = torch.autograd.grad(loss(torch.func.functional_call(tower, weights, x), y), weights["weight"])
    expected = torch.autograd.grad(loss(torch.func.functional_call(tower, weights, x), y, module=reference), weights["weight"])
    assert torch.allclose(*found, *expected, rtol=1e-10)
    jacobian = torch.autograd.functional.jacobian(lambda t: loss(t, y), x)
    x.requires_grad_()
    assert torch.allclose(jacobian, *torch.autograd.grad(loss(x, y, module=reference), x), rtol=1e-10)


# --- A temperature passed as the scale ---


@pytest.fixture
def unwarned(monkeypatch):
    monkeypatch.setattr(checks, "_warned", set())


@losses
@pytest.mark.parametrize(
    "kind", [float, torch.tensor, lambda s: nn.Parameter(torch.tensor([s]))], ids=["float", "tensor", "parameter"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_scale_below_one_with_normalised_embeddings_warns_once(loss, kind, dtype, unwarned):
    x, y = (t.to(dtype) for t in embeddings(5, width=64))
    with pytest.warns(
        UserWarning, match=r"^scale=0.02 with normalised.*1 / temperature: for a temperature of 0.02 pass scale=50"
    ) as caught:
        loss(x, y, kind(0.02))
        loss(x, y, kind(0.0201))
    assert len(caught) == 1 and caught[0].filename == __file__


def test_the_adapter_warns_too(unwarned):
    x, y = embeddings(5)
    with pytest.warns(UserWarning, match="scale=0.07"):
        adapter.ClipLoss()(x, y, torch.tensor(0.07))
    with pytest.warns(UserWarning, match="scale=0.08"):
        adapter.SigLipLoss()(x, y, torch.tensor(0.08), -10.0)


@losses
@pytest.mark.parametrize("scale, norm", [(1.0, 1.0), (50.0, 1.0), (0.02, 7.0), (0.5, 1.2)])
def test_other_scales_and_embeddings_of_other_norms_give_no_warning(loss, scale, norm, unwarned):
    x, y = embeddings(5, norm=norm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(x, y, scale)
        loss(x, y, torch.tensor(scale))


def test_a_warning_that_is_an_error_is_raised_at_every_call(unwarned):
    x, y = embeddings(5)
    for _ in range(2):
        with pytest.raises(UserWarning, match=r"^scale=-0.1 .*pass a positive one"):
            megabatch.clip_loss(x, y, -0.1)


def test_a_scalar_on_a_device_is_not_read_if_that_would_synchronise():
    # Reading a meta tensor raises, which shows that it was read.
    elsewhere = torch.tensor(5.0, device="meta")
    assert _value(elsewhere, waits=False) is None
    with pytest.raises(RuntimeError, match="meta"):
        _value(elsewhere, waits=True)


@losses
def test_numbers_that_no_float_can_represent_are_refused(loss):
    x, y = embeddings(5)
    with pytest.raises(ValueError, match="scale has more than 308 digits: must be a finite number"):
        loss(x, y, 10**400)
    with pytest.raises(ValueError, match=r"scale=1e\+39: must be within ±3.4e\+38, what logits of torch.float32"):
        loss(x.float(), y.float(), 1e39)
    assert loss(x, y, 1e39).isfinite()


# --- Options of the other loss ---


@pytest.mark.parametrize("option", [{"label_smoothing": 0.1}, {"drop_above": 0.1}, {"symmetric": True}])
def test_the_sigmoid_loss_refuses_options_of_the_softmax_loss(option):
    x, y = embeddings(5)
    for call in (lambda: megabatch.siglip_loss(x, y, 5.0, -2.0, **option), lambda: megabatch.SigLipLoss(**option)):
        with pytest.raises(TypeError, match=next(iter(option))):
            call()


# --- Tensors of other kinds ---

X = torch.nn.functional.normalize(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), dim=1)
EMBEDDINGS = {
    "sparse COO": (lambda t: t.to_sparse(), r"has the layout torch.sparse_coo: must be dense; pass \w.to_dense\(\)"),
    "sparse CSR": (lambda t: t.to_sparse_csr(), "has the layout torch.sparse_csr"),
    "nested": (lambda t: torch.nested.nested_tensor(list(t)), "is a nested tensor: must be dense"),
    "jagged": (lambda t: torch.nested.nested_tensor(list(t), layout=torch.jagged), "is a nested tensor: must be dense"),
    "meta": (lambda t: t.to("meta"), "is on the meta device"),
    "complex": (lambda t: t.to(torch.complex64), "is torch.complex64: must be one of"),
    "integer": (lambda t: t.long(), "is torch.int64: must be one of"),
    "boolean": (lambda t: t > 0, "is torch.bool: must be one of"),
    "fp8": (lambda t: t.to(torch.float8_e4m3fn), "is torch.float8_e4m3fn: must be one of"),
    "quantized": (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "is torch.qint8: must be one of"),
    "one-dimensional": (lambda t: t[0], r"has shape \(3,\): must be \(rows, width\)"),
    "of width 0": (lambda t: t[:, :0], r"has shape \(4, 0\): must be \(rows, width\) with a width of at least 1"),
    "a list": (lambda t: t.tolist(), "is a list: must be a tensor of embeddings"),
}


# The latter two are the softmax loss, if that takes the embeddings.
@pytest.mark.parametrize("loss", [clip, siglip, one_direction, both_directions])
@pytest.mark.parametrize("side", ["x", "y"])
@pytest.mark.parametrize("kind", EMBEDDINGS)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:Sparse invariant checks")
def test_embeddings_of_another_kind_are_refused_by_name(loss, side, kind):
    make, words = EMBEDDINGS[kind]
    with pytest.raises(ValueError, match=f"^{side} {words}"):
        loss(**{"x": X, "y": X} | {side: make(X)})


@losses
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_arguments_of_another_kind_are_refused_by_name(loss):
    ids, weights, scale = torch.arange(4), torch.ones(4), torch.tensor(5.0)
    for argument, words in (
        ({"ids": ids.to_sparse()}, "^ids has the layout torch.sparse_coo"),
        ({"ids": ids.to("meta")}, "^ids is on the meta device"),
        ({"ids": ids.to(torch.complex64)}, "^ids is torch.complex64: must be a tensor of integers"),
        ({"weights": weights.to_sparse()}, "^weights has the layout torch.sparse_coo"),
        ({"weights": weights.to("meta")}, "^weights is on the meta device"),
        ({"weights": torch.nested.nested_tensor([weights])}, "^weights is a nested tensor"),
        ({"scale": scale.to("meta")}, "^scale is on the meta device"),
        ({"scale": scale[None].to_sparse()}, "^scale has the layout torch.sparse_coo"),
    ):
        with pytest.raises(ValueError, match=words):
            loss(X, X, **argument)


@losses
def test_a_tensor_that_wraps_others_is_refused(loss):
    from torch.testing._internal.two_tensor import TwoTensor

    for argument in ("x", "y", "ids", "weights", "scale"):
        arguments = {"x": X, "y": X, "ids": torch.arange(4), "weights": torch.ones(4), "scale": torch.tensor(5.0)}
        wrapped = TwoTensor(arguments[argument], arguments[argument])
        with pytest.raises(ValueError, match=f"^{argument} is a TwoTensor, which wraps another tensor"):
            loss(**arguments | {argument: wrapped})


class Named(torch.Tensor):
    """A subclass of Tensor without any wrapped tensor."""


@losses
def test_a_plain_subclass_of_tensor_is_accepted(loss):
    plain, named = X.clone().requires_grad_(), X.clone().as_subclass(Named).requires_grad_()
    loss(plain, X).backward()
    loss(named, X).backward()
    assert torch.equal(plain.grad, named.grad)


@losses
def test_tensors_of_inference_mode_give_a_value_but_no_gradient(loss):
    with torch.inference_mode():
        x, scale, ids, weights = X.clone(), torch.tensor(5.0), torch.arange(4) // 2, torch.ones(4)
        inside = loss(x, x, scale)
    assert torch.equal(loss(x, x, scale), inside)
    y = X.clone().requires_grad_()
    for arguments, name in (((x, y), "x"), ((y, x), "y"), ((y, y, scale), "scale")):
        with pytest.raises(ValueError, match=rf"^{name} was made in inference mode.*torch.no_grad\(\).*pass {name}.clone\(\)"):
            loss(*arguments)
    # These are not part of the graph.
    gradients = [torch.autograd.grad(loss(y, X, ids=i, weights=w), y) for i, w in ((ids, weights), (ids.clone(), weights.clone()))]
    assert torch.equal(*gradients[0], *gradients[1])


@losses
def test_a_lazily_negated_view_is_read_with_its_sign(loss):
    negated = torch.imag(torch.complex(X, -X).conj())
    assert negated.is_neg() and torch.equal(loss(negated, X), loss(X, X))


@losses
def test_no_rows_at_all_are_refused(loss):
    with pytest.raises(ValueError, match="x has 0 rows over all ranks"):
        loss(X[:0], X[:0])
