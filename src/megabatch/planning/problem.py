"""The problem that a plan solves: the request with its machine, base run, budget of samples and memory limit resolved."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import config
from ..costs.hardware import Machine, find_machine
from ..costs.strategy import Precision
from ..objectives import MEAN, OBJECTIVES, ObjectiveSpec
from .request import Budget, Request, base_run, check_batch, parse_count, sample_budget


@dataclass(frozen=True)
class Problem:
    """Everything that is fixed before the batch is chosen.

    base: the run with the requested towers and data. given: the batch, if the request fixes it. limit: bytes that may be used on
    each device.
    """

    request: Request
    machine: Machine
    base: config.Run
    budget: Budget
    given: int | None
    precision: Precision
    limit: int

    @property
    def objective(self) -> ObjectiveSpec:
        """The objective of the base run, or a mean over samples if samples are not compared with each other."""
        return OBJECTIVES[self.base.loss.objective if self.request.pairs else MEAN]


def problem_of(request: Request) -> Problem:
    """Resolve a request. Raises ValueError if its parts do not fit together."""
    if request.objective == "lm" and request.text_length is not None:
        request = replace(request, length=request.text_length)
    machine = find_machine(request.gpu, request.gpus, request.memory, request.rates)
    base = base_run(request)
    if isinstance(request.model, config.Run) and request.start == "scratch" and (base.x.locked or base.x.weights):
        # A run states itself whether its image tower is pretrained or locked.
        request = replace(request, start="locked" if base.x.locked else "pretrained")
    budget = sample_budget(request, base)
    given = parse_count(request.batch, "batch")
    if given is not None:
        check_batch(given, budget.data)
    precision = choose_precision(request.precision, machine)
    return Problem(request, machine, base, budget, given, precision, limit=int(request.share * machine.device.memory))


def choose_precision(requested: Precision | None, machine: Machine) -> Precision:
    """Return the requested precision, which the device must support, or the first of bf16, fp16 and fp32 that it supports."""
    if requested is not None:
        machine.device.flops_per_second(requested)
        return requested
    # CPUs that support half precision may be far slower in it.
    order: tuple[Precision, ...] = ("bf16", "fp16", "fp32") if machine.device.type != "cpu" else ("fp32",)
    return next(precision for precision in order if precision in machine.device.rates)
