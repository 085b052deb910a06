"""Time whole training steps with one optimization after the other: `python -m benchmarks.whole_steps --help`.

A step is zero_grad, both encoders, the loss, backward and AdamW, in bf16 autocast, with inputs in pinned host memory. Settings with
different modules run in different processes, and the gradients of each are compared with those of a plain step first. With fp8
layers the difference is that of the arithmetic, and a lost chunk is found by a second comparison, with a step in two passes of the
same layers.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import megabatch
from benchmarks import report
from benchmarks.encoders.measure import flops_of, matmul_rate, synchronize
from benchmarks.encoders.model import TINY, VIT_B_32, VIT_L_14, Batch, Clip, TextTower
from benchmarks.encoders.schemes import Megabatch, Scheme, TwoPass
from benchmarks.machine import describe
from benchmarks.peers import declare_torchvision_schemas

FILE = Path(__file__).parent / "results" / "whole-steps-cuda.jsonl"
# Largest difference from the plain step's gradients, which bf16 explains; a lost chunk makes a difference of tens of percent.
AGREEMENT = 0.06
# The same between two steps with fp8 layers and equal chunks, in which few roundings differ. One of three chunks is a third.
FP8_AGREEMENT = 0.2


class Recipe(NamedTuple):
    """A recipe of torchao.float8 by its name there."""

    name: str
    title: str


RECIPES = {
    "fp8": Recipe("tensorwise", "fp8 with a scale per tensor"),
    "fp8_rows": Recipe("rowwise", "fp8 with a scale per row"),
    "fp8_rows_gw": Recipe("rowwise_with_gw_hp", "fp8 with a scale per row, but weight gradients in bf16"),
}
# Products of fp8 numbers need widths that are multiples of this, and a device of this capability.
FP8_MULTIPLE, FP8_CAPABILITY = 16, (8, 9)
OPTIMIZATIONS = {
    "fused": "fused AdamW",
    "linear": "linear patches",
    "channels_last": "channels last",
    "layers": "compiled layers",
    "compile": "compiled towers",
    "attention": "short attention",
    "residuals": "bf16 residuals",
} | {name: recipe.title for name, recipe in RECIPES.items()}


class Case(NamedTuple):
    """A model and a batch. chunk: None runs it at once. forward: chunks at once in forward. keep: as in `megabatch.cached`."""

    model: str
    pairs: int
    chunk: int | None = None
    forward: int = 1
    keep: int | str = 0
    optimizations: tuple[str, ...] = ()

    @classmethod
    def of(cls, words: str) -> Case:
        """Read MODEL:PAIRS, then /CHUNK, xFORWARD, kKEEP and +OPTIMIZATION…, for example `l14:2048/256x2+compile+fused`."""
        match = re.fullmatch(r"(\w+):(\d+)(?:/(\d+)(?:x(\d+))?(?:k(\d+|auto))?)?((?:\+\w+)*)", words)
        optimizations = tuple(match[6].split("+")[1:]) if match else ()
        if match is None or match[1] not in MODELS or not set(optimizations) <= set(OPTIMIZATIONS):
            raise argparse.ArgumentTypeError(
                f"{words!r}: must be MODEL:PAIRS[/CHUNK[xFORWARD][kKEEP]][+OPTIMIZATION…], MODEL one of {', '.join(MODELS)} and "
                f"OPTIMIZATION one of {', '.join(OPTIMIZATIONS)}"
            )
        if len(set(optimizations) & set(RECIPES)) > 1:
            raise argparse.ArgumentTypeError(f"{words!r}: must be MODEL:PAIRS… with at most one of {', '.join(RECIPES)}")
        keep = match[5] if match[5] == "auto" else int(match[5] or 0)
        return cls(match[1], int(match[2]), int(match[3]) if match[3] else None, int(match[4] or 1), keep, optimizations)

    @property
    def recipe(self) -> str | None:
        """The recipe of the fp8 layers, if the case has any."""
        return next((each for each in self.optimizations if each in RECIPES), None)

    def __str__(self) -> str:
        chunk = f"/{self.chunk}x{self.forward}k{self.keep}" if self.chunk else ""
        return f"{self.model}:{self.pairs}{chunk}" + "".join(f"+{each}" for each in self.optimizations)


class Texts(Clip):
    """BERT-base as the encoder of both sides: queries and documents of 128 tokens, without dropout, whose results would vary."""

    length = 128

    def __init__(self, shape: dict[str, Any], device: str) -> None:
        nn.Module.__init__(self)
        declare_torchvision_schemas()
        from transformers import AutoModel, BertConfig

        with torch.device(device):
            self.config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **shape)
            width = self.config.hidden_size
            encoder = AutoModel.from_config(self.config, attn_implementation="sdpa")
            self.image = self.text = TextTower(encoder, nn.Linear(width, width, bias=False))
            self.log_scale = nn.Parameter(torch.tensor(20.0).log())
        self.train()

    def batch(self, pairs: int, seed: int = 0) -> Batch:
        generator = torch.Generator(self.device).manual_seed(seed)
        random = {"generator": generator, "device": self.device}
        pinned = self.device.type == "cuda"
        sides = []
        for _ in range(2):
            ids = torch.randint(5, self.config.vocab_size, (pairs, self.length), **random).cpu()
            sides.append(ids.pin_memory() if pinned else ids)
        return Batch(*sides)


MODELS: dict[str, tuple[str, type[Clip], dict[str, Any]]] = {
    "l14": ("CLIP ViT-L/14", Clip, VIT_L_14),
    "b32": ("CLIP ViT-B/32", Clip, VIT_B_32),
    "bert": ("BERT-base", Texts, {}),
    "tiny": ("tiny CLIP", Clip, TINY),
    "tiny_bert": (
        "tiny BERT",
        Texts,
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
    ),
}
LAYERS = ("CLIPEncoderLayer", "BertLayer")
# Pairs at once in the plain step that gradients are compared with: what fits without optimizations.
PLAIN_CHUNKS = {"l14": 128, "b32": 1024, "bert": 128}


class AtOnce(Scheme):
    """Both towers without chunks, and `megabatch.clip_loss`."""

    def step(self, batch: Batch) -> Tensor:
        images, texts = (tower(self.move(rows)) for tower, rows in zip((self.clip.image, self.clip.text), batch, strict=True))
        loss = megabatch.clip_loss(images, texts, self.clip.log_scale.exp())
        loss.backward()
        return loss.detach()


class SameChunks(Scheme):
    """Two passes that compute what `Megabatch` does: a scale of fp8 numbers belongs to a chunk.

    forward: chunks at once in the first pass, without graphs if there are several. With one the first pass has graphs: a compiled
    block without graphs rounds differently.
    """

    def __init__(self, clip: Clip, chunk: int, forward: int) -> None:
        super().__init__(clip, chunk)
        self.forward = forward

    def step(self, batch: Batch) -> Tensor:
        towers = self.clip.image, self.clip.text
        leaves = [self._embeddings(tower, rows).requires_grad_() for tower, rows in zip(towers, batch, strict=True)]
        loss = megabatch.clip_loss(*leaves, self.clip.log_scale.exp())
        loss.backward()
        for tower, rows, leaf in zip(towers, batch, leaves, strict=True):
            for piece, gradient in zip(rows.split(self.chunk), leaf.grad.split(self.chunk), strict=True):
                tower(self.move(piece)).backward(gradient)
        return loss.detach()

    def _embeddings(self, tower: nn.Module, rows: Tensor) -> Tensor:
        # `Megabatch` runs its first chunk with a graph in any case.
        first, rest = rows[: self.chunk], rows[self.chunk :]
        pieces = [tower(self.move(first)).detach()]
        with torch.set_grad_enabled(self.forward == 1):
            pieces += [tower(self.move(piece)).detach() for piece in rest.split(self.forward * self.chunk) if len(piece)]
        return torch.cat(pieces)


def scheme_of(case: Case, clip: Clip) -> Scheme:
    if case.chunk is None:
        return AtOnce(clip, case.pairs)
    return Megabatch(clip, case.chunk, case.keep, case.forward * case.chunk if case.forward > 1 else None)


class Bench:
    """A model to which the optimizations of some cases have been applied, and the gradients of its plain steps."""

    def __init__(self, cases: list[Case], device: str) -> None:
        if cases[0].recipe is not None and (reason := fp8_unavailable(device)):
            raise ValueError(reason)
        torch.manual_seed(0)
        self.device = device
        self.title, kind, shape = MODELS[cases[0].model]
        self.clip = kind(shape, device)
        self.flops = sum(flops_of(self.clip, tower).both for tower in ("image", "text"))
        # Before anything is applied.
        self.expected = {self._checked(case): self._plain_gradients(case) for case in cases}
        apply(self.clip, cases[0].optimizations)

    def row(self, case: Case, runs: int) -> dict[str, Any]:
        """Return seconds, peak memory and useful share of a step, and how far its gradients are from those of a plain one."""
        optimizer = torch.optim.AdamW(self.clip.parameters(), lr=0.0, fused="fused" in case.optimizations)
        scheme = scheme_of(case, self.clip)
        rate = matmul_rate(self.device)
        self.clip.zero_grad()
        began = time.perf_counter()
        scheme.step(self.clip.batch(self._checked(case), seed=1))
        found = gradients(self.clip)
        first = time.perf_counter() - began
        difference = largest_difference(found, self.expected[self._checked(case)])
        same_chunks = None if case.recipe is None else self._difference_from_same_chunks(case, found)
        # Comparisons with NaN are false.
        if same_chunks is not None and not same_chunks <= FP8_AGREEMENT:
            return {"failed": f"the gradients differ by {same_chunks:.1%} from those of two passes with the same layers"}
        if same_chunks is None and not difference <= AGREEMENT:
            return {"failed": f"the gradients differ by {difference:.1%} from those of a plain step"}
        batch = self.clip.batch(case.pairs)
        # The second step is the first that "auto" keeps graphs in.
        self._run(scheme, optimizer, batch, 2)
        release(self.device)
        seconds = self._run(scheme, optimizer, batch, runs)
        return {
            "seconds": seconds,
            "steps": runs,
            "first_step_s": first,
            "peak_bytes": torch.cuda.max_memory_allocated() if self.device == "cuda" else None,
            "useful_share": case.pairs * self.flops / seconds / rate,
            "matmul_flops_per_s": rate,
            "difference": difference,
            "same_chunks_difference": same_chunks,
            "kept": scheme.kept(),
            "title": self.title,
        }

    def _difference_from_same_chunks(self, case: Case, found: dict[str, Tensor]) -> float:
        SameChunks(self.clip, case.chunk or case.pairs, case.forward).step(self.clip.batch(self._checked(case), seed=1))
        return largest_difference(found, gradients(self.clip))

    def _run(self, scheme: Scheme, optimizer: torch.optim.Optimizer, batch: Batch, steps: int) -> float:
        """Return the seconds of a step, of several one after the other as in a training: the host may run ahead."""
        synchronize(self.device)
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            scheme.step(batch)
            optimizer.step()
        synchronize(self.device)
        return (time.perf_counter() - began) / steps

    def _checked(self, case: Case) -> int:
        """Return the pairs of the check: all, or chunks of each kind; another shape would be compiled separately."""
        return case.pairs if case.chunk is None else (case.forward + 1) * case.chunk

    def _plain_gradients(self, case: Case) -> dict[str, Tensor]:
        TwoPass(self.clip, min(case.chunk or case.pairs, PLAIN_CHUNKS.get(case.model, case.pairs))).step(
            self.clip.batch(self._checked(case), seed=1)
        )
        return gradients(self.clip)


def convert(block: nn.Module, recipe: Recipe, *, emulate: bool = False) -> None:
    """Replace the linear layers of a block by torchao's fp8 ones with the same weights, where their widths allow it.

    emulate: round to fp8 and multiply in fp32, for devices that cannot multiply fp8 numbers.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_convertible(layer: nn.Module, name: str) -> bool:
        return isinstance(layer, nn.Linear) and layer.in_features % FP8_MULTIPLE == 0 == layer.out_features % FP8_MULTIPLE

    config = replace(Float8LinearConfig.from_recipe_name(recipe.name), emulate=emulate)
    convert_to_float8_training(block, config=config, module_filter_fn=is_convertible)


