"""The cases of OpenCLIP's own tests of its losses and tasks, rewritten for models without a download, with our losses inside.

OpenCLIP 3.3.0 tests its losses only by training (test_training_simple.py); 4.2.0.dev0 has tests of its own for them. By file:

- test_loss.py: features that are not contiguous are gathered by rows. Left out: which collective gathers them; we gather nothing.
- test_siglip_chunked_loss.py: every chunk size, also one that does not divide the rows, forward and backward; blocks without
  positives (`negative_only`) are those of other ranks, here with two processes.
- test_factory_task.py: the loss for each combination of arguments, weights of CoCa, rank and world size. Left out: the label cache
  and NaFlex, which are OpenCLIP's.
- test_task_specific_unit.py, test_clap_task.py: the sum of losses, CoCa's shift and accumulated batches, the teacher without
  gradients, audio features. They run with OpenCLIP 4.x and skip themselves with 3.3, where the calls of the losses are compared.
- test_task_compile.py: a compiled training step (4.x). Left out: counters and learning rates of its training state.
- test_training_simple.py: in test_open_clip_training.py, with a tiny model. Left out: mT5 (a download), torchscript (our losses are
  called outside of the model), zero-shot evaluation.
- Left out: all other files, which use no loss (data, tokenizers, models, checkpoints, NaFlex and audio inputs, evaluation), and
  GenLIP's and GenLAP's, whose losses stay OpenCLIP's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from open_clip_training import CONTEXT, WORDS, arguments, batches, open_clip, tiny_clip
from torch import Tensor, nn
from torch.nn.functional import normalize
from world import World

from megabatch.adapters import open_clip as adapter

pytestmark = pytest.mark.slow

# Sums of a few thousand terms in fp64, in another order. OpenCLIP's contrastive loss with weight 0 is an integer.
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12, "check_dtype": False}


def inputs(rows: int = 64, width: int = 32, seed: int = 0) -> dict[str, Tensor]:
    """Return normalised features with a scale and a bias, all of which require a gradient."""
    g = torch.Generator().manual_seed(seed)
    images, texts = (normalize(torch.randn(rows, width, generator=g).double(), dim=-1) for _ in range(2))
    found = {"image_features": images, "text_features": texts}
    found |= {"logit_scale": torch.tensor(10.0).double(), "logit_bias": torch.tensor(-10.0).double()}
    return {name: value.requires_grad_() for name, value in found.items()}


def value_and_gradients(loss: Any, given: dict[str, Tensor], wanted: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return every loss of a call by name, and the gradients of their sum by the names of the inputs."""
    losses = loss(**given, output_dict=True)
    leaves = {name: value for name, value in (wanted or given).items() if value.requires_grad}
    gradients = torch.autograd.grad(sum(losses.values()), list(leaves.values()), allow_unused=True)
    return {name: value.detach() for name, value in losses.items()} | {
        f"gradient of {name}": torch.zeros_like(leaves[name]) if gradient is None else gradient
        for name, gradient in zip(leaves, gradients, strict=True)
    }


