"""WHAT is computed: one file a loss (function, Module, autograd Function)."""

from .clip import ClipLoss, clip_loss
from .diagnostics import Diagnostics
from .siglip import SigLipLoss, siglip_loss

__all__ = ["ClipLoss", "Diagnostics", "SigLipLoss", "clip_loss", "siglip_loss"]
