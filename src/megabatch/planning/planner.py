"""Make a plan: the batch from the problem, the strategy from the machine, the hyperparameters from the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .. import config, trust, vocabulary
from ..costs.hardware import Machine
from ..costs.memory import Prediction
from ..costs.time import interval
from ..evidence import FACTS, Confidence, Fact, collisions
from ..optimizers import OPTIMIZERS
from ..towers import names_code
from ..towers.known import find_text_model
from .alternatives import alternatives, changes, curve
from .budget import time_warnings, within_budget
from .calibration import Calibration
from .choose_batch import choose_batch, task_of
from .estimator import Estimator, Tools, estimator_for
from .hyperparameters import GIVEN, Hyperparameters, KnownRate, derive_hyperparameters
from .plan import BUDGET_GIVEN, Number, Plan, PublishedRun
from .problem import Problem, is_built_with_weights, problem_of
from .request import Request, asked_by_run, parse_base
from .search import Estimate

GIB = 2**30
# Sources of a plan's numbers.
PREDICTED, PROFILE = "memory predicted on fake tensors", "megabatch profile"


def plan(
    model: str | config.Run | None = None,
    *,
    tools: Tools | None = None,
    trust_code: bool = False,
    progress: Callable[[str], object] = lambda text: None,
    **asked: Any,
) -> Plan:
    """Return the plan for a model, data and machine; `Request` documents the arguments.

    Without arguments: the embedded default on this machine. Of a Run, what the arguments do not change stays.
    trust_code: whether code that a Run names (`trust.callables`) may be imported and called. A function that `model` itself names,
        "package.module:function", comes from the caller and is trusted.
    progress: called with a few words on what is being done.
    """
    if isinstance(model, config.Run):
        trust.require_trust(model, trust_code)
        asked = asked_by_run(model, asked)
    try:
        request = Request(model, **asked)
    except TypeError as error:
        fields = {field.name for field in dataclasses.fields(Request)}
        named = next((name for name in asked if name not in fields and vocabulary.foreign(name)), None)
        option = vocabulary.FOREIGN[named].option.strip("-").replace("-", "_") if named else ""
        remedy = f"{named} is called {option} here" if option else f"the arguments are {', '.join(sorted(fields))}"
        raise ValueError(f"plan: {error}; {remedy}") from None
    problem = problem_of(request)
    progress("counting the operations of the model")
    return plan_for(problem, estimator_for(problem, tools), progress)


def plan_for(problem: Problem, estimator: Estimator, progress: Callable[[str], object] = lambda text: None) -> Plan:
    """Return the plan for a problem: its batch, the strategy that reaches it, its hyperparameters, and what else could be done."""
    progress("predicting memory and time")
    problem, estimator, spent, spending_notes = within_budget(problem, estimator)
    choice = choose_batch(problem, estimator)
    estimate, predicted = estimator.checked(choice.batch)
    strategy, machine, calibration = estimate.strategy, problem.machine, estimator.calibration
    task = task_of(problem, estimator.parameters)
    follows = _with_values_of_file(hyperparameters(problem, estimator, strategy.batch), problem)
    run = run_of(problem, estimate, follows)
    numbers = (
        Number("batch", strategy.batch, f"{strategy.batch:,}", choice.why, choice.source, choice.confidence),
        *strategy_numbers(estimate, problem.limit, machine, calibration),
        *(collision_numbers(strategy.batch, problem.budget.unique, problem.budget.data) if problem.request.pairs else ()),
        *follows.numbers,
        *_run_numbers(problem, run, spent),
    )
    progress("comparing alternatives")
    others = tuple(alternatives(problem, estimator, estimate))
    price = problem.request.price
    hours = others[0].hours
    cost = None if price is None else others[0].cost
    return Plan(
        run=run,
        strategy=strategy,
        machine=f"{machine.gpus} × {machine.device.name}",
        device_bytes=machine.device.memory,
        limit_bytes=problem.limit,
        seconds_per_step=estimate.seconds,
        peak_bytes=estimate.peak,
        moment=predicted.moment,
        memory=_memory_parts(predicted, estimate.peak),
        time=estimator.step(strategy).parts,
        numbers=numbers,
        alternatives=others,
        notes=(*choice.notes, *spending_notes, *calibration.notes, *notes(problem, estimator, follows)),
        changes=tuple(changes(problem, estimator, estimate)),
        curve=tuple(curve(problem, estimator, estimate)),
        pairs=problem.request.pairs,
        negatives=problem.request.negatives,
        data=problem.budget.data,
        seen=problem.budget.seen,
        price=price,
        warnings=(*choice.warnings, *time_warnings(problem, hours, cost), *_other_readings(problem)),
        others=tuple(
            PublishedRun(
                recipe.name,
                recipe.batch,
                recipe.task.seen,
                recipe.lr,
                recipe.warmup,
                recipe.source,
                None if recipe.task.optimizer == task.optimizer else recipe.task.optimizer.upper(),
                recipe.task.length,
            )
            for recipe in choice.others
        ),
        text_length=estimator.text_length if task.kind in ("embedder", "lm") else None,
        open_clip=task.kind == "image-text" and not problem.objective.views,
        edits=_edits(problem, run),
        device_type=machine.device.type,
        usual=None if choice.low is None or choice.high is None else (choice.low, choice.high),
        views=problem.objective.views,
        lm=problem.request.objective == "lm",
        lora=problem.request.lora,
    )


def _other_readings(problem: Problem) -> list[str]:
    """Return what else the question could mean."""
    request = problem.request
    known = find_text_model(request.model) if isinstance(request.model, str) else None
    if known is None or not known.causal or request.objective != "finetune":
        return []
    return [
        f"{request.model} is a language model: this plan fine-tunes it as a text embedder on pairs. To fine-tune it as a language"
        " model, ask with --objective lm --start pretrained, and --data in tokens."
    ]


def _run_numbers(problem: Problem, run: config.Run | None, spent: str) -> list[Number]:
    """Return the samples seen, and what a run's file needs beside them, with their reasons."""
    data, _, seen = problem.budget
    request, unit = problem.request, "sequences" if problem.request.objective == "lm" else "samples"
    if spent:
        why, source = spent, BUDGET_GIVEN
    elif request.seen is not None or request.epochs is not None:
        why, source = "as requested", "given"
    else:
        fact = FACTS["epochs"]
        why, source = f"{seen / data:.3g} epochs, the usual number: {fact.says}", fact.source
    numbers = [Number("samples seen", seen, f"{seen:,}", f"{why}; the data has {data:,} {unit}", source, "high")]
    if run is not None and isinstance(request.model, str):
        why = "as requested" if request.dim else "the width of the model's own embeddings, or a usual one if it has none"
        numbers.append(Number("width", run.loss.dim, f"{run.loss.dim:,}", why, "the model", "high"))
        if run.data.workers:
            why = "processes on each GPU that read and decode: the training process alone would be slower than the GPU"
            numbers.append(Number("workers", run.data.workers, f"{run.data.workers}", why, "common practice", "low"))
    return numbers


