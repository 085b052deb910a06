"""Targets that are files: data of every format, checkpoints, weights, and results of measurements."""

from __future__ import annotations

import csv
import io
import json
import random
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import torch
from PIL import Image
from pyarrow import ipc, parquet
from safetensors.torch import save
from torch import nn

from megabatch import config, measurements
from megabatch.config import Data
from megabatch.costs.hardware import find_machine
from megabatch.data import open_source
from megabatch.data.source import BadSample, Kind, Source
from megabatch.measuring.sweep import outcome as outcomes
from megabatch.planning.calibration import calibrate
from megabatch.towers.weights import load_weights
from megabatch.training import checkpoint

from .harness import Target
from .mutations import mutated
from .values import as_json, scalar, spoiled, text, value

FILES = (ValueError, OSError)
# Samples to read from each source.
READ = 12
RUN = config.build(config.EMBEDDED)


def _image(size: int = 4) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), (10, 20, 30)).save(file, "PNG")
    return file.getvalue()


def _read(source: Source) -> None:
    """Read a source as training does: groups and labels of all samples, and some samples completely."""
    places = [(shard, index) for shard, length in enumerate(source.lengths) for index in range(min(length, READ))][:READ]
    for place in places:
        source.group(*place)
        source.label(*place)
        try:
            source.read(*place)
        except BadSample as bad:
            assert bad.key and bad.reason, "a bad sample has no name or no reason"


def _rows(rng: random.Random) -> list[dict[str, Any]]:
    rows = []
    for number in range(rng.choice((1, 2, 5))):
        row: dict[str, Any] = {
            "query": f"question {number}",
            "positive": f"answer {number}",
            "label": number % 2,
            "negatives": ["a", "b"],
        }
        rows.append(row if rng.random() < 0.6 else spoiled(row, rng))
    return rows


TEXTS = Data(label="label", negatives="negatives")


def _open(name: str, data: Data = TEXTS, x: Kind = "text", y: Kind = "text") -> Callable[[bytes, Path], None]:
    def run(content: bytes, folder: Path) -> None:
        path = folder / name
        path.write_bytes(content)
        _read(open_source(data, str(path), x=x, y=y))

    return run


def _jsonl(rng: random.Random) -> bytes:
    data = b"\n".join(as_json(row, rng).replace(b"\n", b" ") for row in _rows(rng)) + b"\n"
    return data if rng.random() < 0.4 else mutated(data, rng)


def _table(delimiter: str) -> Callable[[random.Random], bytes]:
    def make(rng: random.Random) -> bytes:
        file = io.StringIO(newline="")
        writer = csv.writer(file, delimiter=delimiter, quoting=rng.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL)), escapechar="\\")
        rows = _rows(rng)
        writer.writerow(["query", "positive", "label", "negatives"])
        for row in rows:
            writer.writerow([json.dumps(entry) if isinstance(entry, list) else str(entry)[:2000] for entry in row.values()])
        data = file.getvalue().encode("utf-8", "surrogatepass")
        return data if rng.random() < 0.3 else mutated(data, rng)

    return make


