"""Rules about settings that the tool refuses, ignores, or reads in another way than their names say."""

from __future__ import annotations

from collections.abc import Iterator

from ..facts import TrainingFacts
from ..rule import Violation, rule


@rule(
    "settings-disagree",
    "error",
    source="transformers' integrations/deepspeed.py and training_args.py, accelerate's launch.py, Lightning's Trainer",
    remedy='Make the settings agree; in a DeepSpeed file for the Trainer, "auto" takes the Trainer\'s value.',
)
def settings_disagree(t: TrainingFacts) -> Iterator[Violation]:
    """Settings that contradict each other.

    Only one of them can hold: the tool refuses to start, or ignores the other.
    """
    if t.disagreement:
        yield Violation("error", "disagreement", t.disagreement, {"disagreement": None})


@rule(
    "two-precisions",
    "error",
    source="transformers' training_args.py and DeepSpeed's runtime/config.py refuse both",
    remedy="Switch fp16 off and keep bf16.",
)
def two_precisions(t: TrainingFacts) -> Iterator[Violation]:
    """fp16 and bf16 at the same time.

    A training has one of them, and the tool refuses to start.
    """
    if t.two_precisions:
        yield Violation("error", "two_precisions", "fp16 and bf16 are both on.", {"two_precisions": False})


@rule(
    "parameter-offload-ignored",
    "warning",
    source="DeepSpeed's and accelerate's documentation: offloaded parameters need ZeRO stage 3",
    remedy="Offload parameters with ZeRO stage 3 only; below it, offload the optimizer.",
)
def parameter_offload_ignored(t: TrainingFacts) -> Iterator[Violation]:
    """Offloaded parameters below ZeRO stage 3.

    Below stage 3 every rank keeps all parameters, and the setting has no effect: the memory that it should save is not saved.
    """
    if t.offloads_parameters and t.zero_stage is not None and t.zero_stage < 3:
        text = f"Parameters are offloaded at ZeRO stage {t.zero_stage}, where that has no effect."
        yield Violation("warning", "offloads_parameters", text, {"offloads_parameters": False}, "Or use stage 3.")


@rule(
    "split-batches",
    "warning",
    source="accelerate's documentation of split_batches; transformers issue 38484",
    remedy="Leave split_batches out, or write the batch of all ranks on purpose and keep the learning rate that belongs to it.",
)
def split_batches(t: TrainingFacts) -> Iterator[Violation]:
    """A device's batch that all ranks share.

    With split_batches the number called "per device" is the batch of all ranks, and each gets a part of it.
    """
    if not t.split_batches or t.ranks == 1:
        return
    rows = None if t.micro is None or t.ranks is None else t.micro // t.ranks
    each = "a part of it" if rows is None else f"{rows:,}"
    text = f"split_batches makes {t.micro or 'the stated batch'} the batch of all {t.ranks or ''} ranks, of which each gets {each}."
    yield Violation("warning", "split_batches", " ".join(text.split()), {"split_batches": False})


@rule(
    "data-parallel",
    "warning",
    source="PyTorch's documentation of DataParallel recommends DistributedDataParallel; colpali issue 124",
    remedy="Launch one process per GPU: `torchrun --nproc-per-node N script.py …`. A contrastive loss then needs to gather the"
    " embeddings of all ranks to keep its negatives.",
)
def data_parallel(t: TrainingFacts) -> Iterator[Violation]:
    """Several GPUs in one process.

    The Trainer then uses DataParallel: slower, and a loss outside of the model compares the pairs of all GPUs, while the same
    script under torchrun compares those of one.
    """
    if t.data_parallel:
        number = f"{t.visible} GPUs" if t.visible else "Several GPUs"
        yield Violation("warning", "data_parallel", f"{number} are driven by one process (DataParallel).")


@rule(
    "reduce-function-ignored",
    "warning",
    source="accelerate's utils/memory.py: find_executable_batch_size as a decorator drops reduce_batch_size_fn up to 1.14",
    remedy="Use accelerate 1.15 or newer, or call find_executable_batch_size(function, …) instead of decorating.",
)
def reduce_function_ignored(t: TrainingFacts) -> Iterator[Violation]:
    """A function that reduces the batch and is not called.

    The decorator of older versions drops it and shrinks the batch by its own factor.
    """
    if t.reduce_function:
        text = "reduce_batch_size_fn of the decorator find_executable_batch_size is ignored up to accelerate 1.14."
        yield Violation("warning", "reduce_function", text)


@rule(
    "quantized-without-adapter",
    "error",
    source="transformers' Trainer refuses to train quantized weights; QLoRA (2305.14314) trains an adapter",
    remedy="Train an adapter (LoRA), or load the weights in bf16.",
)
def quantized_without_adapter(t: TrainingFacts) -> Iterator[Violation]:
    """Quantized weights without an adapter.

    Weights in 4 or 8 bits have no gradient: only an adapter on top of them can learn.
    """
    if t.quantized and t.adapter is False:
        yield Violation("error", "quantized", "The weights are quantized, and there is no adapter.", {"adapter": True})


@rule(
    "checkpointing-with-cache",
    "note",
    source="transformers' modeling_layers.py: checkpointed layers switch the cache off and warn",
    remedy="Set use_cache to false for training.",
)
def checkpointing_with_cache(t: TrainingFacts) -> Iterator[Violation]:
    """Gradient checkpointing with a cache of keys and values.

    The cache serves generation. With checkpointing it is switched off, with a warning for every run; older models keep it and need
    the memory.
    """
    if t.checkpointing and t.use_cache:
        text = "use_cache is on together with gradient checkpointing."
        yield Violation("note", "use_cache", text, {"use_cache": False})


RULES = (
    settings_disagree,
    two_precisions,
    quantized_without_adapter,
    split_batches,
    data_parallel,
    parameter_offload_ignored,
    reduce_function_ignored,
    checkpointing_with_cache,
)
