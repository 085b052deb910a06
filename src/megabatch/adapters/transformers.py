"""Hugging Face's Trainer for two-tower models: negatives of all ranks, encoders in chunks, and an audit before the first step.

`ContrastiveTrainer` replaces `transformers.Trainer` for CLIPModel, SiglipModel, VisionTextDualEncoderModel and every module whose
forward returns the two embeddings by name and which has a `logit_scale`. `ContrastiveMixin` does the same for a Trainer of your
own.
"""

from __future__ import annotations

import inspect
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback

from ..audit import Finding, Severity, audit, exit_code, read_any
from ..chunks.cached import Cached, cached
from ..losses import clip_loss, siglip_loss


class ContrastiveSettings(NamedTuple):
    """How `ContrastiveMixin` trains.

    outputs: the names of the two embeddings in what the model returns, of the same rows in the same order.
    loss: `megabatch.clip_loss`, `megabatch.siglip_loss`, or another function of x, y, scale and maybe a bias, which takes `group`.
        None: the sigmoid loss for a model with a `logit_bias`, else the softmax loss.
    chunk: rows that go through the model at once, with the gradients of the whole batch. None: all rows of this rank.
    tokens: tokens that go through the model at once, for texts of different lengths. keep: chunks whose activations are stored.
        Both as in `megabatch.cached`.
    options: further options of the loss, as in `megabatch.clip_loss`: label_smoothing, drop_above, …
    """

    outputs: tuple[str, str] = ("image_embeds", "text_embeds")
    loss: Callable[..., Tensor] | None = None
    chunk: int | None = None
    tokens: int | None = None
    keep: int | Literal["auto"] = 0
    options: Mapping[str, Any] = {}


class Embeddings(NamedTuple):
    """What one forward of the wrapped model returns: both embeddings, the scale, and the bias or None."""

    x: Tensor
    y: Tensor
    scale: Tensor
    bias: Tensor | None


