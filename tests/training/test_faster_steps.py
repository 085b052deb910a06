"""What `train` computes with faster kernels on CUDA: the optimizer's update, and the patches of images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import PAIRS, assert_equal, final, run_of, stopping, train, write_pairs
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megabatch import config
from megabatch.costs.memory import Prediction
from megabatch.costs.strategy import Strategy
from megabatch.costs.time import StepTime
from megabatch.measuring.predictions import predictions
from megabatch.optimizers import is_fused
from megabatch.planning.estimator import estimator_for
from megabatch.planning.problem import problem_of
from megabatch.planning.request import Request
from megabatch.towers.patches import PatchConv2d
from megabatch.training.build import assemble, compile_tower
from megabatch.training.distributed import ranks
from megabatch.training.loop import Training
from megabatch.training.optimizer import build_optimizer
from megabatch.training.schedules import Step
from megabatch.training.signals import Stopped

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
IMAGES = ["x.name=small_towers:patches", "x.options={}", "data.workers=0", "evaluate.large=[]", "schedule.samples=1000"]


@pytest.mark.parametrize(
    ("name", "options", "device", "fused"),
    [
        ("adamw", {}, "cuda", True),
        ("adamw", {"amsgrad": True}, "cuda", True),
        ("adamw", {}, "cpu", False),
        ("adamw", {}, "mps", False),
        ("sgd", {}, "cuda", False),
        ("torch.optim:Adam", {}, "cuda", False),
        # An option decides.
        ("adamw", {"fused": False}, "cuda", False),
        ("adamw", {"foreach": False}, "cuda", False),
        ("adamw", {"capturable": True}, "cuda", False),
        ("adamw", {"differentiable": False}, "cuda", False),
        ("torch.optim:Adam", {"fused": True}, "cuda", True),
        ("sgd", {"fused": True}, "cpu", True),
    ],
)
def test_the_fused_kernel_is_used_where_nothing_speaks_against_it(name, options, device, fused):
    assert is_fused(name, options, device) is fused


class Weight(nn.Module):
    """One matrix. On fake tensors, "cuda" needs no such device."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4, device=device, dtype=dtype))


@pytest.mark.parametrize(("device", "options", "fused"), [("cuda", {}, True), ("cuda", {"foreach": True}, None), ("cpu", {}, None)])
def test_the_optimizer_is_built_as_decided(device, options, fused):
    with FakeTensorMode():
        model = Weight(device)
        optimizer = build_optimizer(model, config.Optimizer(options=options))
        assert optimizer.defaults["fused"] is fused
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
        # The fused kernel reads its step count on the device.
        assert optimizer.state[model.weight]["step"].device.type == (device if fused else "cpu")


def test_complex_parameters_have_no_fused_kernel():
    with FakeTensorMode():
        assert build_optimizer(Weight("cuda", torch.complex64), config.Optimizer()).defaults["fused"] is None


@pytest.fixture
def pairs(tmp_path):
    return write_pairs(tmp_path / "pairs.jsonl", PAIRS)


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Kernels round differently: about 1e-7 of a value in every step."""
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("order", [("true", "false"), ("false", "true")], ids=["from fused", "to fused"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])])
def test_a_run_goes_on_with_another_kernel_of_its_optimizer(pairs, tmp_path, monkeypatch, order, device):
    before, after = (
        run_of(pairs, tmp_path / "run", f"compute.device={device}", "optimizer.ema=0.9", f"optimizer.options.fused={fused}")
        for fused in order
    )
    stopping(monkeypatch, after=3)
    with pytest.raises(Stopped):
        train(before)
    monkeypatch.undo()
    saved = final(tmp_path / "run")
    with ranks(after.compute) as here:
        training = Training(assemble(after, here), tmp_path / "run")
        training.resume()
        assert_equal(saved, {name: tensor.detach().cpu() for name, tensor in training.tensors().items()})
        counts = {value.device.type for state in training.optimizer.state.values() for key, value in state.items() if key == "step"}
        assert counts == {device if order[1] == "true" else "cpu"}
    train(after)
    assert {float(value) for name, value in final(tmp_path / "run").items() if name.endswith(".step")} == {6.0}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])])
def test_all_kernels_compute_the_same_updates(device):
    results = []
    for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 3)).to(device)
        optimizer = build_optimizer(model, config.Optimizer(lr=0.01, options=options))
        for _ in range(5):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape).to(device)
            optimizer.step()
        results.append(dict(model.named_parameters()))
    fused, *others = results
    for other in others:
        for name in fused:
            torch.testing.assert_close(fused[name], other[name], rtol=1e-6, atol=1e-6)


class PartlySharded(nn.Module):
    """A layer that is split over the ranks, and a vector that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.vector = nn.Linear(4, 4), nn.Parameter(torch.ones(3))


