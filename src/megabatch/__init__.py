"""megabatch: which batch size a training needs, and the means to train at it on the hardware at hand."""

from . import reference
from .losses import ClipLoss, Diagnostics, SigLipLoss, clip_loss, siglip_loss

__all__ = ["ClipLoss", "Diagnostics", "SigLipLoss", "clip_loss", "reference", "siglip_loss"]

__version__ = "0.1.0"
