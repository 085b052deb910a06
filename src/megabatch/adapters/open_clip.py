"""OpenCLIP 3.3 and 4.x: its losses with the same constructors and calls, computed without the similarity matrix.

- `torchrun … -m megabatch.adapters.open_clip ARGUMENTS` in place of `-m open_clip_train.main ARGUMENTS` changes nothing else.
- In a copy of OpenCLIP's scripts: `from megabatch.adapters.open_clip import create_loss` (3.3), or `adapt(task)` after
`create_task` (4.x). - In a loop of your own: the classes `ClipLoss`, `SigLipLoss`, `CoCaLoss` and `DistillClipLoss`.

Every rank gets the value of the whole batch. (OpenCLIP's `local_loss` and sigmoid loss report each rank's part; their mean is this
value.) The gradient after DDP's average is always the exact one, which OpenCLIP computes with `gather_with_grad=True`. So the
arguments that choose between gathering schemes are accepted and have no effect.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..chunks.cached import cached
from ..losses import clip_loss, distill_loss, siglip_loss
from ..towers.patches import linear_patches


class ClipLoss(nn.Module):
    """A drop-in for `open_clip.loss.ClipLoss`: the softmax loss.

    accum_freq: that of OpenCLIP's training loop, which calls the loss so often for one step and adds up the gradients. Each call
        has the features of the whole batch, so the gradients of the scale and the bias must be divided by it; OpenCLIP does not.
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        *,
        accum_freq: int = 1,
    ) -> None:
        super().__init__()
        if use_horovod:
            raise ValueError("use_horovod=True: ranks must belong to a torch.distributed group; launch with torchrun instead")
        self.rank, self.world_size, self.accum_freq = rank, world_size, accum_freq

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        scale = _scalar(logit_scale, self.accum_freq)
        loss = clip_loss(image_features, text_features, scale, group=_group(self.rank, self.world_size))
        if isinstance(logit_bias, Tensor):
            # A bias has no effect on a softmax, but DDP waits for a gradient of every parameter.
            loss = loss + 0 * logit_bias.sum()
        return {"contrastive_loss": loss} if output_dict else loss


class CoCaLoss(ClipLoss):
    """A drop-in for `open_clip.loss.CoCaLoss`: the softmax loss, and the cross-entropy of the caption's tokens, as in OpenCLIP."""

    def __init__(
        self,
        caption_loss_weight: float,
        clip_loss_weight: float,
        pad_id: int = 0,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        *,
        accum_freq: int = 1,
    ) -> None:
        super().__init__(local_loss, gather_with_grad, cache_labels, rank, world_size, use_horovod, accum_freq=accum_freq)
        self.clip_loss_weight, self.caption_loss_weight = clip_loss_weight, caption_loss_weight
        self.caption_loss = nn.CrossEntropyLoss(ignore_index=pad_id)

    def forward(  # type: ignore[override]
        self,
        image_features: Tensor,
        text_features: Tensor,
        logits: Tensor,
        labels: Tensor,
        logit_scale: Tensor | float,
        output_dict: bool = False,
    ) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        if self.clip_loss_weight:
            contrastive = self.clip_loss_weight * cast(Tensor, super().forward(image_features, text_features, logit_scale))
        else:
            contrastive = torch.zeros((), device=logits.device)
        caption = self.caption_loss_weight * self.caption_loss(logits.permute(0, 2, 1), labels)
        return {"contrastive_loss": contrastive, "caption_loss": caption} if output_dict else (contrastive, caption)


class DistillClipLoss(ClipLoss):
    """A drop-in for `open_clip.loss.DistillClipLoss`: the softmax loss, and the cross-entropy with a teacher's softmax."""

    def forward(  # type: ignore[override]
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        dist_image_features: Tensor,
        dist_text_features: Tensor,
        dist_logit_scale: Tensor | float,
        output_dict: bool = False,
    ) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        group = _group(self.rank, self.world_size)
        student = (image_features, text_features, _scalar(logit_scale, self.accum_freq))
        teacher = (dist_image_features.detach(), dist_text_features.detach(), _detached(dist_logit_scale))
        contrastive = clip_loss(*student, group=group)
        distillation = distill_loss(*student, *teacher, group=group)
        return {"contrastive_loss": contrastive, "distill_loss": distillation} if output_dict else (contrastive, distillation)


