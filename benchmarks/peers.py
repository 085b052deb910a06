"""The implementations to compare: one entry for each loss of each package, with the reason if it cannot run here.

An entry imports its package when it is loaded. A missing package is reported and is not an error.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LossCall = Callable[[Tensor, Tensor, Tensor, Tensor], Any]  # (x, y, scale, bias) -> a tensor, or a ComputedLoss

HALF = (torch.bfloat16, torch.float16)
# Rows per chunk, for losses that leave it to the caller.
CHUNK = 1024
SMOOTHING = 0.1
# Bytes of a workspace of megabatch's losses on CUDA that saves a small part of the exponentials of large batches.
WORKSPACE = 512 * 2**20

# Declared schemas exist as long as the object that declared them.
_torchvision_library: torch.library.Library | None = None


class Unavailable(Exception):
    """Raised by `load` if the installed version lacks what the entry needs."""


@dataclass(frozen=True)
class Peer:
    """One loss of one implementation; `load` imports it and returns the callable (x, y, scale, bias) -> loss."""

    name: str
    loss: str
    load: Callable[[], LossCall]
    package: str
    # Peak memory in batch-by-batch float32 matrices, measured and rounded up: decides whether a case fits.
    matrices: float = 0.0
    cuda_only: bool = False
    # Wrong results of other packages are timed and marked as wrong; ours, and those of your own callables, are not timed.
    timed_if_wrong: bool = False
    # False: it runs only if --only names it.
    by_default: bool = True
    # Label smoothing, which check.answer takes into account.
    smoothing: float = 0.0


def find(name: str, loss: str) -> Peer:
    """Return the entry of that name and loss; a name of the form `module:function` is your own callable.

    >>> find("openclip", "clip").package
    'open_clip'
    """
    if ":" in name:
        module, function = name.split(":", 1)
        return Peer(name, loss, lambda: getattr(importlib.import_module(module), function), module)
    for peer in PEERS:
        if (peer.name, peer.loss) == (name, loss):
            return peer
    known = ", ".join(peer.name for peer in PEERS if peer.loss == loss) or "none"
    raise ValueError(f"no implementation {name!r} of the loss {loss!r}: must be one of {known}, or module:function")


def unavailable(peer: Peer, device: str) -> str | None:
    """Return why the entry cannot run on this device, or None, without importing its package."""
    if importlib.util.find_spec(peer.package.split(".")[0]) is None:
        return f"{peer.package} is not installed"
    if peer.cuda_only and device != "cuda":
        return f"{peer.package} runs on CUDA only"
    return None


def version(peer: Peer) -> str | None:
    """Return the installed version of the entry's package."""
    names = metadata.packages_distributions().get(peer.package.split(".")[0])
    return metadata.version(names[0]) if names else None


def declare_torchvision_schemas() -> bool:
    """Declare two operator schemas if torchvision, and with it open_clip, needs them to be imported; return whether it did.

    PyPI's torchvision is built for CUDA. With a CPU build of torch its operators do not load, and its import fails with
    `operator torchvision::nms does not exist`. Only the schemas are declared: the operators themselves stay missing, and the
    losses use none of them. Calling it again does nothing.
    """
    global _torchvision_library
    if _torchvision_library is not None or importlib.util.find_spec("torchvision") is None:
        return False
    try:
        # Only the import itself shows whether its operators load on this platform.
        importlib.import_module("torchvision")
        return False
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    _torchvision_library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        _torchvision_library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return True


def _as_trained(call: LossCall) -> LossCall:
    # Full-matrix losses get half-precision embeddings inside autocast, as their own trainers call them.
    def run(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=x.dtype if x.dtype in HALF else None, enabled=x.dtype in HALF):
            return call(x, y, scale, bias)

    return run


class ComputedLoss(NamedTuple):
    """A value whose gradients are known already. `backward` and `detach` are those of a tensor."""

    value: Tensor
    leaves: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]

    def backward(self) -> None:
        for leaf, gradient in zip(self.leaves, self.gradients, strict=True):
            leaf.grad = gradient

    def detach(self) -> Tensor:
        return self.value


