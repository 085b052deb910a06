"""Compare the losses beyond clip and siglip with what people use instead: `python -m benchmarks.other_losses --device cuda`.

At a small size, value and gradients of each implementation are compared with those of the formula in float64 on the same inputs.
Then it is timed at the sizes below: the median of a few steps of forward and backward, and the peak of allocated memory above the
inputs, their gradients included. One that runs out of memory has no time, one whose package is not installed no row. About two
minutes on an H200.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch
from benchmarks import report
from benchmarks.machine import describe
from benchmarks.memory import available_bytes, peak_of
from benchmarks.peers import declare_torchvision_schemas
from megabatch import reference

RESULTS = Path(__file__).parent / "results"
DIMS = (768, 512, 256, 128, 64)
# Seconds and steps that the timing of one implementation takes at most.
BUDGET_S, MOST_STEPS = 2.0, 10
# The largest error of a gradient relative to that of the formula: rounding of a few products in the dtype, and of the gradient.
# Where a peer is further off, its row says so; where ours is, the program fails.
LARGEST_ERROR = {torch.bfloat16: 2e-2, torch.float32: 1e-4}

# Implementations that do not store the matrix of their loss.
WITHOUT_MATRIX = ("megabatch", "megabatch, eager", "megabatch, each width", "loop of clip_loss", "late-interaction-kernels")
# Implementations whose kernels run on a GPU only, or that differ from the default there only; and modules that some need.
CUDA_ONLY = ("megabatch, eager", "late-interaction-kernels")
NEEDED_MODULES = {
    "OpenCLIP": "open_clip",
    "late-interaction-kernels": "late_interaction_kernels",
    "lightly": "lightly",
    "pytorch-metric-learning": "pytorch_metric_learning",
    "Sentence Transformers": "sentence_transformers",
}
# Rows of the matrix that Sentence Transformers computes at a time, its default. Its similarity holds rows × batch × width numbers.
GIST_ROWS = 32

Inputs = list[Tensor]
Loss = Callable[..., Tensor]


class Contest(NamedTuple):
    """One loss: its formula, its implementations (ours are named megabatch), and its inputs.

    inputs(rows, dtype, device): the differentiable tensors, then the others.
    matrix(rows): elements of the matrix that the formula stores.
    sizes: rows to time on a CPU and on CUDA; checked: rows at which results are compared with the formula.
    """

    name: str
    formula: Loss
    implementations: dict[str, Loss]
    inputs: Callable[[int, torch.dtype, str], tuple[Inputs, Inputs]]
    matrix: Callable[[int], int]
    sizes: dict[str, Sequence[int]]
    checked: int = 512


def unit(rows: int, *shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return F.normalize(torch.randn(rows, *shape, device=device), dim=-1).to(dtype)


def pairs(width: int, rows: int, dtype: torch.dtype, device: str, noise: float = 0.05) -> tuple[Inputs, Inputs]:
    x, other = unit(rows, width, dtype=dtype, device=device), torch.randn(rows, width, device=device)
    return [x, F.normalize(x + noise * other, dim=-1).to(dtype)], []


def with_teacher(rows: int, dtype: torch.dtype, device: str) -> tuple[Inputs, Inputs]:
    # A teacher that is not sure, so that its distribution is more than the positive.
    return pairs(512, rows, dtype, device, noise=0.2)[0], pairs(768, rows, dtype, device, noise=0.2)[0]


def tokens(rows: int, dtype: torch.dtype, device: str) -> tuple[Inputs, Inputs]:
    lengths = torch.randint(64, 257, (rows,), device=device)
    mask = torch.arange(256, device=device) < lengths[:, None]
    return [unit(rows, 32, 128, dtype=dtype, device=device), unit(rows, 256, 128, dtype=dtype, device=device)], [mask]


def with_classes(rows: int, dtype: torch.dtype, device: str) -> tuple[Inputs, Inputs]:
    classes = 64 * rows
    targets = torch.randint(classes, (rows,), device=device)
    return [unit(rows, 512, dtype=dtype, device=device), unit(classes, 512, dtype=dtype, device=device)], [targets]


def with_labels(rows: int, dtype: torch.dtype, device: str) -> tuple[Inputs, Inputs]:
    # Four rows for each label.
    return [unit(rows, 768, dtype=dtype, device=device)], [torch.arange(rows, device=device) // 4]


def with_guide(rows: int, dtype: torch.dtype, device: str) -> tuple[Inputs, Inputs]:
    # A guide that finds some negatives more similar than the positive.
    return pairs(768, rows, dtype, device)[0], pairs(384, rows, dtype, device, noise=0.2)[0]


def normalised(loss: Loss, count: int) -> Loss:
    """Return the loss of normalised embeddings, the first `count` arguments: these peers normalise what they get."""
    return lambda *tensors: loss(*(F.normalize(t, dim=-1) for t in tensors[:count]), *tensors[count:])


def openclip_distill(x: Tensor, y: Tensor, teacher_x: Tensor, teacher_y: Tensor) -> Tensor:
    declare_torchvision_schemas()
    from open_clip.loss import DistillClipLoss

    with autocast(x):
        # It computes the contrastive loss too; its gradient is not asked for.
        return DistillClipLoss()(x, y, 20.0, teacher_x, teacher_y, 50.0)[1]


def lightly_nt_xent(a: Tensor, b: Tensor) -> Tensor:
    declare_torchvision_schemas()
    from lightly.loss import NTXentLoss

    with autocast(a):
        return NTXentLoss(temperature=0.1)(a, b)


def metric_learning_supcon(x: Tensor, labels: Tensor) -> Tensor:
    from pytorch_metric_learning.losses import SupConLoss

    with autocast(x):
        return SupConLoss(temperature=0.1)(x, labels)


def sentence_transformers_gist(x: Tensor, y: Tensor, guide_x: Tensor, guide_y: Tensor) -> Tensor:
    declare_torchvision_schemas()
    from sentence_transformers.sentence_transformer.losses.cached_gist_embed import CachedGISTEmbedLoss

    # Its loss alone, without models: the attributes are those that its constructor sets.
    loss = CachedGISTEmbedLoss.__new__(CachedGISTEmbedLoss)
    torch.nn.Module.__init__(loss)
    loss.similarity_fct, loss.cross_entropy_loss = torch.nn.CosineSimilarity(dim=-1), torch.nn.CrossEntropyLoss()
    loss.temperature, loss.margin, loss.margin_strategy = 0.05, 0.0, "absolute"
    loss.contrast_anchors = loss.contrast_positives = True
    loss.gather_across_devices, loss.show_progress_bar, loss.mini_batch_size = False, False, GIST_ROWS
    with autocast(x):
        return loss.calculate_loss([[x], [y]], [[guide_x], [guide_y]])


def gist(loss: Loss, x: Tensor, y: Tensor, guide_x: Tensor, guide_y: Tensor) -> Tensor:
    directions = ("x_to_y", "x_to_x", "y_to_y")
    return loss(x, y, 20.0, directions=directions, guide=megabatch.Guide(guide_x, guide_y))


def plain_maxsim(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    with autocast(x):
        similarity = torch.einsum("itd,jud->ijtu", x, y).float().masked_fill(~mask[:, None], -torch.inf)
    return F.cross_entropy(similarity.max(3).values.sum(2), torch.arange(len(x), device=x.device))


def late_interaction_kernels(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    from late_interaction_kernels import maxsim

    return F.cross_entropy(maxsim(x, y, d_mask=mask), torch.arange(len(x), device=x.device))


def plain_classes(x: Tensor, y: Tensor, targets: Tensor) -> Tensor:
    with autocast(x):
        similarity = x @ y.T
        logits = 30.0 * (similarity - 0.35 * F.one_hot(targets, len(y)).to(similarity.dtype))
        return F.cross_entropy(logits, targets)


def autocast(x: Tensor) -> Any:
    return torch.autocast(x.device.type, torch.bfloat16, enabled=x.dtype == torch.bfloat16)


def plain_loop(loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    return reference.matryoshka_loss(loss, x, y, 20.0, dims=DIMS)


CONTESTS = (
    Contest(
        "distillation",
        lambda x, y, s, t: reference.distill_loss(x, y, 20.0, s, t, 50.0),
        {
            "megabatch": lambda x, y, s, t: megabatch.distill_loss(x, y, 20.0, s, t, 50.0),
            "megabatch, eager": lambda x, y, s, t: megabatch.distill_loss(x, y, 20.0, s, t, 50.0, backend="eager"),
            "OpenCLIP": openclip_distill,
        },
        with_teacher,
        lambda rows: rows**2,
        {"cpu": (2048,), "cuda": (16384, 65536)},
    ),
    Contest(
        "Matryoshka",
        functools.partial(plain_loop, reference.clip_loss),
        {
            "megabatch": lambda x, y: megabatch.matryoshka(megabatch.clip_loss, DIMS)(x, y, 20.0),
            "megabatch, each width": lambda x, y: megabatch.matryoshka(lambda *t: megabatch.clip_loss(*t), DIMS)(x, y, 20.0),
            "loop of clip_loss": functools.partial(plain_loop, megabatch.clip_loss),
            "loop of the formula": functools.partial(plain_loop, reference.clip_loss),
        },
        functools.partial(pairs, 768),
        lambda rows: rows**2,
        {"cpu": (2048,), "cuda": (16384, 65536)},
    ),
    Contest(
        "one width",
        lambda x, y: reference.clip_loss(x, y, 20.0),
        {"megabatch": lambda x, y: megabatch.clip_loss(x, y, 20.0)},
        functools.partial(pairs, 768),
        lambda rows: rows**2,
        {"cpu": (2048,), "cuda": (16384, 65536)},
    ),
    Contest(
        "late interaction",
        lambda x, y, mask: reference.maxsim_loss(x, y, 1.0, y_mask=mask),
        {
            "megabatch": lambda x, y, mask: megabatch.maxsim_loss(x, y, 1.0, y_mask=mask),
            "megabatch, eager": lambda x, y, mask: megabatch.maxsim_loss(x, y, 1.0, y_mask=mask, backend="eager"),
            "einsum": plain_maxsim,
            "late-interaction-kernels": late_interaction_kernels,
        },
        tokens,
        lambda rows: rows**2 * 32 * 256,
        {"cpu": (48,), "cuda": (512, 2048)},
        checked=32,
    ),
    Contest(
        "classes",
        lambda x, y, targets: reference.class_softmax_loss(x, y, targets, 30.0, margin=0.35),
        {
            "megabatch": lambda x, y, targets: megabatch.class_softmax_loss(x, y, targets, 30.0, margin=0.35),
            "cross_entropy": plain_classes,
        },
        with_classes,
        lambda rows: 64 * rows**2,
        {"cpu": (512,), "cuda": (8192, 16384)},
        checked=128,
    ),
    Contest(
        "NT-Xent",
        normalised(lambda a, b: reference.nt_xent_loss(a, b, 10.0), 2),
        {
            "megabatch": normalised(lambda a, b: megabatch.nt_xent_loss(a, b, 10.0), 2),
            "lightly": lightly_nt_xent,
        },
        functools.partial(pairs, 768),
        lambda rows: 4 * rows**2,
        {"cpu": (1024,), "cuda": (16384, 65536)},
    ),
    Contest(
        "SupCon",
        normalised(lambda x, labels: reference.supcon_loss(x, labels, 10.0), 1),
        {
            "megabatch": normalised(lambda x, labels: megabatch.supcon_loss(x, labels, 10.0), 1),
            "pytorch-metric-learning": metric_learning_supcon,
        },
        with_labels,
        lambda rows: rows**2,
        {"cpu": (2048,), "cuda": (16384, 65536)},
    ),
    Contest(
        "GIST",
        normalised(functools.partial(gist, reference.infonce_loss), 4),
        {
            "megabatch": normalised(functools.partial(gist, megabatch.infonce_loss), 4),
            "Sentence Transformers": sentence_transformers_gist,
        },
        with_guide,
        lambda rows: 3 * rows**2,
        {"cpu": (256,), "cuda": (2048,)},
        checked=256,
    ),
    Contest(
        "spread-out",
        reference.spread_out_loss,
        {"megabatch": megabatch.spread_out_loss, "formula": reference.spread_out_loss},
        lambda rows, dtype, device: ([unit(rows, 768, dtype=dtype, device=device)], []),
        lambda rows: rows**2,
        {"cpu": (4096,), "cuda": (16384, 65536)},
    ),
)


def unavailable(name: str, device: str) -> str | None:
    """Return why an implementation cannot run here, or None."""
    if name in CUDA_ONLY and device != "cuda":
        return "needs a CUDA device"
    module = NEEDED_MODULES.get(name)
    return f"{module} is not installed" if module is not None and importlib.util.find_spec(module) is None else None


def gradients(loss: Loss, leaves: Inputs, others: Inputs) -> tuple[Tensor, list[Tensor]]:
    """Return the value and the gradients of one step."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    value = loss(*leaves, *others)
    return value.detach(), list(torch.autograd.grad(value, leaves))


