"""Held-out recall of towers trained with fp8 linear layers, beside bf16: `python -m benchmarks.fp8 --help`.

Two transformers over bytes are trained contrastively on a source of `benchmarks.study`, with bf16 autocast alone and with each of
torchao's recipes for the linear layers of their blocks. A seed has the same weights and the same order of the pairs in every
setting. Recall is measured on the test pairs of the source, which are in no training: with the layers as they were trained, and
with the plain layers in bf16, which is how an exported model is used. Each setting has a process, and all compile their blocks at
the same time; then one training runs at a time, so that its steps can be timed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megabatch
from benchmarks import report
from benchmarks.encoders.measure import synchronize
from benchmarks.machine import describe
from benchmarks.study import data
from megabatch.training.evaluate import retrieval

FILE = Path(__file__).parent / "results" / "fp8-cuda.jsonl"
# The first GPUs that multiply fp8 numbers: Ada and Hopper.
CAPABILITY = (8, 9)
# Both dimensions of a product of fp8 matrices are multiples of this.
MULTIPLE = 16
# Width of the embeddings.
DIM = 256
BETAS, WEIGHT_DECAY, CLIP_NORM, MAX_SCALE = (0.9, 0.98), 0.1, 1.0, 100.0
# Shares of the steps in which the rate rises linearly, before it falls as a cosine, and whose mean is the final loss.
WARM_UP, LAST = 0.1, 0.05


class Recipe(NamedTuple):
    """A recipe of torchao.float8 by its name there."""

    name: str
    title: str


BF16 = "bf16"
RECIPES = {
    "fp8": Recipe("tensorwise", "fp8 with a scale per tensor"),
    "fp8_rows": Recipe("rowwise", "fp8 with a scale per row"),
    "fp8_rows_gw": Recipe("rowwise_with_gw_hp", "fp8 with a scale per row, but weight gradients in bf16"),
}
TITLES = {BF16: "bf16"} | {name: recipe.title for name, recipe in RECIPES.items()}


def convert(block: nn.Module, recipe: Recipe, *, emulate: bool = False) -> None:
    """Replace the linear layers of a block by torchao's fp8 ones with the same weights, where both widths are multiples of 16.

    emulate: round to fp8 and multiply in fp32, for devices that cannot multiply fp8 numbers.
    """
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe.name), emulate=emulate)
    convert_to_float8_training(block, config=config, module_filter_fn=lambda layer, name: is_convertible(layer))


def is_convertible(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and layer.in_features % MULTIPLE == 0 == layer.out_features % MULTIPLE


def unavailable(device: str) -> str | None:
    """Return why fp8 layers cannot be trained on a device, or None."""
    capability = torch.cuda.get_device_capability() if device == "cuda" and torch.cuda.is_available() else None
    if capability is None or capability < CAPABILITY:
        name = device if capability is None else "a GPU of capability {}.{}".format(*capability)
        needed = "{}.{}".format(*CAPABILITY)
        return f"fp8 layers need a CUDA device of capability {needed} or later, and this is {name}"
    if importlib.util.find_spec("torchao") is None:
        return "fp8 layers need torchao, which is not installed: pip install torchao"
    return None


class Size(NamedTuple):
    """The shape of both towers and the length of a training. length: bytes of a text that a tower reads."""

    width: int = 512
    depth: int = 6
    length: int = 32
    batch: int = 512
    steps: int = 600
    lr: float = 5e-4


class Block(nn.Module):
    """A pre-norm transformer block with heads of 64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attention.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Tower(nn.Module):
    """Unit embeddings of texts, rows of bytes that are padded with zeros: the mean of the last block's outputs, projected."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, size.width)
        self.positions = nn.Parameter(torch.empty(size.length, size.width))
        for table in (self.embedding.weight, self.positions):
            nn.init.normal_(table, std=0.02)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        self.projection = nn.Linear(size.width, DIM, bias=False)

    def forward(self, texts: Tensor) -> Tensor:
        with torch.autocast(texts.device.type, dtype=torch.bfloat16):
            hidden = self.embedding(texts.int()) + self.positions
            for block in self.blocks:
                hidden = block(hidden)
            is_text = (texts != 0).unsqueeze(-1)
            mean = (self.norm(hidden) * is_text).sum(1) / is_text.sum(1)
            embedding = self.projection(mean)
        return F.normalize(embedding.float(), dim=-1)


class Towers(nn.Module):
    """A tower for each side and the logarithm of the scale; the seed decides the weights, whatever the device."""

    def __init__(self, size: Size, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.x, self.y = Tower(size), Tower(size)
        self.log_scale = nn.Parameter(torch.tensor(1 / 0.07).log())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return megabatch.clip_loss(self.x(x), self.y(y), self.log_scale.exp().clamp(max=MAX_SCALE), group=None)


class Texts(NamedTuple):
    """Pairs of texts on a device, rows of bytes."""

    x: Tensor
    y: Tensor


def load(file: Path, length: int, device: str) -> tuple[Texts, Texts]:
    """Return the training pairs and the test pairs of a source, the first bytes of each text."""
    if not file.exists():
        raise ValueError(
            f"{file} does not exist: build it with `python -m benchmarks.study data --sources {file.name.split('.')[0]}`"
        )
    arrays = data.read(file)
    if arrays.x.shape[1] != arrays.y.shape[1]:
        raise ValueError(f"{file} has images: choose a source of two texts")
    x, y = (torch.from_numpy(side[:, :length].copy()).to(device) for side in (arrays.x, arrays.y))
    first_test = arrays.train + arrays.validation
    return Texts(x[: arrays.train], y[: arrays.train]), Texts(x[first_test:], y[first_test:])


def batches(pairs: int, batch: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Yield the rows of each step: shuffled epochs, without the incomplete batch at the end of each."""
    generator = torch.Generator().manual_seed(seed)
    while steps:
        for rows in torch.randperm(pairs, generator=generator)[: pairs // batch * batch].view(-1, batch)[:steps]:
            yield rows
            steps -= 1


class Setting:
    """Compiled towers with one kind of linear layers, which are trained with one seed after the other."""

    def __init__(self, name: str, size: Size, pairs: tuple[Texts, Texts], device: str) -> None:
        self.name, self.size, self.device = name, size, device
        self.training, test = pairs
        # Whole batches: for others the blocks would be compiled again.
        evaluated = len(test.x) // size.batch * size.batch
        if not evaluated:
            raise ValueError(f"batch={size.batch}: must be at most {len(test.x)}, the number of test pairs")
        self.test = Texts(test.x[:evaluated], test.y[:evaluated])
        self.towers = Towers(size, seed=0).to(device)
        # Plain layers with the same weights.
        self.plain = copy.deepcopy(self.towers, {id(weight): weight for weight in self.towers.parameters()})
        for block in (*self.towers.x.blocks, *self.towers.y.blocks):
            if name != BF16:
                convert(block, RECIPES[name])
            if device == "cuda":
                block.compile(dynamic=False)

    def warm_up(self) -> float:
        """Take the first steps, in which the blocks are compiled, and return their seconds."""
        began = time.perf_counter()
        rows = torch.arange(self.size.batch, device=self.device)
        for _ in range(3):
            self.towers.loss(self.training.x[rows], self.training.y[rows]).backward()
        self.recall(self.towers)
        self.recall(self.plain)
        synchronize(self.device)
        return time.perf_counter() - began

    def train(self, seed: int) -> dict[str, Any]:
        """Train new weights and return the row of the results."""
        size = self.size
        self.towers.load_state_dict(Towers(size, seed).state_dict())
        weights = list(self.towers.parameters())
        optimizer = torch.optim.AdamW(weights, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
        losses = torch.zeros(size.steps, device=self.device)
        order = torch.stack(list(batches(len(self.training.x), size.batch, size.steps, seed))).to(self.device)
        synchronize(self.device)
        began = time.perf_counter()
        for step, rows in enumerate(order):
            optimizer.param_groups[0]["lr"] = size.lr * rate(step, size.steps)
            loss = self.towers.loss(self.training.x[rows], self.training.y[rows])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(weights, CLIP_NORM)
            optimizer.step()
            losses[step] = loss.detach()
        synchronize(self.device)
        seconds = (time.perf_counter() - began) / size.steps
        return {
            "recall": self.recall(self.towers),
            "recall_in_bf16": self.recall(self.plain),
            "loss": float(losses[-math.ceil(LAST * size.steps) :].mean()),
            "losses": [float(part.mean()) for part in losses.chunk(10)],
            "seconds_per_step": seconds,
            "pairs": len(self.test.x),
            "training_pairs": len(self.training.x),
            # One for forward and backward of all blocks, unless a block was compiled again.
            "compiled_graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"] if self.device == "cuda" else 0,
        }

    def recall(self, towers: Towers) -> float:
        """Return the recall at 1 among the test pairs, the mean of both directions."""
        # With a graph, as in training, for the same reason.
        sides = [
            torch.cat([tower(rows).detach() for rows in side.split(self.size.batch)])
            for tower, side in ((towers.x, self.test.x), (towers.y, self.test.y))
        ]
        # NaN in an embedding: a diverged training finds nothing.
        if not all(side.isfinite().all() for side in sides):
            return 0.0
        found = retrieval(*sides)
        return (found.x_to_y[1] + found.y_to_x[1]) / 2


def rate(step: int, steps: int) -> float:
    """Return the share of the peak learning rate in a step."""
    warm_up = WARM_UP * steps
    return min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * max(0.0, (step - warm_up) / (steps - warm_up))))


