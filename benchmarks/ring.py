"""What the ring across GPUs costs, by the model that plans use: `python -m benchmarks.ring`.

The model (`costs.time.ring_wait`) knows the bytes that a rank sends, the rate of the slowest link and a latency per hop. It is
compared with times that siglip-kernel publishes for its own ring on 4 to 16 GPUs, starting from the published time on one.
Nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from megabatch.costs.devices import find_device
from megabatch.costs.time import ring_wait

RESULTS = Path(__file__).parent / "results"
SOURCE = "siglip-kernel 0.1.2, project description on PyPI: GH200, four to a node, NVLink in it and Slingshot between nodes"
WIDTH = 768
# Bytes per element of a block that siglip-kernel sends per hop: the block in forward, its gradient in backward, both bf16.
THEIR_BYTES = 4
# Ours, with bf16 embeddings: a block in forward; a block and its gradient in fp32 in backward. The sigmoid loss sends all of it in
# one tour. Bytes per element, and operations per pair and element.
OUR_LOSSES = {"clip": (8, 8), "siglip": (6, 6)}
# One way, bytes per second for each GPU.
SLINGSHOT = 25e9
LINKS = {
    "NVLink 4 (H100, H200)": 450e9,
    "NVLink 3 (A100)": 300e9,
    "PCIe 5 ×16": 64e9,
    "PCIe 4 ×16": 32e9,
    "400 Gb/s": 50e9,
    "200 Gb/s": 25e9,
    "100 Gb/s Ethernet": 12.5e9,
    "25 Gb/s Ethernet": 3.125e9,
}
COMPARED = ("H200", "A100-80GB")


class Published(NamedTuple):
    """A published time. one_s: that of the same batch on one GPU, or, if scaled, four times that of a quarter of its pairs."""

    images: int
    captions: int
    gpus: int
    one_s: float
    seconds: float
    scaled: bool = False


PUBLISHED = (
    Published(65_536, 65_536, 4, 46.9e-3, 13.1e-3),
    Published(65_536, 65_536, 8, 46.9e-3, 10.1e-3),
    Published(131_072, 131_072, 8, 193.4e-3, 31.5e-3),
    Published(65_536, 262_144, 4, 196e-3, 57e-3),
    Published(65_536, 262_144, 8, 196e-3, 42e-3),
    Published(65_536, 262_144, 16, 196e-3, 35e-3),
    Published(131_072, 524_288, 16, 4 * 196e-3, 87e-3, scaled=True),
)


def predicted(row: Published) -> float:
    """Return the seconds that the model gives: each GPU computes its share, and the captions travel."""
    device = find_device("GH200")
    link = (device.link if row.gpus <= 4 else SLINGSHOT) * device.efficiency.link
    hops = row.gpus - 1
    sending = hops * THEIR_BYTES * row.captions / row.gpus * WIDTH / link
    computing = row.one_s / row.gpus
    return computing + ring_wait(sending, computing, hops)


def rows_that_hide(loss: str, device: str, link: float) -> float:
    """Return the rows of a rank from which on a ring of many ranks computes longer than it sends."""
    sent, operations = OUR_LOSSES[loss]
    found = find_device(device)
    return sent * found.flops_per_second("bf16") / (operations * link * found.efficiency.link)


def rows() -> list[dict[str, Any]]:
    compared = [{**each._asdict(), "predicted_s": predicted(each), "source": SOURCE} for each in PUBLISHED]
    hidden = [
        {"link": name, "bytes_per_second": link, "loss": loss, "device": device, "rows": rows_that_hide(loss, device, link)}
        for name, link in LINKS.items()
        for loss in OUR_LOSSES
        for device in COMPARED
    ]
    return compared + hidden


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return both tables."""
    lines = ["| images | captions | GPUs | published, ms | predicted, ms | |", "| ---: | ---: | ---: | ---: | ---: | ---: |"]
    for row in rows:
        if "gpus" in row:
            error = row["predicted_s"] / row["seconds"] - 1
            times = (f"{1e3 * row[key]:.1f}" for key in ("seconds", "predicted_s"))
            lines.append(f"| {row['images']:,} | {row['captions']:,} | {row['gpus']} | {' | '.join(times)} | {error:+.0%} |")
    lines += ["", f"Published: {SOURCE}. The last row starts from four times the published time of a quarter of its pairs.", ""]
    lines += [f"| link | one way | {' | '.join(f'rows a rank, {device}' for device in COMPARED)} |", "| --- | ---: | ---: | ---: |"]
    cells = {(row["link"], row["device"]): row for row in rows if row.get("loss") == "clip"}
    for name in dict.fromkeys(row["link"] for row in rows if "link" in row):
        found = [cells[name, device] for device in COMPARED]
        texts = " | ".join(f"{each['rows']:,.0f}" for each in found)
        lines.append(f"| {name} | {found[0]['bytes_per_second'] / 1e9:g} GB/s | {texts} |")
    return "\n".join(
        [
            *lines,
            "",
            "Rows a rank from which on many ranks send a block in less time than they compute with one; both losses, bf16.",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ring", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "ring.jsonl", help="file of rows")
    options = parser.parse_args(arguments)
    found = rows()
    options.out.write_text("".join(json.dumps(row) + "\n" for row in found))
    print(markdown(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