@cache
def _tars() -> tuple[bytes, ...]:
    made = []
    for format in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=format) as tar:
            long = "folder/" * 20
            for number, stem in enumerate(("000", "001", f"{long}002")):
                members = {
                    "png": _image(),
                    "txt": f"caption {number}".encode(),
                    "json": json.dumps({"label": number, "hard": ["a"]}).encode(),
                }
                for extension, content in members.items():
                    info = tarfile.TarInfo(f"{stem}.{extension}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        made.append(file.getvalue())
    return tuple(made)


def _tar(rng: random.Random) -> bytes:
    data = rng.choice(_tars())
    if rng.random() < 0.5:
        # The checksum of a header would reveal any change: change the header and recompute it.
        at = 512 * rng.randrange(len(data) // 512)
        header = bytearray(data[at : at + 512])
        field, width = rng.choice(((0, 100), (124, 12), (156, 1), (157, 100), (257, 8), (345, 155), (100, 8)))
        content = rng.choice(
            (b"\0", b"\xff", b"7", b"77777777777\0", b"\x80" + b"\xff" * 11, b"-1", b"../../x.png", b"x", b"L", b"g", b"S", b"K")
        )
        header[field : field + width] = content[:width].ljust(width, b"\0")
        header[148:156] = b" " * 8
        header[148:156] = f"{sum(header):06o}\0 ".encode()
        data = data[:at] + bytes(header) + data[at + 512 :]
    return data if rng.random() < 0.3 else mutated(data, rng, _tars())


@cache
def _arrow_tables(kind: Kind) -> tuple[Any, ...]:
    images = {"image": [{"bytes": _image(), "path": None}] * 3, "caption": ["a", "b", "c"]}
    texts = {"query": ["a", "b", "c"], "positive": ["d", "e", "f"], "label": [0, 1, 0], "negatives": [["x"], [], ["y", "z"]]}
    large = {**texts, "query": pyarrow.array(["a", "b", "c"], pyarrow.large_string())}
    coded = {**texts, "positive": pyarrow.array(["d", "e", "d"]).dictionary_encode()}
    return tuple(pyarrow.table(columns) for columns in ((texts, large, coded) if kind == "text" else (images,)))


@cache
def _parquets(kind: Kind) -> tuple[bytes, ...]:
    made = []
    for table in _arrow_tables(kind):
        for compression in ("none", "snappy", "zstd"):
            file = io.BytesIO()
            parquet.write_table(table, file, compression=compression)
            made.append(file.getvalue())
    return tuple(made)


@cache
def _arrows(kind: Kind) -> tuple[bytes, ...]:
    made = []
    for table in _arrow_tables(kind):
        file = io.BytesIO()
        with ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
        made.append(file.getvalue())
    return tuple(made)


def _damaged(corpus: Callable[[], Sequence[bytes]], whole: float = 0.1) -> Callable[[random.Random], bytes]:
    def make(rng: random.Random) -> bytes:
        data = rng.choice(corpus())
        return data if rng.random() < whole else mutated(data, rng, corpus())

    return make


def _dataset(rng: random.Random, kind: Kind = "text") -> dict[str, bytes]:
    state = {"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "0", "_split": "train"}
    info = {"features": {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}}
    made = {"state.json": state, "dataset_info.json": info}
    files = {name: as_json(spoiled(dict(table), rng) if rng.random() < 0.2 else table, rng) for name, table in made.items()}
    files = {name: mutated(data, rng) if rng.random() < 0.1 else data for name, data in files.items()}
    return files | {"data.arrow": _damaged(lambda: _arrows(kind), 0.2)(rng)}


def _open_dataset(files: dict[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    _read(open_source(replace(TEXTS, kind="datasets"), str(folder), x="text", y="text"))


def _open_images(files: dict[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    _read(open_source(Data(kind="datasets"), str(folder)))


def _patterns(rng: random.Random) -> str:
    parts = (
        "a",
        "*",
        "?",
        "[",
        "]",
        "{0..3}",
        "{000..999999999}",
        "{a,b}",
        "{",
        "}",
        "..",
        "/",
        ".tar",
        ".csv",
        ".jsonl",
        "~",
        "\0",
        "**",
    )
    if rng.random() < 0.2:
        return rng.choice(("a.tar", "*.tar", "?.tar", "{a,a}.tar", "[a].tar", "**.tar"))
    return "".join(rng.choice(parts) for _ in range(rng.randrange(1, 7))) if rng.random() < 0.8 else text(rng)


def _open_pattern(source: str, folder: Path) -> None:
    # Nothing above the empty folder is searched: a pattern may match the whole disk.
    if "/" in source or "~" in source or ".." in source.replace("{0..3}", "").replace("{000..999999999}", ""):
        source = source.replace("/", "").replace("~", "").replace("..", ".")
    (folder / "a").mkdir()
    (folder / "a.tar").write_bytes(_tars()[0])
    _read(open_source(Data(), source))


def _state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"weight": torch.zeros(3, 2), "bias": torch.ones(3), "step": torch.tensor(1)}


@cache
def _checkpoint() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.save(folder, 1, _state(), {"seconds": 1.0, "run": config.as_table(RUN)}, keep=1)
        return {file.name: file.read_bytes() for file in path.iterdir()}


def _checkpoints(rng: random.Random) -> dict[str, bytes]:
    files = dict(_checkpoint())
    kind = rng.random()
    if kind < 0.4:
        # Change values of the manifest together with its checksum, which would reveal them.
        table = json.loads(files["checkpoint.json"])
        spot: Any = table["content"]
        while isinstance(spot, (dict, list)) and spot:
            key = rng.choice(list(spot) if isinstance(spot, dict) else range(len(spot)))
            if not isinstance(spot[key], (dict, list)) or rng.random() < 0.2:
                spot[key] = rng.choice((scalar, value))(rng)
                break
            spot = spot[key]
        from megabatch.training.checkpoint import manifest

        try:
            table["crc32"] = manifest._sum(table["content"])
            files["checkpoint.json"] = json.dumps(table).encode("utf-8", "surrogatepass")
        except (RecursionError, UnicodeEncodeError):
            files["checkpoint.json"] = b"{"
    elif kind < 0.7:
        files["checkpoint.json"] = mutated(files["checkpoint.json"], rng)
    elif kind < 0.95:
        name = rng.choice([name for name in files if name != "checkpoint.json"])
        files[name] = mutated(files[name], rng)
    return files


def _load_checkpoint(files: dict[str, bytes], folder: Path) -> None:
    path = folder / "step-00000001"
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    checkpoint.read_metadata(path)
    checkpoint.load(path, _state())


@cache
def _weights() -> tuple[bytes, ...]:
    file = io.BytesIO()
    torch.save(nn.Linear(2, 3).state_dict(), file)
    return save(nn.Linear(2, 3).state_dict()), file.getvalue()


def _weights_as(name: str) -> Callable[[bytes, Path], None]:
    def run(content: bytes, folder: Path) -> None:
        (folder / name).write_bytes(content)
        load_weights(nn.Linear(2, 3), folder / name)

    return run


FOUND: tuple[Any, ...] = (
    measurements.Fit(64, 10**9, ({"size": 64, "ran": True, "peak_bytes": 10**8},)),
    measurements.Profile(
        ({"batch": 64, "chunk": 64, "keep": 0, "ranks": 1, "seconds": 0.1, "spread": 0.01, "pairs_per_s": 640.0},), 64, 64
    ),
    measurements.Noise(1000.0, 900.0, 1100.0, 64, True, ({"step": 1, "critical": 1.0, "low": 0.5, "high": 2.0},), 128),
    measurements.Sweep(256, 1e-3, "samples", ({"batch": 256, "lr": 1e-3, "mean": 0.5, "spread": 0.1, "seconds": 1.0},)),
)


def _measured(rng: random.Random) -> bytes:
    table = json.loads(
        measurements.as_json(
            measurements.Measured(rng.choice(FOUND), config.as_table(RUN), rng.choice(("NVIDIA H100", "cpu")), "2.0", "2026-01-01")
        )
    )
    if rng.random() < 0.8:
        place = table["found"] if rng.random() < 0.7 else table
        for key in ("points", "trials", "rows", "course"):
            if isinstance(place.get(key), list) and place[key] and rng.random() < 0.5:
                place = place[key][0]
        spoiled(place, rng)
    data = as_json(table, rng)
    return data if rng.random() < 0.6 else mutated(data, rng)


def _read_measured(content: bytes, folder: Path) -> None:
    (folder / "measured.json").write_bytes(content)
    calibrate([folder / "measured.json"], RUN, "fp32", find_machine("H100"))


RATES = {
    "measured": "rates",
    "device": "NVIDIA H200",
    "kind": "cuda",
    "memory": 150 * 10**9,
    "gpus": 8,
    "products": {"fp32": 5e13, "bf16": 8e14},
    "bandwidth": 4e12,
    "copy": 5e10,
    "link": 4e11,
    "ranks": 8,
    "torch": "2.0",
    "date": "2026-01-01",
    "host": 5e-6,
}


def _rates(rng: random.Random) -> bytes:
    table = {**RATES, "products": dict(RATES["products"])}  # type: ignore[call-overload]
    data = as_json(spoiled(table, rng) if rng.random() < 0.8 else table, rng)
    return data if rng.random() < 0.6 else mutated(data, rng)


def _read_rates(content: bytes, folder: Path) -> None:
    (folder / "rates.json").write_bytes(content)
    find_machine(rates=folder / "rates.json")


def _outcome(rng: random.Random) -> bytes:
    table: dict[str, Any] = {
        "run": outcomes._settings(RUN),
        "outcome": {"quality": 0.5, "seconds": 1.0, "pairs_per_s": 100.0, "steps": 10},
    }
    data = as_json(spoiled(table, rng) if rng.random() < 0.8 else table, rng)
    return data if rng.random() < 0.6 else mutated(data, rng)


def _read_outcome(content: bytes, folder: Path) -> None:
    (folder / "outcome.json").write_bytes(content)
    outcomes.read_outcome(config.build(config.EMBEDDED, [f"out={folder}"]))


IMAGES = Data(label="json:label", negatives="json:hard")
TARGETS = (
    Target("data: JSON lines", _jsonl, _open("pairs.jsonl"), 4, FILES),
    Target("data: CSV", _table(","), _open("pairs.csv"), 4, FILES),
    Target("data: TSV", _table("\t"), _open("pairs.tsv"), 2, FILES),
    Target("data: tar", _tar, _open("pairs.tar", IMAGES, "image", "text"), 4, FILES),
    Target("data: Parquet", _damaged(lambda: _parquets("text")), _open("pairs.parquet"), 3, FILES),
    Target(
        "data: Parquet with images",
        _damaged(lambda: _parquets("image")),
        _open("pairs.parquet", Data(), "image", "text"),
        1,
        FILES,
    ),
    Target("data: Arrow dataset", _dataset, _open_dataset, 3, FILES),
    Target("data: Arrow dataset with images", lambda rng: _dataset(rng, "image"), _open_images, 1, FILES),
    Target("data: patterns", _patterns, _open_pattern, 1, FILES),
    Target("checkpoint", _checkpoints, _load_checkpoint, 2, FILES),
    Target("weights: safetensors", _damaged(lambda: _weights()[:1]), _weights_as("weights.safetensors"), 2, FILES),
    Target("weights: torch.save", _damaged(lambda: _weights()[1:]), _weights_as("weights.pt"), 2, FILES),
    Target("measured.json", _measured, _read_measured, 5, FILES),
    Target("rates.json", _rates, _read_rates, 3, FILES),
    Target("outcome.json", _outcome, _read_outcome, 2, FILES),
)
