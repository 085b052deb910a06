"""Held-out recall against the batch at a fixed number of samples: `python -m benchmarks.batches --help`.

Each batch is trained on the embedded pairs with several learning rates and seeds, and with further rates as long as the best is
the lowest or the highest. The rate is chosen on the characters that the embedded default holds out, which also selected its towers;
the reported recall is measured on as many others, which selected nothing. All pairs are on the device, and on CUDA a step is one
captured graph, so that the data loader plays no part.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as processes
from torch import Tensor

import megabatch
from benchmarks.machine import describe
from megabatch import config
from megabatch.data.loader import Loader
from megabatch.data.sampler import InOrder, split, stable_hash
from megabatch.reporting.figures import Axis, Chart, Figure, Series, save
from megabatch.reporting.format import count_text, percent_text
from megabatch.reporting.history import number
from megabatch.towers.model import Pair, build_pair, build_towers
from megabatch.training.build import open_data
from megabatch.training.evaluate import retrieval
from megabatch.training.optimizer import build_optimizer, clip_gradients
from megabatch.training.schedules import step_schedule

RESULTS = Path(__file__).parent / "results"
BATCHES, SEEDS = (64, 512, 4096, 16384), (0, 1, 2)
# Factors around the rate that the square-root rule gives from the embedded default's rate and batch.
STEP = 3.0
RATE_FACTORS = (1 / STEP, 1.0, STEP)
# The most rates that are tried for a batch if the best is still the lowest or the highest.
MOST_RATES = 6
SHOWN = ("batch", "lr", "seed", "choosing_1", "x_to_y_1", "y_to_x_1", "train_seconds", "error")


# The pairs and the device of a worker process.
_here: tuple[dict[str, Pairs], torch.device]


class Pairs(NamedTuple):
    """All preprocessed pairs of a source."""

    x: Tensor
    y: Tensor
    ids: Tensor


class Case(NamedTuple):
    batch: int
    lr: float
    seed: int
    samples: int


def load(run: config.Run) -> dict[str, Pairs]:
    """Return the pairs for training, for choosing the rate (those that `run` holds out), and for reporting (as many others)."""
    x, y = build_towers(run)
    fraction = run.data.held_out
    training, held_out = open_data(replace(run, data=replace(run.data, held_out=2 * fraction)), x.kind, y.kind)
    # The pairs that a smaller fraction holds out are among those of a larger one.
    reported, choosing = split(held_out, fraction)
    parts = {"training": training, "choosing": choosing, "reported": reported}
    found = {}
    for name, source in parts.items():
        options: dict[str, Any] = {"seed": 0, "workers": 0, "rank": 0, "ranks": 1, "ids": True, "classes": None, "augment": False}
        loader = Loader(source, InOrder(source.lengths), x.prepare, y.prepare, **options)
        (batch,) = loader.batches([(0, sum(source.lengths))])
        assert isinstance(batch.x, Tensor) and isinstance(batch.y, Tensor) and batch.ids is not None
        found[name] = Pairs(batch.x, batch.y, batch.ids)
    return found


def train(case: Case, pairs: dict[str, Pairs], device: torch.device) -> dict[str, Any]:
    """Train one case and return its row of the results."""
    settings = {"batch.size": case.batch, "schedule.samples": case.samples, "seed": case.seed, "optimizer.lr": case.lr}
    run = config.build(config.EMBEDDED, [f"{key}={value}" for key, value in settings.items()])
    torch.manual_seed(run.seed)
    model = build_pair(run, *build_towers(run)).to(device).train()
    here = {name: Pairs(*(t.to(device) for t in part)) for name, part in pairs.items()}
    rate = torch.zeros((), device=device)
    optimizer = build_optimizer(model, run.optimizer)
    for group in optimizer.param_groups:
        # A captured graph reads the rate from the device.
        group |= {"capturable": device.type == "cuda", "fused": device.type == "cuda", "foreach": False, "lr": rate}
    began = time.perf_counter()
    steps = step_schedule(run, len(here["training"].x))[: case.samples // case.batch]
    take_step = _Step(model, optimizer, run, here["training"], case.batch)
    for step, rows in zip(steps, _stream(len(here["training"].x), case, device), strict=False):
        rate.fill_(run.optimizer.lr * step.rate)
        loss = take_step(rows)
    found = {name: _quality(model, here[name]) for name in ("choosing", "reported")}
    return {
        **case._asdict(),
        "steps": len(steps),
        "loss": float(loss),
        "choosing_1": (found["choosing"].x_to_y[1] + found["choosing"].y_to_x[1]) / 2,
        **{f"{side}_{k}": v for side in ("x_to_y", "y_to_x") for k, v in getattr(found["reported"], side).items()},
        "pairs": found["reported"].pairs,
        "train_seconds": time.perf_counter() - began,
        "device": device.type,
    }


class _Step:
    """One optimizer step on the given rows of the training pairs; on CUDA captured at the first call."""

    def __init__(self, model: Pair, optimizer: torch.optim.Optimizer, run: config.Run, pairs: Pairs, batch: int) -> None:
        self.model, self.optimizer, self.run, self.pairs = model, optimizer, run, pairs
        self._rows = torch.zeros(batch, dtype=torch.int64, device=pairs.x.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        self._rows.copy_(rows)
        if not rows.is_cuda:
            return self._take()
        if self._graph is None:
            self._capture()
        assert self._graph is not None and self._loss is not None
        self._graph.replay()
        return self._loss

    def _take(self) -> Tensor:
        x, y, ids = (t[self._rows] for t in self.pairs)
        options = {"ids": ids, "label_smoothing": self.run.loss.label_smoothing, "group": None}
        loss = megabatch.clip_loss(self.model.x(x), self.model.y(y), self.model.scale(), **options)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_gradients(self.model.parameters(), self.run.optimizer.clip_norm)
        self.optimizer.step()
        self.model.clamp_scale(self.run.loss.max_scale)
        return loss.detach()

    def _capture(self) -> None:
        """Capture a step. The warm-up steps before the capture change the state, which is restored after them."""
        side = torch.cuda.Stream()
        before = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        with torch.cuda.stream(side):
            for _ in range(3):
                self._take()
        torch.cuda.synchronize()
        self.model.load_state_dict(before)
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = self._take()


def _stream(length: int, case: Case, device: torch.device) -> Iterator[Tensor]:
    """Yield the rows of consecutive batches from an endless stream of shuffled epochs."""
    rest = torch.zeros(0, dtype=torch.int64, device=device)
    for epoch in itertools.count():
        generator = torch.Generator().manual_seed(stable_hash(case.seed, epoch))
        rest = torch.cat([rest, torch.randperm(length, generator=generator).to(device)])
        while len(rest) >= case.batch:
            yield rest[: case.batch]
            rest = rest[case.batch :]


@torch.no_grad()
def _quality(model: Pair, pairs: Pairs) -> Any:
    model.eval()
    x = torch.cat([model.x(part) for part in pairs.x.split(4096)])
    y = torch.cat([model.y(part) for part in pairs.y.split(4096)])
    return retrieval(x, y, ids=pairs.ids)


def cases(samples: int, batches: Sequence[int]) -> list[Case]:
    """Return every batch with every rate and seed, the longest first."""
    default = config.build(config.EMBEDDED)
    rates = {b: default.optimizer.lr * math.sqrt(b / default.batch.size) for b in batches}
    return [
        Case(batch, float(f"{rates[batch] * factor:.2g}"), seed, samples)
        for batch, seed, factor in itertools.product(sorted(batches), SEEDS, RATE_FACTORS)
    ]


class Best(NamedTuple):
    """The result of a batch at its best learning rate. recalls: held-out recall at 1 of each seed, mean of both directions."""

    batch: int
    lr: float
    steps: int
    recalls: list[float]


def best_rates(rows: Iterable[Mapping[str, Any]]) -> list[Best]:
    """Return, for each batch, the learning rate with the highest mean over seeds. A run without a recall (it diverged) counts as 0.

    The mean is that of choosing_1 where rows have one (recall on other held-out pairs than those reported), else of the recall.

    >>> rows = [{"batch": 64, "lr": lr, "steps": 10, "x_to_y_1": r, "y_to_x_1": r} for lr, r in ((1e-3, 0.25), (1e-2, None))]
    >>> best_rates(rows)
    [Best(batch=64, lr=0.001, steps=10, recalls=[0.25])]
    """
    cases: dict[int, dict[float, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        cases[int(row["batch"])][float(row["lr"])].append(row)
    best = []
    for batch, rates in sorted(cases.items()):
        lr, runs = max(sorted(rates.items()), key=lambda case: fmean(_choosing(run) for run in case[1]))
        best.append(Best(batch, lr, int(runs[0]["steps"]), [_recall(run) for run in runs]))
    return best


def study_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Return held-out recall at 1 against the batch at equal samples, each batch at its best learning rate.

    The line is the mean over seeds; bars reach from the worst seed to the best.
    """
    best = best_rates(rows)
    if not best:
        raise ValueError("there are no rows to draw; run `python -m benchmarks.batches` first")
    means = [fmean(case.recalls) for case in best]
    errors = [(mean - min(case.recalls), max(case.recalls) - mean) for mean, case in zip(means, best, strict=True)]
    texts = [percent_text(mean) for mean in means]
    seeds = max(len(case.recalls) for case in best)
    x = Axis(
        f"batch, at its best learning rate; mean, worst and best of {seeds} seed{'s' * (seeds > 1)}",
        scale="log2",
        ticks={case.batch: f"{case.batch:,}\nlr {case.lr:g}\n{case.steps:,} updates" for case in best},
        low=best[0].batch / 1.5,
        high=best[-1].batch * 1.5,
    )
    y = Axis(format=percent_text, low=0, high=1.15 * max(0.01, *(max(case.recalls) for case in best)))
    samples = count_text(max(number(row, "samples") or 0 for row in rows))
    points = [(case.batch, mean) for case, mean in zip(best, means, strict=True)]
    series = Series(points, errors=errors, texts=texts, offset=(0, 14), size=7)
    chart = Chart(f"held-out recall at 1 after {samples} samples, mean of both directions", [series], x, y)
    return Figure([chart], "held-out recall at 1 against the batch", size=(7.6, 4.4))


