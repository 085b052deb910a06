"""Time a training step of CLIP in OpenCLIP's own loop, with its losses and with ours: `python -m benchmarks.open_clip_step`.

Batches that the GPU holds at once, and larger ones in micro-batches. For these, OpenCLIP has `--accum-freq`, which encodes twice
and computes the loss of the whole batch once for every micro-batch; ours runs the encoders in chunks of the same size, and of
smaller ones where OpenCLIP has the memory for the batch at all.
Batches are on the GPU already. Before anything is timed, the losses of a step must agree.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import megabatch
from benchmarks import report
from benchmarks.machine import describe
from benchmarks.peers import declare_torchvision_schemas
from megabatch.adapters import open_clip as adapter

FILE = Path(__file__).parent / "results" / "open_clip-cuda.jsonl"
# How far losses of one batch may differ: under autocast OpenCLIP rounds logits to bf16, by up to 0.2 % of a logit of 14.
AGREEMENT = 0.05


class Case(NamedTuple):
    """A step of `accum` micro-batches of `rows` pairs with one of the losses, "clip" or "siglip"."""

    loss: str
    rows: int
    accum: int

    @property
    def pairs(self) -> int:
        return self.rows * self.accum


class Setting(NamedTuple):
    """How a step is computed. chunk: rows of a chunk of images; None: OpenCLIP's loss and loop. text_chunk: of texts, if another.

    linear_patches: whether the patch convolution is computed as a linear layer. forward: chunks that go through an encoder at
    once in forward.
    """

    chunk: int | None = None
    text_chunk: int | None = None
    linear_patches: bool = False
    forward: int = 1

    @classmethod
    def of(cls, words: str) -> Setting:
        """Return the setting that words such as "912", "912,864+linear+forward4" and "OpenCLIP+linear" describe."""
        match = re.fullmatch(r"(OpenCLIP|(\d+)(?:,(\d+))?)(\+linear)?(?:\+forward([1-9]))?", words)
        if match is None:
            raise argparse.ArgumentTypeError(f"{words!r} must be ROWS, IMAGES,TEXTS or OpenCLIP, then +linear and +forward4")
        _, images, texts, linear, forward = match.groups()
        return cls(int(images) if images else None, int(texts) if texts else None, bool(linear), int(forward or 1))

    @property
    def is_plain_open_clip(self) -> bool:
        return self == Setting()


class Loader(list[tuple[Tensor, Tensor]]):
    """Batches with the attributes that OpenCLIP's loop reads."""

    @property
    def num_batches(self) -> int:
        return len(self)

    @property
    def num_samples(self) -> int:
        return sum(len(images) for images, _ in self)


class Recorded(nn.Module):
    """A loss that keeps its last value."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss, self.value = loss, torch.zeros(())

    def forward(self, **inputs: Any) -> Any:
        outputs = self.loss(**inputs)
        self.value = outputs["contrastive_loss"].detach()
        return outputs


def measure(case: Case, setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Return seconds and peak memory of a step, and the loss of the first one."""
    declare_torchvision_schemas()
    import open_clip
    from open_clip_train.train import train_one_epoch

    torch.manual_seed(0)
    # As in OpenCLIP's main program.
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark = True, True
    ours = setting.chunk is not None
    siglip = {"init_logit_scale": 2.3, "init_logit_bias": -10.0} if case.loss == "siglip" else {}
    model = open_clip.create_model(options.model, device=options.device, output_dict=True, **siglip)
    accum = 1 if ours else case.accum
    args = SimpleNamespace(
        device=options.device,
        precision="amp_bf16",
        distill=False,
        accum_freq=accum,
        skip_scheduler=True,
        horovod=False,
        grad_clip_norm=None,
        log_every_n_steps=10**9,
        rank=0,
        world_size=1,
        batch_size=case.pairs // accum,
        wandb=False,
        model=options.model,
        log_local=False,
        siglip=case.loss == "siglip",
        local_loss=True,
        gather_with_grad=True,
        loss_dist_impl=None,
        local_rank=0,
    )
    loss = Recorded(adapter.create_loss(args) if ours else open_clip.create_loss(args))
    if setting.linear_patches:
        megabatch.linear_patches(model)
    if setting.chunk is not None and setting.chunk < case.pairs:
        forward_chunk = setting.forward * max(setting.chunk, setting.text_chunk or 0) if setting.forward > 1 else None
        adapter.encode_in_chunks(model, setting.chunk, text_chunk=setting.text_chunk, forward_chunk=forward_chunk)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    micro = batches(model, case, options.device, accum)

    def run(steps: int) -> None:
        data = SimpleNamespace(dataloader=Loader(micro * steps), set_epoch=lambda epoch: None)
        train_one_epoch(model, {"train": data}, loss, 0, optimizer, None, None, None, args)
        synchronize(options.device)

    run(1)
    first = loss.value.item()
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    run(options.steps)
    seconds = (time.perf_counter() - began) / options.steps
    peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else None
    return {"seconds": seconds, "peak_bytes": peak, "value": first}


