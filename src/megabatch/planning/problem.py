"""The problem that a plan solves: the request with its machine, base run, budget of samples and memory limit resolved."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from .. import config
from ..costs.hardware import Machine, find_machine
from ..costs.models import shapes_of
from ..costs.strategy import Precision
from ..data import open_source
from ..data.sampler import split
from ..objectives import MEAN, OBJECTIVES, ObjectiveSpec
from ..recipes import Kind, usual_epochs
from ..towers import find_library, full_name, names_code
from ..towers.transformers import PREFIX, sequence_length
from .request import Budget, Request, Start, base_run, check_batch, check_ranks, parse_count, sample_budget

# Worker processes of each rank that read data for an accelerator.
WORKERS = 8
# Gigabits per second of an InfiniBand port by generation (HDR, NDR, XDR), one for each GPU, and bytes per second of a gigabit.
NETWORKS = {"infiniband": 200, "hdr": 200, "ndr": 400, "xdr": 800}
GIGABIT = 1e9 / 8


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
    if request.objective == "lm":
        request = replace(request, length=_sequence_length(request))
    if request.start == "scratch" and (request.objective == "finetune" or request.lora is not None):
        # Fine-tuning starts from weights, whatever else is said.
        request = replace(request, start="pretrained")
    machine = _with_nodes(find_machine(request.gpu, request.gpus, request.memory, request.rates), request)
    base = config.with_ranks(base_run(request), machine.gpus)
    if request.start == "scratch" and request.objective != "lm":
        request = replace(request, start=start_of(base))
    if base.data.workers == 0 and machine.device.type != "cpu" and isinstance(request.model, str):
        base = replace(base, data=replace(base.data, workers=WORKERS))
    kind = kind_of(request, base)
    budget = sample_budget(request, base, count_samples, lambda data: usual_epochs(kind, request.start, data))
    given = parse_count(request.batch, "batch") if request.per_gpu is None else request.per_gpu * machine.gpus
    if given is not None:
        check_batch(given, budget.data)
    check_ranks(machine.gpus, budget.data)
    precision = choose_precision(request.precision, machine)
    return Problem(request, machine, base, budget, given, precision, limit=int(request.share * machine.device.memory))


def start_of(run: config.Run) -> Start:
    """Return how the image tower of a run starts when `megabatch train` runs it: as the run states, or as its library builds it."""
    if run.x.locked:
        return "locked"
    return "pretrained" if run.x.weights or is_built_with_weights(run.x.name) else "scratch"


def is_built_with_weights(name: str) -> bool:
    """Return whether a tower's library builds it with pretrained weights. A function may do so too, which is unknown: False."""
    return not names_code(name) and find_library(name).holds_weights(name.partition(":")[2])


def _sequence_length(request: Request) -> int:
    """Return the tokens of a language model's sequences: as requested, else the default, or fewer if it reads fewer."""
    wanted = request.text_length
    if wanted is None and request.length != Request.length:
        wanted = request.length
    name = full_name(request.model) if isinstance(request.model, str) else ""
    if not name.startswith(PREFIX):
        # A function that builds a model does not say what the model reads.
        return request.length if wanted is None else wanted
    return sequence_length(name.removeprefix(PREFIX), wanted, request.length)


def kind_of(request: Request, base: config.Run) -> Kind:
    """Return what is trained, as the rules see it."""
    if request.objective == "lm":
        return "lm"
    if not request.pairs:
        return "classifier"
    # A tower "x" on side y is the tower of side x.
    towers = (("x", base.x.name), ("y", base.x.name if base.y.name == "x" else base.y.name))
    kinds = {find_library(name).kind_of(name.partition(":")[2], side) for side, name in towers}
    return "embedder" if kinds == {"text"} else "image-text"


def _with_nodes(machine: Machine, request: Request) -> Machine:
    """Return the machine with its GPUs spread over the requested nodes, and the network between them."""
    if request.nodes is not None:
        if machine.gpus % request.nodes:
            raise ValueError(f"nodes is {request.nodes} and gpus is {machine.gpus}: the GPUs must be spread evenly over the nodes")
        machine = replace(machine, node=machine.gpus // request.nodes)
    if request.interconnect is not None:
        machine = replace(machine, network=parse_network(request.interconnect))
    return machine


def parse_network(text: str) -> float:
    """Return the bytes per second of "infiniband", "100GbE", "400Gb/s" or "25GB/s": for each GPU, one way.

    >>> parse_network("100GbE"), parse_network("25 GB/s"), parse_network("NDR")
    (12500000000.0, 25000000000.0, 50000000000.0)
    """
    name = text.strip().lower()
    if name in NETWORKS:
        return NETWORKS[name] * GIGABIT
    parsed = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(gbe|gbit/s|gbps|gb/s)", name)
    if parsed is None or not 0 < float(parsed[1]) <= 1e5:
        names = ", ".join(NETWORKS)
        raise ValueError(f"interconnect is {text[:40]!r}: must be one of {names}, or a speed, as 100GbE or 25GB/s")
    # Bytes are written GB/s, bits GbE, Gbit/s or Gbps; a lower-case Gb/s is bits too.
    is_bytes = parsed[2] == "gb/s" and text.strip()[-4:-2] != "Gb"
    return float(parsed[1]) * (1e9 if is_bytes else GIGABIT)


def count_samples(run: config.Run) -> int:
    """Return the training samples of a run's source, after those that are held out. Opens the source and builds the towers."""
    x, y = shapes_of(run)
    data = run.data
    if not OBJECTIVES[run.loss.objective].contrastive and data.negatives is None:
        # A classifier does not use hard negatives.
        data = replace(data, negatives=False)
    source = open_source(data, x=x.kind, y=y.kind)
    training = source if isinstance(data.held_out, str) else split(source, data.held_out)[0]
    return sum(training.lengths)


def choose_precision(requested: Precision | None, machine: Machine) -> Precision:
    """Return the requested precision, which the device must support, or the first of bf16, fp16 and fp32 that it supports."""
    if requested is not None:
        machine.device.flops_per_second(requested)
        return requested
    # CPUs that support half precision may be far slower in it.
    order: tuple[Precision, ...] = ("bf16", "fp16", "fp32") if machine.device.type != "cpu" else ("fp32",)
    return next(precision for precision in order if precision in machine.device.rates)