def _with_values_of_file(follows: Hyperparameters, problem: Problem) -> Hyperparameters:
    """Return the hyperparameters, with those that a run's file sets itself as it sets them."""
    if not isinstance(problem.request.model, config.Run):
        return follows
    base, defaults = problem.base, config.DEFAULTS
    own: dict[str, Any] = {}
    if base.optimizer.betas != defaults.optimizer.betas:
        own |= {"betas": base.optimizer.betas}
    if base.optimizer.weight_decay != defaults.optimizer.weight_decay:
        own |= {"weight_decay": base.optimizer.weight_decay}
    if base.optimizer.ema is not None and problem.request.ema is None:
        own |= {"ema": base.optimizer.ema}
    if base.loss.label_smoothing != defaults.loss.label_smoothing:
        own |= {"label_smoothing": base.loss.label_smoothing}
    if base.schedule.warmup != defaults.schedule.warmup:
        warmup = base.schedule.warmup
        steps = round(warmup if warmup >= 1 else warmup * follows.steps)
        # A file that was written for a longer run: the rate would rise until the end.
        if steps < follows.steps:
            own |= {"warmup": steps}
    names = {"betas": "β2", "weight_decay": "weight decay", "ema": "EMA", "label_smoothing": "label smoothing", "warmup": "warm-up"}
    shown = {names[key]: value[1] if key == "betas" else value for key, value in own.items()}
    numbers = [number for number in follows.numbers if number.name not in shown]
    numbers += [Number(name, value, f"{value:g}", "as the run's file says", "given", "high") for name, value in shown.items()]
    return follows._replace(**own, numbers=tuple(numbers))


