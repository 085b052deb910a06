"""The exact gradients that every scheme is compared with before it is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.encoders.model import Batch, Clip
from benchmarks.encoders.schemes import Scheme, TwoPass, Uncached
from megabatch import reference

Gradients = dict[str, Tensor | None]

# Allowed error, in multiples of that of a plain PyTorch step in the same precision: rounding errors vary, and more so where they
# are tiny. A lost chunk or a wrong factor causes errors of more than a percent.
SLACK = {"float32": 10.0, "bfloat16": 3.0}
# The gradient of the scale is a single number, so that its rounding errors do not average out; mistakes in it are whole factors.
SCALE_TOLERANCE = 0.01


class Truth(NamedTuple):
    """A small batch, its gradients of a few weights in a higher precision, and the errors of plain steps.

    own: the largest relative error of a plain PyTorch step, for each precision that schemes are checked in.
    """

    batch: Batch
    gradients: Gradients
    own: dict[str, float]


def truth(clip: Clip, batch: Batch) -> Truth:
    """Return the gradients of an uncached step in float64, with the loss as its formula."""
    clip.use("float64")
    embeddings = clip.image(batch.images.to(clip.device)), clip.text(batch.texts.to(clip.device))
    reference.clip_loss(*embeddings, clip.log_scale.exp()).backward()
    exact = _take_gradients(clip)
    own = {}
    for precision in ("float32", "bfloat16"):
        clip.use(precision)
        own[precision] = _worst(gradients_of(Uncached(clip, len(batch.images)), batch), exact)
    return Truth(batch, exact, own)


def truth_in_chunks(clip: Clip, batch: Batch, chunk: int) -> Truth:
    """Return the gradients of a two-pass step in float32, for a batch that does not fit uncached."""
    clip.use("float32")
    exact = gradients_of(TwoPass(clip, chunk), batch)
    clip.use("bfloat16")
    return Truth(batch, exact, {"bfloat16": _worst(gradients_of(TwoPass(clip, chunk), batch), exact)})


def check(clip: Clip, make: Callable[[], Scheme], expected: Truth) -> dict[str, Any]:
    """Return whether a scheme's gradients are right, their errors, and its gradient of the scale relative to the true one."""
    found: dict[str, Any] = {"right": True, "errors": {}, "own_errors": expected.own, "check_pairs": len(expected.batch.images)}
    for precision, own in expected.own.items():
        clip.use(precision)
        scheme = make()
        gradients = gradients_of(scheme, expected.batch)
        worst = found["errors"][precision] = _worst(gradients, expected.gradients)
        # Comparisons with NaN are false, so NaN is wrong.
        found["right"] = found["right"] and worst <= SLACK[precision] * own
        given = gradients["log_scale"]
        factor = None if given is None else float(given / expected.gradients["log_scale"])
        found.setdefault("scale_factor", factor)
        if scheme.scale_is_trained and precision == "float32":
            found["right"] = found["right"] and factor is not None and abs(factor - 1) <= SCALE_TOLERANCE
    clip.use("bfloat16")
    return found


def gradients_of(scheme: Scheme, batch: Batch) -> Gradients:
    """Return the gradients of a few weights after a step, in float64 on the host."""
    for _ in range(scheme.repeats):
        scheme.clip.zero_grad()
        scheme.step(batch)
    return _take_gradients(scheme.clip)


def _take_gradients(clip: Clip) -> Gradients:
    """Return the gradients of the scale and of five matrices of each tower, from first to last, and clear all gradients."""
    chosen = {"log_scale": clip.log_scale}
    for tower in ("image", "text"):
        # Matrices only: the gradient in the bias of a key is only rounding, since a softmax does not depend on it.
        matrices = [(name, weight) for name, weight in getattr(clip, tower).named_parameters() if weight.ndim > 1]
        chosen |= {f"{tower}.{name}": weight for name, weight in (matrices[k * (len(matrices) - 1) // 4] for k in range(5))}
    taken = {name: None if weight.grad is None else weight.grad.double().cpu() for name, weight in chosen.items()}
    clip.zero_grad()
    return taken


def _worst(gradients: Gradients, exact: Gradients) -> float:
    """Return the largest relative error among the towers' weights; 1 for a missing gradient."""
    errors = []
    for name, wanted in exact.items():
        given = gradients[name]
        if name != "log_scale":
            errors.append(1.0 if given is None else float((given - wanted).norm() / wanted.norm()))
    # Unlike Python's max, this keeps NaN.
    return float(torch.tensor(errors).max())
