"""The drop-in losses give the values and gradients of OpenCLIP's, in one process and in two."""

from __future__ import annotations

import pytest
import torch
from cases import embeddings
from torch import nn
from world import World

from benchmarks.peers import declare_torchvision_schemas
from megabatch.adapters import open_clip as adapter


def theirs():
    """Return OpenCLIP's module; imported late, since worker processes import this file before the schemas are declared."""
    declare_torchvision_schemas()
    from open_clip import loss

    return loss


class Model(nn.Module):
    """Projections with OpenCLIP's two scalars."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.image, self.text = nn.Linear(6, 4).double(), nn.Linear(6, 4).double()
        self.logit_scale = nn.Parameter(torch.tensor(1.2, dtype=torch.float64))
        self.logit_bias = nn.Parameter(torch.tensor(-2.0, dtype=torch.float64))

    def forward(self, images, texts):
        x, y = (nn.functional.normalize(t, dim=-1) for t in (self.image(images), self.text(texts)))
        return x, y, self.logit_scale.exp(), self.logit_bias + 0


def step(model, loss, rank=0):
    value = loss(*model(*embeddings(5, width=6, seed=rank)), output_dict=True)["contrastive_loss"]
    value.backward()
    return value.item(), [p.grad for p in model.parameters()]


CLIP = [{"gather_with_grad": True, "local_loss": local, "cache_labels": True} for local in (False, True)]
SIGLIP = [{"dist_impl": way} for way in ("bidir", "shift", "gather", "reduce")]
CHOICES = [("ClipLoss", options) for options in CLIP] + [("SigLipLoss", options) for options in SIGLIP]


@pytest.mark.parametrize("name, options", CHOICES, ids=str)
def test_one_process_gives_the_same_value_and_gradients(name, options):
    value, gradients = step(Model(), getattr(adapter, name)(**options))
    expected, expected_gradients = step(Model(), getattr(theirs(), name)(**options))
    assert value == pytest.approx(expected, rel=1e-12)
    for found, true in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(found, true, rtol=1e-9, atol=1e-13)


def train(rank, size):
    """Return the results (of megabatch, of OpenCLIP) for every choice."""
    return [
        [
            step(nn.parallel.DistributedDataParallel(Model()), getattr(module, name)(rank=rank, world_size=size, **options), rank)
            for module in (adapter, theirs())
        ]
        for name, options in CHOICES
    ]


@pytest.mark.slow
def test_two_processes_give_the_same_value_and_gradients():
    # A separate World: torch.distributed.nn, which OpenCLIP uses, keeps the first process group that it sees.
    world = World()
    results = world.run(2, train)
    world.close()
    for (name, options), *ranks in zip(CHOICES, *results, strict=True):
        # OpenCLIP's local losses are each rank's part; their mean is the loss.
        mean = sum(expected for _, (expected, _) in ranks) / 2
        for (value, gradients), (_, expected_gradients) in ranks:
            assert value == pytest.approx(mean, rel=1e-12), (name, options)
            for found, true in zip(gradients, expected_gradients, strict=True):
                assert torch.allclose(found, true, rtol=1e-9, atol=1e-13), (name, options)


def test_the_call_takes_positions_and_missing_biases_as_openclip_does():
    x, y = embeddings(5)
    assert torch.allclose(adapter.ClipLoss()(x, y, 3.0), theirs().ClipLoss()(x, y, 3.0))
    assert torch.allclose(adapter.SigLipLoss()(x, y, 3.0, None), theirs().SigLipLoss()(x, y, 3.0, None))


def test_a_world_size_without_processes_is_refused():
    x, y = embeddings(5)
    with pytest.raises(ValueError, match="rank=1, world_size=2, but this process is rank 0 of 1"):
        adapter.ClipLoss(rank=1, world_size=2)(x, y, 3.0)
    with pytest.raises(ValueError, match="torchrun"):
        adapter.ClipLoss(use_horovod=True)
