"""What surrounds a loss does not change it: other threads, autocast, inference mode, fake tensors and calls that failed."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import embeddings
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from world import error_of

import megabatch
from megabatch import reference
from megabatch.tiles.products import _settings, units

pytestmark = pytest.mark.filterwarnings("ignore:scale=")


def unit(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


# --- Threads ---


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="this PyTorch has no such setting")
def test_overlapping_products_leave_the_precision_of_the_process_as_it_was():
    x, before = unit(2, 2).bfloat16(), torch.backends.mkldnn.matmul.fp32_precision
    # As in two threads, of which the first ends while the second computes.
    first, second = units(x, "ieee"), units(x, "ieee")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    second.__exit__(None, None, None)
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_a_thread_waits_for_another_precision():
    with units(unit(2, 2).bfloat16(), "ieee"):
        pass
    setting, entered, events = next(iter(_settings.values())), threading.Event(), []

    def other() -> None:
        setting.take("another")
        events.append("second")
        setting.give_back()
        entered.set()

    original, setting.switch = setting.switch, type("Switch", (), {setting.name: "default"})()
    try:
        setting.take("one")
        thread = threading.Thread(target=other)
        thread.start()
        assert not entered.wait(0.1)
        events.append("first")
        setting.give_back()
        thread.join(10)
        assert events == ["first", "second"] and getattr(setting.switch, setting.name) == "default"
    finally:
        setting.switch = original


# --- Autocast ---


def test_a_guide_drops_the_same_negatives_under_autocast():
    topic = unit(1, 32, seed=3)
    guide = megabatch.Guide(*(F.normalize(topic + 0.003 * unit(64, 32, seed=seed), dim=-1) for seed in (4, 5)))
    x, y = unit(64, 16, seed=1), unit(64, 16, seed=2)
    expected = megabatch.infonce_loss(x.bfloat16(), y.bfloat16(), 20.0, guide=guide)
    with torch.autocast("cpu", torch.bfloat16):
        found = megabatch.infonce_loss(x, y, 20.0, guide=guide)
    assert torch.equal(found, expected)


# --- Inference mode ---

X, Y, TEACHER, IDS = unit(8, 4, seed=1), unit(8, 4, seed=2), unit(8, 3, seed=3), torch.arange(8) // 2
IN_INFERENCE = {
    "ids": lambda ids, t: megabatch.infonce_loss(X, Y, 20.0, ids=ids),
    "queue": lambda ids, t: megabatch.infonce_loss(X, Y, 20.0, queue=Y.flip(1).clone()),
    "guide": lambda ids, t: megabatch.infonce_loss(X, Y, 20.0, guide=megabatch.Guide(t, t)),
    "nt_xent": lambda ids, t: megabatch.nt_xent_loss(X, Y, 20.0, ids=ids),
    "dcl": lambda ids, t: megabatch.dcl_loss(X, Y, 20.0, ids=ids),
    "classes": lambda ids, t: megabatch.class_softmax_loss(X, Y, ids, 20.0, margin=0.1, angular_margin=0.2),
    "distill": lambda ids, t: megabatch.distill_loss(X, Y, 20.0, t, t, 30.0),
}


@pytest.mark.parametrize("name", IN_INFERENCE)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_values_in_inference_mode_are_those_outside(name, mode):
    expected = IN_INFERENCE[name](IDS, TEACHER)
    with torch.inference_mode():
        ids, teacher = IDS.clone(), TEACHER.clone()
    with mode():
        assert torch.equal(IN_INFERENCE[name](ids, teacher), expected)


SCORES = unit(8, 4, seed=4)
IN_TRAINING = {
    "teacher": lambda x, ids, t, w: megabatch.distill_loss(x, Y, 20.0, t, t, 30.0),
    "targets": lambda x, ids, t, w: megabatch.class_softmax_loss(x, Y, ids, 20.0),
    "ids of scores": lambda x, ids, t, w: megabatch.similarity_loss(x, Y, 20.0, similarity=lambda a, b: a @ b.T, ids=ids),
    "ids of tokens": lambda x, ids, t, w: megabatch.maxsim_loss(x[:, None], Y[:, None], 20.0, ids=ids),
    "weights of margins": lambda x, ids, t, w: megabatch.margin_mse_loss(x, SCORES, weights=w),
    "weights of lists": lambda x, ids, t, w: megabatch.listwise_kl_loss(x, SCORES, weights=w),
}


@pytest.mark.parametrize("name", IN_TRAINING)
def test_what_was_made_in_inference_mode_may_be_trained_with(name):
    def gradient(ids: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
        x = X.clone().requires_grad_()
        return torch.autograd.grad(IN_TRAINING[name](x, ids, teacher, weights), x)[0]

    inputs = IDS, TEACHER, torch.linspace(1, 2, 8)
    with torch.inference_mode():
        copies = [t.clone() for t in inputs]
    assert torch.equal(gradient(*copies), gradient(*inputs))


# --- Fake tensors ---


def test_a_call_with_fake_tensors_does_not_disturb_later_ones():
    def call() -> Tensor:
        return megabatch.siglip_loss(torch.ones(7, 3), torch.ones(7, 3), torch.tensor(2.0), torch.tensor(-1.0))

    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        call()
    # No other test has this number of rows, whose reciprocal is kept.
    assert call().isfinite()


# --- Memory ---


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: megabatch.siglip_loss(x, y, 10.0, -10.0, workspace=400),
        lambda x, y: megabatch.matryoshka(megabatch.clip_loss, dims=(16, 8))(x, y, 10.0),
    ],
    ids=["siglip", "matryoshka"],
)
def test_backward_frees_what_it_has_used(loss):
    x, y = (unit(40, 16, seed=seed).requires_grad_() for seed in (0, 1))
    value = loss(x, y)
    kept = [t for t in value.grad_fn.saved_tensors if t.shape == x.shape]
    assert len(kept) >= 4, "the gradients are saved beside the embeddings"
    del kept
    value.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        value.grad_fn.saved_tensors  # noqa: B018
    held = [v for v in vars(value.grad_fn).values() if isinstance(v, Tensor) and v.shape == x.shape]
    held += [v for v in getattr(value.grad_fn, "saved", ()) or () if isinstance(v, Tensor) and v.shape == x.shape]
    assert not held


# --- Rows that do not count ---


def test_one_row_has_no_pairs_to_spread():
    x = (10 * torch.randn(1, 256, generator=torch.Generator().manual_seed(1))).requires_grad_()
    value = megabatch.spread_out_loss(x)
    value.backward()
    assert value == 0 and not x.grad.any()
    assert megabatch.spread_out_loss(torch.eye(3, 7) * 1.1) == 0 == reference.spread_out_loss(torch.eye(3, 7) * 1.1)


# --- Mistakes ---

MISTAKES = {
    "nothing to compare": (lambda: megabatch.infonce_loss(X, Y, 20.0, in_batch=False), "nothing is compared"),
    "positives without ids": (lambda: megabatch.clip_loss(X, Y, 20.0, duplicates="positive"), "ids is None"),
    "negative weights": (lambda: megabatch.clip_loss(X, Y, 20.0, weights=torch.linspace(-1, 1, 8)), "weights holds -1 to 1"),
    "infinite weights": (lambda: megabatch.siglip_loss(X, Y, 20.0, -10.0, weights=torch.ones(8) / 0), "weights holds inf to inf"),
    "weights of zero": (lambda: megabatch.clip_loss(X, Y, 20.0, weights=torch.zeros(8)), "zero in all rows"),
    "a truth value as the scale": (lambda: megabatch.clip_loss(X, Y, True), "scale=True"),
    "a truth value as smoothing": (lambda: megabatch.clip_loss(X, Y, 20.0, label_smoothing=True), "label_smoothing=True"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused(name):
    call, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        call()


def fail_on_one_rank(rank: int, size: int) -> list[str]:
    x, y = embeddings(5, width=4, seed=rank)
    group = dist.group.WORLD
    wrong = rank == 0

    def product(a: Tensor, b: Tensor) -> Tensor:
        return a.double() @ b.double().T

    guide = unit(5, 3).to(torch.float32 if wrong else torch.float64)
    return [
        error_of(lambda: megabatch.infonce_loss(x, y, 20.0, directions=[["x_to_y"]] if wrong else ["x_to_y"], group=group)),
        error_of(lambda: megabatch.infonce_loss(x, y, 20.0, guide=megabatch.Guide(guide, guide), group=group)),
        error_of(lambda: megabatch.similarity_loss(x.float() if wrong else x, y.float(), 20.0, similarity=product, group=group)),
    ]


def test_what_one_rank_raises_every_rank_raises(world):
    results = world.run(2, fail_on_one_rank)
    assert results[0] == results[1]
    for message, part in zip(results[0], ("rank 0: TypeError", "guide is", "dtype of sums"), strict=True):
        assert part in message


def owners(dtype: torch.dtype) -> Tensor:
    return megabatch.infonce_loss(X, torch.cat((Y, X[:3])), 20.0, in_batch=False, negatives_of=torch.tensor([0, 1, 2]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_owners_of_negatives_may_be_unsigned(dtype):
    assert torch.equal(owners(dtype), owners(torch.int64))
