"""The benchmark of feeding: every pipeline yields all pairs, and its rows become a table."""

import importlib.util
import json

import pytest
import torch
from PIL import Image

from benchmarks import feeding, machine
from megabatch.data.device_decoding import DeviceDecoder


def decode_to_black(jpegs, grey):
    return [torch.zeros(1 if grey else 3, feeding.HEIGHT, feeding.WIDTH, dtype=torch.uint8) for _ in jpegs]


# webdataset leaves the shards that it reads open.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pipelines_are_measured_beside_each_other(tmp_path, monkeypatch, device):
    small = {"IMAGES": 3, "ROUNDS": 1, "WARMUP_S": 0.1, "MEASURED_S": 0.1, "PIECE_ROWS": 3}
    for name, value in small.items():
        monkeypatch.setattr(feeding, name, value)
    # The cost of an image does not matter here, and the device is replaced.
    monkeypatch.setattr(feeding, "natural_image", lambda seed: Image.new("RGB", (feeding.WIDTH, feeding.HEIGHT), (9 * seed, 9, 9)))
    monkeypatch.setattr(feeding, "open_decoder", lambda _, limit: DeviceDecoder(torch.device("cpu"), limit, decode_to_black))
    monkeypatch.setattr(feeding, "describe", lambda _: machine.describe("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    threads = torch.get_num_threads()
    try:
        feeding.main(tmp_path / "rows.jsonl", device, workers=1)
    finally:
        torch.set_num_threads(threads)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    peer = importlib.util.find_spec("webdataset") is not None
    assert len(rows) == 2 + (device == "cuda") + peer
    assert all(row["pairs_per_core_s"] > 0 and row.get("pairs_per_s", 1) > 0 for row in rows)
    assert len(feeding.markdown(rows).splitlines()) == len(rows) + 4
    if device == "cuda":
        # A device that decodes everything to black differs by the brightest level.
        assert rows[0]["device_most_difference"] >= 9