def worst_error(contest: Contest, loss: Loss, dtype: torch.dtype, device: str) -> float:
    """Return the largest ‖g − g64‖ / ‖g64‖ of the gradients, or the relative error of the value if that is larger."""
    torch.manual_seed(0)
    leaves, others = contest.inputs(contest.checked, dtype, device)
    value, found = gradients(loss, leaves, others)
    wide = [t.double() if t.is_floating_point() else t for t in others]
    true_value, true = gradients(contest.formula, [t.double() for t in leaves], wide)
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, true, strict=True)]
    return max(*errors, abs(value.double() - true_value).item() / abs(true_value).item())


def measure(contest: Contest, name: str, rows: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return time and memory of one implementation, or why it has none."""
    # Logits and one gradient of them, in fp32, are the least that an implementation with the matrix needs.
    needed = 0 if name in WITHOUT_MATRIX else 8 * contest.matrix(rows)
    if needed > available_bytes(device):
        return {"needed_bytes": needed}
    torch.manual_seed(0)
    leaves, others = contest.inputs(rows, dtype, device)
    step = functools.partial(gradients, contest.implementations[name], leaves, others)
    try:
        step()
        peak = peak_of(step, device).extra_bytes
    except torch.OutOfMemoryError as error:
        return {"error": str(error).splitlines()[0]}
    seconds: list[float] = []
    while len(seconds) < 3 or (sum(seconds) < BUDGET_S and len(seconds) < MOST_STEPS):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds), "extra_bytes": peak}


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table of the docs."""
    machine = rows[0]["machine"]
    header = ("loss", "rows", "implementation", "forward + backward", "extra memory", "error")
    lines = [(row["loss"], f"{row['rows']:,}", row["implementation"], *_cells(row), f"{row['gradient_error']:.0e}") for row in rows]
    caption = (
        f"{rows[0]['dtype']}, on {machine.get('gpu', machine['cpu'])} with torch {machine['torch']}, {machine['date'][:10]}. Rows: "
        f"pairs, queries of 32 tokens with documents of 256 (width 128), or samples with 64 times as many classes (width 512). "
        f"Prefixes: {', '.join(map(str, DIMS))}. The error is the largest of value and gradients, relative to the formula in "
        "float64, at a smaller size."
    )
    return f"{report.markdown_table(header, lines, left=('loss', 'implementation'))}\n\n{caption}"


def _cells(row: dict[str, Any]) -> tuple[str, str]:
    if "seconds" in row:
        return f"{1000 * row['seconds']:,.1f} ms", f"{row['extra_bytes'] / 2**20:,.0f} MiB"
    return ("needs", f"{row['needed_bytes'] / 2**30:,.0f} GiB") if "needed_bytes" in row else ("out of memory", "")


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 1 if a result of ours is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.other_losses", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", help="losses, separated by commas")
    parser.add_argument(
        "--out", type=Path, help="file of rows (default: results/other-losses-DEVICE.jsonl); rows of other losses stay"
    )
    options = parser.parse_args(arguments)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    machine = describe(options.device)
    out = options.out or RESULTS / f"other-losses-{options.device}.jsonl"
    names = options.only.split(",") if options.only else [contest.name for contest in CONTESTS]
    rows = [row for row in (report.read_rows(out) if out.exists() else []) if row["loss"] not in names]
    wrong = False
    for contest in CONTESTS:
        if contest.name not in names:
            continue
        for size in contest.sizes[options.device]:
            for name, loss in contest.implementations.items():
                reason = unavailable(name, options.device)
                if reason is not None:
                    print(f"{contest.name:18} {size:8,} {name:25} {reason}", flush=True)
                    continue
                error = worst_error(contest, loss, dtype, options.device)
                wrong |= name.startswith("megabatch") and not error < LARGEST_ERROR[dtype]
                result = measure(contest, name, size, dtype, options.device)
                row = {"loss": contest.name, "implementation": name, "rows": size, "dtype": str(dtype).removeprefix("torch.")}
                rows.append({**row, "gradient_error": error, **result, "machine": machine})
                print(f"{contest.name:18} {size:8,} {name:25} {' '.join(_cells(rows[-1])):30} error {error:.1e}", flush=True)
                # Written after every case, so that a run that is stopped loses nothing.
                report.write_rows(out, rows)
                gc.collect()
                if options.device == "cuda":
                    torch.cuda.empty_cache()
    print(markdown(rows))
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
