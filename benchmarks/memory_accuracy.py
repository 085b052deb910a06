"""What predict_memory says beside what a GPU then takes: one process a case, rows to benchmarks/results/memory-cuda.jsonl.

    python -m benchmarks.memory_accuracy                 # all cases, on a GPU: about six minutes
    python -m benchmarks.memory_accuracy --quick         # two tiny cases on a CPU: that the program works
    python -m benchmarks.memory_accuracy --predict-only  # no device: predictions and others' formulas alone

Beside each prediction stands what others' arithmetic says of the case: the seeds' formula, torchinfo's and accelerate's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megabatch
from benchmarks.machine import describe
from benchmarks.peers import declare_torchvision_schemas
from megabatch.planning.memory import Prediction, Setup, predict_memory
from megabatch.planning.memory.step import default_loss, switch_checkpointing

RESULTS = Path(__file__).parent / "results"
STEPS = 3
DTYPES = {"fp32": None, "bf16": torch.bfloat16}
# A case that takes longer is given up; the others still have their turn.
SECONDS = 120


@dataclass(frozen=True)
class Case:
    """One step of a model. `chunk` encodes in chunks; without it a contrastive step takes the batch at once."""

    model: str
    rows: int
    precision: str = "fp32"
    checkpointing: bool = False
    objective: str = "supervised"
    chunk: int | None = None
    keep: int = 0
    device: str = "cuda"

    def setup(self) -> Setup:
        fields = asdict(self)
        del fields["model"], fields["rows"]
        return Setup(**fields)


@dataclass(frozen=True)
class Subject:
    """A model by name: how it is made, and its inputs for a number of rows; of two towers, two of each."""

    build: Callable[[], Any]
    inputs: Any


def cases() -> Iterator[Case]:
    """Every family, in both precisions, with and without checkpointing, at three batch sizes where that says something."""
    for rows in (32, 64, 128):
        yield Case("resnet50", rows)
        yield Case("vit_base_patch16_224", rows, "bf16")
    for name in ("resnet50", "convnext_tiny", "efficientnet_b0", "swin_tiny_patch4_window7_224"):
        yield Case(name, 64, "bf16")
    for name in ("convnext_tiny", "efficientnet_b0", "vit_base_patch16_224", "swin_tiny_patch4_window7_224"):
        yield Case(name, 64)
    yield Case("vit_large_patch14_224", 32, "bf16")
    yield Case("vit_large_patch14_224", 64, "bf16", checkpointing=True)
    for precision in ("fp32", "bf16"):
        yield Case("bert-base", 32, precision)
        yield Case("gpt2", 8, precision)
        yield Case("gpt2-medium", 4, precision)
    yield Case("gpt2", 16, "bf16", checkpointing=True)
    yield Case("bert-base", 64, "bf16", checkpointing=True)
    for name, rows, chunk in (("clip-vit-b-32", 512, 128), ("clip-vit-l-14", 128, 32)):
        yield Case(name, rows, "bf16", objective="clip")
        yield Case(name, 8 * rows, "bf16", objective="clip", chunk=chunk)
        yield Case(name, 8 * rows, "bf16", objective="siglip", chunk=chunk, keep=2)


def quick_cases() -> list[Case]:
    return [Case("tiny", 8, device="cpu"), Case("tiny-clip", 8, objective="clip", chunk=4, device="cpu")]


def subject(name: str) -> Subject:
    """The model of that name, with random weights."""
    if name == "tiny":
        return Subject(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 64), nn.GELU(), nn.Linear(64, 10)), _pictures(16))
    declare_torchvision_schemas()
    if name == "tiny-clip" or name.startswith("clip-"):
        return _clip(name)
    if name == "bert-base" or name.startswith("gpt2"):
        return _language(name)
    import timm

    return Subject(lambda: timm.create_model(name), _pictures(224))


def _pictures(side: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.zeros(rows, 3, side, side)


def _language(name: str) -> Subject:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, GPT2Config

    if name == "bert-base":
        maker, config, length = AutoModelForMaskedLM, BertConfig(), 512
    else:
        medium = {"n_embd": 1024, "n_layer": 24, "n_head": 16} if name == "gpt2-medium" else {}
        maker, config, length = AutoModelForCausalLM, GPT2Config(**medium), 1024

    def inputs(rows: int) -> dict[str, Tensor]:
        ids = torch.zeros(rows, length, dtype=torch.int64)
        return {"input_ids": ids, "labels": torch.zeros_like(ids)}

    return Subject(lambda: maker.from_config(config, attn_implementation="sdpa"), inputs)


class _Tower(nn.Module):
    """One side of a transformers CLIP, normalised in fp32."""

    def __init__(self, encoder: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.encoder, self.projection = encoder, projection

    def forward(self, inputs: Tensor) -> Tensor:
        return F.normalize(self.projection(self.encoder(inputs).pooler_output).float(), dim=-1)

    def gradient_checkpointing_enable(self) -> None:
        self.encoder.gradient_checkpointing_enable()


def _clip(name: str) -> Subject:
    from transformers import AutoModel, CLIPConfig

    from benchmarks.encoders.model import TINY, VIT_L_14

    shape = {"clip-vit-l-14": VIT_L_14, "tiny-clip": TINY, "clip-vit-b-32": {"projection_dim": 512}}[name]
    config = CLIPConfig(**shape)

    def build() -> tuple[nn.Module, nn.Module]:
        model = AutoModel.from_config(config, attn_implementation="sdpa")
        return _Tower(model.vision_model, model.visual_projection), _Tower(model.text_model, model.text_projection)

    text = config.text_config

    def texts(rows: int) -> Tensor:
        # Every text ends with the token that ends a text, which the tower looks for.
        return torch.full((rows, text.max_position_embeddings), text.eos_token_id, dtype=torch.int64)

    return Subject(build, (_pictures(config.vision_config.image_size), texts))


def measure(case: Case) -> dict[str, Any]:
    """Real steps on the device: the highest number of bytes in tensors, and in what the allocator holds."""
    device, made = torch.device(case.device), subject(case.model)
    with device:
        built = made.build()
    modules = list(built) if isinstance(built, tuple) else [built]
    if case.checkpointing:
        for module in modules:
            switch_checkpointing(module, case.model)
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()])
    supervised = case.objective == "supervised"
    step = _supervised(case, modules[0], made.inputs) if supervised else _contrastive(case, modules, made.inputs)
    for number in range(STEPS):
        if number == 1 and case.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step()
        optimizer.step()
        optimizer.zero_grad()
    if case.device != "cuda":
        return {"measured": None, "measured_reserved": None}
    return {"measured": torch.cuda.max_memory_allocated(), "measured_reserved": torch.cuda.max_memory_reserved()}


def _autocast(case: Case) -> Any:
    dtype = DTYPES[case.precision]
    return nullcontext() if dtype is None else torch.autocast(case.device, dtype)


def _supervised(case: Case, module: nn.Module, inputs: Callable[[int], Any]) -> Callable[[], None]:
    def step() -> None:
        # Made anew in every step, as a loader does.
        with torch.device(case.device):
            batch = inputs(case.rows)
            with _autocast(case):
                output = module(**batch) if isinstance(batch, dict) else module(batch)
                loss = default_loss(output)
        loss.backward()

    return step


def _contrastive(case: Case, towers: list[nn.Module], inputs: Any) -> Callable[[], None]:
    chunk = case.chunk or case.rows
    keep = case.keep if case.chunk else 1
    encode_x, encode_y = (megabatch.cached(tower, chunk=chunk, keep=keep, device=case.device) for tower in towers)
    scale = torch.tensor(10.0, device=case.device, requires_grad=True)
    bias = torch.tensor(-10.0, device=case.device, requires_grad=True)
    x_rows, y_rows = (make(case.rows) for make in inputs)

    def step() -> None:
        with _autocast(case):
            y, x = encode_y(y_rows), encode_x(x_rows)
        if case.objective == "siglip":
            loss = megabatch.siglip_loss(x, y, scale, bias, group=None)
        else:
            loss = megabatch.clip_loss(x, y, scale, group=None)
        loss.backward()

    return step


def predict(case: Case) -> Prediction:
    made = subject(case.model)
    return predict_memory(made.build, made.inputs, case.rows, case.setup())


def others(case: Case) -> dict[str, int]:
    """What other arithmetic says, in bytes.

    seeds: 12 bytes a parameter for weights, gradients and Adam's state, and rows × length × width × bytes for each layer, which the
        documents take for all that a layer keeps; torchinfo: parameters, and twice the output of every innermost module with
        weights; accelerate: four times the weights, whatever the batch.
    """
    made = subject(case.model)
    with torch.device("meta"):
        built = made.build()
    modules = list(built) if isinstance(built, tuple) else [built]
    inputs = made.inputs if isinstance(made.inputs, tuple) else (made.inputs,)
    weights = sum(p.numel() * p.element_size() for module in modules for p in module.parameters())
    element = 4 if DTYPES[case.precision] is None else 2
    innermost = blocks = 0
    for module, make in zip(modules, inputs, strict=True):
        found = _output_bytes(module, make, case.rows)
        innermost, blocks = innermost + found[0], blocks + found[1]
    return {"seeds": 3 * weights + blocks * element // 4, "torchinfo": weights + 2 * innermost, "accelerate": 4 * weights}


def _output_bytes(module: nn.Module, make: Callable[[int], Any], rows: int) -> tuple[int, int]:
    """The bytes of the outputs of all innermost modules with weights, in fp32, and of all layers: members of lists of modules."""
    members = {member for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) for member in m}
    layers = {member for member in members if not any(inner in members for inner in member.modules() if inner is not member)}
    sizes = {"innermost": 0, "layers": 0}

    def note(inner: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor):
            return
        if not any(True for _ in inner.children()) and any(True for _ in inner.parameters()):
            sizes["innermost"] += first.numel() * 4
        if inner in layers:
            sizes["layers"] += first.numel() * 4

    for inner in module.modules():
        inner.register_forward_hook(note)
    with torch.no_grad(), torch.device("meta"):
        batch = make(rows)
        module(**batch) if isinstance(batch, dict) else module(batch)
    return sizes["innermost"], sizes["layers"]


def predicted_row(case: Case) -> dict[str, Any]:
    """What is said of a case without the device."""
    began = time.perf_counter()
    predicted = predict(case)
    return {
        **asdict(case),
        "predicted": predicted.peak_bytes,
        "predicted_reserved": predicted.reserved_bytes,
        "parts": predicted.parts,
        "moment": predicted.moment,
        "predict_seconds": round(time.perf_counter() - began, 2),
        **{f"others_{name}": size for name, size in others(case).items()},
    }


def measured_row(case: Case) -> dict[str, Any]:
    """What the device says, and which device that is."""
    return measure(case) | {"machine": describe(case.device)}


def run_apart(case: Case, part: str) -> dict[str, Any]:
    """A part of a row ("predict" or "measure"), from a process of its own: nothing of one case is left to the next."""
    command = [sys.executable, "-m", "benchmarks.memory_accuracy", f"--{part}", json.dumps(asdict(case))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"{part}: took more than {SECONDS} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": f"{part}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"}
    return json.loads(lines[-1])  # type: ignore[no-any-return]


def joined(predicted: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """One line of the table, with the errors of both predictions."""
    found = {**measured, **predicted}
    if found.get("measured") and "predicted" in found:
        found["error"] = found["predicted"] / found["measured"] - 1
        found["reserved_error"] = found["predicted_reserved"] / found["measured_reserved"] - 1
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two tiny cases on a CPU")
    parser.add_argument("--predict-only", action="store_true", help="measure nothing")
    parser.add_argument("--only", default="", help="cases whose model's name holds this")
    parser.add_argument("--output", type=Path, default=RESULTS / "memory-cuda.jsonl")
    parser.add_argument("--jobs", type=int, default=4, help="predictions made at once, beside the one measurement")
    for part in ("--predict", "--measure"):
        parser.add_argument(part, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for text, part in ((options.predict, predicted_row), (options.measure, measured_row)):
        if text:
            print(json.dumps(part(Case(**json.loads(text)))))
            return 0
    chosen = [case for case in (quick_cases() if options.quick else cases()) if options.only in case.model]
    if not options.predict_only and not options.quick and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here: pass --predict-only, or --quick")
    with options.output.open("w") as file, ThreadPoolExecutor(options.jobs) as pool:
        waiting = [pool.submit(run_apart, case, "predict") for case in chosen]
        failed = False
        for case, predicted in zip(chosen, waiting, strict=True):
            measured = {} if options.predict_only else run_apart(case, "measure")
            failed |= _said({**asdict(case), **joined(predicted.result(), measured)}, file)
    return int(failed)


def _said(found: dict[str, Any], file: Any) -> bool:
    print(json.dumps(found), file=file, flush=True)
    names = ("model", "rows", "precision", "checkpointing", "objective", "chunk", "predicted", "measured", "error")
    print({name: found[name] for name in (*names, "reserved_error", "failed") if found.get(name) is not None}, flush=True)
    return "failed" in found


if __name__ == "__main__":
    raise SystemExit(main())
