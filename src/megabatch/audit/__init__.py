"""Check a training before it starts: what is wrong, where, why, and the fix as a diff of the file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megabatch import config

from .comparison import audit_together
from .documents import Document, Reading
from .facts import TrainingFacts, with_facts
from .readers import read_any
from .readers.run import reading_of
from .report import audit_report, rules_page
from .rule import SEVERITIES, Finding, Rule, Severity, Violation, exit_code
from .rules import RULES

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "RULES",
    "Finding",
    "Reading",
    "Severity",
    "TrainingFacts",
    "audit",
    "audit_report",
    "audit_together",
    "exit_code",
    "read_any",
    "rules_page",
]


def audit(
    run: config.Run | Reading, model: nn.Module | None = None, *, data: int | None = None, ranks: int | None = None, **facts: Any
) -> list[Finding]:
    """Return what is wrong with a training, most severe first.

    run: a megabatch run, or the result of `read_any`. The fix of a run without a file is a diff of what `config.as_toml` writes.
    model: provides facts that the file does not state: BatchNorm and the precision of the weights.
    data: samples of an epoch. ranks: of the launch; for a megabatch run, 1 if not given. facts: further facts, by the names of
        `TrainingFacts`: base_lr and base_batch, unique, finetuning, …

    >>> run = config.build({"schedule": {"samples": 400_000_000, "warmup": 0}, "batch": {"size": 8192}})
    >>> [(finding.code, finding.where) for finding in audit(run)]
    [('no-warmup', 'schedule.warmup')]
    """
    facts |= {"data": data, "ranks": ranks}
    if isinstance(run, config.Run):
        facts["ranks"] = 1 if ranks is None else ranks
        run = reading_of(run, "run.toml", config.as_toml(run), facts)
    if model is not None:
        facts |= _facts_of(model)
    training, document = with_facts(run.training, facts), run.document
    violations = [(rule, violation) for rule in RULES for violation in rule.violations(training)]
    codes = {rule.code for rule, _ in violations}

    def is_better(rule: Rule, text: str) -> bool:
        """Return whether a text of this document does not break the rule, nor one that the document kept."""
        try:
            after = with_facts(document.read(text), facts)
            return {other.code for other in RULES if other.violations(after)} <= codes - {rule.code}
        except (ValueError, RecursionError):
            return False

    findings = [_finding(rule, violation, training, document, is_better) for rule, violation in violations]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def _finding(
    rule: Rule, violation: Violation, training: TrainingFacts, document: Document, is_better: Callable[[Rule, str], bool]
) -> Finding:
    """Return the finding with the first fix that the tool has keys for, that works, and that breaks no other rule."""
    advice = f" {violation.advice}" if violation.advice else ""
    diff = None
    # A fix is computed from all known facts of the training, not only from those in its file.
    for changes in (violation.changes, *violation.otherwise):
        after = document.edited(changes, training)
        if after is not None and is_better(rule, after):
            diff = document.diff(after)
            break
    return Finding(
        rule.code,
        violation.severity,
        document.where(violation.fact),
        f"{violation.text} {rule.because.partition('. ')[0].rstrip('.')}.{advice if diff else ''}",
        diff or f"{rule.remedy}{advice}",
        rule.source,
    )


def _facts_of(model: nn.Module) -> dict[str, bool]:
    """Return the facts that a model provides. Layers that a model in training mode keeps in evaluation mode do not count."""
    import torch
    from torch import nn

    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and (m.training or not model.training)]
    half = any(p.requires_grad and p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    facts = {"batchnorm": bool(layers), "half_weights": half}
    if layers and all(isinstance(layer, nn.SyncBatchNorm) for layer in layers):
        facts["sync_batchnorm"] = True
    return facts
