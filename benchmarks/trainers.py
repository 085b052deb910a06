"""Whole training steps on texts of ragged lengths, Sentence Transformers' cached loss beside ours: `python -m benchmarks.trainers`.

One process builds an encoder with random weights and runs the same batches through every scheme: embedding, loss, backward and
AdamW, bf16 autocast on CUDA. Before anything is timed, the gradients of a small batch are compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import report
from benchmarks.machine import _version, describe
from benchmarks.memory import peak_of
from benchmarks.peers import declare_torchvision_schemas

RESULTS = Path(__file__).parent / "results"
# No step is repeated after so many seconds.
LONG_SECONDS = 15.0


@dataclass(frozen=True)
class Subject:
    """An encoder. longest: the most tokens of a text; mini_batch: rows of a chunk."""

    build: Callable[[], nn.Module]
    longest: int
    mini_batch: int


def _bert(**sizes: int) -> nn.Module:
    from transformers import BertConfig, BertModel

    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertModel(BertConfig(**sizes, **dropout), add_pooling_layer=False)


def _decoder() -> nn.Module:
    from transformers import Qwen3Config, Qwen3Model

    return Qwen3Model(
        Qwen3Config(
            vocab_size=151_936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            use_cache=False,
        )
    )


SUBJECTS = {
    "small": Subject(
        lambda: _bert(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512, vocab_size=4096), 128, 32
    ),
    "bert-base": Subject(_bert, 256, 128),
    "decoder-0.6b": Subject(_decoder, 128, 128),
}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "theirs": ("theirs", {}),
    "ours, keep=0": ("ours", {"keep": 0}),
    "ours": ("ours", {"keep": "auto"}),
    "theirs, tokens": ("theirs", {"mini_batch_num_tokens": True}),
    "ours, tokens, keep=0": ("ours", {"mini_batch_num_tokens": True, "keep": 0}),
    "ours, tokens": ("ours", {"mini_batch_num_tokens": True, "keep": "auto"}),
}
TITLES = {
    "theirs": "Sentence Transformers, chunks of rows",
    "theirs, tokens": "Sentence Transformers, chunks of tokens",
    "ours": "megabatch, chunks of rows",
    "ours, keep=0": "megabatch, chunks of rows, none kept",
    "ours, tokens": "megabatch, chunks of tokens",
    "ours, tokens, keep=0": "megabatch, chunks of tokens, none kept",
}


class Encoder(nn.Module):
    """A module of a SentenceTransformer around a transformer that exists in memory only."""

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        states = self.transformer(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
        features["token_embeddings"] = states.last_hidden_state
        return features


def texts(rows: int, longest: int, median: float, vocabulary: int, seed: int, device: str) -> dict[str, Tensor]:
    """Return random tokens with log-normal lengths, padded on the right to the longest."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (median * torch.randn(rows, generator=generator).mul(0.8).exp()).long().clamp(4, longest)
    width = int(lengths.max())
    ids = torch.randint(1, vocabulary, (rows, width), generator=generator)
    mask = (torch.arange(width) < lengths[:, None]).long()
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