class Worker:
    """A process of one setting, which compiles as soon as it starts and trains a seed on request."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        size = [f"--{key}={getattr(options, key)}" for key in Size._fields]
        command = [sys.executable, "-m", "benchmarks.fp8", "--one", name, "--device", options.device, *size]
        command += ["--source", options.source, "--data", str(options.data)]
        # The messages of compilers go to the terminal.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self) -> dict[str, Any]:
        """Return the next record that the process prints, or that it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        return {"failed": f"the process ended with code {self._process.wait()}"}

    def train(self, seed: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        # A process that has ended says so in its answer.
        with contextlib.suppress(BrokenPipeError):
            print(seed, file=self._process.stdin, flush=True)
        return self.answer()

    def stop(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def serve(options: argparse.Namespace) -> None:
    """Compile a setting, then train each seed that standard input has, and print records as JSON lines."""
    size = _size(options)
    pairs = load(_file(options), size.length, options.device)
    setting = Setting(options.one, size, pairs, options.device)
    print(json.dumps({"compile_s": setting.warm_up()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(setting.train(int(line))), flush=True)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the results as a Markdown table with a line for each source and setting, and a caption."""
    headers = ("pairs", "linear layers", "recall@1", "seeds", "in bf16", "final loss", "ms per step", "speed")
    places = dict.fromkeys((row["source"], row["setting"]) for row in rows)
    lines = []
    for source, setting in places:
        runs, plain = ([row for row in rows if (row["source"], row["setting"]) == (source, name)] for name in (setting, BF16))
        lines.append([source, TITLES[setting], *_cells(runs, [row["seconds_per_step"] for row in plain if "recall" in row])])
    table = report.markdown_table(headers, lines, left=("pairs", "linear layers", "seeds"))
    trained = {row["source"]: row for row in rows if "recall" in row}
    if not trained:
        return table
    return table + "\n\n" + " ".join([*(_towers(row) for row in trained.values()), _conditions(next(iter(trained.values())))])


def _cells(runs: list[dict[str, Any]], plain_seconds: list[float]) -> list[str]:
    """Return the cells of one setting: means over seeds, and the recall of each."""
    for run in runs:
        if "failed" in run:
            return [run["failed"], *[""] * 5]
    runs = sorted(runs, key=lambda run: run["seed"])
    mean = {key: fmean(run[key] for run in runs) for key in ("recall", "recall_in_bf16", "loss", "seconds_per_step")}
    return [
        f"{mean['recall']:.1%}",
        ", ".join(f"{run['recall']:.1%}" for run in runs),
        f"{mean['recall_in_bf16']:.1%}",
        f"{mean['loss']:.3f}",
        report.three_digits(1e3 * mean["seconds_per_step"]),
        f"{fmean(plain_seconds) / mean['seconds_per_step']:.2f}×" if plain_seconds else "",
    ]


def _towers(row: dict[str, Any]) -> str:
    size = Size(**row["size"])
    return (
        f"{row['source']}: {data.SOURCES[row['source']].title}, {row['training_pairs']:,} pairs, two transformers of {size.depth} "
        f"blocks, {size.width} wide, over the first {size.length} bytes of a text, {size.steps:,} steps of {size.batch:,} pairs, "
        f"recall among {row['pairs']:,} held-out pairs."
    )


def _conditions(row: dict[str, Any]) -> str:
    machine = row["machine"]
    return (
        "Recall is the mean of both directions and of the seeds, with the layers as trained and with plain ones in bf16. Steps in "
        "bf16 autocast with compiled blocks, whose linear layers alone are in fp8, on "
        f"{report.device_name(machine)} with torch {machine['torch']}, {machine['date'][:10]}."
    )


def _size(options: argparse.Namespace) -> Size:
    return Size(*(getattr(options, key) for key in Size._fields))


def _file(options: argparse.Namespace) -> Path:
    return options.data / f"{options.source}.npz.xz"


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return the exit code: 0, or 1 if a training failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--settings", default=",".join(TITLES), help=f"comma-separated, of {', '.join(TITLES)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--source", default="names", help="a source of `benchmarks.study` with two texts")
    parser.add_argument("--data", type=Path, default=Path("build/study"), help="folder of the sources")
    for key, value in Size._field_defaults.items():
        parser.add_argument(f"--{key}", type=type(value), default=value)
    parser.add_argument("--out", type=Path, default=FILE, help="file of rows; rows of other sources stay")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        serve(options)
        return 0
    settings = options.settings.split(",")
    if unknown := set(settings) - set(TITLES):
        parser.error(f"--settings has {', '.join(sorted(unknown))}: must be of {', '.join(TITLES)}")
    if set(settings) & set(RECIPES) and (reason := unavailable(options.device)):
        parser.error(f"{reason}; choose --settings bf16")
    if not _file(options).exists():
        parser.error(f"{_file(options)} does not exist: build it with `python -m benchmarks.study data --sources {options.source}`")
    rows = _measure(settings, options)
    print(markdown(rows))
    return int(any("failed" in row for row in rows))


def _measure(settings: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train every setting with every seed, all settings with a seed before the next one, and return the rows of the file."""
    began = time.perf_counter()
    rows = [row for row in (report.read_rows(options.out) if options.out.exists() else []) if row["source"] != options.source]
    common = {"source": options.source, "size": _size(options)._asdict(), "machine": describe(options.device)}
    workers = [Worker(name, options) for name in settings]
    # All compile before the first is timed.
    compiled = {worker.name: worker.answer() for worker in workers}
    print(f"{time.perf_counter() - began:.0f} s: {compiled}", flush=True)
    for seed in range(options.seeds):
        for worker in workers:
            result = compiled[worker.name] if "failed" in compiled[worker.name] else compiled[worker.name] | worker.train(seed)
            rows.append({"setting": worker.name, "seed": seed, **common, **result})
            print(f"{time.perf_counter() - began:.0f} s: {worker.name}, seed {seed}: {result}", flush=True)
            report.write_rows(options.out, rows)
    for worker in workers:
        worker.stop()
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
