"""WHAT is computed: one file per loss, with its function, Module and autograd Function."""

from .batch import Diagnostics
from .clip import ClipLoss, clip_loss
from .siglip import SigLipLoss, siglip_loss

__all__ = ["ClipLoss", "Diagnostics", "SigLipLoss", "clip_loss", "siglip_loss"]
