"""How fast one worker process reads and prepares samples: measured on the run's source for a second, else a usual rate."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .. import config
from ..data import open_source
from ..data.collate import ReadTask, SamplePlace, SampleReader
from ..data.device_decoding import can_defer
from ..towers import BuiltTower

# Seconds for which a source is read, and samples that are read between two readings of the clock.
MEASURED_S, PIECE = 1.0, 8
# Seconds of one process for a sample: a JPEG of 97 kB decoded and resized with its caption (benchmarks/results/feeding-cpu.jsonl),
# and a text split into tokens.
IMAGE_S, TEXT_S = 2.7e-3, 1e-4
# With data.decode = "device", seconds of a worker process for such a JPEG, and of the training process, one thread of which
# launches the decoding and resizing: those of a whole loader that has workers enough (benchmarks/results/feeding-cuda.jsonl).
PACKED_S, DECODED_S = 1.9e-4, 1.5e-4


class ReadingRate(NamedTuple):
    """Seconds that one process needs to read and prepare a sample, and where the number comes from.

    decoding: seconds of the training process for a sample, if the device decodes its images.
    """

    seconds: float
    source: str
    decoding: float = 0.0


def reading_rate(run: config.Run, towers: Sequence[BuiltTower], clock: Callable[[], float] = time.perf_counter) -> ReadingRate:
    """Return the rate for a run's source, measured if it can be opened here. towers: that prepare the sides of a sample."""
    if not towers:
        return ReadingRate(0.0, "token ids are read in no time that matters")
    if run.data.decode == "device":
        return _on_device(towers)
    if not run.data.source.startswith(config.FILL_IN):
        try:
            return ReadingRate(_measured(run, towers, clock), f"{run.data.source}, read for {MEASURED_S:g} s")
        # The data is elsewhere, or its samples are not as the run says: training reports that.
        except (ValueError, OSError, RuntimeError):
            pass
    usual = sum(IMAGE_S if tower.kind == "image" else TEXT_S for tower in towers)
    return ReadingRate(usual, "assumed: JPEGs of usual size, one core")


def _on_device(towers: Sequence[BuiltTower]) -> ReadingRate:
    """Return the usual rate if the device decodes the images of all towers that let it."""
    images = sum(tower.kind == "image" for tower in towers)
    decoded = sum(tower.kind == "image" and can_defer(tower.prepare) for tower in towers)
    seconds = decoded * PACKED_S + (images - decoded) * IMAGE_S + (len(towers) - images) * TEXT_S
    return ReadingRate(seconds, "assumed: JPEGs of usual size, decoded on the device", decoded * DECODED_S)


def _measured(run: config.Run, towers: Sequence[BuiltTower], clock: Callable[[], float]) -> float:
    """Return the seconds for a sample of the source, read at random places by what worker processes use."""
    source = open_source(run.data, x=towers[0].kind, y=towers[-1].kind)
    rng = random.Random(0)
    shards = [number for number, length in enumerate(source.lengths) if length]
    if not shards:
        raise ValueError("the source is empty")
    has_y = len(towers) > 1
    reader = SampleReader(
        source,
        towers[0].prepare,
        towers[1].prepare if has_y else None,
        seed=run.seed,
        ids=False,
        classes=None,
        negatives=has_y and bool(run.data.negatives),
        augment=True,
        reduce_jpegs=run.data.reduce_jpegs,
    )
    tried, samples, began = 0, 0, clock()
    while clock() - began < MEASURED_S:
        places = []
        for position in range(tried, tried + PIECE):
            shard = rng.choice(shards)
            places.append(SamplePlace(position, shard, rng.randrange(source.lengths[shard])))
        rows, _ = reader[ReadTask(places, PIECE, last=False)]
        tried, samples = tried + PIECE, samples + len(rows.info.keys)
    if not samples:
        raise ValueError("no sample could be read")
    return (clock() - began) / samples