def _update_partly_sharded(rank: int, size: int, fused: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = PartlySharded()
    fully_shard(model.layer, mesh=init_device_mesh("cpu", (size,)))
    optimizer = build_optimizer(model, config.Optimizer(options={"fused": fused}))
    for number in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5 - number)
        optimizer.step()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]


@pytest.mark.slow
def test_sharded_and_unsharded_parameters_are_updated_by_the_fused_kernel(world):
    fused, plain = (world.run(2, _update_partly_sharded, fused) for fused in (True, False))
    for a, b in zip(fused[0] + fused[1], plain[0] + plain[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def of_images(*overrides: str) -> config.Run:
    return config.build(config.EMBEDDED, [*IMAGES, *overrides])


def step_of(run: config.Run, folder: Path) -> tuple[Training, float]:
    """Return a run after one step, and the loss of that step."""
    with ranks(run.compute) as here:
        training = Training(assemble(run, here), folder)
        (batch,) = training.parts.shuffled().batches([(0, 32)])
        return training, float(training.step(Step(0, 32, 1.0), batch)[0].loss)


def test_patches_of_images_alone_become_linear_with_the_same_parameters_and_step(tmp_path):
    settings = ["compute.device=cpu", "batch.size=32", "batch.chunk=16"]
    runs = (of_images(*settings, *more) for more in ([], ["compute.linear_patches=true"]))
    (plain, loss), (linear, other) = (step_of(run, tmp_path) for run in runs)
    kinds = [[type(m) for m in training.parts.x.module.modules() if isinstance(m, nn.Conv2d)] for training in (plain, linear)]
    assert kinds == [[nn.Conv2d, nn.Conv2d], [PatchConv2d, nn.Conv2d]]
    assert loss == pytest.approx(other, rel=1e-6)
    # Each resumes from a checkpoint of the other. The first moment is a tenth of the gradient.
    assert plain.tensors().keys() == linear.tensors().keys()
    moments = ({name: value for name, value in each.tensors().items() if name.endswith("exp_avg")} for each in (plain, linear))
    assert_close(*moments)


def test_a_run_without_patches_may_ask_for_linear_ones(pairs, tmp_path):
    train(run_of(pairs, tmp_path / "run", "compute.linear_patches=true", steps=1))


def test_short_attention_and_checkpointing_exclude_each_other():
    both = ["compute.short_attention=true", "x.checkpointing=true"]
    with pytest.raises(ValueError, match=r"compute\.short_attention.*must be false with x\.checkpointing"):
        config.build(config.EMBEDDED, both)


def test_a_run_may_ask_for_short_attention(pairs, tmp_path):
    run = run_of(pairs, tmp_path / "run", "compute.short_attention=true", steps=1)
    with pytest.warns(UserWarning, match=r"compute\.short_attention has no effect, because the kernels are for Hopper GPUs"):
        train(run)
    with ranks(run.compute) as here, pytest.warns(UserWarning, match="has no effect"):
        parts = assemble(run, here)
    # One hook before forward and one after it, on each tower.
    for tower in (parts.x.module, parts.y.module):
        assert len(tower._forward_pre_hooks) == len(tower._forward_hooks) == 1


WITH_BLOCKS = ["y.name=text", "y.options.depth=6", "y.options.width=16", "y.options.heads=2"]


@pytest.mark.slow
def test_a_run_with_bf16_residuals_trains_and_resumes_exactly(pairs, tmp_path, monkeypatch):
    settings = [*WITH_BLOCKS, "compute.precision=bf16", "compute.bf16_residuals=true"]
    whole, stopped = (run_of(pairs, tmp_path / name, *settings, steps=4) for name in ("whole", "stopped"))
    train(whole)
    stopping(monkeypatch, after=2)
    with pytest.raises(Stopped):
        train(stopped)
    monkeypatch.undo()
    train(stopped)
    assert_equal(final(whole.out), final(stopped.out))
    plain = run_of(pairs, tmp_path / "plain", *settings[:-1], steps=4)
    train(plain)
    before, after = final(plain.out), final(whole.out)
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ([*WITH_BLOCKS, "compute.precision=fp32"], r"compute\.precision is not bf16"),
        ([*WITH_BLOCKS, "compute.precision=fp16"], r"compute\.precision is not bf16"),
        (["compute.precision=bf16"], "no tower has 6 equal blocks with norms"),
    ],
)
def test_a_run_says_why_bf16_residuals_have_no_effect(pairs, tmp_path, settings, reason):
    run = run_of(pairs, tmp_path / "run", "compute.bf16_residuals=true", *settings)
    with ranks(run.compute) as here, pytest.warns(UserWarning, match=rf"compute\.bf16_residuals has no effect, because {reason}"):
        assemble(run, here)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "settings", "linear"),
    [
        ("H200", ["compute.precision=bf16"], True),
        ("H200", ["compute.precision=fp32"], False),
        ("H200", ["compute.precision=bf16", "compute.linear_patches=false"], False),
        ("cpu", ["compute.precision=fp32"], False),
        ("cpu", ["compute.precision=fp32", "compute.linear_patches=true"], True),
    ],
)
def test_a_plan_counts_the_patches_as_the_run_computes_them(gpu, settings, linear):
    run = of_images(*settings)
    request = Request(run, data=1000, gpu=gpu, gpus=1, precision=run.compute.precision)
    calls = [call for call in estimator_for(problem_of(request)).task.towers[0].forward.calls if call.flops]
    # The patches, the convolution on features, which stays, and the projection.
    assert ["matmul" in call.op_class for call in calls] == [linear, False, True]
    assert ["convolution" in call.op_class for call in calls] == [not linear, True, False]


