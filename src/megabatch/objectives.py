"""Training objectives, one record each: everything in which they differ to a run, a plan, the cost models and the audit.

A new contrastive loss is a function in `losses/`, its public name, and a record here. Everybody else reads fields of the record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Values of loss.objective in a run's file, and those among them that compare the samples of a batch with each other.
ObjectiveName = Literal["clip", "siglip", "infonce", "dcl", "nt_xent", "classify"]
PairLoss = Literal["clip", "siglip", "infonce", "dcl", "nt_xent"]
# Names that cost models and the audit use. They also describe trainings that are not runs of megabatch: "supervised" is any mean
# over samples, "lm" a mean over tokens.
CostName = Literal["clip", "siglip", "infonce", "dcl", "nt_xent", "supervised"]
AuditName = Literal["clip", "siglip", "infonce", "dcl", "nt_xent", "supervised", "lm"]

# Keys of a run's file that every contrastive objective uses, and no other.
PAIR_KEYS = (
    *("loss.scale", "loss.max_scale", "loss.duplicates", "loss.dims", "loss.spread_out"),
    *("data.negatives", "evaluate.large"),
)
# Keys of a run's file that losses over directions use.
DIRECTION_KEYS = ("loss.directions", "loss.partition", "loss.drop_above", "loss.drop_ratio")
# Who is compared with whom in a loss over directions: the first two compare x with y, the others a side with itself.
DIRECTIONS = ("x_to_y", "y_to_x", "x_to_x", "y_to_y")
CROSS_DIRECTIONS = DIRECTIONS[:2]
# Operations for each pair of rows and each dimension of the embeddings: the logits twice and two products for the gradients of a
# product of x with y. A product of a side with itself is symmetric, and needs half.
CROSS_FLOPS, SAME_SIDE_FLOPS = 8.0, 4.0
# Operations of the spread-out regulariser for each row and pair of dimensions: the Gram matrix of each side and a product with it.
SPREAD_OUT_FLOPS = 8.0
# Where the learnable bias of the sigmoid loss starts (arXiv 2303.15343).
SIGMOID_BIAS = -10.0


@dataclass(frozen=True)
class LossOptions:
    """The options of a contrastive loss that change what it costs.

    directions: of a loss over directions; empty: its default. dims: widths of the prefixes (Matryoshka); empty: the whole width.
    spread_out: whether the spread-out regulariser of both sides is added. negatives: hard negatives for each row of x.
    in_batch: whether rows of other samples are negatives. hardened: whether hardness weights negatives that other samples share,
    so that directions between x and y need a product each. masked: whether pairs with equal ids are told apart. weighted: whether
    negatives count by their similarity, or labels are smoothed.
    """

    directions: tuple[str, ...] = ()
    dims: tuple[int, ...] = ()
    spread_out: bool = False
    negatives: int = 0
    in_batch: bool = True
    hardened: bool = False
    masked: bool = True
    weighted: bool = False


PLAIN_LOSS = LossOptions()


@dataclass(frozen=True)
class ObjectiveSpec:
    """What one objective is.

    name: its value in a run's file. cost_name: its name in cost models and the audit.
    title: what help texts call it.
    contrastive: whether the loss compares the samples of a batch with each other. If not, it is a mean over samples: a batch can be
        accumulated in chunks, there is one tower, and samples have classes.
    metric, held_out_metric: what a step of the log and a finished run are judged by.
    keys: keys of a run's file that this objective uses and some other objective does not.
    function: its name in `megabatch.losses`, called as (x, y, scale) or, with a bias, (x, y, scale, bias).
    arguments: keys of the section [loss] that the function takes by the same name.
    one_direction: whether the function takes `symmetric=False`, which hard negatives need.
    takes_owners: whether it takes `negatives_of`, the row that each hard negative belongs to.
    directions: of a loss over directions, those of a run that names none.
    scale: where the learnable scale (1 / temperature) starts. bias: whether a learnable bias is added to the logits.
    flops: of forward and backward, for each pair of rows and each dimension of the embeddings.
    prefixes: whether kernels compute all widths of Matryoshka together, by default or from x to y alone.
    gradients_in_forward: whether one pass over the tiles gives the loss and its gradients, which are then saved for backward.
    max_scale: where its paper clamps the learnable scale.
    saturation: pairs of a batch above which more negatives bought nothing (arXiv 2303.15343, table 5).
    open_clip_flag: the flag of OpenCLIP's command line that selects this loss.
    views: whether both sides of a pair are views of one sample, which one tower encodes.
    """

    name: ObjectiveName
    cost_name: CostName
    title: str
    contrastive: bool
    metric: Literal["recall", "accuracy"]
    held_out_metric: Literal["recall@1", "accuracy"]
    keys: tuple[str, ...]
    function: str = ""
    arguments: tuple[str, ...] = ()
    one_direction: bool = False
    takes_owners: bool = False
    directions: tuple[str, ...] = ()
    scale: float = 1.0
    bias: bool = False
    flops: float = 0.0
    prefixes: bool = False
    gradients_in_forward: bool = False
    max_scale: float | None = None
    saturation: int | None = None
    open_clip_flag: str | None = None
    views: bool = False

    def flops_of(self, shard: int, batch: int, width: int, options: LossOptions = PLAIN_LOSS) -> float:
        """Return the operations of forward and backward of one rank: its `shard` rows with the `batch` rows of all ranks."""
        chosen = options.directions or self.directions
        if chosen:
            cross = sum(direction in CROSS_DIRECTIONS for direction in chosen)
            products = cross if options.hardened else min(cross, 1)
            # Hard negatives are compared with the rows of x and of y.
            products += options.negatives * sum(direction in chosen for direction in ("x_to_y", "y_to_y"))
            per_pair = CROSS_FLOPS * products + SAME_SIDE_FLOPS * self.same_sides(options.directions)
        else:
            per_pair = self.flops * (1 + options.negatives)
        pairs = shard * batch if options.in_batch else shard
        spread_out = SPREAD_OUT_FLOPS * shard * width**2 if options.spread_out else 0.0
        return per_pair * pairs * sum(options.dims or (width,)) + spread_out

    def same_sides(self, directions: tuple[str, ...] = ()) -> int:
        """Return how many sides the loss compares with themselves."""
        return sum(direction not in CROSS_DIRECTIONS for direction in directions or self.directions)

    @property
    def smooths_labels(self) -> bool:
        return "loss.label_smoothing" in self.keys


OBJECTIVES: dict[str, ObjectiveSpec] = {
    spec.name: spec
    for spec in (
        ObjectiveSpec(
            name="clip",
            cost_name="clip",
            title="softmax",
            contrastive=True,
            metric="recall",
            held_out_metric="recall@1",
            keys=("loss.label_smoothing", "loss.drop_above", *PAIR_KEYS),
            function="clip_loss",
            arguments=("label_smoothing", "drop_above"),
            one_direction=True,
            scale=1 / 0.07,
            max_scale=100.0,
            flops=8.0,
            prefixes=True,
            saturation=98_304,
        ),
        ObjectiveSpec(
            name="siglip",
            cost_name="siglip",
            title="sigmoid",
            contrastive=True,
            metric="recall",
            held_out_metric="recall@1",
            keys=("loss.bias", *PAIR_KEYS),
            function="siglip_loss",
            scale=10.0,
            bias=True,
            flops=6.0,
            gradients_in_forward=True,
            saturation=32_768,
            open_clip_flag="--siglip",
        ),
        ObjectiveSpec(
            name="infonce",
            cost_name="infonce",
            title="InfoNCE over several directions",
            contrastive=True,
            metric="recall",
            held_out_metric="recall@1",
            keys=("loss.label_smoothing", "loss.hardness", "loss.hardness_on", "loss.in_batch", *DIRECTION_KEYS, *PAIR_KEYS),
            function="infonce_loss",
            arguments=(
                *("directions", "partition", "label_smoothing", "drop_above", "drop_ratio"),
                *("hardness", "hardness_on", "in_batch"),
            ),
            takes_owners=True,
            directions=("x_to_y",),
            scale=20.0,
            flops=CROSS_FLOPS,
            prefixes=True,
            saturation=98_304,
        ),
        ObjectiveSpec(
            name="dcl",
            cost_name="dcl",
            title="decoupled softmax (DCL)",
            contrastive=True,
            metric="recall",
            held_out_metric="recall@1",
            keys=(*DIRECTION_KEYS, *PAIR_KEYS),
            function="dcl_loss",
            arguments=("directions", "partition", "drop_above", "drop_ratio"),
            takes_owners=True,
            directions=CROSS_DIRECTIONS,
            scale=10.0,
            flops=CROSS_FLOPS,
            saturation=98_304,
        ),
        ObjectiveSpec(
            name="nt_xent",
            cost_name="nt_xent",
            title="NT-Xent of two views (SimCLR)",
            views=True,
            contrastive=True,
            metric="recall",
            held_out_metric="recall@1",
            keys=tuple(key for key in PAIR_KEYS if key != "data.negatives"),
            function="nt_xent_loss",
            directions=DIRECTIONS,
            scale=10.0,
            flops=CROSS_FLOPS + 2 * SAME_SIDE_FLOPS,
            saturation=98_304,
        ),
        ObjectiveSpec(
            name="classify",
            cost_name="supervised",
            title="cross-entropy over classes",
            contrastive=False,
            metric="accuracy",
            held_out_metric="accuracy",
            keys=("loss.label_smoothing",),
        ),
    )
}
# The objective of a run that names none.
DEFAULT: PairLoss = "clip"
# The objective whose pairs are judged one by one.
SIGMOID: PairLoss = "siglip"
# The objective of a run that a plan for a mean over samples writes.
MEAN: ObjectiveName = "classify"

PAIR_LOSSES = tuple(name for name, spec in OBJECTIVES.items() if spec.contrastive)
BY_COST_NAME: dict[str, ObjectiveSpec] = {spec.cost_name: spec for spec in OBJECTIVES.values()}


def users_of_keys() -> dict[str, tuple[str, ...]]:
    """Return the objectives that use each key of a run's file, for keys that not all of them use.

    >>> users_of_keys()["loss.label_smoothing"]
    ('clip', 'infonce', 'classify')
    """
    keys = dict.fromkeys(key for spec in OBJECTIVES.values() for key in spec.keys)
    return {key: tuple(name for name, spec in OBJECTIVES.items() if key in spec.keys) for key in keys}


def contains_positives(directions: tuple[str, ...], partition: str | None) -> bool:
    """Return whether each softmax of a loss over directions has a direction that contains the positive.

    >>> contains_positives(("x_to_y", "x_to_x"), "separate"), contains_positives(("x_to_y", "x_to_x"), "by_anchor")
    (False, True)
    """
    cross = {"x_to_x": "x_to_y", "y_to_y": "y_to_x"}
    same_side = [direction for direction in directions if direction in cross]
    if partition == "by_anchor":
        return all(cross[direction] in directions for direction in same_side)
    return partition != "separate" or not same_side


def is_contrastive(cost_name: str | None) -> bool:
    """Return whether a cost model's or audit's objective is known to compare the samples of a batch with each other.

    >>> is_contrastive("siglip"), is_contrastive("lm"), is_contrastive(None)
    (True, False, False)
    """
    return cost_name in BY_COST_NAME and BY_COST_NAME[cost_name].contrastive