def _choosing(row: Mapping[str, Any]) -> float:
    return number(row, "choosing_1") or 0.0 if "choosing_1" in row else _recall(row)


def _recall(row: Mapping[str, Any]) -> float:
    return fmean(number(row, side) or 0.0 for side in ("x_to_y_1", "y_to_x_1"))


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the results as a Markdown table with each batch at its best rate, and a line that describes it."""
    lines = ["| batch | updates | learning rate | held-out recall@1 | seeds |", "| ---: | ---: | ---: | ---: | --- |"]
    for best in best_rates(rows):
        mean = sum(best.recalls) / len(best.recalls)
        each = ", ".join(f"{recall:.1%}" for recall in sorted(best.recalls))
        lines.append(f"| {best.batch:,} | {best.steps:,} | {best.lr:g} | {mean:.1%} | {each} |")
    first = rows[0]
    rates = [len({row["lr"] for row in rows if row["batch"] == batch}) for batch in {row["batch"] for row in rows}]
    seeds = {row["seed"] for row in rows}
    return "\n".join(lines) + (
        f"\n\n{first['samples']:,} samples at every batch, {min(rates)} to {max(rates)} learning rates and {len(seeds)} seeds "
        f"each; recall is the mean of both directions among {first['pairs']:,} pairs of characters never seen, on which nothing "
        "was chosen; the rate was, on as many others. Without the augmentation of texts. "
        f"On {first.get('gpu') or first['cpu']} with torch {first['torch']}, {str(first['date'])[:10]}."
    )


def further(rows: Sequence[dict[str, Any]]) -> list[Case]:
    """Return the next rate of every batch whose best rate is the lowest or highest tried, since a better one may be beyond it."""
    found = []
    for best in best_rates(rows):
        tried = sorted({row["lr"] for row in rows if row["batch"] == best.batch})
        beyond = {tried[0]: tried[0] / STEP, tried[-1]: tried[-1] * STEP}.get(best.lr)
        if beyond is not None and len(tried) < MOST_RATES:
            samples = rows[0]["samples"]
            found += [Case(best.batch, float(f"{beyond:.2g}"), seed, samples) for seed in sorted({row["seed"] for row in rows})]
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return the exit code: 0, or 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="benchmarks.batches", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--redraw", type=Path, help="Only draw the figure of a results file.")
    options = parser.parse_args(arguments)
    out = options.redraw or options.out or RESULTS / f"batches-{options.device}.jsonl"
    if not options.redraw:
        _measure(options, out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    save(study_figure([row for row in rows if "error" not in row]), out.with_suffix(".png"))
    return int(any("error" in row for row in rows))


def _measure(options: argparse.Namespace, out: Path) -> None:
    """Train the cases that the file does not have yet, in several processes."""
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    machine = describe(options.device)
    with tempfile.TemporaryDirectory() as folder, out.open("a") as file:
        began = time.perf_counter()
        pairs = load(config.build(config.EMBEDDED))
        torch.save({name: tuple(part) for name, part in pairs.items()}, f"{folder}/pairs.pt")
        print({name: len(part.x) for name, part in pairs.items()}, f"{time.perf_counter() - began:.0f} s", flush=True)
        with ProcessPoolExecutor(
            options.processes, processes.get_context("spawn"), _begin, (f"{folder}/pairs.pt", options.device)
        ) as pool:
            first = cases(options.samples, [int(b) for b in options.batches.split(",")])
            work = missing(first, rows) or missing(further(rows), rows)
            while work:
                for done in as_completed([pool.submit(_train_here, case) for case in work]):
                    rows.append(done.result() | machine)
                    print(json.dumps(rows[-1]), file=file, flush=True)
                    shown = {key: rows[-1][key] for key in SHOWN if key in rows[-1]}
                    print(f"[{len(rows)}, {time.perf_counter() - began:.0f} s] {shown}", flush=True)
                work = missing(further(rows), rows)


def missing(work: Sequence[Case], rows: Sequence[dict[str, Any]]) -> list[Case]:
    """Return the cases without a row."""
    done = {tuple(row[field] for field in Case._fields) for row in rows}
    return [case for case in work if case not in done]


def _begin(file: str, device: str) -> None:
    """Load the pairs in a worker process."""
    global _here
    torch.set_num_threads(1)
    _here = {name: Pairs(*part) for name, part in torch.load(file, weights_only=True).items()}, torch.device(device)


def _train_here(case: Case) -> dict[str, Any]:
    try:
        return train(case, *_here)
    except Exception as error:
        return {**case._asdict(), "error": repr(error)}


if __name__ == "__main__":
    raise SystemExit(main())