class ContrastiveMixin:
    """Makes `compute_loss` of a Trainer the contrastive loss of the rows of all ranks; put it before the Trainer's class.

    contrastive: a `ContrastiveSettings`; all other arguments are the Trainer's. A column `ids` in the inputs (one integer for each
    row) excludes pairs with equal ids from the negatives.

    In training every rank gets the loss of the whole batch, and DDP's or FSDP's average of gradients is its exact gradient. In
    evaluation each rank's loss is that of its own rows, because ranks may have different numbers of batches.
    """

    def __init__(self, *args: Any, contrastive: ContrastiveSettings | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.contrastive = contrastive or ContrastiveSettings()
        self._cached: tuple[Any, Cached] | None = None
        trainer: Any = self
        # The loss is a mean over the batch, which the Trainer divides by the number of accumulated batches.
        trainer.model_accepts_loss_kwargs, trainer.loss_is_scaled_for_ga = False, False
        # Evaluation computes the loss although there are no labels.
        trainer.can_return_loss = True
        steps = trainer.args.gradient_accumulation_steps
        if steps > 1:
            rows = trainer.args.per_device_train_batch_size
            warnings.warn(
                f"gradient_accumulation_steps={steps} adds no negatives to a contrastive loss: each of the {steps} losses sees "
                f"its own batch only; train with per_device_train_batch_size={rows * steps}, no accumulation and "
                f"ContrastiveSettings(chunk={rows}), which needs the same memory",
                stacklevel=2,
            )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss, and with return_outputs also the embeddings by name. The Trainer calls it with the wrapped model."""
        columns = {name: value for name, value in inputs.items() if name not in ("ids", "return_loss")}
        inner = unwrapped(model)
        # Inside the wrapper's forward: DDP and FSDP prepare once for all chunks, and see that the scale is used.
        with replaced_forward(inner, self._embed(inner)):
            found: Embeddings = model(**columns)
        function = self.contrastive.loss or (clip_loss if found.bias is None else siglip_loss)
        takes_bias = "bias" in inspect.signature(function).parameters
        group = dist.group.WORLD if model.training and dist.is_available() and dist.is_initialized() else None
        options = dict(self.contrastive.options) | ({"ids": inputs["ids"]} if "ids" in inputs else {})
        bias = (0.0 if found.bias is None else found.bias,) if takes_bias else ()
        loss = function(found.x, found.y, found.scale, *bias, group=group, **options)
        if not takes_bias and found.bias is not None:
            # It has no effect on a softmax, but DDP waits for a gradient of every parameter.
            loss = loss + 0 * found.bias
        if not return_outputs:
            return loss
        return loss, dict(zip(self.contrastive.outputs, (found.x, found.y), strict=True))

    def _embed(self, inner: nn.Module) -> Callable[..., Embeddings]:
        """Return what replaces the forward of the model: its embeddings, computed in chunks if there is a chunk."""
        encode, model = self._encoder(inner), cast(Any, inner)
        if not hasattr(inner, "logit_scale"):
            raise ValueError(
                f"the model is a {type(inner).__name__} without a logit_scale: give it a parameter of that name, the logarithm of "
                "the scale, for example torch.nn.Parameter(torch.tensor(20.0).log())"
            )

        def embed(**columns: Any) -> Embeddings:
            outputs = encode(**columns)
            x, y = (_named(outputs, name) for name in self.contrastive.outputs)
            # Read here: FSDP gathers its parameters before the forward, and shards them again after it.
            bias: Any = getattr(inner, "logit_bias", None)
            return Embeddings(x, y, model.logit_scale.exp().reshape(()), None if bias is None else bias.reshape(()) + 0)

        return embed

    def _encoder(self, inner: nn.Module) -> Callable[..., Any]:
        settings, forward = self.contrastive, inner.forward
        if settings.chunk is None and settings.tokens is None:
            return forward
        # The Trainer wraps and changes the model after its construction. A cached encoder measures and remembers, so it is made
        # once.
        key = (id(inner), getattr(forward, "__func__", forward))
        if self._cached is None or self._cached[0] != key:
            encoder = cached(forward, settings.chunk, tokens=settings.tokens, outputs=settings.outputs, keep=settings.keep)
            self._cached = key, encoder
        return self._cached[1]


class ContrastiveTrainer(ContrastiveMixin, Trainer):
    """`transformers.Trainer` with the contrastive loss of `ContrastiveMixin`."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DDP and torch.compile; raise a ValueError for wrappers that cannot be right."""
    inner: Any = model
    while True:
        if isinstance(inner, nn.DataParallel):
            raise ValueError(
                "the model is in torch.nn.DataParallel, because a program with several GPUs was started as one process: start it "
                "with torchrun, one process for each GPU, or show it one GPU only"
            )
        if isinstance(inner, DistributedDataParallel):
            inner = inner.module
        elif hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        else:
            return inner


@contextmanager
def replaced_forward(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Context in which calling the model runs another forward; hooks and wrappers stay."""
    own = model.__dict__.get("forward")
    model.forward = forward
    try:
        yield
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own


def _named(outputs: Any, name: str) -> Tensor:
    found = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
    if found is None:
        names = ", ".join(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise ValueError(f"the model returns no {name!r}, but {names}: name both embeddings, ContrastiveSettings(outputs=(…, …))")
    return found


class AuditCallback(TrainerCallback):
    """Checks the TrainingArguments with `megabatch.audit` before the first step: warns, or stops the training.

    fail_on: the least severe finding that stops it: "error", "warning" or "note"; None only warns. facts: what the arguments do
    not state, by the names of `megabatch.audit.TrainingFacts`: objective="clip", gather="exact", unique=…
    """

    def __init__(self, fail_on: Severity | None = "error", **facts: Any) -> None:
        self.fail_on, self.facts = fail_on, facts
        self.findings: Sequence[Finding] = ()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        dataset: Any = getattr(kwargs.get("train_dataloader"), "dataset", None)
        data = len(dataset) if hasattr(dataset, "__len__") else None
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "training_arguments.json"
            file.write_text(args.to_json_string(), "utf-8")
            reading = read_any(file, **self.facts)
            self.findings = audit(reading, kwargs.get("model"), data=data, ranks=args.world_size)
        text = "\n".join(f"{f.severity}: {f.where}: {f.why} ({f.code})\n{f.fix}".replace(f"{folder}/", "") for f in self.findings)
        if self.fail_on is not None and exit_code(self.findings, self.fail_on):
            raise ValueError(f"the audit of the TrainingArguments stops this training:\n{text}")
        if self.findings and args.process_index == 0:
            warnings.warn(f"audit of the TrainingArguments:\n{text}", stacklevel=2)
