"""megabatch: which batch size a training needs, and the means to train at it on the hardware at hand."""

from typing import Any

from . import reference
from .chunks import accumulate, cached, repeat_on_oom
from .losses import ClipLoss, Diagnostics, SigLipLoss, clip_loss, siglip_loss

__all__ = [
    "ClipLoss",
    "Diagnostics",
    "SigLipLoss",
    "accumulate",
    "cached",
    "clip_loss",
    "reference",
    "repeat_on_oom",
    "siglip_loss",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """What plans and measures, imported when it is asked for: losses need none of what that imports."""
    if name in ("NoiseScale", "find_chunk", "fitted", "micro_batches"):
        from . import measuring

        return getattr(measuring, name)
    if name == "plan":
        from .planning.planner import plan

        return plan
    if name == "audit":
        from .planning.audit import audit

        return audit
    if name == "predict_memory":
        from .planning.memory import predict_memory

        return predict_memory
    raise AttributeError(f"module 'megabatch' has no attribute {name!r}")