def _edits(problem: Problem, run: config.Run | None) -> tuple[str, ...]:
    """Return what the plan changed in the run that it was given, one line per key."""
    if run is None or not isinstance(problem.request.model, config.Run):
        return ()
    lines = []
    for name, after in config.as_table(run).items():
        before = config.as_table(problem.request.model).get(name)
        if isinstance(after, dict) and isinstance(before, dict) and name != "planned":
            for key in dict.fromkeys([*before, *after]):
                if before.get(key) != after.get(key):
                    values = (config.NONE if value is None else value for value in (before.get(key), after.get(key)))
                    lines.append(f"{name}.{key}: {' → '.join(map(str, values))}")
    return tuple(lines)


def hyperparameters(problem: Problem, estimator: Estimator, batch: int) -> Hyperparameters:
    """Return the hyperparameters at a batch, scaled from the given rate, from a sweep's, or from the usual one."""
    request, sweep = problem.request, estimator.calibration.sweep
    given, known = parse_base(request.base_lr), None
    if given is not None:
        known = KnownRate(*given, GIVEN)
    elif sweep is not None:
        origin = estimator.calibration.origin["sweep"]
        fact = Fact(f"the best rate of a sweep at {sweep.batch:,}, {origin}", "megabatch sweep", "measured")
        known = KnownRate(sweep.lr, sweep.batch, fact)
    elif request.model is None:
        fact = Fact("the rate of the embedded run, tuned at its batch", "embedded configuration", "medium")
        known = KnownRate(problem.base.optimizer.lr, problem.base.batch.size, fact)
    elif isinstance(request.model, config.Run) and problem.base.optimizer.lr != config.DEFAULTS.optimizer.lr:
        fact = Fact("the rate of the run's file at its batch", "given", "medium")
        known = KnownRate(problem.base.optimizer.lr, problem.base.batch.size, fact)
    task = task_of(problem, estimator.parameters)
    return derive_hyperparameters(task, batch, known, ema=request.ema, smooths_labels=problem.objective.smooths_labels)


def notes(problem: Problem, estimator: Estimator, follows: Hyperparameters) -> list[str]:
    """Return what to know before the run, one sentence or two each."""
    request, device, fact = problem.request, problem.machine.device, FACTS["no accumulation"]
    lines = []
    if request.pairs:
        lines.append(f"Chunks, not accumulation, reach the batch, because {fact.says} ({fact.source}).")
        lines.append(
            "Whether a larger batch is better at equal samples is known only from a measurement on your data: compare with half of"
            " it."
        )
    if follows.sweep:
        lines.append(f"Sweep the learning rate: {', '.join(f'{rate:g}' for rate in follows.sweep)}.")
    missing = config.unfilled(problem.base)
    if missing and request.trainable:
        lines.append(f"Fill in {', '.join(missing)} in the run's file: `megabatch train` refuses it until then.")
    lines += _assumed_start(problem)
    if device.type == "cpu" and not estimator.calibration.steps and request.rates is None:
        lines.append(f"This machine has no accelerator: the times rest on an assumption ({device.source}).")
    return lines


def _assumed_start(problem: Problem) -> list[str]:
    """Return what the plan takes for the start of a tower that brings its weights itself, or may do so."""
    request, tower = problem.request, problem.base.x
    if not request.trainable or tower.locked or tower.weights:
        return []
    if names_code(tower.name):
        start = "random" if request.start == "scratch" else "pretrained"
        return [f"{tower.name} decides itself what it starts from: the plan assumes {start} weights (--start says which)."]
    if is_built_with_weights(tower.name):
        return [
            f"The plan assumes a start from the pretrained weights of {tower.name}, because `megabatch train` loads them. For"
            " random weights, name a folder of the model without a weight file."
        ]
    return []


