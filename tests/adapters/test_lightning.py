"""Lightning's callbacks: the chunk that is found ran on every rank and changes no training; the noise is that of `NoiseScale`."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from world import error_of

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


@pytest.mark.parametrize(
    "options, limit, sizes",
    [
        ({"init_val": 2, "max_val": 3}, 100, [2, 3]),
        ({"init_val": 12}, LIMIT, [12, 6, 3]),
        ({"init_val": 8}, 100, [8, 16]),
        ({"init_val": 100}, 100, [16]),
    ],
)
def test_powers_stay_between_one_row_and_the_batch(options, limit, sizes):
    from megabatch.adapters.lightning import ChunkFinder

    model, finder = module_class()(limit=limit), ChunkFinder(steps_per_trial=2, margin=0.0, **options)
    fit(model, data(0, 1), [finder])
    assert [trial.size for trial in finder.trials] == sizes
    assert finder.optimal_chunk == sizes[-1]
    if all(trial.ran for trial in finder.trials):
        assert len(model.seen) == 2 * len(sizes) + STEPS


def test_rows_and_memory_stay_free():
    from megabatch.adapters.lightning import ChunkFinder
    from megabatch.measuring.fit.memory import resident_bytes

    # The module refuses more than five rows, whatever the memory: of those, 40% stay free.
    finder = ChunkFinder("binsearch", steps_per_trial=1, margin=0.4)
    fit(module_class()(limit=LIMIT), data(0, 1), [finder])
    assert finder.optimal_chunk == 3
    for options in ({"budget": 1, "margin": 0.0}, {"budget": resident_bytes() + 2**30, "margin": 0.999}):
        with pytest.raises(ValueError, match="no chunk ran"):
            fit(module_class()(), data(0, 1), [ChunkFinder(steps_per_trial=1, **options)])


def test_other_callbacks_see_the_training_alone():
    from megabatch.adapters.lightning import ChunkFinder

    class Counter(library().Callback):
        count = 0

        def on_before_backward(self, *args: Any) -> None:
            self.count += 1

    counter, finder = Counter(), ChunkFinder(steps_per_trial=1)
    trainer = fit(module_class()(), data(0, 1), [counter, finder])
    assert (counter.count, len(finder.trials)) == (STEPS, 4)
    assert trainer.callbacks[:2] == [counter, finder]
    idle = ChunkFinder()
    fit(module_class()(), data(0, 1), [idle], fast_dev_run=True)
    assert idle.optimal_chunk is None


def test_a_training_step_may_take_the_batch_alone_and_return_a_dict():
    from megabatch.adapters.lightning import ChunkFinder

    class Short(module_class()):
        def training_step(self, batch: Any) -> Any:
            return {"loss": super().training_step(batch, 0), "more": 1}

    finder = ChunkFinder("binsearch", steps_per_trial=1, margin=0.0)
    fit(Short(limit=LIMIT), data(0, 1), [finder])
    assert finder.optimal_chunk == LIMIT


def test_trials_divide_and_clear_gradients_as_the_training_does():
    """Two trial steps end at the weights of two steps with the loss divided by the accumulated batches."""
    from megabatch.adapters import lightning as adapter

    model = module_class()()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = SimpleNamespace(
        training_step=model.training_step,
        backward=lambda loss, optimizer: loss.backward(),
        optimizer_step=lambda optimizer, closure: optimizer.step(closure),
    )
    model.log = lambda *args, **options: None
    trainer = SimpleNamespace(strategy=strategy, optimizers=[optimizer], accumulate_grad_batches=4)
    [batch, *_] = data(0, 1)
    for _ in range(2):
        adapter._training_step(trainer, model, batch, 0)()
    expected = module_class()()
    expected.log = model.log
    for _ in range(2):
        optimizer = torch.optim.SGD(expected.parameters(), lr=0.1 / 4)
        optimizer.zero_grad()
        expected.training_step(batch, 0).backward()
        optimizer.step()
    for name, value in weights(expected).items():
        assert torch.allclose(weights(model)[name], value, rtol=1e-5, atol=1e-7), name


def test_manual_optimization_is_refused():
    from megabatch.adapters.lightning import ChunkFinder, NoiseScale

    for callback in (ChunkFinder(), NoiseScale()):
        model = module_class()()
        model.automatic_optimization = False
        with pytest.raises(ValueError, match="manually"):
            fit(model, data(0, 1), [callback])


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


def micro_batches(steps: int, *rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return micro-batches with these numbers of rows for each step; the second value follows from the first."""
    x = torch.randn(steps, sum(rows), 8, generator=torch.Generator().manual_seed(2))
    return [(part, part @ torch.ones(8, 1)) for step in x for part in step.split(list(rows))]


