"""The implementations to compare: a table of entries, each one loss of one package, or the reason it cannot run here.

Nothing is imported before an entry is loaded, and a package that is absent is reported, never an error.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LossCall = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (x, y, scale, bias) -> loss

HALF = (torch.bfloat16, torch.float16)

# Declared schemas live as long as the object that declared them.
_torchvision_library: torch.library.Library | None = None


class Unavailable(Exception):
    """Raised by an entry's `load` when the installed version lacks what the entry needs."""


@dataclass(frozen=True)
class Peer:
    """One loss of one implementation; `load` imports it and returns the callable (x, y, scale, bias) -> loss."""

    name: str
    loss: str
    load: Callable[[], LossCall]
    package: str
    # How many batch-by-batch float32 matrices the peak amounts to, measured and rounded up: decides whether a case fits.
    matrices: float = 0.0
    cuda_only: bool = False


def find(name: str, loss: str) -> Peer:
    """The entry of that name and loss; a name of the form `module:function` is a callable of your own.

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
    raise ValueError(f"no implementation {name!r} of the loss {loss!r}: choose among {known}, or give module:function")


def unavailable(peer: Peer, device: str) -> str | None:
    """Why the entry cannot run on this device, or None; looks for the package without importing it."""
    if importlib.util.find_spec(peer.package.split(".")[0]) is None:
        return f"{peer.package} is not installed"
    if peer.cuda_only and device != "cuda":
        return f"{peer.package} runs on CUDA only"
    return None


def declare_torchvision_schemas() -> bool:
    """Whether two operator schemas had to be declared so that torchvision, and with it open_clip, can be imported.

    PyPI's torchvision is built for CUDA. Beside a CPU build of torch its operators do not load, and its own import
    then stops at `operator torchvision::nms does not exist`. Only the schemas are declared: the operators themselves
    stay absent, and the losses use none of them. Calling it again does nothing.
    """
    global _torchvision_library
    if _torchvision_library is not None or importlib.util.find_spec("torchvision") is None:
        return False
    try:
        # The import itself is the only sure sign that its operators load on this platform.
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
    # Full-matrix losses meet half-precision embeddings inside autocast: that is how their own trainers call them.
    def run(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=x.dtype if x.dtype in HALF else None, enabled=x.dtype in HALF):
            return call(x, y, scale, bias)

    return run


def _megabatch_clip() -> LossCall:
    from megabatch import clip_loss

    return lambda x, y, scale, bias: clip_loss(x, y, scale)


def _megabatch_siglip() -> LossCall:
    from megabatch import siglip_loss

    return siglip_loss


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

    def call(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
        loss = MultipleNegativesRankingLoss(torch.nn.Identity(), scale=scale.item(), similarity_fct=dot_score, **both)
        return loss.compute_loss_from_embeddings([x, y], None)

    return _as_trained(call)


def _inf_cl_clip() -> LossCall:
    from inf_cl import cal_flash_loss

    def call(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return (cal_flash_loss(x, y, scale=scale).mean() + cal_flash_loss(y, x, scale=scale).mean()) / 2

    return call


def _memeff_clip() -> LossCall:
    from memeff import MemoryEfficientCLIPLoss

    def call(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        # stable=True would return a gradient that is not the gradient of the loss.
        return MemoryEfficientCLIPLoss(temperature=1 / scale.item(), normalized_inputs=True, stable=False)(x, y)

    return call


def _cut_cross_entropy_clip() -> LossCall:
    from cut_cross_entropy import linear_cross_entropy

    def call(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        labels = torch.arange(len(x), device=x.device)
        rows = linear_cross_entropy((scale * x).to(x.dtype), y, labels)
        return (rows + linear_cross_entropy((scale * y).to(y.dtype), x, labels)) / 2

    return call


def _siglip_kernel_siglip() -> LossCall:
    from siglip_kernel import fused_siglip_loss

    return lambda x, y, scale, bias: fused_siglip_loss(x, y, scale.log(), bias)


PEERS: tuple[Peer, ...] = (
    Peer("ours", "clip", _megabatch_clip, "megabatch"),
    Peer("openclip", "clip", _openclip_clip, "open_clip", matrices=4.5),
    Peer("full matrix", "clip", _full_matrix_clip, "torch", matrices=4.5),
    Peer("formula", "clip", _formula_clip, "megabatch", matrices=10),
    Peer("sentence-transformers", "clip", _sentence_transformers_clip, "sentence_transformers", matrices=6.5),
    Peer("inf-cl", "clip", _inf_cl_clip, "inf_cl", cuda_only=True),
    Peer("memeff", "clip", _memeff_clip, "memeff", cuda_only=True),
    Peer("cut-cross-entropy", "clip", _cut_cross_entropy_clip, "cut_cross_entropy", cuda_only=True),
    Peer("ours", "siglip", _megabatch_siglip, "megabatch"),
    Peer("openclip", "siglip", _openclip_siglip, "open_clip", matrices=5.5),
    Peer("openclip chunked", "siglip", _openclip_siglip_chunked, "open_clip", matrices=5.5),
    Peer("full matrix", "siglip", _full_matrix_siglip, "torch", matrices=4),
    Peer("formula", "siglip", _formula_siglip, "megabatch", matrices=9),
    Peer("siglip-kernel", "siglip", _siglip_kernel_siglip, "siglip_kernel", cuda_only=True),
)