def predicted(*overrides: str) -> tuple[Prediction, StepTime, int]:
    """Return the predicted memory and seconds of a step of the embedded run, and its parameters."""
    run = config.build(config.EMBEDDED, ["compute.precision=bf16", *overrides])
    request = Request(run, data=100_000, gpu="H200", gpus=1, precision="bf16")
    estimator = estimator_for(problem_of(request))
    strategy = Strategy(1, 16, 16, 1, precision="bf16")
    return estimator.peaks.predict(strategy), estimator.step(strategy), estimator.task.trainable


@pytest.mark.slow
def test_a_plan_predicts_the_update_as_the_run_computes_it():
    memory, step, trainable = predicted()
    assert predicted("optimizer.options.fused=true")[0] == memory
    lists, slower, _ = predicted("optimizer.options.foreach=true")
    assert predicted("optimizer.options.capturable=true")[0] == lists
    # AdamW over lists has temporaries of the size of the weights, at the peak of so small a step. The fused kernel has none; it has
    # its step counts, of 512 bytes each, on the device.
    assert lists.moment == "optimizer step" != memory.moment
    assert lists.phases["optimizer step"] - memory.parts["weights"] - memory.parts["optimizer"] > 7.9 * trainable
    assert lists.peak_bytes > memory.peak_bytes
    assert step.parts["optimizer"] < 0.5 * slower.parts["optimizer"]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_on_a_gpu_is_fused_with_linear_patches_in_half_precision(tmp_path, precision):
    settings = ["compute.device=cuda", f"compute.precision={precision}", "batch.size=32", "batch.chunk=16"]
    slower = ["optimizer.options.foreach=true", "compute.linear_patches=false"]
    runs = (of_images(*settings, *more) for more in ([], slower))
    (fast, loss), (plain, other) = (step_of(run, tmp_path) for run in runs)
    assert [training.optimizer.defaults["fused"] for training in (fast, plain)] == [True, None]
    kinds = [[type(m) for m in training.parts.x.module.modules() if isinstance(m, nn.Conv2d)] for training in (fast, plain)]
    assert kinds == [[nn.Conv2d if precision == "fp32" else PatchConv2d, nn.Conv2d], [nn.Conv2d, nn.Conv2d]]
    # Sums in another order, of values rounded to the precision; fp32 convolutions compute in TF32.
    unit = 2**-8 if precision == "bf16" else 2**-11
    assert loss == pytest.approx(other, rel=4 * unit)
    for name, moment in plain.tensors().items():
        if name.endswith("exp_avg"):
            size = float(moment.abs().max())
            torch.testing.assert_close(fast.tensors()[name], moment, rtol=0, atol=max(1e-7, 16 * unit * size))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.filterwarnings("ignore:the encoder contains batch normalisation")
