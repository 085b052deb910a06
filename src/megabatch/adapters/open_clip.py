"""OpenCLIP's `ClipLoss` and `SigLipLoss`: the same constructor and call, computed without the similarity matrix.

In OpenCLIP's training script, replace what `create_loss` returns. OpenCLIP itself is not imported.

The value is that of the whole batch on every rank (OpenCLIP's `local_loss` and sigmoid loss report each rank's own part, whose mean
it is), and the gradient after DDP's average is always the exact one, which OpenCLIP gives with `gather_with_grad=True`. So the
arguments that choose between gathering schemes are accepted and change nothing.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from ..losses import clip_loss, siglip_loss


class ClipLoss(nn.Module):
    """OpenCLIP's softmax loss."""

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
            raise ValueError("use_horovod=True: the ranks must be a torch.distributed group; launch with torchrun instead")
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
            # A softmax does not see a bias, but DDP waits for a gradient of every parameter.
            loss = loss + 0 * logit_bias.sum()
        return {"contrastive_loss": loss} if output_dict else loss


class SigLipLoss(nn.Module):
    """OpenCLIP's sigmoid loss."""

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
    """The group that OpenCLIP's rank and world_size speak of."""
    if world_size == 1:
        return None
    here = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if here != (rank, world_size):
        raise ValueError(
            f"rank={rank}, world_size={world_size}, but this process is rank {here[0]} of {here[1]}: initialise torch.distributed "
            "first and pass its rank and world size"
        )
    return dist.group.WORLD
