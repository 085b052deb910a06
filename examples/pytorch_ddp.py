"""Contrastive training in plain PyTorch with DDP: gradients of the whole batch, activations of one chunk.

python examples/pytorch_ddp.py
torchrun --nproc-per-node 2 examples/pytorch_ddp.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megabatch


class TwoTowers(nn.Module):
    """Two encoders and a scale: put yours here. DDP wraps it whole, so that every gradient is exchanged, also that of the scale."""

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.image, self.text = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(2))
        self.log_scale = nn.Parameter(torch.tensor(10.0).log())
        self.encoders = [megabatch.cached(self.image, chunk), megabatch.cached(self.text, chunk)]

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y = (nn.functional.normalize(encode(rows), dim=1) for encode, rows in zip(self.encoders, (images, texts), strict=True))
        return x, y, self.log_scale.exp()


def main(words: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=512, help="Pairs of a step over all ranks.")
    parser.add_argument("--chunk", type=int, default=32, help="Pairs that go through the encoders at once.")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args(words)

    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    if ranks > 1:
        dist.init_process_group()
    group = dist.group.WORLD if ranks > 1 else None
    torch.manual_seed(0)
    model = TwoTowers(args.chunk).to(device)
    trained = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)
    images, texts = torch.randn(2, args.batch // ranks, 64, device=device)
    for step in range(args.steps):
        x, y, scale = trained(images, texts)
        loss = megabatch.clip_loss(x, y, scale, group=group)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")  # of the whole batch, equal on all ranks
    if ranks > 1:
        dist.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    main()
