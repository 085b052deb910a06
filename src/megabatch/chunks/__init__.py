"""HOW MUCH at once: encoders and losses run a batch in chunks, with the result of the whole batch."""

from .accumulate import accumulate
from .cached import cached
from .oom import retry_on_oom

__all__ = ["accumulate", "cached", "retry_on_oom"]
