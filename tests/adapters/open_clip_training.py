"""OpenCLIP's own training loop on a tiny CLIP, which tests run with its losses and with ours."""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import declare_torchvision_schemas

CONTEXT, WORDS = 6, 50


def open_clip() -> Any:
    """Return OpenCLIP; imported late, since worker processes import this file before the schemas are declared."""
    declare_torchvision_schemas()
    import open_clip

    return open_clip


def tiny_clip(siglip: bool = False, patch_dropout: float = 0.0, coca: bool = False, scale_shape: bool = False) -> nn.Module:
    """Return a CLIP of OpenCLIP with 10,000 parameters, always with the same weights."""
    torch.manual_seed(0)
    vision = {"image_size": 16, "patch_size": 8, "width": 16, "layers": 1, "head_width": 8, "patch_dropout": patch_dropout}
    text = {"context_length": CONTEXT, "vocab_size": WORDS, "width": 16, "heads": 2, "layers": 1}
    options: dict[str, Any] = {"nonscalar_logit_scale": scale_shape, "output_dict": True}
    if siglip:
        options |= {"init_logit_scale": math.log(10), "init_logit_bias": -5.0}
    if coca:
        text |= {"embed_cls": True, "output_tokens": True}
        vision |= {"output_tokens": True, "attentional_pool": True, "attn_pooler_heads": 2}
        decoder = {"context_length": CONTEXT, "vocab_size": WORDS, "width": 16, "heads": 2, "layers": 1}
        from open_clip.coca_model import CoCa

        del options["output_dict"]
        model = CoCa(16, decoder, text, vision, **options)
        # OpenCLIP leaves some of them without values.
        for parameter in model.parameters():
            if parameter.ndim:
                nn.init.normal_(parameter, std=0.1)
        return model
    return open_clip().CLIP(16, vision, text, **options)


def batches(count: int, rows: int, rank: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return that many batches of images and token ids for a rank; token 49 ends a text, 0 pads it."""
    g = torch.Generator().manual_seed(100 + rank)
    images = torch.randn(count, rows, 3, 16, 16, generator=g)
    texts = torch.randint(1, WORDS - 1, (count, rows, CONTEXT), generator=g)
    texts[:, :, -1] = WORDS - 1
    return list(zip(images, texts, strict=True))


class Loader(list):
    """A list of batches with the attributes that OpenCLIP's loop reads."""

    @property
    def num_batches(self) -> int:
        return len(self)

    @property
    def num_samples(self) -> int:
        return sum(len(images) for images, _ in self)


class Data:
    def __init__(self, loader: Loader) -> None:
        self.dataloader = loader

    def set_epoch(self, epoch: int) -> None:
        pass


def arguments(**changes: Any) -> argparse.Namespace:
    """Return what OpenCLIP's loop and create_loss read of the command line."""
    values = {
        "device": "cpu",
        "precision": "fp32",
        "distill": False,
        "accum_freq": 1,
        "skip_scheduler": True,
        "horovod": False,
        "grad_clip_norm": None,
        "log_every_n_steps": 10**9,
        "rank": 0,
        "local_rank": 0,
        "world_size": 1,
        "batch_size": 8,
        "wandb": False,
        "model": "tiny",
        "siglip": False,
        "local_loss": True,
        "gather_with_grad": True,
        "loss_dist_impl": None,
        "log_local": False,
        "distributed": False,
        "coca_caption_loss_weight": 2.0,
        "coca_contrastive_loss_weight": 1.0,
    }
    return argparse.Namespace(**(values | changes))


def train(
    model: nn.Module,
    loss: nn.Module,
    data: list[tuple[Tensor, Tensor]],
    teacher: nn.Module | None = None,
    *,
    rate: float = 0.005,
    **changes: Any,
) -> Any:
    """Train one epoch in OpenCLIP's train_one_epoch; return the weights."""
    open_clip()
    from open_clip_train.train import train_one_epoch

    args = arguments(**changes)
    # Not Adam, which would hide a gradient that is a multiple of the true one.
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    train_one_epoch(model, {"train": Data(Loader(data))}, loss, 0, optimizer, None, None, teacher, args)
    return {name.removeprefix("module."): value.clone() for name, value in model.state_dict().items()}
