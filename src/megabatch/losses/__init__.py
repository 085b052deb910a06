"""WHAT is computed: one file per loss, with its function, Module and autograd Function."""

from .batch import Diagnostics
from .clip import ClipLoss, clip_loss
from .dcl import dcl_loss
from .distill import DistillLoss, distill_loss, listwise_kl_loss, margin_mse_loss
from .graphed import graphed
from .indexed import ClassSoftmaxLoss, class_softmax_loss
from .infonce import Guide, InfoNCELoss, infonce_loss
from .matryoshka import MatryoshkaLoss, matryoshka
from .maxsim import MaxSimLoss, maxsim_loss
from .nt_xent import nt_xent_loss
from .siglip import SigLipLoss, siglip_loss
from .similarity import SimilarityLoss, similarity_loss
from .spread_out import spread_out_loss
from .supcon import supcon_loss

__all__ = [
    "ClassSoftmaxLoss",
    "ClipLoss",
    "Diagnostics",
    "DistillLoss",
    "Guide",
    "InfoNCELoss",
    "MatryoshkaLoss",
    "MaxSimLoss",
    "SigLipLoss",
    "SimilarityLoss",
    "class_softmax_loss",
    "clip_loss",
    "dcl_loss",
    "distill_loss",
    "graphed",
    "infonce_loss",
    "listwise_kl_loss",
    "margin_mse_loss",
    "matryoshka",
    "maxsim_loss",
    "nt_xent_loss",
    "siglip_loss",
    "similarity_loss",
    "spread_out_loss",
    "supcon_loss",
]
