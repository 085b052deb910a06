"""Builds the parts of a run from its configuration: data, towers, model, objective."""

from __future__ import annotations

import itertools
import os
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..config import Run
from ..data import open_source
from ..data.device_decoding import DeviceDecoder, can_defer, open_decoder
from ..data.loader import Loader
from ..data.paths import find_files
from ..data.sampler import InOrder, Order, split
from ..data.source import Damage, Kind, Source
from ..objectives import OBJECTIVES
from ..towers import names_code
from ..towers.attention import short_attention, unavailable
from ..towers.memory_format import choose_memory_format
from ..towers.model import Classifier, build_pair, build_towers
from ..towers.patches import linear_image_patches, uses_linear_patches
from ..towers.repeats import SHORTEST, equal_blocks
from ..towers.residuals import keep_residuals_in_bf16
from ..towers.tower import BuiltTower
from .distributed import Ranks
from .objective import Classification, Contrastive


@dataclass(frozen=True)
class Assembly:
    """The parts of a run. `classes` numbers the labels of a classification run, and is empty for others.

    decoder: decodes JPEGs on the run's device; None if workers do.
    """

    run: Run
    ranks: Ranks
    training: Source
    held_out: Source
    x: BuiltTower
    y: BuiltTower
    model: nn.Module
    objective: Contrastive | Classification
    classes: dict[str, int]
    decoder: DeviceDecoder | None = None

    @property
    def damage(self) -> list[Damage]:
        """Damaged files of both sources, each once: two parts of one source share them."""
        return list(dict.fromkeys([*self.training.damage, *self.held_out.damage]))

    def shuffled(self) -> Loader:
        """Return a loader of the training pairs, an endless stream of epochs."""
        order = Order(self.training.lengths, self.run.data.window, self.run.seed)
        return self.loader(self.training, order, augment=True)

    def in_order(self, source: Source) -> Loader:
        """Return a loader of the pairs of a source in their order, without augmentation."""
        return self.loader(source, InOrder(source.lengths), augment=False)

    def loader(self, source: Source, order: Any, *, augment: bool) -> Loader:
        return Loader(
            source,
            order,
            self.x.prepare,
            None if self.classes else self.y.prepare,
            seed=self.run.seed,
            workers=self.run.data.workers,
            reduce_jpegs=self.run.data.reduce_jpegs,
            rank=self.ranks.rank,
            ranks=self.ranks.size,
            ids=not self.classes,
            classes=self.classes or None,
            negatives=not self.classes and bool(self.run.data.negatives),
            augment=augment,
            pinned=self.ranks.device.type == "cuda",
            decoder=self.decoder,
        )


def assemble(run: Run, ranks: Ranks) -> Assembly:
    """Return the parts of a run; its seed draws the weights, the same on every rank."""
    torch.manual_seed(run.seed)
    x, y = build_towers(run)
    decoder = device_decoder(run, ranks.device, x, y)
    training, held_out = open_data(run, x.kind, y.kind)
    contrastive = OBJECTIVES[run.loss.objective].contrastive
    classes = {} if contrastive else classes_of(training)
    if contrastive:
        model: nn.Module = build_pair(run, x, y)
    else:
        model = Classifier(x.module, run.loss.dim, len(classes), locked=run.x.locked)
    model.to(ranks.device)
    if uses_linear_patches(run.compute.linear_patches, ranks.device.type, run.compute.precision):
        linear_image_patches(model)
    if run.compute.short_attention:
        reason = unavailable(ranks.device) or ("compute.precision is not bf16" if run.compute.precision != "bf16" else None)
        if reason:
            warnings.warn(f"compute.short_attention has no effect, because {reason}: PyTorch computes attention", stacklevel=2)
    if run.compute.bf16_residuals:
        missing = not keep_residuals_in_bf16(model)
        if missing or run.compute.precision != "bf16":
            reason = f"no tower has {SHORTEST} equal blocks with norms" if missing else "compute.precision is not bf16"
            warnings.warn(f"compute.bf16_residuals has no effect, because {reason}", stacklevel=2)
    # Both sides may share a tower.
    for tower, name in {y.module: run.y.name, x.module: run.x.name}.items():
        choose_memory_format(tower, run.compute, ranks.device.type, run.compute.precision, own_code=names_code(name))
        if run.compute.short_attention:
            short_attention(tower)
        if run.compute.compile:
            compile_tower(tower)
    kind = Contrastive if contrastive else Classification
    objective = kind(model, run, ranks)  # type: ignore[arg-type]
    return Assembly(run, ranks, training, held_out, x, y, model, objective, classes, decoder)


def device_decoder(run: Run, device: torch.device, *towers: BuiltTower) -> DeviceDecoder | None:
    """Return what decodes the run's JPEGs on its device, or None if workers do. ValueError if the device or no tower can."""
    if run.data.decode == "workers":
        return None
    if not any(tower.kind == "image" and can_defer(tower.prepare) for tower in towers):
        raise ValueError(
            'data.decode is "device", but no tower of the run prepares images by cropping and resizing alone (PrepareImage); set'
            ' data.decode="workers"'
        )
    return open_decoder(device, run.data.max_pixels)


def compile_tower(tower: nn.Module) -> None:
    """Compile the equal blocks of a tower, one for all, which takes seconds; or the whole tower if it has none."""
    runs = [run.blocks for run in equal_blocks(tower)]
    is_one_for_all = all(_rates(block) == _rates(blocks[0]) for blocks in runs for block in blocks)
    for module in itertools.chain(*runs) if runs and is_one_for_all else [tower]:
        module.compile()


def _rates(block: nn.Module) -> list[float]:
    """Return the numbers that a compiled block has as constants, such as the rates of stochastic depth."""
    return [value for module in block.modules() for value in vars(module).values() if isinstance(value, float)]


def open_data(run: Run, x: Kind, y: Kind) -> tuple[Source, Source]:
    """Return the source that a run trains on and the one it is evaluated on. x, y: what the towers take."""
    data = run.data
    if not OBJECTIVES[run.loss.objective].contrastive and data.negatives is None:
        # A classifier does not use hard negatives.
        data = replace(data, negatives=False)
    source = open_source(data, x=x, y=y)
    if isinstance(run.data.held_out, str):
        shared = sorted(_files_of(data.source) & _files_of(run.data.held_out))
        if shared:
            raise ValueError(
                f"data.held_out is {run.data.held_out!r}, and data.source has {shared[0]} too: a model must not be evaluated on"
                " what it is trained on; name other files, or hold out a share, as data.held_out=0.05"
            )
        return source, open_source(data, run.data.held_out, x=x, y=y)
    return split(source, run.data.held_out)


def _files_of(source: str) -> set[str]:
    """Return the files that a source names, or what it is called, a folder or a collection of this package."""
    try:
        return {str(path.resolve()) for path in find_files(source)}
    except ValueError:
        return {os.path.realpath(os.path.expanduser(source))}


def classes_of(source: Source) -> dict[str, int]:
    """Return the labels of a source, numbered in alphabetical order."""
    present = {source.label(shard, index) for shard, length in enumerate(source.lengths) for index in range(length)}
    # A sample without a label is unreadable: the loader skips, counts and logs it.
    labels = sorted(label for label in present if label is not None)
    if len(labels) < 2:
        raise ValueError(
            f"the data has {len(labels)} classes: a classifier needs at least two; name the column of the class (data.label=…)"
        )
    return {label: number for number, label in enumerate(labels)}
