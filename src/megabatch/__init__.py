"""megabatch: which batch size a training needs, and the means to train at it on the hardware at hand."""

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
