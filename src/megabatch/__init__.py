"""megabatch: tells which batch size a training needs, and trains at it on the available hardware.

Public names are imported when they are first used, so that `import megabatch` and `megabatch --help` do not import torch.
A public name is written three times here, for Python, for `import *` and for type checkers; a test compares the three.
"""

from typing import TYPE_CHECKING

from .version import __version__

if TYPE_CHECKING:
    from . import audit, reference
    from .chunks.accumulate import accumulate
    from .chunks.cached import cached
    from .chunks.oom import retry_on_oom
    from .costs.memory import predict_memory
    from .losses import (
        ClassSoftmaxLoss,
        ClipLoss,
        Diagnostics,
        DistillLoss,
        Guide,
        InfoNCELoss,
        MatryoshkaLoss,
        MaxSimLoss,
        SigLipLoss,
        SimilarityLoss,
        class_softmax_loss,
        clip_loss,
        dcl_loss,
        distill_loss,
        graphed,
        infonce_loss,
        listwise_kl_loss,
        margin_mse_loss,
        matryoshka,
        maxsim_loss,
        nt_xent_loss,
        siglip_loss,
        similarity_loss,
        spread_out_loss,
        supcon_loss,
    )
    from .measuring import NoiseScale, find_chunk, fitted, micro_batches
    from .planning.planner import plan
    from .towers.attention import short_attention
    from .towers.patches import linear_patches
    from .towers.residuals import bf16_residuals

__all__ = [
    "ClassSoftmaxLoss",
    "ClipLoss",
    "Diagnostics",
    "DistillLoss",
    "Guide",
    "InfoNCELoss",
    "MatryoshkaLoss",
    "MaxSimLoss",
    "NoiseScale",
    "SigLipLoss",
    "SimilarityLoss",
    "__version__",
    "accumulate",
    "audit",
    "bf16_residuals",
    "cached",
    "class_softmax_loss",
    "clip_loss",
    "dcl_loss",
    "distill_loss",
    "find_chunk",
    "fitted",
    "graphed",
    "infonce_loss",
    "linear_patches",
    "listwise_kl_loss",
    "margin_mse_loss",
    "matryoshka",
    "maxsim_loss",
    "micro_batches",
    "nt_xent_loss",
    "plan",
    "predict_memory",
    "reference",
    "retry_on_oom",
    "short_attention",
    "siglip_loss",
    "similarity_loss",
    "spread_out_loss",
    "supcon_loss",
]

# The module of each name that is imported at its first use. A name that maps to itself is a module.
_MODULES = {
    "ClassSoftmaxLoss": "losses",
    "ClipLoss": "losses",
    "Diagnostics": "losses",
    "DistillLoss": "losses",
    "Guide": "losses",
    "InfoNCELoss": "losses",
    "MatryoshkaLoss": "losses",
    "MaxSimLoss": "losses",
    "NoiseScale": "measuring",
    "SigLipLoss": "losses",
    "SimilarityLoss": "losses",
    "accumulate": "chunks.accumulate",
    "audit": "audit",
    "bf16_residuals": "towers.residuals",
    "cached": "chunks.cached",
    "chunks": "chunks",
    "class_softmax_loss": "losses",
    "clip_loss": "losses",
    "dcl_loss": "losses",
    "distill_loss": "losses",
    "find_chunk": "measuring",
    "fitted": "measuring",
    "graphed": "losses",
    "infonce_loss": "losses",
    "linear_patches": "towers.patches",
    "listwise_kl_loss": "losses",
    "losses": "losses",
    "margin_mse_loss": "losses",
    "matryoshka": "losses",
    "maxsim_loss": "losses",
    "micro_batches": "measuring",
    "nt_xent_loss": "losses",
    "plan": "planning.planner",
    "predict_memory": "costs.memory",
    "reference": "reference",
    "retry_on_oom": "chunks.oom",
    "short_attention": "towers.attention",
    "siglip_loss": "losses",
    "similarity_loss": "losses",
    "spread_out_loss": "losses",
    "supcon_loss": "losses",
}

# Not for type checkers: with a module-level __getattr__, every misspelt name would have the type Any.
if not TYPE_CHECKING:

    def __getattr__(name):
        """Import a public name when it is first used."""
        if name not in _MODULES:
            raise AttributeError(f"module 'megabatch' has no attribute {name!r}")
        from importlib import import_module

        module = import_module(f"megabatch.{_MODULES[name]}")
        # Stored, so that the next access does not call this function.
        value = globals()[name] = module if _MODULES[name] == name else getattr(module, name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
