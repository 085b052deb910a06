"""The work and memory of a model follow the options of the run and the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megabatch import config
from megabatch.costs.counting import count_work
from megabatch.costs.hardware import find_machine
from megabatch.costs.lora import add_adapters
from megabatch.costs.operations import flops_of
from megabatch.costs.strategy import Precision, Strategy
from megabatch.costs.time import StepWork, step_time
from megabatch.data.glyphs import Glyphs
from megabatch.planning.reading import PIECE, reading_rate
from megabatch.planning.request import Request, base_run
from megabatch.planning.workload import Workload, traced, workload

MIB = 2**20
RUN = config.build(config.EMBEDDED, ["compute.precision=bf16"])
REQUEST = Request(RUN, data=100_000)
# The loss of 8,192 pairs is the peak, because the chunks are small.
STRATEGY = Strategy(1, 8192, 64, 0, precision="bf16")


@pytest.fixture(scope="module")
def work() -> Workload:
    return workload(REQUEST, RUN, "bf16", find_machine("H200"))


def predicted(work: Workload, *overrides: str, gpu: str = "H200") -> Any:
    run = config.build(config.EMBEDDED, ["compute.precision=bf16", *overrides])
    return traced(REQUEST, run, work, find_machine(gpu))(STRATEGY)


def test_a_smaller_workspace_is_a_smaller_peak(work: Workload) -> None:
    usual, less, least = (
        predicted(work, *workspace) for workspace in ([], [f"compute.workspace={128 * MIB}"], [f"compute.workspace={64 * MIB}"])
    )
    # The workspace of the tiles, and the sums of 8,192 rows and columns.
    assert usual.parts["loss tiles"] == (256 + 16) * MIB and less.parts["loss tiles"] == (128 + 16) * MIB
    assert usual.peak_bytes - less.peak_bytes == 128 * MIB and less.peak_bytes - least.peak_bytes == 64 * MIB
    assert least.reserved_bytes < less.reserved_bytes < usual.reserved_bytes


def test_workspaces_are_those_of_the_devices_capability(work: Workload) -> None:
    h200, a100 = (predicted(work, gpu=gpu) for gpu in ("H200", "A100"))
    # cuBLAS has one workspace for forward and one for backward: 32 MiB each on 9.0, 8 MiB and 128 KiB before.
    assert h200.parts["workspace"] - a100.parts["workspace"] == 2 * (24 * MIB - 128 * 1024)
    assert h200.peak_bytes - a100.peak_bytes == h200.parts["workspace"] - a100.parts["workspace"]
    assert predicted(work, gpu="H100").peak_bytes == h200.peak_bytes and predicted(work, gpu="L4").peak_bytes == a100.peak_bytes


@pytest.mark.slow
def test_towers_are_counted_as_the_device_computes_them() -> None:
    run = config.build(config.EMBEDDED, ["x.name=vit", "x.options={}"])
    cpu, h200 = (workload(Request(run, data=100_000), run, "fp32", find_machine(gpu)) for gpu in ("cpu", "H200"))
    on_cpu, on_cuda = (count_work(cpu.modules[0], cpu.inputs[0], device=device) for device in ("cpu", "cuda"))
    assert cpu.towers[0] == on_cpu != on_cuda == h200.towers[0]
    assert cpu.towers[0].forward.flops == h200.towers[0].forward.flops
    half = workload(Request(run, data=100_000), run, "bf16", find_machine("H200")).towers[0]
    assert {"attention"} == {call.op_class for call in half.forward.calls if "attention" in call.op_class}


@pytest.mark.slow
def test_a_bf16_residual_stream_is_less_memory() -> None:
    def peak(*overrides: str, precision: Precision = "bf16", checkpointing: bool = False) -> int:
        tower = ["x.name=vit", "x.options={}", "x.options.size=64", "x.options.depth=8", f"compute.precision={precision}"]
        run = config.build(config.EMBEDDED, [*tower, *overrides])
        request, machine = Request(run, data=100_000), find_machine("H200")
        strategy = Strategy(1, 256, 256, 1, precision=precision, checkpointing=checkpointing)
        return traced(request, run, workload(request, run, precision, machine), machine)(strategy).peak_bytes

    # Checkpointing saves the inputs of eight blocks, 64 positions of 96 numbers. All but the first have two bytes less a number;
    # there is one more copy of the stream at the peak.
    saved = peak(checkpointing=True) - peak("compute.bf16_residuals=true", checkpointing=True)
    assert saved == 6 * 256 * 64 * 96 * 2
    # Otherwise norms save their inputs in fp32, to which autocast on CUDA casts them: temporaries alone are smaller.
    assert peak() > peak("compute.bf16_residuals=true")
    assert peak(precision="fp32") == peak("compute.bf16_residuals=true", precision="fp32")


def test_a_locked_tower_has_no_backward(work: Workload) -> None:
    run = config.build(config.EMBEDDED, ["compute.precision=bf16", "x.locked=true"])
    x, y = workload(Request(run, data=100_000), run, "bf16", find_machine("H200")).towers
    assert not x.backward.calls and x.trainable == 0 and x.parameters == work.towers[0].parameters
    assert y == work.towers[1] and y.backward.flops > y.forward.flops > 0
    # Images reach the device as bytes, texts as token ids: rows of some hundred bytes to some kB.
    assert all(100 <= tower.inputs <= 10_000 for tower in (x, y))


def tiny_folder(path: Path, name: str, **shape: Any) -> str:
    """Write the configuration of a small text model, as transformers saves it, and return the tower's name."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 300}
    getattr(transformers, name)(**{**sizes, **shape}).save_pretrained(path)
    return f"transformers:{path}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [("BertConfig", {}), ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 16}), ("ModernBertConfig", {"pad_token_id": 0})],
)
def test_a_text_embedder_is_counted_and_traced_at_the_requested_length(name: str, shape: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_folder(tmp_path, name, **shape)
    work = {}
    for length in (32, 64):
        request = Request(model, objective="finetune", data=1000, text_length=length, gpu="H200")
        run = base_run(request)
        assert request.pairs and run.y.name == "x"
        work[length] = workload(request, run, "bf16", find_machine("H200"))
        assert len(work[length].towers) == 1 and work[length].inputs[0](3)[0]["input_ids"].shape == (3, length)
    predicted = traced(request, run, work[64], find_machine("H200"))(replace(STRATEGY, shard=64, chunk=32))
    assert predicted.parts["weights"] >= 4 * work[64].towers[0].parameters
    attention = [sum(c.times * c.flops for c in work[n].towers[0].forward.calls if c.op_class == "attention") for n in (32, 64)]
    # Attention grows with the square of the length; a kernel for half precision without a mask computes it.
    assert attention[1] == pytest.approx(4 * attention[0])


def test_grouped_queries_cost_as_much_attention_as_separate_ones() -> None:
    query, few, all_heads = (torch.empty(2, heads, 16, 8, device="meta", dtype=torch.bfloat16) for heads in (4, 1, 4))
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    grouped, separate = (flops_of(operator, (query, keys, keys), {}, None) for keys in (few, all_heads))
    # Two products of 2 × 16 × 16 × 8 FLOPs for each of 2 × 4 heads.
    assert grouped == separate == 2 * 2 * 4 * 2 * 16 * 16 * 8


@pytest.mark.slow
def test_lora_trains_adapters_only_and_keeps_no_gradients_of_the_rest(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path, "BertConfig", hidden_size=256, intermediate_size=1024)
    works, peaks = [], []
    for rank in (None, 4):
        request = Request(model, objective="finetune", data=1000, text_length=32, lora=rank, gpu="H200")
        run = base_run(request)
        works.append(workload(request, run, "bf16", find_machine("H200")))
        peaks.append(traced(request, run, works[-1], find_machine("H200"))(replace(STRATEGY, shard=64, chunk=32)))
    full, adapted = (work.towers[0] for work in works)
    # Six linear layers in each of two blocks; four are 256 wide, two lead to 1,024 and back.
    assert adapted.trainable == 2 * 4 * (4 * 2 * 256 + 2 * (256 + 1024)) < full.trainable / 20
    assert adapted.parameters == full.parameters + adapted.trainable
    # Backward computes no gradients of frozen weights: nearly half of the matrix products of a step less.
    assert adapted.backward.flops < 0.7 * full.backward.flops
    weights, optimizer = (peaks[1].parts[part] / peaks[0].parts[part] for part in ("weights", "optimizer"))
    # Frozen weights are in half precision; only the adapters have fp32 weights and Adam's state.
    assert 0.5 < weights < 0.6 and optimizer < 0.1
    with pytest.raises(ValueError, match="lora is 4"):
        add_adapters(nn.Linear(3, 3), 4, "bf16")


class Attending(nn.Module):
    """A block whose attention reads the weights of its last layer, and whose dtype is read from a linear layer, as in OpenCLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.perceptron = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.perceptron.weight.dtype)
        return self.perceptron(self.attention(x, x, x, need_weights=False)[0])


def test_layers_whose_weights_are_only_read_have_no_adapters() -> None:
    model = add_adapters(nn.Sequential(Attending(), Attending()), 2, "bf16")
    work = count_work(model, lambda rows: torch.zeros(rows, 4, 16), "bf16")
    # One linear layer in each block has two matrices of 2 × 16; every one of them computes something.
    assert work.trainable == 2 * 2 * 2 * 16
    model.float()(torch.randn(3, 4, 16)).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["ViT-B/32", "google/siglip-base-patch16-224"])
@pytest.mark.slow
def test_lora_of_an_image_and_a_text_tower_of_open_clip(name: str) -> None:
    pytest.importorskip("open_clip")
    machine = find_machine("A100-80GB")
    request = Request(name, data=100_000, start="pretrained", lora=4, gpu="A100-80GB")
    run = base_run(request)
    work = workload(request, run, "bf16", machine)
    predict = traced(request, run, work, machine)
    for checkpointing in (False, True):
        predicted = predict(replace(STRATEGY, shard=64, chunk=32, checkpointing=checkpointing))
        assert all(0 < tower.trainable < tower.parameters / 50 for tower in work.towers)
        # Only adapters have Adam's two moments, in fp32.
        assert predicted.parts["optimizer"] < 3 * 4 * sum(tower.trainable for tower in work.towers)


def test_a_classifier_with_adapters_can_recompute_its_blocks() -> None:
    machine = find_machine("A100-80GB")
    request = Request("vit", objective="supervised", data=1000, classes=1000, lora=4, gpu="A100-80GB")
    run = base_run(request)
    predict = traced(request, run, workload(request, run, "bf16", machine), machine)
    kept, recomputed = (predict(replace(STRATEGY, shard=64, chunk=64, checkpointing=again)) for again in (False, True))
    assert recomputed.parts["weights"] == kept.parts["weights"] and recomputed.peak_bytes < kept.peak_bytes


@pytest.mark.slow
def test_language_models_are_named_and_misspelt_ones_get_a_hint() -> None:
    pytest.importorskip("transformers")
    request = Request("HuggingFaceTB/SmolLM2-135M", objective="lm", data=10**6, length=128, gpu="H200")
    work = workload(request, base_run(request), "bf16", find_machine("H200"))
    assert work.towers[0].parameters == pytest.approx(134.5e6, rel=0.01) and not work.built
    with pytest.raises(ValueError, match="SmolLM2"):
        workload(replace(request, model="SmolLM-135M"), base_run(request), "bf16", find_machine("H200"))


def test_reading_is_measured_on_the_source_and_assumed_without_it(work: Workload) -> None:
    ticks = iter(range(10**6))
    measured = reading_rate(RUN, work.built, clock=lambda: 0.01 * next(ticks))
    # The clock is read once for each piece.
    assert measured.seconds == pytest.approx(0.01 / PIECE, rel=0.05) and "glyphs" in measured.source
    missing = replace(RUN, data=replace(RUN.data, source="no/such/folder"))
    assert reading_rate(missing, work.built).seconds > 1e-3 and reading_rate(missing, ()).seconds == 0


@pytest.mark.parametrize("reduced", [True, False])
def test_reading_is_measured_as_a_run_reads(work: Workload, monkeypatch: pytest.MonkeyPatch, reduced: bool) -> None:
    requests = []

    def read(self, shard, index, request):
        requests.append(request.x)
        return original(self, shard, index, request)

    original = Glyphs.read
    monkeypatch.setattr(Glyphs, "read", read)
    ticks = iter(range(10**6))
    reading_rate(replace(RUN, data=replace(RUN.data, reduce_jpegs=reduced)), work.built, clock=lambda: 0.3 * next(ticks))
    assert len(requests) == 3 * PIECE
    assert all((request.sufficient is not None) == reduced and request.tensor for request in requests)


def test_workers_have_less_to_do_if_the_device_decodes(work: Workload) -> None:
    run = replace(RUN, data=replace(RUN.data, source="no/such/folder"))
    workers, device = (
        reading_rate(replace(run, data=replace(run.data, decode=where)), work.built) for where in ("workers", "device")
    )
    assert not workers.decoding and 0 < device.decoding < device.seconds < workers.seconds / 5


def test_a_step_waits_for_workers_that_are_slower_than_the_device(work: Workload) -> None:
    machine, strategy = find_machine("H200"), Strategy(1, 1024, 256, 1, precision="bf16")
    quick, slow, alone = (
        step_time(StepWork(work.towers, dim=128, reading_s=reading_s, workers=workers), strategy, machine)
        for reading_s, workers in ((1e-9, 8), (0.01, 8), (0.01, 0))
    )
    assert "waiting for data" not in quick.parts
    # Eight processes read 1,024 samples of 10 ms each while the device computes; without them, nothing overlaps.
    assert slow.seconds == pytest.approx(1.28) and alone.seconds == pytest.approx(quick.seconds + 10.24)
    decoded = StepWork(work.towers, dim=128, reading_s=0.001, workers=8, decoding_s=0.002)
    assert step_time(decoded, strategy, machine).seconds == pytest.approx(2.048), "one thread launches the decoding"
