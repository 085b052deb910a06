"""Rules about the weights that a training starts from."""

from __future__ import annotations

from collections.abc import Iterator

from ...recipes import advise_rate
from ..facts import TrainingFacts
from ..rule import Violation, rule


@rule(
    "locked-random-tower",
    "error",
    source="LiT (2111.07991) locks a pretrained tower",
    remedy='Name the weights of the locked tower (`weights = "…"`, or --pretrained), or do not lock it.',
)
def locked_random_tower(t: TrainingFacts) -> Iterator[Violation]:
    """A locked tower with random weights.

    A locked tower does not learn, so that the other one is trained to imitate random features.
    """
    if t.random_tower:
        yield Violation("error", "random_tower", "A tower is locked and has no weights to start from.")


@rule(
    "rate-for-pretrained-weights",
    "error",
    source="CLIP towers train from scratch at 4e-4 to 2e-3 (CLIP 2103.00020, OpenCLIP, DataComp); 5e-5 and below is for fine-tuning"
    " (BERT, 1810.04805)",
    remedy="Name the pretrained weights, or take the rate of a training from scratch.",
)
def rate_for_pretrained_weights(t: TrainingFacts) -> Iterator[Violation]:
    """Random weights at a rate for fine-tuning.

    Either the weights were forgotten, or the run ends long before it has learned.
    """
    if not t.contrastive or t.finetuning is not False or t.locked or t.optimizer is None or t.lr is None or t.lr > t.rates()[0]:
        return
    text = f"The towers start from random weights at a rate of {t.lr:g}, which is for pretrained ones."
    wanted = advise_rate(t.tasks()[0], t.size or 256).value
    yield Violation("error", "finetuning", text, {"lr": wanted}, "If weights were meant, name them instead.")


@rule(
    "not-filled-in",
    "note",
    source="`megabatch train` refuses such a file",
    remedy="Fill in the values that begin with FILL IN.",
)
def not_filled_in(t: TrainingFacts) -> Iterator[Violation]:
    """A planned run whose files are still to be named.

    A plan knows neither where the data is nor where pretrained weights are, and leaves these values to the user.
    """
    if t.unfilled:
        yield Violation("note", "unfilled", f"Still to be filled in: {t.unfilled}.")


RULES = (locked_random_tower, rate_for_pretrained_weights, not_filled_in)
