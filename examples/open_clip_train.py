"""Train a CLIP of OpenCLIP with its own losses replaced, and a batch larger than memory: one line for each.

    python examples/open_clip_train.py                                             # a tiny model on random pairs, without a
    download torchrun --nproc-per-node 2 examples/open_clip_train.py
    python examples/open_clip_train.py --model ViT-B-32 --batch 4096 --chunk 512

With OpenCLIP's own script nothing is to be written: replace `-m open_clip_train.main` by `-m megabatch.adapters.open_clip`.
"""

import argparse
import os

import open_clip
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import megabatch
from megabatch.adapters.open_clip import ClipLoss, encode_in_chunks

TINY = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 512, "width": 32, "heads": 2, "layers": 2},
}


def pairs(model: torch.nn.Module, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random pairs: put your loader here."""
    size = model.visual.image_size
    images = torch.randn(rows, 3, *(size if isinstance(size, tuple) else (size, size)))
    texts = torch.randint(1, model.vocab_size, (rows, model.context_length))
    return images.to(device), texts.to(device)


def main(words: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="A name of OpenCLIP's models.")
    parser.add_argument("--batch", type=int, default=64, help="Pairs of a step over all ranks.")
    parser.add_argument("--chunk", type=int, default=16, help="Pairs that go through the encoders at once.")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args(words)

    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    if ranks > 1:
        dist.init_process_group()
    torch.manual_seed(0)
    model = open_clip.create_model(args.model, output_dict=True) if args.model else open_clip.CLIP(**TINY, output_dict=True)
    megabatch.linear_patches(model)  # the same results, faster on a GPU; leave it out for ResNets
    encode_in_chunks(model.to(device), args.chunk)  # instead of --accum-freq
    trained = DistributedDataParallel(model) if ranks > 1 else model
    loss_fn = ClipLoss(rank=rank, world_size=ranks)  # instead of open_clip.ClipLoss
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)
    images, texts = pairs(model, args.batch // ranks, device)
    for step in range(args.steps):
        loss = loss_fn(**trained(images, texts), output_dict=True)["contrastive_loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    if ranks > 1:
        dist.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    main()