@pytest.mark.parametrize("name", ["vit_small_patch16_224", "resnet50"])
@pytest.mark.parametrize("plain", [False, True], ids=["as by default", "foreach and convolution"])
def test_predicted_memory_is_the_memory_of_a_step(tmp_path, plain, name):
    pytest.importorskip("timm")
    overrides = [
        f"x.name=timm:{name}", "x.options={}", "data.workers=0", "evaluate.large=[]", "batch.size=128",
        "batch.chunk=128", "batch.keep=1", "compute.device=cuda", "compute.precision=bf16",
    ]  # fmt: skip
    plainly = ["optimizer.options.foreach=true", "compute.linear_patches=false", "compute.channels_last=false"]
    overrides += plainly if plain else []
    run = config.build(config.EMBEDDED, overrides)
    with ranks(run.compute) as here:
        training = Training(assemble(run, here), tmp_path)
        (batch,) = training.parts.shuffled().batches([(0, 128)])
        for number in range(4):
            if number == 2:
                torch.cuda.reset_peak_memory_stats()
            training.step(Step(0, 128, 1.0), batch)
        measured = torch.cuda.max_memory_allocated()
        found = predictions(run, here, 10_000, 0)(128, 128, 1)
    # cuDNN chooses algorithms, and with them its workspace, by the memory that is free.
    assert found.peak_bytes == pytest.approx(measured, rel=0.05 if name == "resnet50" else 0.02)


def test_equal_blocks_are_compiled_one_by_one_and_other_towers_whole(monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(module))
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(6)]
    compile_tower(nn.Sequential(nn.Linear(4, 8), *blocks))
    assert compiled == blocks
    # Blocks of stochastic depth: a compiled block holds for one rate.
    for rate, block in enumerate(blocks, start=1):
        block[1].p = rate / 10
    for tower in (nn.Sequential(nn.Linear(4, 8), *blocks), nn.Sequential(nn.Linear(4, 8), nn.ReLU())):
        compiled.clear()
        compile_tower(tower)
        assert compiled == [tower]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_with_compiled_towers_ends_at_the_same_weights(pairs, tmp_path, monkeypatch):
    # Without the code generator, which takes a minute.
    monkeypatch.setattr(nn.Module, "compile", lambda module, compile=nn.Module.compile: compile(module, backend="aot_eager"))
    ends = []
    for value in ("false", "true"):
        run = run_of(pairs, tmp_path / value, "y.name=text", "y.options.depth=6", f"compute.compile={value}", steps=2)
        train(run)
        ends.append(final(run.out))
    eager, compiled = ends
    assert eager.keys() == compiled.keys()
    for name, tensor in eager.items():
        torch.testing.assert_close(compiled[name], tensor, msg=name)