def _megabatch_value_and_grad(loss: str) -> Callable[..., ComputedLoss]:
    import megabatch

    criterion = megabatch.graphed({"clip": megabatch.clip_loss, "siglip": megabatch.siglip_loss}[loss])

    def call(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> ComputedLoss:
        leaves = (x, y, scale) if loss == "clip" else (x, y, scale, bias)
        value, gradients = criterion.value_and_grad(*leaves)
        return ComputedLoss(value, leaves, gradients)

    return call


def _megabatch(loss: str, ids: bool = False, graphed: bool = False, **options: Any) -> LossCall:
    import megabatch

    function: Callable[..., Any] = {"clip": megabatch.clip_loss, "siglip": megabatch.siglip_loss}[loss]
    if graphed:
        function = megabatch.graphed(function)

    def call(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        # All ids are distinct, so the result is that of the loss without ids.
        more = options | ({"ids": torch.arange(len(x), device=x.device)} if ids else {})
        scalars = (scale,) if loss == "clip" else (scale, bias)
        result = function(x, y, *scalars, **more)
        return result[0] if options.get("diagnostics") else result

    return call


def _formula_clip() -> LossCall:
    from megabatch.reference import clip_loss

    return _as_trained(lambda x, y, scale, bias: clip_loss(x, y, scale))


def _formula_siglip() -> LossCall:
    from megabatch.reference import siglip_loss

    return _as_trained(siglip_loss)


def _full_matrix_clip() -> LossCall:
    def call(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        logits = scale * x @ y.T
        labels = torch.arange(len(x), device=x.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    return _as_trained(call)


def _full_matrix_siglip() -> LossCall:
    def call(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        logits = scale * x @ y.T + bias
        return (F.softplus(logits).sum() - logits.diagonal().sum()) / len(x)

    return _as_trained(call)


def _compiled(load: Callable[[], LossCall]) -> LossCall:
    """Return the loss under torch.compile."""
    call, compiled = load(), []

    def run(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        if not compiled:
            # Dynamic shapes are slower on CUDA. On a CPU the first call is a tiny one: it compiles for all sizes, so that the
            # memory of the compiler is not counted.
            compiled.append(torch.compile(call, dynamic=not x.is_cuda))
        return compiled[0](x, y, scale, bias)

    return run


def _openclip_clip() -> LossCall:
    declare_torchvision_schemas()
    from open_clip.loss import ClipLoss

    loss = ClipLoss()
    return _as_trained(lambda x, y, scale, bias: loss(x, y, scale))


def _openclip_siglip() -> LossCall:
    declare_torchvision_schemas()
    from open_clip.loss import SigLipLoss

    return _as_trained(SigLipLoss())


def _openclip_siglip_chunked() -> LossCall:
    declare_torchvision_schemas()
    from open_clip import __version__
    from open_clip.loss import SigLipLoss

    if "chunk_size" not in inspect.signature(SigLipLoss.__init__).parameters:
        raise Unavailable(f"SigLipLoss of open_clip {__version__} has no chunk_size")
    return _as_trained(SigLipLoss(chunk_size=1024))


def _sentence_transformers_clip() -> LossCall:
    declare_torchvision_schemas()
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from sentence_transformers.util import dot_score

    def prepare(scale: float) -> Callable[[Tensor, Tensor], Tensor]:
        both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
        loss = MultipleNegativesRankingLoss(torch.nn.Identity(), scale=scale, similarity_fct=dot_score, **both)
        return lambda x, y: loss.compute_loss_from_embeddings([x, y], None)

    return _as_trained(_with_a_number(prepare))


def _sentence_transformers_clip_cached() -> LossCall:
    declare_torchvision_schemas()
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss
    from sentence_transformers.util import dot_score

    def prepare(scale: float) -> Callable[[Tensor, Tensor], Tensor]:
        both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
        model = torch.nn.Sequential(torch.nn.Identity())
        loss = CachedMultipleNegativesRankingLoss(model, scale, similarity_fct=dot_score, mini_batch_size=CHUNK, **both)

        def call(x: Tensor, y: Tensor) -> Tensor:
            own_x, own_y = (rows.detach().requires_grad_() for rows in (x, y))
            value = loss.calculate_loss([[own_x], [own_y]], with_backward=True)
            # It has computed the gradients. Like its own backward, this passes them on through a product whose value is zero.
            product = (x * own_x.grad).sum() + (y * own_y.grad).sum()
            return value + (product - product.detach())

        return call

    return _as_trained(_with_a_number(prepare))


def _with_a_number(prepare: Callable[[float], Callable[[Tensor, Tensor], Tensor]]) -> LossCall:
    """Adapt a loss whose scale is a number without a gradient: read it once, since each read synchronises the device."""
    prepared: list[Callable[[Tensor, Tensor], Tensor]] = []

    def call(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        if not prepared:
            prepared.append(prepare(scale.item()))
        return prepared[0](x, y)

    return call


def _inf_cl_clip() -> LossCall:
    from inf_cl import cal_flash_loss

    def call(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return (cal_flash_loss(x, y, scale=scale).mean() + cal_flash_loss(y, x, scale=scale).mean()) / 2

    return call


def _memeff_clip() -> LossCall:
    from memeff import MemoryEfficientCLIPLoss

    # stable=True would return a gradient that is not the gradient of the loss.
    options = {"normalized_inputs": True, "stable": False}
    return _with_a_number(lambda scale: MemoryEfficientCLIPLoss(temperature=1 / scale, **options))


def _cut_cross_entropy_clip(**options: Any) -> LossCall:
    from cut_cross_entropy import linear_cross_entropy

    def call(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        labels = torch.arange(len(x), device=x.device)
        rows = linear_cross_entropy((scale * x).to(x.dtype), y, labels, **options)
        return (rows + linear_cross_entropy((scale * y).to(y.dtype), x, labels, **options)) / 2

    return call


def _liger_clip() -> LossCall:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()

    def call(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        labels = torch.arange(len(x), device=x.device)
        return (loss(y, (scale * x).to(x.dtype), labels) + loss(x, (scale * y).to(y.dtype), labels)) / 2

    return call


def _siglip_kernel_siglip() -> LossCall:
    from siglip_kernel import fused_siglip_loss

    return lambda x, y, scale, bias: fused_siglip_loss(x, y, scale.log(), bias, backend="chunked_bf16")


def _other(name: str, loss: str, load: Callable[[], LossCall], package: str, **facts: Any) -> Peer:
    return Peer(name, loss, load, package, timed_if_wrong=True, **facts)


def _option(name: str, loss: str, smoothing: float = 0.0, by_default: bool = False, **options: Any) -> Peer:
    load = partial(_megabatch, loss, **options)
    return Peer(f"ours, {name}", loss, load, "megabatch", cuda_only=True, by_default=by_default, smoothing=smoothing)


PEERS: tuple[Peer, ...] = (
    Peer("ours", "clip", partial(_megabatch, "clip"), "megabatch"),
    _other("openclip", "clip", _openclip_clip, "open_clip", matrices=4.5),
    _other("openclip compiled", "clip", partial(_compiled, _openclip_clip), "open_clip", matrices=2, cuda_only=True),
    Peer("full matrix", "clip", _full_matrix_clip, "torch", matrices=4.5),
    Peer("full matrix compiled", "clip", partial(_compiled, _full_matrix_clip), "torch", matrices=3),
    Peer("formula", "clip", _formula_clip, "megabatch", matrices=10),
    _other("sentence-transformers", "clip", _sentence_transformers_clip, "sentence_transformers", matrices=6.5),
    _other("sentence-transformers cached", "clip", _sentence_transformers_clip_cached, "sentence_transformers", cuda_only=True),
    _other("inf-cl", "clip", _inf_cl_clip, "inf_cl", cuda_only=True),
    _other("memeff", "clip", _memeff_clip, "memeff", cuda_only=True),
    _other("cut-cross-entropy", "clip", _cut_cross_entropy_clip, "cut_cross_entropy", cuda_only=True),
    # Its default skips blocks of the gradient without an entry above 2.4e-4 in bf16: at large batches nearly all of them.
    _other(
        "cut-cross-entropy unfiltered",
        "clip",
        partial(_cut_cross_entropy_clip, filter_eps=None),
        "cut_cross_entropy",
        cuda_only=True,
    ),
    _other("liger", "clip", _liger_clip, "liger_kernel", cuda_only=True),
    Peer("ours", "siglip", partial(_megabatch, "siglip"), "megabatch"),
    _other("openclip", "siglip", _openclip_siglip, "open_clip", matrices=5.5),
    _other("openclip chunked", "siglip", _openclip_siglip_chunked, "open_clip", matrices=5.5),
    Peer("full matrix", "siglip", _full_matrix_siglip, "torch", matrices=4),
    Peer("full matrix compiled", "siglip", partial(_compiled, _full_matrix_siglip), "torch", matrices=3),
    Peer("formula", "siglip", _formula_siglip, "megabatch", matrices=9),
    _other("siglip-kernel", "siglip", _siglip_kernel_siglip, "siglip_kernel", cuda_only=True),
    _option("ids", "clip", ids=True),
    _option("label smoothing", "clip", smoothing=SMOOTHING, label_smoothing=SMOOTHING),
    _option("diagnostics", "clip", diagnostics=True),
    _option("512 MiB", "clip", workspace=WORKSPACE),
    _option("graphed", "clip", by_default=True, graphed=True),
    _option("graphed", "siglip", by_default=True, graphed=True),
    *(
        Peer("ours, value_and_grad", loss, partial(_megabatch_value_and_grad, loss), "megabatch", cuda_only=True)
        for loss in ("clip", "siglip")
    ),
    # Saved exponentials leave it nothing to do.
    _option("int8", "clip", int8_backward=True, workspace=WORKSPACE),
    _option("ids", "siglip", ids=True),
    _option("diagnostics", "siglip", diagnostics=True),
)