def batches(model: nn.Module, case: Case, device: str, parts: int) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs of one step on the device, in equal parts."""
    g = torch.Generator(device).manual_seed(1)
    size = model.visual.image_size
    images = torch.randn(case.pairs, 3, *(size if isinstance(size, tuple) else (size, size)), device=device, generator=g)
    texts = torch.randint(1, model.vocab_size - 1, (case.pairs, model.context_length), device=device, generator=g)
    return list(zip(images.chunk(parts), texts.chunk(parts), strict=True))


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown, each with its relation to the last of plain OpenCLIP."""
    lines = [
        "| loss | pairs | implementation | rows at once | seconds | peak GiB | against OpenCLIP |",
        "| --- | ---: | --- | ---: | ---: | ---: | --- |",
    ]
    theirs: dict[str, Any] = {}
    for row in rows:
        # Rows of before 2026-11-17 do not have all of the fields.
        setting = Setting(*(row.get(field, default) for field, default in Setting._field_defaults.items()))
        if setting.is_plain_open_clip:
            theirs = row
        name, at_once = ("OpenCLIP", f"{row['rows']:,}") if setting.chunk is None else ("**megabatch**", f"{setting.chunk:,}")
        name += ", linear patches" if setting.linear_patches else ""
        name += f", {setting.forward} chunks at once in forward" if setting.forward > 1 else ""
        at_once += f" images, {setting.text_chunk:,} texts" if setting.text_chunk else ""
        peak = "" if row.get("peak_bytes") is None else f"{row['peak_bytes'] / 2**30:.1f}"
        seconds = f"{row['seconds']:.3f}" if "seconds" in row else row["failed"]
        relation = ""
        if row is not theirs and "seconds" in theirs and "seconds" in row:
            relation = f"{theirs['seconds'] / row['seconds']:.2f}× as fast"
            if peak:
                relation += f", {theirs['peak_bytes'] / row['peak_bytes']:.2f}× leaner"
        lines.append(f"| {row['loss']} | {row['pairs']:,} | {name} | {at_once} | {seconds} | {peak} | {relation} |")
    machine = rows[0]["machine"]
    versions = f"torch {machine['torch']}, open_clip {machine['open_clip']}, {machine['date'][:10]}"
    where = f"{machine.get('gpu', machine['cpu'])}, {versions}"
    return "\n".join([*lines, "", f"{rows[0]['model']}, bf16 autocast: {where}."])


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=2048, help="Pairs of a micro-batch.")
    parser.add_argument("--accum", default="8,16,32", help="Micro-batches of the larger batches.")
    parser.add_argument(
        "--chunk",
        type=Setting.of,
        nargs="+",
        default=[Setting(2048), Setting(912)],
        help="Chunks of the larger batches: ROWS or IMAGES,TEXTS, with +linear for linear patches and +forward4 for four chunks at "
        "once in forward; OpenCLIP+linear for its own loop.",
    )
    parser.add_argument("--steps", type=int, default=2, help="Timed steps.")
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args(words)
    rows: list[dict[str, Any]] = []
    larger = [Case("clip", options.rows, int(accum)) for accum in options.accum.split(",")]
    for case in (Case("clip", options.rows, 1), Case("siglip", options.rows, 1), *larger):
        values: list[float] = []
        fits = True
        for setting in (Setting(), *(options.chunk if case.accum > 1 else [Setting(case.rows)])):
            if not fits and (setting.chunk or 0) < case.rows:
                continue
            row = case._asdict() | {"pairs": case.pairs} | setting._asdict() | {"model": options.model, "steps": options.steps}
            try:
                row |= measure(case, setting, options)
                values.append(row["value"])
            except torch.OutOfMemoryError:
                row["failed"] = "out of memory"
                fits = fits and not setting.is_plain_open_clip
            if options.device == "cuda":
                torch.cuda.empty_cache()
            print(row, flush=True)
            if values and max(values) - min(values) > AGREEMENT * max(map(abs, values)):
                raise SystemExit(f"the losses {values} do not agree: nothing more is measured")
            rows.append(row | {"machine": describe(options.device)})
            report.write_rows(options.out, rows)
    print(markdown(rows))


if __name__ == "__main__":
    main()
