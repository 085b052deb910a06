"""Lightning's callbacks: the chunk that is found ran on every rank and changes no training; the noise is that of `NoiseScale`."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import megabatch

pytestmark = pytest.mark.slow

ROWS, STEPS, LIMIT = 16, 3, 5


def library(name: str = "lightning") -> Any:
    # torchvision, which torchmetrics imports if it is installed, may not match this torch.
    from benchmarks.peers import declare_torchvision_schemas

    declare_torchvision_schemas()
    if name == "lightning":
        import lightning.pytorch as module
    else:
        import pytorch_lightning as module
    return module


def data(rank: int, size: int, steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of a rank: its share of the rows of the same batches."""
    g = torch.Generator().manual_seed(1)
    pairs = torch.randn(steps, 2, ROWS, 8, generator=g)
    return [(x[rank::size], y[rank::size]) for x, y in pairs]


def module_class(name: str = "lightning") -> Any:
    class Pair(library(name).LightningModule):
        """Two towers; more than `limit` rows at once are out of memory."""

        def __init__(self, chunk: int = 16, limit: int = 10**6) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.chunk, self.limit, self.seen = chunk, limit, []
            self.image, self.text = (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 4)) for _ in range(2))
            self.logit_scale = nn.Parameter(torch.tensor(10.0).log())
            self.encode = [megabatch.cached(tower, chunk) for tower in (self.image, self.text)]
            self.image[0].register_forward_pre_hook(self.check)

        def check(self, layer: nn.Module, inputs: Any) -> None:
            if len(inputs[0]) > self.limit:
                raise torch.OutOfMemoryError("out of memory.")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for encode in self.encode:
                encode.chunk = self.chunk
            x, y = (nn.functional.normalize(e(rows), dim=1) for e, rows in zip(self.encode, batch, strict=True))
            group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
            loss = megabatch.clip_loss(x, y, self.logit_scale.exp(), group=group)
            self.log("loss", loss, on_epoch=True)
            self.seen.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Pair


def fit(model: Any, loader: Any, callbacks: Any, name: str = "lightning", **options: Any) -> Any:
    if torch.distributed.is_initialized():
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        # As if Lightning had been started by torchrun; the process group exists already.
        os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29512"}
        options |= {"strategy": "ddp", "devices": size}
    trainer = library(name).Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )
    with warnings.catch_warnings():
        # Lightning advises on loaders with few workers.
        warnings.simplefilter("ignore")
        # A list would be several loaders.
        trainer.fit(model, torch.utils.data.DataLoader(loader, batch_size=None))
    return trainer


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
@pytest.mark.parametrize("mode, expected", [("power", 4), ("binsearch", 5)])
def test_the_chunk_is_the_largest_that_runs_and_nothing_else_changes(name, mode, expected):
    from megabatch.adapters.lightning import ChunkFinder

    reference = module_class(name)(chunk=expected)
    fit(reference, data(0, 1), [], name)
    model, finder = module_class(name)(limit=LIMIT), ChunkFinder(mode, steps_per_trial=2, margin=0.0)
    trainer = fit(model, data(0, 1), [finder], name)
    assert (finder.optimal_chunk, model.chunk) == (expected, expected)
    assert {trial.size: trial.ran for trial in finder.trials}[expected]
    assert all(torch.equal(a, b) for a, b in zip(weights(model).values(), weights(reference).values(), strict=True))
    # The mean over the epoch is that of the training, without the trials.
    assert trainer.callback_metrics["loss_epoch"] == pytest.approx(sum(model.seen[-STEPS:]) / STEPS, rel=1e-6)


def test_the_batch_is_not_touched():
    from megabatch.adapters.lightning import ChunkFinder

    with pytest.raises(ValueError, match="batch_size"):
        ChunkFinder(batch_arg_name="batch_size")
    with pytest.raises(ValueError, match="chunk"):
        fit(regression(), data(0, 1), [ChunkFinder()])


def test_trials_are_limited():
    from megabatch.adapters.lightning import ChunkFinder

    finder = ChunkFinder("binsearch", init_val=1, max_trials=2, steps_per_trial=1)
    fit(module_class()(), data(0, 1), [finder])
    assert (finder.optimal_chunk, len(finder.trials)) == (2, 2)