def fp8_unavailable(device: str) -> str | None:
    """Return why a device has no fp8 layers, or None."""
    if device != "cuda" or torch.cuda.get_device_capability() < FP8_CAPABILITY:
        return "fp8 layers need a CUDA device of capability {}.{} or later".format(*FP8_CAPABILITY)
    return None


def apply(clip: Clip, optimizations: tuple[str, ...]) -> None:
    """Change the towers as the optimizations say; `fused` is the optimizer's."""
    towers = {id(tower): tower for tower in (clip.image, clip.text)}.values()
    if "linear" in optimizations:
        megabatch.linear_patches(clip)
    if "attention" in optimizations:
        for tower in towers:
            megabatch.short_attention(tower)
    if "residuals" in optimizations:
        megabatch.bf16_residuals(clip)
    if "channels_last" in optimizations:
        clip.to(memory_format=torch.channels_last)
    blocks = [module for module in clip.modules() if type(module).__name__ in LAYERS]
    for recipe in set(optimizations) & set(RECIPES):
        for block in blocks:
            convert(block, RECIPES[recipe])
    if "layers" in optimizations:
        for block in blocks:
            block.compile(dynamic=False)
    if "compile" in optimizations:
        for tower in towers:
            tower.compile(dynamic=False)


def gradients(clip: Clip) -> dict[str, Tensor]:
    """Return the gradients of five matrices, from first to last, and clear all gradients."""
    matrices = [(name, weight) for name, weight in clip.named_parameters() if weight.ndim > 1]
    chosen = (matrices[k * (len(matrices) - 1) // 4] for k in range(5))
    taken = {name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone() for name, weight in chosen}
    clip.zero_grad()
    return taken


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest norm of a difference as a share of what was expected; NaN if there is one."""
    shares = torch.stack([(found[name] - wanted).norm() / wanted.norm() for name, wanted in expected.items()])
    return float(shares.max())


def release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table; each row beside the first one of its model, batch and chunk."""
    headers = ("model", "pairs", "chunk", "step", "seconds", "speed", "peak GiB", "useful", "gradients")
    lines, plain = [], dict[tuple[Any, ...], float]()
    for row in rows:
        case = Case(**row["case"] | {"optimizations": tuple(row["case"]["optimizations"])})
        at = case.model, case.pairs, case.chunk is None
        step = ", ".join(OPTIMIZATIONS[each] for each in case.optimizations) or "plain"
        step += f", {case.forward} chunks at once in forward" if case.forward > 1 else ""
        step += f", keep {case.keep}" if case.keep else ""
        cells = [row.get("title", case.model), f"{case.pairs:,}", f"{case.chunk or ''}", step]
        if "seconds" not in row:
            lines.append([*cells, row["failed"], *[""] * 4])
            continue
        first = plain.setdefault(at, row["seconds"])
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}"
        speed = f"{first / row['seconds']:.2f}×"
        shares = f"{row['useful_share']:.0%}", f"{row['difference']:.1%}"
        lines.append([*cells, report.three_digits(row["seconds"]), speed, peak, *shares])
    table = report.markdown_table(headers, lines, left=("model", "step"))
    measured = [row for row in rows if "seconds" in row]
    if not measured:
        return table
    machine, rates = measured[0]["machine"], [row["matmul_flops_per_s"] / 1e12 for row in measured]
    return table + (
        f"\n\nWhole steps, bf16 autocast, AdamW, on {report.device_name(machine)} with torch {machine['torch']}, "
        f"{machine['date'][:10]}. Useful: forward and backward counted once, as a share of the rate of a large product beside it "
        f"({min(rates):.0f} to {max(rates):.0f} TFLOP/s). Gradients: the largest difference of five matrices' gradients from those "
        "of a plain step in bf16, as a share of their norm."
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_steps", description=__doc__.splitlines()[0])
    parser.add_argument("cases", type=Case.of, nargs="+", metavar="MODEL:PAIRS[/CHUNK[xFORWARD][kKEEP]][+OPTIMIZATION…]")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=5, help="timed steps")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds that the cases of one process may take")
    parser.add_argument("--out", type=Path, default=FILE, help="file of rows; rows of other cases stay")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        bench = Bench(options.cases, options.device)
        for case in options.cases:
            print(json.dumps(bench.row(case, options.runs)), flush=True)
            release(options.device)
        return 0
    rows = report.read_rows(options.out) if options.out.exists() else []
    groups = [
        list(group) for _, group in itertools.groupby(options.cases, lambda case: (case.model, set(case.optimizations) - {"fused"}))
    ]
    for group in groups:
        began = time.perf_counter()
        for case, found in zip(group, _in_process(group, options), strict=True):
            row = json.loads(json.dumps({"case": case._asdict(), "machine": describe(options.device)} | found))
            rows = [each for each in rows if each["case"] != row["case"]] + [row]
            shown = {
                key: row.get(key)
                for key in (
                    "seconds",
                    "useful_share",
                    "peak_bytes",
                    "difference",
                    "same_chunks_difference",
                    "first_step_s",
                    "kept",
                    "failed",
                )
            }
            print(f"{case}: {shown}", flush=True)
        report.write_rows(options.out, rows)
        print(f"{time.perf_counter() - began:.0f} s", flush=True)
    print(markdown(rows))
    return int(any("seconds" not in row for row in rows))


def _in_process(group: list[Case], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each case of a group, which share the model and all that changes it; one that failed says why."""
    command = [sys.executable, "-m", "benchmarks.whole_steps", *map(str, group), "--one"]
    command += ["--device", options.device, "--runs", str(options.runs)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout)
        output, last = done.stdout, (done.stderr.strip().splitlines() or ["no message"])[-1]
    except subprocess.TimeoutExpired as error:
        output, last = (error.stdout or b"").decode(), f"stopped after {options.timeout:.0f} s"
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    failed = {"failed": "out of memory" if "OutOfMemoryError" in last else last[:300]}
    return rows + [failed] * (len(group) - len(rows))


if __name__ == "__main__":
    raise SystemExit(main())