def assert_close(found: dict[str, Tensor], true: dict[str, Tensor]) -> None:
    assert found.keys() == true.keys()
    for name in true:
        torch.testing.assert_close(found[name], true[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("rows, chunk_size", [(64, 64), (64, 32), (64, 8), (64, 1), (70, 8), (32, 0)])
def test_the_sigmoid_loss_does_not_depend_on_the_chunk_size(rows, chunk_size):
    given = inputs(rows)
    true = value_and_gradients(open_clip().loss.SigLipLoss(), given)
    assert_close(value_and_gradients(adapter.SigLipLoss(chunk_size=chunk_size), given), true)


@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss"])
def test_features_need_not_be_contiguous(name):
    given = inputs(12, 5)
    storage = {side: given[side].detach().t().contiguous().requires_grad_() for side in ("image_features", "text_features")}
    transposed = given | {side: value.t() for side, value in storage.items()}
    found = value_and_gradients(getattr(adapter, name)(), transposed, given | storage)
    true = value_and_gradients(getattr(open_clip().loss, name)(), transposed, given | storage)
    assert_close(found, true)


def on_two_ranks(rank: int, size: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Return the results of both libraries for features that are not contiguous, with every scheme of gathering."""
    results = []
    for name, options in [("ClipLoss", {"local_loss": True, "gather_with_grad": True})] + [
        ("SigLipLoss", {"dist_impl": scheme}) for scheme in ("bidir", "shift", "gather", "reduce")
    ]:
        given = inputs(9, 5, seed=rank)
        storage = {side: given[side].detach().t().contiguous().requires_grad_() for side in ("image_features", "text_features")}
        transposed = given | {side: value.t() for side, value in storage.items()}
        pair = []
        for module in (adapter, open_clip().loss):
            loss = getattr(module, name)(rank=rank, world_size=size, **options)
            # The exchange of OpenCLIP's sigmoid loss needs contiguous features.
            features = transposed if module is adapter else {key: value.contiguous() for key, value in transposed.items()}
            found = value_and_gradients(loss, features, storage)
            # OpenCLIP reports this rank's part.
            torch.distributed.all_reduce(found["contrastive_loss"])
            found["contrastive_loss"] /= size
            pair.append(found)
        results.append(tuple(pair))
    return results


def test_two_ranks_add_the_blocks_without_positives():
    # A separate World: torch.distributed.nn, which OpenCLIP uses, keeps the first process group that it sees.
    world = World()
    results = world.run(2, on_two_ranks)
    world.close()
    for pairs in results:
        assert len(pairs) == 5
        for ours, theirs in pairs:
            assert_close(ours, theirs)


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({}, "ClipLoss"),
    ({"siglip": True}, "SigLipLoss"),
    ({"model": "coca_ViT-B-32"}, "CoCaLoss"),
    ({"model": "CoCa_custom"}, "CoCaLoss"),
    ({"distill": True}, "DistillClipLoss"),
    ({"distill": True, "model": "coca_ViT-B-32"}, "DistillClipLoss"),
    ({"distill": True, "siglip": True}, "DistillClipLoss"),
    ({"siglip": True, "loss_dist_impl": "gather"}, "SigLipLoss"),
]


@pytest.mark.parametrize("changes, name", ARGUMENTS, ids=str)
def test_the_loss_is_the_one_that_the_arguments_choose(changes, name):
    loss = adapter.create_loss(arguments(rank=3, world_size=8, accum_freq=2, **changes))
    assert type(loss) is getattr(adapter, name)
    assert (loss.rank, loss.world_size, loss.accum_freq) == (3, 8, 2)


@pytest.mark.parametrize("weights", [(2.0, 1.0), (0.5, 3.0), (1.0, 0.0), (0.0, 1.0)])
def test_coca_weights_both_losses_and_leaves_padding_out(weights):
    caption, contrastive = weights
    args = arguments(model="coca_tiny", coca_caption_loss_weight=caption, coca_contrastive_loss_weight=contrastive)
    g = torch.Generator().manual_seed(1)
    given = inputs(6, 8)
    del given["logit_bias"]
    given["logits"] = torch.randn(6, CONTEXT, WORDS, generator=g).double().requires_grad_()
    labels = torch.randint(1, WORDS, (6, CONTEXT), generator=g)
    labels[:, 4:] = 0
    ours, theirs = (
        value_and_gradients(library.create_loss(args), given | {"labels": labels}, given) for library in (adapter, open_clip())
    )
    assert_close(ours, theirs)
    assert ours["gradient of logits"][:, 4:].abs().max() == 0
    values = adapter.create_loss(args)(**given, labels=labels)
    assert [value.item() for value in values] == pytest.approx([ours["contrastive_loss"].item(), ours["caption_loss"].item()])


def test_a_teacher_gets_no_gradient():
    student, teacher = inputs(6, 8), inputs(6, 8, seed=1)
    given = {name: value for name, value in student.items() if name != "logit_bias"}
    frozen = {f"dist_{name}": value.detach() for name, value in teacher.items() if name != "logit_bias"}
    true = value_and_gradients(open_clip().loss.DistillClipLoss(), given | frozen)
    assert_close(value_and_gradients(adapter.DistillClipLoss(), given | frozen), true)
    learning = {name: value.clone().requires_grad_() for name, value in frozen.items()}
    found = value_and_gradients(adapter.DistillClipLoss(), given | learning, learning)
    assert all(found[f"gradient of {name}"].abs().max() == 0 for name in learning)


@pytest.fixture
def tasks() -> Any:
    open_clip()
    return pytest.importorskip("open_clip.task", reason="OpenCLIP 4.x has tasks; with 3.3 there are losses only")


def batch(rows: int = 8) -> dict[str, Tensor]:
    image, text = batches(1, rows)[0]
    return {"image": image.double(), "text": text}


def training_step(task: nn.Module, given: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what a task reports in training, and its losses with the gradients of all parameters."""
    task.train()
    losses, report = task(given)
    losses["loss"].backward()
    return report, {name: value.detach() for name, value in losses.items()} | {
        name: p.grad for name, p in task.named_parameters() if p.grad is not None
    }


KINDS = ("CLIPTask", "SigLIPTask", "CoCaTask", "DistillCLIPTask")


def make_task(tasks: Any, kind: str) -> Any:
    models = [tiny_clip(siglip=kind == "SigLIPTask", coca=kind == "CoCaTask").double() for _ in range(2)]
    if kind != "DistillCLIPTask":
        return getattr(tasks, kind)(models[0], verbose=False)
    nn.init.normal_(models[1].visual.proj)
    return tasks.DistillCLIPTask(*models, verbose=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True])
# Dynamo reads the gradient of tensors that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_task_reports_and_learns_as_with_its_own_loss(tasks, kind, compiled):
    found = []
    for ours in (True, False):
        task = make_task(tasks, kind)
        if ours:
            adapter.adapt(task)
            assert type(task.loss).__module__ == adapter.__name__
        if compiled:
            task.compile(backend="eager")
        report, results = training_step(task, batch())
        parts = [value for name, value in results.items() if name.endswith("_loss")]
        assert float(results["loss"]) == pytest.approx(float(sum(parts)), rel=1e-6)
        assert "logit_scale" in report and "logit_scale" not in results
        found.append(results)
    assert_close(*found)
    assert not any(name.startswith("teacher") for name in found[0])


@pytest.mark.parametrize("kind", ("CLIPTask", "SigLIPTask", "CoCaTask"))
def test_accumulated_batches_of_a_task_are_one_batch(tasks, kind):
    given = [batch(4), {name: value.flip(0) for name, value in batch(4).items()}]
    found = []
    for ours in (True, False):
        task = make_task(tasks, kind)
        if ours:
            adapter.adapt(task, accum_freq=2)
        with torch.no_grad():
            outputs = [task.trainable_module(**part) for part in given]
        scalars = ("logit_scale", "logit_bias")
        cut = {name: torch.cat([out[name] for out in outputs]) for name in outputs[0] if name not in scalars}
        losses, _ = task.compute_accum_loss(cut, {name: outputs[0][name] for name in scalars if name in outputs[0]}, given)
        found.append(losses)
    assert_close(*found)


def test_audio_features_are_compared_with_texts(tasks):
    class Model(nn.Module):
        """A CLAP of two tables, as far as the task sees it."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.audio, self.text, self.logit_scale = nn.Linear(8, 4), nn.Embedding(16, 4), nn.Parameter(torch.ones([]))
            self.visual = SimpleNamespace(image_size=8)

        def forward(self, audio: dict[str, Tensor], text: Tensor) -> dict[str, Tensor]:
            features = {"audio_features": self.audio(audio["waveform"]), "text_features": self.text(text).mean(1)}
            return {name: normalize(value, dim=-1) for name, value in features.items()} | {"logit_scale": self.logit_scale.exp()}

    g = torch.Generator().manual_seed(2)
    given = {"audio": {"waveform": torch.randn(6, 8, generator=g).double()}, "text": torch.randint(0, 16, (6, 5), generator=g)}
    ours, theirs = adapter.adapt(tasks.CLAPTask(Model().double())), tasks.CLAPTask(Model().double())
    assert type(ours.loss) is adapter.ClipLoss
    assert_close(training_step(ours, given)[1], training_step(theirs, given)[1])
