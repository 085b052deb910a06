"""Which modules are found in an encoder, and which wrappers are refused."""

from __future__ import annotations

import functools

import pytest
import torch
from small_encoders import tower
from torch import Tensor, nn

import megabatch
from megabatch.chunks.ddp_fsdp import modules_in


class DeepSpeedEngine(nn.Module):
    __module__ = "deepspeed.runtime.engine"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class FullyShardedDataParallel(DeepSpeedEngine):
    __module__ = "torch.distributed.fsdp"


@pytest.mark.parametrize("wrapper, words", [(DeepSpeedEngine, "of DeepSpeed"), (FullyShardedDataParallel, "FSDP1")])
def test_wrappers_that_cannot_run_in_chunks_are_refused_with_the_reason(wrapper, words):
    wrapped = wrapper(tower())
    for encoder in (wrapped, wrapped.forward, lambda x: wrapped(x), functools.partial(torch.add, wrapped)):
        with pytest.raises(ValueError, match=words):
            megabatch.cached(encoder, chunk=4)


class Trainer:
    """An object that is not a Module but has one."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def encode(self, x: Tensor) -> Tensor:
        return self.model(x)

    __call__ = encode


def test_modules_are_found_behind_methods_objects_partials_and_functions():
    model = tower()
    trainer = Trainer(model)
    forward = model.forward
    for call in (
        model,
        model.forward,
        trainer.encode,
        trainer,
        lambda x: model(x),
        lambda x: forward(x),
        functools.partial(model, 1),
    ):
        assert modules_in(call) == [model]
    assert modules_in(functools.partial(torch.add, model)) == [model]
    assert modules_in(lambda x: x) == [] and modules_in(len) == []


def test_zero_3_parameters_are_refused_too():
    model = tower()
    model[0].weight.ds_id = 1
    with pytest.raises(ValueError, match="DeepSpeed"):
        megabatch.cached(model, chunk=4)