class Bench:
    def __init__(self, name: str, device: str) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling

        torch.manual_seed(0)
        self.device, self.subject = device, SUBJECTS[name]
        transformer = self.subject.build()
        config: Any = transformer.config
        self.vocabulary = config.vocab_size
        modules = [Encoder(transformer), Pooling(config.hidden_size, pooling_mode="mean")]
        self.model = SentenceTransformer(modules=modules, device=device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=device == "cuda")

    def loss(self, scheme: str) -> Any:
        from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

        from megabatch.adapters.sentence_transformers import MultipleNegativesRankingLoss

        kind, options = SCHEMES[scheme]
        options = {"mini_batch_size": self.subject.mini_batch, **options}
        if "mini_batch_num_tokens" in options:
            options["mini_batch_num_tokens"] = self.subject.mini_batch * self.subject.longest
        kinds: dict[str, Any] = {"theirs": CachedMultipleNegativesRankingLoss, "ours": MultipleNegativesRankingLoss}
        return kinds[kind](self.model, **options)

    def batch(self, pairs: int, seed: int = 0) -> list[dict[str, Tensor]]:
        """Return short anchors and longer documents."""
        longest = self.subject.longest
        medians = (longest / 16, longest / 4)
        return [
            texts(pairs, longest, median, self.vocabulary, 2 * seed + place, self.device) for place, median in enumerate(medians)
        ]

    def step(self, loss: Any, batch: list[dict[str, Tensor]], update: bool = True) -> float:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            value = loss([dict(features) for features in batch], None)
        value.backward()
        if update:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(value.detach())

    def gradient(self, scheme: str, pairs: int = 96) -> Tensor:
        self.step(self.loss(scheme), self.batch(pairs, seed=9), update=False)
        flat = torch.cat([p.grad.flatten().float() for p in self.model.parameters() if p.grad is not None])
        self.optimizer.zero_grad()
        return flat

    def measure(self, scheme: str, pairs: int, repeats: int) -> dict[str, Any]:
        loss, batch = self.loss(scheme), self.batch(pairs)
        # Loads kernels and creates the optimizer's state; the first step with keep="auto" measures the graphs.
        self.step(loss, self.batch(4 * self.subject.mini_batch, seed=1))
        if SCHEMES[scheme][1].get("keep") == "auto":
            self.step(loss, self.batch(4 * self.subject.mini_batch, seed=2))
        seconds, peaks, value = [], [], 0.0
        # The first step also makes the allocator take its memory; in a long one that does not show.
        while len(seconds) < repeats and sum(seconds) < LONG_SECONDS:
            began = time.perf_counter()
            found = peak_of(lambda: self.step(loss, batch), self.device)
            seconds.append(time.perf_counter() - began)
            peaks.append(found.extra_bytes)
            value = found.result
        cached = getattr(loss, "_cached", None)
        return {
            "scheme": scheme,
            "texts": 2 * pairs,
            "tokens": int(sum(features["attention_mask"].sum() for features in batch)),
            "padded_tokens": sum(features["attention_mask"].numel() for features in batch),
            "step_s": min(seconds),
            "extra_bytes": max(peaks),
            "loss": value,
            "chunks": None if cached is None else cached[1].chunks,
            "kept": None if cached is None else cached[1].kept,
        }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return the exit code: 1 if gradients differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainers", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", default=None, help="some of " + ", ".join(SUBJECTS))
    parser.add_argument("--texts", default=None, help="numbers of texts in a batch, two for each pair")
    parser.add_argument("--schemes", default=";".join(SCHEMES), help="separated by semicolons")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=220.0, help="leave out the cases that would start after this time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    declare_torchvision_schemas()
    on_gpu = options.device == "cuda"
    models = (options.models or ("bert-base,decoder-0.6b" if on_gpu else "small")).split(",")
    sizes = [int(size) for size in (options.texts or ("4096,16384" if on_gpu else "1024")).split(",")]
    out = options.out or RESULTS / f"trainers-{options.device}.jsonl"
    began, wrong = time.perf_counter(), False
    machine = describe(options.device) | {"sentence_transformers": _version("sentence-transformers")}
    with out.open("w") as file:
        for name in models:
            bench = Bench(name, options.device)
            theirs, ours = bench.gradient("theirs"), bench.gradient("ours, tokens, keep=0")
            error = float((theirs - ours).norm() / theirs.norm())
            print(f"{name}: gradients of 192 texts differ by {error:.1e}", flush=True)
            # bf16 has 8 bits: chunks of other shapes are rounded differently, in 12 to 28 layers.
            wrong = wrong or error > (5e-2 if on_gpu else 1e-4)
            for size in sizes:
                for scheme in options.schemes.split(";"):
                    if time.perf_counter() - began > options.seconds:
                        print(f"{name}, {size} texts, {scheme}: left out, time is up", flush=True)
                        continue
                    try:
                        row = bench.measure(scheme, size // 2, options.repeats)
                    except torch.OutOfMemoryError:
                        row = {"scheme": scheme, "texts": size, "error": "out of memory"}
                        bench.optimizer.zero_grad()
                    gc.collect()
                    if on_gpu:
                        torch.cuda.empty_cache()
                    row = {"model": name, **row, "gradient_error": error, "device": options.device}
                    print(json.dumps(row | machine), file=file, flush=True)
                    print(_line(row), flush=True)
            del bench
            gc.collect()
    print(f"{time.perf_counter() - began:.0f} s in all")
    return int(wrong)


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table, each of ours with its relation to Sentence Transformers' step."""
    theirs = {(row["model"], row["texts"]): row["step_s"] for row in rows if row["scheme"] == "theirs"}
    lines = []
    for row in sorted(rows, key=lambda row: (row["model"], row["texts"], list(SCHEMES).index(row["scheme"]))):
        measured = ("out of memory", "", "")
        if "error" not in row:
            ratio = theirs[row["model"], row["texts"]] / row["step_s"]
            measured = f"{row['step_s']:.2f} s", f"{row['extra_bytes'] / 2**30:.1f} GiB", f"{ratio:.1f}×"
        lines.append((row["model"], f"{row['texts']:,}", TITLES[row["scheme"]], *measured))
    header = ("encoder", "texts", "loss", "step", "memory above weights", "speed")
    first = rows[0]
    versions = f"torch {first['torch']}, sentence-transformers {first['sentence_transformers']}, {first['date'][:10]}"
    caption = f"{first.get('gpu', first['cpu'])}, {versions}."
    return f"{report.markdown_table(header, lines, left=('encoder', 'loss'))}\n\n{caption}"


def _line(row: dict[str, Any]) -> str:
    start = f"{row['model']:>12}, {row['texts']:>6,} texts, {row['scheme']:<20}"
    if "error" in row:
        return f"{start}: {row['error']}"
    kept = "" if row["chunks"] is None else f", {row['kept']} of {row['chunks']} chunks kept"
    return f"{start}: {row['step_s']:7.2f} s, +{row['extra_bytes'] / 2**20:,.0f} MiB{kept}"


if __name__ == "__main__":
    raise SystemExit(main())
