"""Trainings of a few steps on a hundred pairs of texts, and readers of their files."""

from __future__ import annotations

import functools
import json
import os
import signal
from pathlib import Path

import torch

from megabatch import config
from megabatch.training import checkpoint, loop
from megabatch.training.loop import Training

# These runs name towers of the tests, which are trusted.
train = functools.partial(loop.train, trust_code=True)


WORDS = ["red", "green", "blue", "round", "square", "large", "small", "old", "new", "odd"]


PAIRS = [(f"{a} {b} thing {i}", f"the {b} one that is {a} {i}") for i, (a, b) in enumerate((a, b) for a in WORDS for b in WORDS)]


def write_pairs(path, pairs, **more):
    lines = (
        json.dumps({"query": q, "positive": p, **{key: value[i] for key, value in more.items()}}) for i, (q, p) in enumerate(pairs)
    )
    path.write_text("".join(line + "\n" for line in lines))
    return path


def run_of(pairs, out, *overrides, steps=6):
    table = {
        "out": str(out),
        "data": {"source": str(pairs), "held_out": 0.2, "window": 30},
        "x": {"name": "small_towers:text"},
        "y": {"name": "small_towers:text"},
        "loss": {"dim": 8},
        "batch": {"size": 24, "chunk": 8, "keep": 0},
        "optimizer": {"lr": 0.01},
        "schedule": {"steps": steps},
        "compute": {"device": "cpu"},
        "watch": {"bar": False, "report": False},
    }
    return config.build(table, overrides)


def final(out):
    """Return every tensor of the run's newest checkpoint."""
    from safetensors.torch import load_file

    path = checkpoint.newest(Path(out) / "checkpoints")
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def log_of(out, event):
    lines = (json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def assert_equal(a, b):
    assert a.keys() == b.keys() and len(a) > 5
    for name in a:
        assert torch.equal(a[name], b[name]), name


def stopping(monkeypatch, after):
    """Send SIGTERM to this process during step `after`."""
    before = Training.step

    def step(self, *args):
        if self.number == after - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return before(self, *args)

    monkeypatch.setattr(Training, "step", step)
