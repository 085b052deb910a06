"""What is fastest: samples a second, seconds a step and memory against the batch or the chunk."""

from .curve import profile
from .page import show

__all__ = ["profile", "show"]
