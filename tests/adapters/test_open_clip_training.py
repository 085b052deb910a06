"""OpenCLIP's own training loop ends at the same weights with our losses as with its own, in one process and in two."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from mixed_precision import Errors, errors
from open_clip_training import CONTEXT, arguments, batches, open_clip, tiny_clip, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World

import megabatch
from megabatch.adapters import open_clip as adapter
from megabatch.towers.patches import PatchConv2d

KINDS: dict[str, dict[str, Any]] = {
    "clip": {},
    "siglip": {"siglip": True},
    "coca": {"model": "coca_tiny"},
    "distill": {"distill": True},
}
ROWS, STEPS = 8, 3
# Between the weights of two trainings in fp32 that differ in the order of sums; a wrong factor moves them by 1e-4 or more.
ROUNDING = 3e-6


def model_for(kind: str) -> nn.Module:
    return tiny_clip(siglip=kind == "siglip", coca=kind == "coca")


def trained(kind: str, model: nn.Module, loss: nn.Module, data: Any, **changes: Any) -> dict[str, torch.Tensor]:
    """Return the weights after training in OpenCLIP's loop; a teacher has other weights."""
    teacher = None
    if kind == "distill":
        teacher = tiny_clip()
        torch.nn.init.normal_(teacher.visual.proj)
    return train(model, loss, data, teacher, distill=kind == "distill", **changes)


def losses(kind: str, **changes: Any) -> tuple[nn.Module, nn.Module]:
    """Return the loss of our create_loss and of OpenCLIP's."""
    args = arguments(**KINDS[kind], **changes)
    theirs, ours = open_clip().create_loss(args), adapter.create_loss(args)
    assert type(ours).__module__.startswith("megabatch") and type(ours).__name__ == type(theirs).__name__
    return ours, theirs


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max((a[name].double() - b[name].double()).abs().max().item() for name in b)


@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_end_at_the_weights_of_openclip(kind):
    ours, theirs = (trained(kind, model_for(kind), loss, batches(STEPS, ROWS)) for loss in losses(kind))
    assert largest_difference(ours, theirs) < ROUNDING
    assert largest_difference(ours, dict(model_for(kind).state_dict())) > 1e-3


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_in_bf16_are_no_farther_from_fp32_than_those_of_openclip(kind):
    exact = trained(kind, model_for(kind), losses(kind)[1], batches(STEPS, ROWS))
    ours, theirs = (trained(kind, model_for(kind), loss, batches(STEPS, ROWS), precision="amp_bf16") for loss in losses(kind))
    assert largest_difference(ours, exact) < 1.5 * largest_difference(theirs, exact)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_accumulation_gives_the_weights_of_the_whole_batch(kind):
    """Also for logit_scale, whose gradient OpenCLIP's loop makes accum_freq times too large."""
    data = batches(2 * STEPS, ROWS)
    whole = [tuple(torch.cat(parts) for parts in zip(*data[i : i + 2], strict=True)) for i in range(0, len(data), 2)]
    expected = trained(kind, model_for(kind), losses(kind)[1], whole)
    ours, theirs = (trained(kind, model_for(kind), loss, data, accum_freq=2) for loss in losses(kind, accum_freq=2))
    assert largest_difference(ours, expected) < ROUNDING
    assert largest_difference(theirs, expected) > 1e-4
    chunks = adapter.encode_in_chunks(model_for(kind), ROWS)
    assert largest_difference(trained(kind, chunks, losses(kind)[0], whole), expected) < ROUNDING
    other = adapter.encode_in_chunks(megabatch.linear_patches(model_for(kind)), 3, text_chunk=5, forward_chunk=10)
    assert (other.encode_image.chunk, other.encode_text.chunk) == (3, 5)
    assert largest_difference(trained(kind, other, losses(kind)[0], whole), expected) < ROUNDING


def test_chunks_replay_random_parts():
    """Patch dropout draws as in one pass over the batch with the same chunks; without replay the gradients would be of other "
    "patches."""

    def gradients(keep: int) -> list[torch.Tensor]:
        model = adapter.encode_in_chunks(tiny_clip(patch_dropout=0.5), 4, keep=keep)
        model.train()
        torch.manual_seed(1)
        adapter.ClipLoss()(**model(*batches(1, ROWS)[0])).backward()
        return [p.grad for p in model.parameters()]

    for found, true in zip(gradients(keep=0), gradients(keep=2), strict=True):
        assert torch.allclose(found, true, rtol=1e-5, atol=1e-7)