def run_of(problem: Problem, estimate: Estimate, follows: Hyperparameters) -> config.Run | None:
    """Return the base run with everything that was decided, or None for what `train` does not train."""
    if not problem.request.trainable:
        return None
    base, strategy = problem.base, estimate.strategy
    optimizer = replace(
        base.optimizer,
        name=problem.request.optimizer if base.optimizer.name in OPTIMIZERS else base.optimizer.name,
        lr=follows.lr,
        betas=follows.betas,
        weight_decay=follows.weight_decay,
        ema=follows.ema,
    )
    length: dict[str, Any] = {"samples": problem.budget.seen, "epochs": None, "steps": None}
    if isinstance(problem.request.model, config.Run) and problem.request.epochs == base.schedule.epochs is not None:
        # The file's own length stays as it is written.
        length = {"samples": None, "epochs": base.schedule.epochs, "steps": None}
    planned = replace(
        base,
        out=problem.request.out or base.out,
        x=replace(base.x, checkpointing=strategy.checkpointing),
        y=replace(base.y, checkpointing=strategy.checkpointing and base.y.name != "x"),
        loss=replace(base.loss, label_smoothing=follows.label_smoothing),
        batch=replace(base.batch, size=strategy.batch, chunk=strategy.chunk, keep=strategy.keep),
        optimizer=optimizer,
        schedule=replace(base.schedule, **length, warmup=float(follows.warmup)),
        compute=replace(
            base.compute,
            precision=strategy.precision,
            sharding=strategy.sharding,
            gradient_exchange=strategy.gradient_exchange,
            # Weights with channels last cannot be sharded.
            channels_last=base.compute.channels_last if strategy.sharding == "ddp" else None,
            # Blocks that are computed again would use other kernels.
            short_attention=base.compute.short_attention and not strategy.checkpointing,
        ),
        planned=config.Planned(estimate.peak, estimate.seconds),
    )
    # A different optimizer than the base run's does not use all of its keys.
    run = config.without_unused(planned)
    config.check(run)
    return run


def strategy_numbers(estimate: Estimate, limit: int, machine: Machine, calibration: Calibration) -> list[Number]:
    """Return the numbers of a strategy with their reasons."""
    strategy = estimate.strategy
    rows = [
        Number("shard", strategy.shard, f"{strategy.shard:,} rows × {strategy.ranks}", "batch / GPUs", "arithmetic", "high"),
        _chunk_number(estimate, limit, calibration),
    ]
    if not strategy.accumulate:
        rest = "no chunk is recomputed" if strategy.keep >= strategy.chunks else "the others cost one extra forward pass"
        why = f"as many of the {strategy.chunks} chunks per tower as still fit; {rest}"
        rows.append(Number("keep", strategy.keep, f"{strategy.keep}", why, PREDICTED, "medium"))
    why = "the fastest precision in which the device trains"
    rows.append(Number("precision", strategy.precision, strategy.precision, why, machine.device.source, "high"))
    if strategy.checkpointing:
        why = "faster than the smaller chunks that would be needed without it"
        rows.append(Number("checkpointing", "on", "on", why, "time model", "medium"))
    if strategy.ranks > 1:
        why = {
            "ddp": "the weights fit unsharded",
            "fsdp2": "weights, gradients and optimizer state are sharded: unsharded, they do not fit or take more time",
            "hsdp": f"sharded over the {strategy.owners} GPUs of each node and replicated across nodes, so that weights"
            " are gathered over the fast links only",
        }[strategy.sharding]
        rows.append(Number("sharding", strategy.sharding, strategy.sharding, why, "memory and time models", "medium"))
    return [*rows, _seconds_number(estimate, machine, calibration), _memory_number(estimate, limit, calibration)]


def _within_limit(estimate: Estimate, limit: int) -> str:
    return f"predicted {estimate.peak / GIB:.1f} GiB of the {limit / GIB:.1f} GiB that may be used"


