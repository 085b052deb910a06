"""Gradients that ranks average in bf16: within rounding of the fp32 exchange, equal on all ranks, half the bytes, once per step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from small_runs import PAIRS, assert_equal, final, log_of, run_of, stopping, train, write_pairs
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.tensor import DTensor
from world import error_of

from megabatch import config
from megabatch.training.build import assemble
from megabatch.training.distributed import ranks, shard, share
from megabatch.training.loop import Training
from megabatch.training.noise.estimator import Moments
from megabatch.training.objective import Classification
from megabatch.training.schedules import Step
from megabatch.training.signals import Stopped

BF16 = "compute.gradient_exchange=bf16"
# The largest relative error of rounding to the 8 significant bits of bf16.
UNIT = 2**-8
LABELS = [pair[0].split()[0] for pair in PAIRS]
CLASSIFY = ("loss.objective=classify", "data.label=label")


@pytest.fixture
def pairs(tmp_path):
    return write_pairs(tmp_path / "pairs.jsonl", PAIRS, label=LABELS)


class Gradients(NamedTuple):
    """Gradients of one step, averaged and of this rank alone, by name, and the dtypes and elements of what was sent."""

    averaged: dict[str, Tensor]
    own: dict[str, Tensor]
    sent: list[tuple[torch.dtype, int]]


def _gradients(rank: int, size: int, pairs: str, folder: str, options: tuple[str, ...]) -> Gradients:
    run = run_of(pairs, folder, *options)
    own: dict[int, Tensor] = {}
    sent: list[tuple[torch.dtype, int]] = []
    hook, all_reduce = default_hooks.bf16_compress_hook, torch.distributed.all_reduce

    def watched_hook(group: Any, bucket: Any) -> Any:
        own.update({id(p): g.clone() for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)})
        with mock.patch.object(torch.distributed, "all_reduce", watched_all_reduce):
            return hook(group, bucket)

    def watched_all_reduce(tensor: Tensor, **options: Any) -> Any:
        sent.append((tensor.dtype, tensor.numel()))
        return all_reduce(tensor, **options)

    with mock.patch.object(default_hooks, "bf16_compress_hook", watched_hook), ranks(run.compute) as here:
        training = Training(assemble(run, here), Path(folder))
        (batch,) = training.parts.shuffled().batches([(0, 24)])
        training.step_fn(batch)
        named = dict(training.parts.model.named_parameters())
        averaged = {name: (p.grad.full_tensor() if isinstance(p, DTensor) else p.grad).clone() for name, p in named.items()}
        return Gradients(averaged, {name: own[id(p)] for name, p in named.items() if id(p) in own}, sent)


@pytest.mark.parametrize("options", [(), ("loss.objective=siglip", "y.name=x"), CLASSIFY], ids=["clip", "siglip", "classify"])
def test_gradients_in_bf16_are_those_in_fp32_rounded_and_equal_on_all_ranks(world, pairs, tmp_path, options):
    plain = world.run(2, _gradients, str(pairs), str(tmp_path), options)
    first, second = world.run(2, _gradients, str(pairs), str(tmp_path), (*options, BF16))
    assert not plain[0].sent
    assert_equal(first.averaged, second.averaged)
    # The loss completes the gradients of its scale and bias on every rank: DDP does not exchange these.
    whole = first.averaged.keys() - first.own.keys()
    assert whole <= {"log_scale", "bias"} and bool(whole) == (options is not CLASSIFY)
    assert_rounded(first.averaged, plain[0].averaged, first.own, second.own)


def assert_rounded(gradients: dict[str, Tensor], in_fp32: dict[str, Tensor], *own: dict[str, Tensor]) -> None:
    """own: the gradients of two ranks alone, without those that are not exchanged."""
    different = 0
    for name, gradient in gradients.items():
        expected = in_fp32[name]
        if name not in own[0]:
            assert torch.equal(gradient, expected), name
            continue
        size = sum(each[name].abs() for each in own) / 2
        # Both ranks' gradients are rounded, then their sum; a little for sums in fp32.
        assert ((gradient - expected).abs() <= UNIT * (1 + UNIT) * (size + expected.abs()) + 1e-7 * size).all(), name
        assert torch.equal(gradient, gradient.bfloat16().float()), name
        different += int((gradient != expected).sum())
    assert different


def test_sharded_gradients_are_rounded_once_for_all_chunks(world, pairs, tmp_path):
    plain, rounded = (world.run(2, _gradients, str(pairs), str(tmp_path), options) for options in ((), (BF16,)))
    sharded, other = world.run(2, _gradients, str(pairs), str(tmp_path), (BF16, "compute.sharding=fsdp2", "batch.chunk=2"))
    assert_equal(sharded.averaged, other.averaged)
    assert_rounded(sharded.averaged, plain[0].averaged, *(gradients.own for gradients in rounded))


@pytest.mark.parametrize("options", [(), CLASSIFY], ids=["clip", "classify"])
def test_every_gradient_is_sent_once_per_step_in_two_bytes(world, pairs, tmp_path, options):
    # 12 rows of each rank, in three chunks.
    (found, _) = world.run(2, _gradients, str(pairs), str(tmp_path), (*options, BF16, "batch.chunk=4"))
    assert {dtype for dtype, _ in found.sent} == {torch.bfloat16}
    assert sum(count for _, count in found.sent) == sum(gradient.numel() for gradient in found.own.values())


def _train(rank: int, size: int, pairs: str, out: str, stop: int | None, options: list[str]) -> None:
    run = run_of(pairs, out, *options, steps=4)
    if stop is None:
        train(run)
        return
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stopping(patch, after=stop)
        train(run)


@pytest.mark.parametrize("sharding", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_stopped_and_resumed_on_two_ranks_is_bit_equal_to_never_stopped(world, pairs, tmp_path, sharding):
    options = [BF16, "x.options.dropout=0.2", "optimizer.clip_norm=0.05", f"compute.sharding={sharding}"]
    world.run(2, _train, str(pairs), str(tmp_path / "whole"), None, options)
    for stop in (2, None):
        world.run(2, _train, str(pairs), str(tmp_path / "parts"), stop, options)
    assert_equal(final(tmp_path / "whole"), final(tmp_path / "parts"))
    steps = log_of(tmp_path / "whole", "step")
    assert [line["loss"] for line in steps] == [line["loss"] for line in log_of(tmp_path / "parts", "step")]
    assert min(line["grad_norm"] for line in steps) > 0.05, "every step is clipped"
    assert config.read(tmp_path / "whole" / "run.toml").compute.gradient_exchange == "bf16"


def _moments(rank: int, size: int, pairs: str, folder: str, options: tuple[str, ...]) -> Moments | None:
    run = run_of(pairs, folder, *options)
    with ranks(run.compute) as here:
        training = Training(assemble(run, here), Path(folder))
        assert isinstance(training.parts.objective, Classification)
        noise = training.parts.objective.measure_noise()
        (batch,) = training.parts.shuffled().batches([(0, 24)])
        training.step(Step(0, 24, 1.0), batch)
        return noise.steps[-1]


def test_noise_is_measured_before_gradients_are_rounded(world, pairs, tmp_path):
    plain, rounded = (world.run(2, _moments, str(pairs), str(tmp_path), (*CLASSIFY, *more)) for more in ((), (BF16,)))
    assert rounded[0] == rounded[1] != plain[0]
    # Only the norm of the averaged gradient is rounded, and the errors of its many elements cancel.
    assert rounded[0] == pytest.approx(plain[0], rel=UNIT)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(4, dtype=torch.complex64))


def _refused(rank: int, size: int) -> list[str]:
    ddp, fsdp2 = (config.Compute(device="cpu", sharding=sharding, gradient_exchange="bf16") for sharding in ("ddp", "fsdp2"))
    with ranks(ddp) as here:
        return [error_of(lambda: share(Complex(), ddp, here)), error_of(lambda: shard(Complex(), fsdp2, here))]


def test_complex_weights_are_refused(world):
    for error in world.run(2, _refused)[0]:
        assert error.startswith("compute.gradient_exchange is \"bf16\", but the weight 'filter' is complex")


@pytest.mark.parametrize("sharding", ["fsdp2", "hsdp"])
def test_a_sharded_classifier_is_refused_because_it_would_accumulate_in_bf16(pairs, tmp_path, sharding):
    with pytest.raises(
        ValueError, match=rf'gradient_exchange is \'bf16\': .*"{sharding}" and .* "classify".*choose sharding "ddp"'
    ):
        run_of(pairs, tmp_path, BF16, f"compute.sharding={sharding}", *CLASSIFY)
    assert run_of(pairs, tmp_path, BF16, f"compute.sharding={sharding}").compute.sharded


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_one_rank_rounds_nothing(world, pairs, tmp_path, sharding):
    sharding = f"compute.sharding={sharding}"
    ((plain,), (alone,)) = (
        world.run(1, _gradients, str(pairs), str(tmp_path), options) for options in ((sharding,), (sharding, BF16))
    )
    assert_equal(plain.averaged, alone.averaged)


def test_one_process_has_nothing_to_exchange(pairs, tmp_path):
    for name, options in (("plain", []), ("bf16", [BF16])):
        train(run_of(pairs, tmp_path / name, *options, steps=2))
    assert_equal(final(tmp_path / "plain"), final(tmp_path / "bf16"))