def test_models_that_cannot_run_in_chunks_are_refused():
    with pytest.raises(ValueError, match="CoCa"):
        adapter.encode_in_chunks(tiny_clip(coca=True), 4)


def on_two_ranks(rank: int, size: int) -> dict[str, float]:
    """Return the largest difference of weights for each case, and between ranks."""
    differences = {}
    world = {"rank": rank, "world_size": size, "distributed": True}
    for kind in KINDS:
        data = batches(STEPS, ROWS, rank)
        results = [trained(kind, DistributedDataParallel(model_for(kind)), loss, data, **world) for loss in losses(kind, **world)]
        differences[kind] = largest_difference(*results)
        if kind in ("coca", "distill"):
            continue
        chunks = DistributedDataParallel(adapter.encode_in_chunks(model_for(kind), 3))
        differences[f"{kind} in chunks"] = largest_difference(
            trained(kind, chunks, losses(kind, **world)[0], data, **world), results[1]
        )
        halves = [tuple(part[i : i + ROWS // 2] for part in batch) for batch in data for i in (0, ROWS // 2)]
        ours = losses(kind, **world, accum_freq=2)[0]
        accumulated = trained(kind, DistributedDataParallel(model_for(kind)), ours, halves, **world, accum_freq=2)
        differences[f"{kind} accumulated"] = largest_difference(accumulated, results[1])
    return differences


def in_bf16_on_two_ranks(rank: int, size: int) -> dict[str, Errors]:
    world, data = {"rank": rank, "world_size": size, "distributed": True}, batches(STEPS, ROWS, rank)
    found = {}
    for kind in KINDS:
        (ours, theirs), start = losses(kind, **world), dict(model_for(kind).state_dict())

        def weights(loss: nn.Module, precision: str, chunk: int | None = None, kind: str = kind) -> dict[str, torch.Tensor]:
            model = model_for(kind) if chunk is None else adapter.encode_in_chunks(model_for(kind), chunk)
            # A small rate: each step's rounding errors are then not multiplied by the next.
            return trained(kind, DistributedDataParallel(model), loss, data, **world, precision=precision, rate=1e-4)

        exact, rounded = (weights(theirs, precision) for precision in ("fp32", "amp_bf16"))
        found[kind] = errors(weights(ours, "amp_bf16"), rounded, exact, start)
        if kind in ("clip", "siglip"):
            found[f"{kind} in chunks"] = errors(weights(ours, "amp_bf16", 3), rounded, exact, start)
    return found


def in_both_precisions(rank: int, size: int) -> tuple[dict[str, float], dict[str, Errors]]:
    return on_two_ranks(rank, size), in_bf16_on_two_ranks(rank, size)


@pytest.fixture(scope="module")
def two_ranks() -> Any:
    # A separate World, and one task: torch.distributed.nn, which OpenCLIP uses, keeps the first process group that it sees.
    world = World()
    yield world.run(2, in_both_precisions)
    world.close()


@pytest.mark.slow
def test_two_processes_end_at_the_weights_of_openclip(two_ranks):
    for differences, _ in two_ranks:
        assert len(differences) == 8
        assert max(differences.values()) < ROUNDING, differences


@pytest.mark.slow
def test_two_processes_in_bf16_end_at_the_weights_of_openclip(two_ranks):
    for _, found in two_ranks:
        assert len(found) == 6
        assert all(case.agree() for case in found.values()), found


class Task(nn.Module):
    """What OpenCLIP 4.x's CLIPTask does with a model and a loss, for where that version is not installed."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.trainable_module, self.loss = model, loss

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        found = self.loss(**self.trainable_module(image=image, text=text), output_dict=True)
        return sum(value for name, value in found.items() if name.endswith("_loss"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_an_adapted_task_has_the_gradients_of_openclip(kind):
    tasks = [Task(model_for(kind), losses(kind)[1]) for _ in range(2)]
    assert adapter.adapt(tasks[0], chunk=3, accum_freq=1) is tasks[0]
    for task in tasks:
        task(*batches(1, ROWS)[0]).backward()
    encoders = tasks[0].trainable_module.encode_image, tasks[0].trainable_module.encode_text
    assert [encode.chunks for encode in encoders] == [3, 3]
    assert adapter.adapt(tasks[1], accum_freq=4).loss.accum_freq == 4
    kept = adapter.adapt(Task(model_for(kind), losses(kind)[1]), chunk=3, keep=2).trainable_module
    assert [encode._keep.requested for encode in (kept.encode_image, kept.encode_text)] == [2, 2]
    for found, true in zip(tasks[0].parameters(), tasks[1].parameters(), strict=True):
        assert torch.allclose(found.grad, true.grad, rtol=1e-4, atol=1e-6)


def test_a_converted_coca_loss_has_its_padding_and_weights():
    theirs = open_clip().CoCaLoss(caption_loss_weight=2.0, clip_loss_weight=0.0, pad_id=7)
    ours, g = adapter.convert(theirs), torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 4, 16, generator=g, requires_grad=True).unbind()
    logits, labels = torch.randn(4, CONTEXT, 10, generator=g), torch.arange(4 * CONTEXT).view(4, CONTEXT) % 10
    expected, found = (loss(x, y, logits, labels, torch.tensor(10.0)) for loss in (theirs, ours))
    assert torch.allclose(torch.stack(found), torch.stack([value.float() for value in expected]))
    # Without a weight, the matrix is not computed.
    assert not found[0].requires_grad


def test_losses_without_a_counterpart_stay_openclips():
    class GenLipLoss(nn.Module):
        __module__ = "open_clip.loss"

    theirs = GenLipLoss()
    assert adapter.convert(theirs) is theirs
    own = nn.CrossEntropyLoss()
    assert adapter.convert(own) is own
    horovod = open_clip().ClipLoss()
    horovod.use_horovod = True
    assert adapter.convert(horovod) is horovod
    with pytest.raises(ValueError, match="use_horovod"):
        adapter.ClipLoss(use_horovod=True)


def test_a_scale_with_one_dimension_is_one_number():
    """Under --fsdp, OpenCLIP reshapes logit_scale to one dimension."""
    model = tiny_clip(scale_shape=True)
    output = model(*batches(1, ROWS)[0])
    assert output["logit_scale"].shape == (1,)
    assert torch.allclose(adapter.ClipLoss()(**output), open_clip().ClipLoss()(**output))


@pytest.fixture
def training_script(monkeypatch, tmp_path):
    """OpenCLIP's training script, restored afterwards, and the arguments for eight pairs in a CSV file."""
    open_clip()
    from open_clip_train import main as script
    from PIL import Image

    for name in ("parse_args", "create_model_and_transforms", "create_loss", "random_seed"):
        monkeypatch.setattr(script, name, getattr(script, name))
    # It would give every logger of this process a level and handlers.
    monkeypatch.setattr(script, "setup_logging", lambda *args, **options: None)
    g = torch.Generator().manual_seed(0)
    rows = []
    for i in range(8):
        Image.fromarray(torch.randint(0, 255, (16, 16, 3), dtype=torch.uint8, generator=g).numpy()).save(tmp_path / f"{i}.png")
        rows.append(f"{tmp_path}/{i}.png\tnumber {i}")
    (tmp_path / "pairs.csv").write_text("\n".join(["filepath\ttitle", *rows]))
    vision = {"image_size": 16, "patch_size": 8, "width": 16, "layers": 1, "head_width": 8}
    text = {"context_length": CONTEXT, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    tiny = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}
    tokens = {"output_tokens": True, "attentional_pool": True, "attn_pooler_heads": 2}
    coca = {"embed_dim": 16, "vision_cfg": vision | tokens, "text_cfg": text | {"embed_cls": True, "output_tokens": True}}
    coca |= {"multimodal_cfg": text, "custom_text": True}
    for name, config in (("tiny-test", tiny), ("coca_tiny-test", coca)):
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        open_clip().add_model_config(tmp_path / f"{name}.json")
    words = f"--model tiny-test --train-data {tmp_path}/pairs.csv --dataset-type csv --epochs 2 --workers 0 --device cpu --warmup 1"
    words += f" --lr 0.001 --eps 0.001 --wd 0 --logs {tmp_path}/logs --aug-cfg scale=(1,1) --precision fp32"
    return script, tmp_path, words.split()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.pin_memory. argument")
def test_the_training_script_takes_accumulation_as_chunks(training_script):
    """--batch-size 2 --accum-freq 4 of our command ends at the weights of --batch-size 8 of OpenCLIP's."""
    script, folder, words = training_script
    script.main([*words, "--name", "theirs", "--batch-size", "8"])
    adapter.main([*words, "--name", "ours", "--batch-size", "2", "--accum-freq", "4"])
    assert largest_difference(saved_weights(folder, "ours"), saved_weights(folder, "theirs")) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("model, expected", [("tiny-test", (8, 1)), ("coca_tiny-test", (2, 4))])
def test_the_accumulation_of_coca_stays_openclips(training_script, monkeypatch, model, expected):
    script, _, words = training_script
    parsed = []
    monkeypatch.setattr(script, "main", lambda rest: parsed.append(script.parse_args(rest)))
    adapter.main([*words, "--model", model, "--batch-size", "2", "--accum-freq", "4"])
    assert (parsed[0].batch_size, parsed[0].accum_freq) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, expected",
    [
        ("--batch-size 8", (8, 1, None, None, False)),
        ("--batch-size 8 --chunk 3", (8, 1, 3, 3, False)),
        ("--batch-size 8 --chunk 3 --text-chunk 5", (8, 1, 3, 5, False)),
        ("--batch-size 8 --linear-patches", (8, 1, None, None, True)),
        ("--batch-size 2 --accum-freq 4", (8, 1, 2, 2, False)),
        ("--batch-size 2 --accum-freq 4 --chunk 3", (8, 1, 3, 3, False)),
    ],
)
def test_the_training_script_has_our_loss_and_the_chunk(training_script, monkeypatch, words, expected):
    script, _, shared = training_script
    found = []

    def main(rest: list[str]) -> None:
        args = script.parse_args(rest)
        args.distill, args.rank, args.world_size = False, 0, 1
        model, *_ = script.create_model_and_transforms(args.model)
        chunks = [getattr(encode, "chunk", None) for encode in (model.encode_image, model.encode_text)]
        patches = isinstance(model.visual.conv1, PatchConv2d)
        found.extend([(args.batch_size, args.accum_freq, *chunks, patches), type(script.create_loss(args))])

    monkeypatch.setattr(script, "main", main)
    adapter.main([*shared, *words.split()])
    assert found == [expected, adapter.ClipLoss]


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--text-chunk", "--forward-chunk"])
def test_other_chunks_alone_are_refused(training_script, monkeypatch, option):
    script, _, words = training_script
    monkeypatch.setattr(script, "main", lambda rest: script.create_model_and_transforms("tiny-test"))
    with pytest.raises(ValueError, match="need --chunk"):
        adapter.main([*words, "--batch-size", "8", option, "5"])


def saved_weights(folder: Any, name: str) -> dict[str, torch.Tensor]:
    return torch.load(folder / "logs" / name / "checkpoints" / "epoch_2.pt", weights_only=False)["state_dict"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.pin_memory. argument")
@pytest.mark.parametrize(
    "words, accumulated",
    [
        ("", ""),
        ("--siglip", ""),
        ("--model coca_tiny-test", ""),
        ("--lock-image --lock-image-unlocked-groups 1 --batch-size 8", "--batch-size 4 --accum-freq 2"),
    ],
)
def test_the_training_script_ends_at_the_weights_of_openclip(training_script, monkeypatch, words, accumulated):
    script, folder, shared = training_script
    create = script.create_model_and_transforms

    def create_with_values(*names: Any, **options: Any) -> Any:
        # OpenCLIP leaves some parameters of CoCa as the memory was.
        model, *transforms = create(*names, **options)
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.ndim and "coca" in words:
                nn.init.normal_(parameter, std=0.1)
        return model, *transforms

    monkeypatch.setattr(script, "create_model_and_transforms", create_with_values)
    shared = [*shared, "--batch-size", "4", *words.split()]
    script.main([*shared, "--name", "theirs"])
    adapter.main([*shared, *accumulated.split(), "--name", "ours"])
    assert largest_difference(saved_weights(folder, "ours"), saved_weights(folder, "theirs")) < ROUNDING


@pytest.mark.slow
def test_the_benchmark_compares_equal_steps(training_script, tmp_path, capsys):
    from benchmarks import open_clip_step

    words = "--device cpu --model tiny-test --rows 4 --accum 2 --steps 1 --chunk 4 2 3,2+linear 2+forward2 OpenCLIP+linear"
    open_clip_step.main([*words.split(), "--out", str(tmp_path / "rows.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    theirs, whole = (None, None, False, 1), (4, None, False, 1)
    larger = [theirs, whole, (2, None, False, 1), (3, 2, True, 1), (2, None, False, 2), (None, None, True, 1)]
    cases = {("clip", 4): [theirs, whole], ("siglip", 4): [theirs, whole], ("clip", 8): larger}
    fields = ("loss", "pairs", "chunk", "text_chunk", "linear_patches", "forward")
    assert [tuple(row[field] for field in fields) for row in rows] == [
        (*case, *setting) for case, settings in cases.items() for setting in settings
    ]
    printed = capsys.readouterr().out
    assert printed.count("megabatch**") == 6 and printed.count("| 3 images, 2 texts |") == 1
    with pytest.raises(SystemExit):
        open_clip_step.main(["--chunk", "3,linear"])
