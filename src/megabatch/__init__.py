"""megabatch: which batch size a training needs, and the means to train at it on the hardware at hand.

Public names are imported when they are first used, so that `import megabatch` and `megabatch --help` do not import torch.
"""

from typing import TYPE_CHECKING

from .version import __version__

if TYPE_CHECKING:
    from . import reference
    from .audit import audit
    from .chunks.accumulate import accumulate
    from .chunks.cached import cached
    from .chunks.oom import retry_on_oom
    from .costs.memory import predict_memory
    from .losses import ClipLoss, Diagnostics, SigLipLoss, clip_loss, siglip_loss
    from .measuring import NoiseScale, find_chunk, fitted, micro_batches
    from .planning.planner import plan

__all__ = [
    "ClipLoss",
    "Diagnostics",
    "NoiseScale",
    "SigLipLoss",
    "__version__",
    "accumulate",
    "audit",
    "cached",
    "clip_loss",
    "find_chunk",
    "fitted",
    "micro_batches",
    "plan",
    "predict_memory",
    "reference",
    "retry_on_oom",
    "siglip_loss",
]

# Type checkers read the imports above: a module-level __getattr__ would give every misspelt name the type Any.
if not TYPE_CHECKING:

    def __getattr__(name):
        """Import a public name when it is first used; `losses` and `chunks` are attributes without an import of their own too."""
        # Not `from . import losses`: that statement looks for the attribute first, and would call this function again.
        if name in ("losses", "ClipLoss", "Diagnostics", "SigLipLoss", "clip_loss", "siglip_loss"):
            import megabatch.losses as module
        elif name in ("chunks", "accumulate", "cached", "retry_on_oom"):
            import megabatch.chunks as module
        elif name == "reference":
            import megabatch.reference as module
        elif name in ("NoiseScale", "find_chunk", "fitted", "micro_batches"):
            import megabatch.measuring as module
        elif name == "plan":
            import megabatch.planning.planner as module
        elif name == "audit":
            import megabatch.audit as module
        elif name == "predict_memory":
            import megabatch.costs.memory as module
        else:
            raise AttributeError(f"module 'megabatch' has no attribute {name!r}")
        # Stored, so that the next access does not call this function.
        value = globals()[name] = module if module.__name__ == f"megabatch.{name}" else getattr(module, name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
