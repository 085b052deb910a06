"""Findings on a training before it starts: what is wrong, where, why, and the fix as a diff of the file."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megabatch import config

from .documents import Document, Reading
from .readers import read_any
from .readers.ours import reading as _reading_of_run
from .report import audit_report, rules_page
from .rule import SEVERITIES, Finding, Problem, Rule, Severity, exit_code
from .rules import RULES
from .together import audit_together
from .training import Training, with_known

__all__ = [
    "RULES",
    "Finding",
    "Reading",
    "Severity",
    "Training",
    "audit",
    "audit_report",
    "audit_together",
    "exit_code",
    "read_any",
    "rules_page",
]


def audit(
    run: config.Run | Reading, model: nn.Module | None = None, *, data: int | None = None, ranks: int | None = None, **known: Any
) -> list[Finding]:
    """What is wrong with a training, the worst first.

    run: a run of megabatch, or what `read_any` understood of a file; a run without its file is shown as `config.as_toml` writes it.
    model: tells what the file does not: BatchNorm, the precision of the weights.
    data: samples of an epoch. ranks: of the launch; 1 for a run of megabatch where it is not said. known: further facts, by the
        names of `Training`: base_lr and base_batch, unique, finetuning, …

    >>> run = config.build({"schedule": {"samples": 400_000_000, "warmup": 0}, "batch": {"size": 8192}})
    >>> [(finding.code, finding.where) for finding in audit(run)]
    [('no-warmup', 'schedule.warmup')]
    """
    known |= {"data": data, "ranks": ranks}
    if isinstance(run, config.Run):
        known["ranks"] = 1 if ranks is None else ranks
        run = _reading_of_run(run, "run.toml", config.as_toml(run), known)
    training = with_known(run.training, known)
    if model is not None:
        training = with_known(training, _facts_of(model))
    # Fixes are made for the training with all that is known of it, not for what its file alone tells.
    found = [_finding(rule, problem, training, run.document) for rule in RULES for problem in rule.problems(training)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _finding(rule: Rule, problem: Problem, training: Training, document: Document) -> Finding:
    diff = document.diff(problem.changes, training)
    advice = f" {problem.advice}" if problem.advice else ""
    return Finding(
        rule.code,
        problem.severity,
        document.where(problem.fact),
        f"{problem.text}{advice if diff else ''} [{rule.source}]",
        diff or f"{rule.remedy}{advice}",
    )


def _facts_of(model: nn.Module) -> dict[str, bool]:
    """What a model tells. Layers that a training model keeps in evaluation mode do not count."""
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and (m.training or not model.training)]
    half = any(p.requires_grad and p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    facts = {"batchnorm": bool(layers), "half_weights": half}
    if layers and all(isinstance(layer, nn.SyncBatchNorm) for layer in layers):
        facts["sync_batchnorm"] = True
    return facts