def regression(name: str = "lightning") -> Any:
    class Regression(library(name).LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self.layer(batch[0]) - batch[1][:, :1]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    return Regression()


def noise_by_hand(steps: int, parts: int) -> megabatch.NoiseScale:
    """Return the estimator after a plain loop over the same rows, in that many micro-batches a step."""
    model = regression()
    noise, optimizer = megabatch.NoiseScale(model, group=None), model.configure_optimizers()
    for x, y in data(0, 1, steps):
        for part in range(parts):
            with noise.micro_batch(rows=ROWS // parts):
                (model.training_step((x[part::parts], y[part::parts]), 0) / parts).backward()
        noise.step()
        optimizer.step()
        optimizer.zero_grad()
    return noise


def test_the_noise_of_accumulated_batches_is_that_of_a_plain_loop():
    from megabatch.adapters.lightning import NoiseScale

    halves = [(x[part::2], y[part::2]) for x, y in data(0, 1, 6) for part in range(2)]
    noise = NoiseScale()
    trainer = fit(regression(), halves, [noise], accumulate_grad_batches=2, gradient_clip_val=0.1)
    expected = noise_by_hand(1, 2)
    assert noise.state_dict()["steps"][0] == pytest.approx(list(expected.steps[0]), rel=1e-4)
    assert (noise.estimate().steps, "critical_batch" in trainer.callback_metrics) == (6, noise.estimate().signal > 0)


def on_two_ranks(rank: int, size: int) -> Any:
    library()
    from megabatch.adapters.lightning import ChunkFinder, NoiseScale

    # The second rank has less memory.
    model, finder = module_class()(limit=LIMIT - 2 * rank), ChunkFinder("binsearch", steps_per_trial=1, margin=0.0)
    fit(model, data(rank, size), [finder])
    regressor, noise = regression(), NoiseScale()
    fit(regressor, data(rank, size), [noise])
    return finder.optimal_chunk, weights(model), noise.state_dict()["steps"], in_two_precisions(rank, size)


@pytest.fixture(scope="module")
def two_ranks() -> Any:
    from world import World

    world = World()
    yield world.run(2, on_two_ranks)
    world.close()


def test_two_ranks_agree_on_the_chunk_and_on_the_weights(two_ranks):
    [(chunk, first, noise, _), (other_chunk, second, *_)] = two_ranks
    assert chunk == other_chunk == LIMIT - 2
    reference = module_class()()
    fit(reference, data(0, 1), [])
    for name, value in weights(reference).items():
        assert torch.equal(first[name], second[name])
        assert torch.allclose(first[name], value, atol=1e-6), name
    assert noise[0] == pytest.approx(list(noise_by_hand(1, 2).steps[0]), rel=1e-4)


def trained_by_sgd(gathers: bool, rank: int, size: int, **options: Any) -> dict[str, torch.Tensor]:
    """Return the weights after three steps with our loss in chunks, or with the formula on rows that Lightning gathers."""

    class Pair(module_class()):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not gathers:
                return super().training_step(batch, batch_idx)
            x, y = (nn.functional.normalize(e(rows), dim=1) for e, rows in zip((self.image, self.text), batch, strict=True))
            x, y = (self.all_gather(rows, sync_grads=True).reshape(-1, rows.shape[1]).float() for rows in (x, y))
            logits, target = self.logit_scale.exp() * x @ y.T, torch.arange(len(x))
            return (nn.functional.cross_entropy(logits, target) + nn.functional.cross_entropy(logits.T, target)) / 2

        def configure_optimizers(self) -> Any:
            # AdamW would hide a gradient that is a multiple of the true one.
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    model = Pair(chunk=3)
    fit(model, data(rank, size), [], **options)
    return weights(model)


def in_two_precisions(rank: int, size: int) -> Any:
    return {
        (gathers, precision): trained_by_sgd(gathers, rank, size, precision=precision)
        for gathers in (True, False)
        for precision in ("32-true", "bf16-mixed")
    }


def test_three_steps_on_two_ranks_end_at_the_weights_of_gathered_rows_also_in_bf16(two_ranks):
    from mixed_precision import errors

    start = weights(module_class()())
    for *_, found in two_ranks:
        exact = found[True, "32-true"]
        for name, value in found[False, "32-true"].items():
            assert torch.allclose(value, exact[name], rtol=0, atol=1e-6), name
        error = errors(found[False, "bf16-mixed"], found[True, "bf16-mixed"], exact, start)
        assert error.agree(), error
