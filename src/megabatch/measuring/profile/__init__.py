"""The fastest size: samples per second, seconds per step and memory against the batch or the chunk."""

from .page import show
from .profile_run import profile

__all__ = ["profile", "show"]