def _chunk_number(estimate: Estimate, limit: int, calibration: Calibration) -> Number:
    chunk, fit = estimate.strategy.chunk, calibration.fit
    shown = f"{chunk:,} rows"
    if fit is not None:
        within = "" if fit.limit_bytes is None else f" within {fit.limit_bytes / GIB:.1f} GiB"
        origin = calibration.origin["fit"]
        why = f"{fit.chunk:,} rows are the largest chunk that ran{within}, {origin}; the batch does not depend on it"
        confidence: Confidence = "measured" if calibration.has_run(replace(estimate.strategy, keep=0)) else "medium"
        return Number("chunk", chunk, shown, why, "megabatch fit", confidence)
    if chunk in calibration.timed:
        origin = next(step.origin for step in calibration.steps if step.strategy.chunk == chunk)
        why = f"the fastest that fits of {len(calibration.timed)} timed chunks, {origin}: {_within_limit(estimate, limit)}"
        return Number("chunk", chunk, shown, why, PROFILE, "measured")
    why = f"the largest that fits: {_within_limit(estimate, limit)}; the batch does not depend on it"
    return Number("chunk", chunk, shown, why, PREDICTED, "high")


def _seconds_number(estimate: Estimate, machine: Machine, calibration: Calibration) -> Number:
    name, shown, step = "seconds per step", f"{estimate.seconds:.3g} s", calibration.nearest(estimate.strategy)
    why = f"counted operations and bytes, divided by the rates of {machine.device.name} at typical efficiencies"
    confidence = calibration.confidence(estimate.strategy)
    if step is None or confidence is None:
        low, high = interval(estimate.seconds, machine.device)
        why += f"; nine in ten steps take between {low:.2g} and {high:.2g} s"
        shown, known = f"{shown} ({low:.2g}–{high:.2g})", machine.device.basis in ("fitted", "measured")
        return Number(name, estimate.seconds, shown, why, machine.device.source, "medium" if known else "low")
    if confidence == "measured":
        why = f"the median of steps at this batch and chunk, {step.origin}"
        return Number(name, estimate.seconds, shown, why, PROFILE, confidence)
    near = step.strategy
    why += f"; scaled by the time of steps at batch {near.batch:,} in chunks of {near.chunk:,}, {step.origin}"
    return Number(name, estimate.seconds, shown, why, f"{PROFILE}; {machine.device.source}", confidence)


def _memory_number(estimate: Estimate, limit: int, calibration: Calibration) -> Number:
    name, shown, step = "peak memory", f"{estimate.peak / GIB:.1f} GiB", calibration.nearest(estimate.strategy)
    if step is None or step.memory is None:
        return Number(name, estimate.peak, shown, _within_limit(estimate, limit), PREDICTED, "high")
    near = step.strategy
    if near == estimate.strategy:
        why = f"of the {limit / GIB:.1f} GiB that may be used; {step.origin}"
        return Number(name, estimate.peak, shown, why, PROFILE, "measured" if step.factor is None else "medium")
    scale = f"scaled by the memory of batch {near.batch:,} in chunks of {near.chunk:,}, {step.origin}"
    confidence: Confidence = "high" if step.factor is None else "medium"
    return Number(name, estimate.peak, shown, f"{_within_limit(estimate, limit)}, {scale}", f"{PROFILE}; {PREDICTED}", confidence)


def collision_numbers(batch: int, unique: int, data: int) -> list[Number]:
    """Return the expected number of equal items in a contrastive batch, with its reason."""
    fact, expected = FACTS["collisions"], collisions(batch, unique, data)
    why = f"{fact.says}: B = {batch:,}, N = {data:,}, U = {unique:,}"
    why += "; they are masked, not used as negatives" if expected else ""
    return [Number("colliding pairs per batch", expected, f"{expected:,.3g}", why, fact.source, fact.confidence)]


def _memory_parts(predicted: Prediction, peak: int) -> dict[str, int]:
    """Return the parts of a predicted peak, and the rest of the peak: more rows, kept chunks, the allocator's reserve."""
    parts = dict(predicted.parts)
    rest = peak - sum(parts.values())
    if rest >= 0:
        return {**parts, "further rows, kept chunks, reserve": rest} if rest else parts
    # A measured peak below the predicted one: the parts keep their proportions.
    return {name: round(part * peak / sum(parts.values())) for name, part in parts.items()}