def test_the_noise_counts_the_rows_of_each_batch_and_whole_steps_only():
    from megabatch.adapters.lightning import NoiseScale

    noise, short, silent = NoiseScale(), NoiseScale(window=2), NoiseScale(log=False)
    batches, options = micro_batches(4, 10, 6), {"accumulate_grad_batches": 2}
    model = regression()
    trainer = fit(model, batches, [noise], **options)
    fit(regression(), batches[:-2], [short], **options)
    assert (noise.estimate().steps, short.estimate().steps, short.state_dict()["steps"]) == (4, 2, noise.state_dict()["steps"][1:3])
    # The last step has two of three batches.
    whole = NoiseScale()
    fit(regression(), micro_batches(2, 6, 5, 5)[:-1], [whole], accumulate_grad_batches=3)
    assert whole.estimate().steps == 1
    # A gradient of which half is that of 10 rows and half that of 6.
    other = regression()
    by_hand = megabatch.NoiseScale(other, group=None)
    for x, y in batches[:2]:
        with by_hand.micro_batch(rows=len(x), share=0.5):
            (other.training_step((x, y), 0) / 2).backward()
    by_hand.step()
    assert noise.state_dict()["steps"][0] == pytest.approx(list(by_hand.steps[0]), rel=1e-4)
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    assert "critical_batch" in trainer.callback_metrics
    assert "critical_batch" not in fit(regression(), batches, [silent], **options).callback_metrics


def test_the_noise_goes_on_from_a_checkpoint():
    from megabatch.adapters.lightning import NoiseScale

    first, second = NoiseScale(), NoiseScale()
    fit(regression(), micro_batches(2, 8, 8), [first], accumulate_grad_batches=2)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    fit(regression(), micro_batches(3, 8, 8), [second], accumulate_grad_batches=2)
    assert second.estimate().steps == 5


def test_one_batch_per_step_has_no_noise_and_warns():
    from megabatch.adapters.lightning import NoiseScale

    model = regression()
    trainer = SimpleNamespace(world_size=1, accumulate_grad_batches=1, precision_plugin=None, strategy=SimpleNamespace(model=model))
    with pytest.warns(UserWarning, match="accumulate_grad_batches=2"):
        NoiseScale().on_train_start(trainer, model)
    with pytest.raises(ValueError, match="no training"):
        NoiseScale().estimate()


def on_two_ranks(rank: int, size: int) -> Any:
    library()
    from megabatch.adapters.lightning import ChunkFinder, NoiseScale

    # The second rank has less memory.
    model, finder = module_class()(limit=LIMIT - 2 * rank), ChunkFinder("binsearch", steps_per_trial=1, margin=0.0)
    fit(model, data(rank, size), [finder])
    # The second rank has fewer rows.
    shorter = ChunkFinder(init_val=1, steps_per_trial=1, margin=0.0)
    fit(module_class()(), [tuple(column[: 8 - 3 * rank] for column in batch) for batch in data(rank, size)], [shorter])
    assert shorter.optimal_chunk == 5
    meeting = module_class()()
    meeting.norm = nn.SyncBatchNorm(8)
    assert "SyncBatchNorm" in error_of(lambda: fit(meeting, data(rank, size), [ChunkFinder()]))
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
