"""A LightningModule for contrastive training on any number of GPUs, whose chunk is found on the first batch.

    python examples/lightning_module.py                                            # a tiny model on random pairs, without a
    download python examples/lightning_module.py --devices 2

`training_step` runs inside DDP's forward, so the cached encoders exchange their gradients once per step.
"""

import argparse

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megabatch
from megabatch.adapters.lightning import ChunkFinder


class Contrastive(lightning.LightningModule):
    """Two encoders and a scale. chunk: rows that go through an encoder at once; `ChunkFinder` sets it."""

    def __init__(self, image: nn.Module, text: nn.Module, chunk: int = 2) -> None:
        super().__init__()
        self.image, self.text, self.chunk = image, text, chunk
        self.log_scale = nn.Parameter(torch.tensor(10.0).log())
        self.encoders = [megabatch.cached(image, chunk), megabatch.cached(text, chunk)]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        for encoder in self.encoders:
            encoder.chunk = self.chunk
        x, y = (nn.functional.normalize(encode(rows), dim=1) for encode, rows in zip(self.encoders, batch, strict=True))
        group = dist.group.WORLD if self.trainer.world_size > 1 else None
        loss = megabatch.clip_loss(x, y, self.log_scale.exp(), group=group)
        self.log("loss", loss, prog_bar=True)  # equal on all ranks
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def tower() -> nn.Module:
    """Return an encoder: put yours here."""
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 32))


def main(words: list[str] | None = None) -> Contrastive:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256, help="Pairs of a step on each rank.")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args(words)

    torch.manual_seed(0)
    model = Contrastive(tower(), tower())
    data = torch.utils.data.TensorDataset(*torch.randn(2, 2 * args.batch * args.devices, 64).unbind())
    loader = torch.utils.data.DataLoader(data, batch_size=args.batch, shuffle=True)
    finder = ChunkFinder(mode="binsearch", max_val=64)
    trainer = lightning.Trainer(
        max_steps=args.steps,
        devices=args.devices,
        strategy="ddp" if args.devices > 1 else "auto",
        callbacks=[finder],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(model, loader)
    print(f"chunk {finder.optimal_chunk}, loss {trainer.callback_metrics['loss']:.3f}")
    return model


if __name__ == "__main__":
    main()
