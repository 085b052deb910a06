"""OpenCLIP's `ClipLoss` and `SigLipLoss`: the same constructor and call, computed without the similarity matrix.

In OpenCLIP's training script, replace what `create_loss` returns. OpenCLIP itself is not imported.

Every rank gets the value of the whole batch. (OpenCLIP's `local_loss` and sigmoid loss report each rank's part; their mean is this
value.) The gradient after DDP's average is always the exact one, which OpenCLIP computes with `gather_with_grad=True`. So the
arguments that choose between gathering schemes are accepted and have no effect.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from ..losses import clip_loss, siglip_loss


class ClipLoss(nn.Module):
    """A drop-in for `open_clip.loss.ClipLoss`: the softmax loss."""

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
    ) -> None:
        super().__init__()
        if use_horovod:
            raise ValueError("use_horovod=True: ranks must belong to a torch.distributed group; launch with torchrun instead")
        self.rank, self.world_size = rank, world_size

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        group = _group(self.rank, self.world_size)
        loss = clip_loss(image_features, text_features, logit_scale, group=group)
        if isinstance(logit_bias, Tensor):
            # A bias has no effect on a softmax, but DDP waits for a gradient of every parameter.
            loss = loss + 0 * logit_bias.sum()
        return {"contrastive_loss": loss} if output_dict else loss


class SigLipLoss(nn.Module):
    """A drop-in for `open_clip.loss.SigLipLoss`: the sigmoid loss."""

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        group = _group(self.rank, self.world_size)
        bias = 0.0 if logit_bias is None else logit_bias
        loss = siglip_loss(image_features, text_features, logit_scale, bias, group=group)
        return {"contrastive_loss": loss} if output_dict else loss


def _group(rank: int, world_size: int) -> dist.ProcessGroup | None:
    """Return the process group that OpenCLIP's rank and world_size describe."""
    if world_size == 1:
        return None
    actual = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if actual != (rank, world_size):
        raise ValueError(
            f"rank={rank}, world_size={world_size}, but this process is rank {actual[0]} of {actual[1]}: initialise "
            "torch.distributed first and pass its rank and world size"
        )
    return dist.group.WORLD
