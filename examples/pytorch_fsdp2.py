"""Contrastive training in plain PyTorch with weights sharded by FSDP2, and encoders in chunks.

torchrun --nproc-per-node 2 examples/pytorch_fsdp2.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import megabatch


def tower() -> nn.Module:
    """Return an encoder: put yours here, and shard its blocks."""
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 32))


def main(words: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=512, help="Pairs of a step over all ranks.")
    parser.add_argument("--chunk", type=int, default=32, help="Pairs that go through the encoders at once.")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args(words)

    if not dist.is_initialized():
        dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    mesh = dist.init_device_mesh(device.type, (ranks,))
    torch.manual_seed(0)
    towers = [tower().to(device) for _ in range(2)]
    for model in towers:
        for block in (model[0], model[2]):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    encoders = [megabatch.cached(model, args.chunk) for model in towers]  # after fully_shard
    # One number cannot be sharded: each rank has it, and the same gradient of it once the gradients are averaged.
    log_scale = torch.tensor(10.0, device=device).log().requires_grad_()
    optimizer = torch.optim.AdamW([*towers[0].parameters(), *towers[1].parameters()], lr=1e-3)
    scale_optimizer = torch.optim.AdamW([log_scale], lr=1e-3, weight_decay=0)
    torch.manual_seed(1 + rank)
    batch = torch.randn(2, args.batch // ranks, 64, device=device)
    for step in range(args.steps):
        x, y = (nn.functional.normalize(encode(rows), dim=1) for encode, rows in zip(encoders, batch, strict=True))
        loss = megabatch.clip_loss(x, y, log_scale.exp(), group=dist.group.WORLD)
        loss.backward()
        dist.all_reduce(log_scale.grad, op=dist.ReduceOp.SUM)
        log_scale.grad /= ranks
        for each in (optimizer, scale_optimizer):
            each.step()
            each.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
