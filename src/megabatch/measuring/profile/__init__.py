"""The fastest size: samples per second, seconds per step and memory against the batch or the chunk."""

from .profile_run import profile
from .report import profile_report

__all__ = ["profile", "profile_report"]