class SigLipLoss(nn.Module):
    """A drop-in for `open_clip.loss.SigLipLoss`: the sigmoid loss. accum_freq: as in `ClipLoss`."""

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        chunk_size: int | None = None,
        *,
        accum_freq: int = 1,
    ) -> None:
        super().__init__()
        self.rank, self.world_size, self.accum_freq = rank, world_size, accum_freq

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        bias = 0.0 if logit_bias is None else _scalar(logit_bias, self.accum_freq)
        scale = _scalar(logit_scale, self.accum_freq)
        loss = siglip_loss(image_features, text_features, scale, bias, group=_group(self.rank, self.world_size))
        return {"contrastive_loss": loss} if output_dict else loss


# How to make each of OpenCLIP's losses ours, by the name of its class.
CONVERSIONS: dict[str, Callable[[Any, dict[str, Any]], nn.Module]] = {
    "ClipLoss": lambda loss, options: ClipLoss(**options),
    "DistillClipLoss": lambda loss, options: DistillClipLoss(**options),
    "SigLipLoss": lambda loss, options: SigLipLoss(**options),
    "CoCaLoss": lambda loss, options: CoCaLoss(
        loss.caption_loss_weight, loss.clip_loss_weight, loss.caption_loss.ignore_index, **options
    ),
}


def convert(loss: nn.Module, *, accum_freq: int = 1) -> nn.Module:
    """Return our class for a loss of OpenCLIP, or the loss itself if there is none for it: GenLIP's, and any under Horovod."""
    kind = type(loss)
    if not kind.__module__.startswith("open_clip.") or kind.__name__ not in CONVERSIONS or getattr(loss, "use_horovod", False):
        return loss
    return CONVERSIONS[kind.__name__](loss, {"rank": loss.rank, "world_size": loss.world_size, "accum_freq": accum_freq})


def create_loss(args: Any) -> nn.Module:
    """Return the loss for the arguments of OpenCLIP's training script: ours, or theirs where there is none.

    With `--accum-freq`, the gradients are those of the whole batch for the encoders, the scale and the bias. Encoders with random
    parts (dropout, patch dropout) draw them twice in OpenCLIP's loop; `encode_in_chunks` with the whole batch does not.
    """
    import open_clip

    return convert(open_clip.create_loss(args), accum_freq=getattr(args, "accum_freq", 1))


Task = TypeVar("Task", bound=nn.Module)


def adapt(
    task: Task,
    *,
    accum_freq: int = 1,
    chunk: int | None = None,
    text_chunk: int | None = None,
    forward_chunk: int | None = None,
    keep: int | Literal["auto"] = 0,
) -> Task:
    """Replace the loss of a task of OpenCLIP 4.x by ours, and return the task; with `chunk`, the encoders run in chunks.

    Call it on what `create_task` returned, before DDP or FSDP. accum_freq: that of the training loop.
    """
    if isinstance(getattr(task, "loss", None), nn.Module):
        task.loss = convert(task.loss, accum_freq=accum_freq)  # type: ignore[arg-type]
    if chunk is not None:
        encode_in_chunks(task, chunk, text_chunk=text_chunk, forward_chunk=forward_chunk, keep=keep)
    elif text_chunk is not None or forward_chunk is not None:
        raise ValueError(f"text_chunk={text_chunk}, forward_chunk={forward_chunk} without chunk: pass the rows of a chunk too")
    return task


Model = TypeVar("Model", bound=nn.Module)


