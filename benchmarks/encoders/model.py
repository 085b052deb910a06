"""The CLIP whose steps are measured: two towers of transformers with random weights, and batches in host memory.

Towers enable autocast themselves, so that all schemes compute the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers import declare_torchvision_schemas

VIT_L_14 = {
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 14,
        "image_size": 224,
    },
    "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "projection_dim": 768,
}
VIT_B_32 = {
    "vision_config": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "patch_size": 32,
        "image_size": 224,
    },
    "text_config": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8},
    "projection_dim": 512,
}
TINY = {
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 8,
        "image_size": 16,
    },
    "text_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 8,
        "vocab_size": 100,
        "bos_token_id": 98,
        "eos_token_id": 99,
    },
    "projection_dim": 16,
}


class Batch(NamedTuple):
    """Images (uint8, N×3×side×side) and token ids (int64, N×length), on the host."""

    images: Tensor
    texts: Tensor

    def first(self, pairs: int) -> Batch:
        """Return the first pairs of the batch."""
        return Batch(self.images[:pairs], self.texts[:pairs])


class Tower(nn.Module):
    """One side of a CLIP: unit embeddings in the weights' dtype, computed in bf16 autocast if `half`."""

    def __init__(self, encoder: nn.Module, projection: nn.Linear) -> None:
        super().__init__()
        self.encoder, self.projection = encoder, projection
        self.half = True

    def embed(self, **inputs: Tensor) -> Tensor:
        with autocast(self.projection.weight.device, self.half):
            embedding = self.projection(self.encoder(**inputs).pooler_output)
        return F.normalize(embedding.to(self.projection.weight.dtype), dim=-1)


class ImageTower(Tower):
    """Embeddings of uint8 images, which are cast and normalised on their device."""

    def __init__(self, encoder: nn.Module, projection: nn.Linear) -> None:
        super().__init__(encoder, projection)
        # Mean and standard deviation of pixels in OpenAI's CLIP.
        self.register_buffer("mean", torch.tensor([0.4815, 0.4578, 0.4082]).view(3, 1, 1))
        self.register_buffer("deviation", torch.tensor([0.2686, 0.2613, 0.2758]).view(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return self.embed(pixel_values=(images.to(self.mean.dtype) / 255 - self.mean) / self.deviation)


class TextTower(Tower):
    """Embeddings of token ids."""

    def forward(self, texts: Tensor) -> Tensor:
        return self.embed(input_ids=texts)


class Clip(nn.Module):
    """Two towers and the logarithm of the scale, with random weights."""

    def __init__(self, shape: dict[str, Any], device: str) -> None:
        super().__init__()
        declare_torchvision_schemas()
        from transformers import AutoModel, CLIPConfig

        # Created on its device: drawing 428 million weights on a CPU takes longer than a step.
        with torch.device(device):
            model = AutoModel.from_config(CLIPConfig(**shape), attn_implementation="sdpa")
            self.image = ImageTower(model.vision_model, model.visual_projection)
            self.text = TextTower(model.text_model, model.text_projection)
        self.log_scale = model.logit_scale
        self.config = model.config
        self.train()

    @property
    def device(self) -> torch.device:
        return self.log_scale.device

    def use(self, precision: str) -> None:
        """Set the precision of the towers: float64, float32, or bfloat16 by autocast."""
        self.double() if precision == "float64" else self.float()
        self.image.half = self.text.half = precision == "bfloat16"
        # Otherwise cuDNN may compute the float32 convolution of the patches in TF32.
        torch.backends.cudnn.allow_tf32 = precision != "float32"

    def plain_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy of the full matrix inside autocast, as other trainers compute it."""
        labels = torch.arange(len(x), device=x.device)
        with autocast(x.device, self.image.half):
            logits = self.log_scale.exp() * x @ y.T
            return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    def batch(self, pairs: int, seed: int = 0) -> Batch:
        """Return random pairs in host memory, pinned for a GPU; every text ends with the end-of-text token."""
        pinned = self.device.type == "cuda"
        vision, text = self.config.vision_config, self.config.text_config
        images = torch.empty(pairs, 3, vision.image_size, vision.image_size, dtype=torch.uint8, pin_memory=pinned)
        texts = torch.empty(pairs, text.max_position_embeddings, dtype=torch.int64, pin_memory=pinned)
        generator = torch.Generator(self.device).manual_seed(seed)
        random = {"generator": generator, "device": self.device}
        # Drawn on the device in pieces: 65,536 images are 10 GB, for which a CPU takes a minute.
        for start in range(0, pairs, 1024):
            piece = images[start : start + 1024]
            piece.copy_(torch.randint(256, piece.shape, dtype=torch.uint8, **random))
            ids = texts[start : start + 1024]
            ids.copy_(torch.randint(text.eos_token_id, ids.shape, **random))
        texts[:, -1] = text.eos_token_id
        return Batch(images, texts)


def autocast(device: torch.device, enabled: bool) -> torch.autocast:
    """Return a context of bf16 autocast on the device, disabled unless `enabled`."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)