def encode_in_chunks(
    model: Model,
    chunk: int,
    *,
    text_chunk: int | None = None,
    forward_chunk: int | None = None,
    keep: int | Literal["auto"] = 0,
) -> Model:
    """Make both encoders of an OpenCLIP model run `chunk` rows at a time, with the gradients of the whole batch; return the model.

    It replaces `--accum-freq m --batch-size b`: train with `--batch-size m·b` and a chunk of b. The gradient is exact, also that of
    `logit_scale`, random parts are replayed, and gradients are exchanged once per step. model: before or after it is wrapped in
    DDP, or a task of OpenCLIP 4.x. text_chunk: rows of a chunk of texts, if other than `chunk`: the peak is that of the tower
    whose chunk takes more. forward_chunk, keep: as in `megabatch.cached`.
    """
    inner: Any = model
    while hasattr(inner, "trainable_module") or hasattr(inner, "module"):
        inner = inner.trainable_module if hasattr(inner, "trainable_module") else inner.module
    if hasattr(inner, "text_decoder") or not (hasattr(inner, "encode_image") and hasattr(inner, "encode_text")):
        raise ValueError(
            f"the model is a {type(inner).__name__}: only models whose forward calls encode_image and encode_text can run in "
            "chunks; a model with a decoder keeps the tokens of the whole batch; leave the chunk out"
        )
    # The model's own forward calls these, so that DDP and FSDP prepare and exchange once for all chunks.
    inner.encode_image = cached(inner.encode_image, chunk, forward_chunk=forward_chunk, keep=keep)
    text_chunk = chunk if text_chunk is None else text_chunk
    inner.encode_text = cached(inner.encode_text, text_chunk, forward_chunk=forward_chunk, keep=keep)
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    """Run OpenCLIP's training script with our losses; `--accum-freq` becomes chunks of the batch.

    `--batch-size b --accum-freq m` trains the same batch as in OpenCLIP, m·b on each rank: the loader gives it whole, and the
    encoders run b rows at a time. `--chunk` sets the rows of a chunk apart from that, `--text-chunk` those of texts,
    `--forward-chunk` those of forward (as in `megabatch.cached`), and `--linear-patches` calls `megabatch.linear_patches` on the
    model. All other arguments are OpenCLIP's.
    """
    from open_clip_train import main as script

    parser = argparse.ArgumentParser("python -m megabatch.adapters.open_clip", add_help=False)
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--text-chunk", type=int)
    parser.add_argument("--forward-chunk", type=int)
    parser.add_argument("--linear-patches", action="store_true")
    own, rest = parser.parse_known_args(arguments)
    parse_args, create_model = script.parse_args, script.create_model_and_transforms

    def parse(words: Sequence[str]) -> Any:
        args = parse_args(words)
        if args.accum_freq > 1 and "coca" not in args.model.lower():
            own.chunk = own.chunk or args.batch_size
            args.batch_size, args.accum_freq = args.batch_size * args.accum_freq, 1
        return args

    def create(*names: Any, **options: Any) -> Any:
        model, *transforms = create_model(*names, **options)
        if own.linear_patches:
            linear_patches(model)
        if own.chunk is not None:
            encode_in_chunks(model, own.chunk, text_chunk=own.text_chunk, forward_chunk=own.forward_chunk)
        elif own.text_chunk is not None or own.forward_chunk is not None:
            raise ValueError("--text-chunk and --forward-chunk need --chunk, the rows of a chunk: pass it too")
        return model, *transforms

    script.parse_args, script.create_model_and_transforms = parse, create
    if hasattr(script, "create_task"):
        create_task = script.create_task
        script.create_task = lambda args, *rest, **more: adapt(create_task(args, *rest, **more), accum_freq=args.accum_freq)
    else:
        script.create_loss = create_loss
    script.main(rest)


def _scalar(value: Tensor | float, accum_freq: int) -> Tensor | float:
    """Return the scale or bias as one number, whose gradient is divided by accum_freq."""
    if not isinstance(value, Tensor):
        return value
    # FSDP needs one dimension to shard, so that OpenCLIP gives the scale the shape (1,).
    value = value.reshape(())
    return value if accum_freq == 1 else value.detach() + (value - value.detach()) / accum_freq


def _detached(value: Tensor | float) -> Tensor | float:
    return value.detach().reshape(()) if isinstance(value, Tensor) else value


def _group(rank: int, world_size: int) -> dist.ProcessGroup | None:
    """Return the process group that OpenCLIP's rank and world_size describe."""
    if world_size == 1:
        return None
    actual = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if actual != (rank, world_size):
        raise ValueError(
            f"rank={rank}, world_size={world_size}, but this process is rank {actual[0]} of {actual[1]}: initialise "
            "torch.distributed first and pass its rank and world size"
        )
    return dist.group.WORLD


if __name__ == "__main__":
    main()
