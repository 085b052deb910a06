"""Hugging Face's Trainer with our loss ends at the weights of the model's own loss on the whole batch, on one rank and on two."""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import Any

import pytest
import torch
from mixed_precision import errors
from torch import nn
from world import World

import megabatch
from benchmarks.peers import declare_torchvision_schemas

# Before transformers is imported, in worker processes too.
declare_torchvision_schemas()

from megabatch.adapters import transformers as adapter  # noqa: E402
from megabatch.adapters.retrieval import grouped_loss  # noqa: E402
from megabatch.adapters.transformers import ContrastiveSettings, ContrastiveTrainer  # noqa: E402

ROWS, STEPS = 8, 3
# Between the weights of two trainings in fp32 that differ in the order of sums; a wrong factor moves them by 1e-4 or more.
ROUNDING = 3e-6


def tiny_model(kind: str = "clip") -> nn.Module:
    from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**shape, "vocab_size": 50, "max_position_embeddings": 6, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    vision = {**shape, "image_size": 16, "patch_size": 8}
    if kind == "siglip":
        return SiglipModel(SiglipConfig(text_config={**text, "projection_size": 16}, vision_config=vision))
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


class OwnPair(nn.Module):
    """Two encoders that know nothing of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.queries, self.documents = nn.Embedding(50, 16), nn.EmbeddingBag(50, 16)
        self.logit_scale = nn.Parameter(torch.tensor(20.0).log())

    def forward(self, query: torch.Tensor, document: torch.Tensor) -> dict[str, torch.Tensor]:
        q, d = self.queries(query).mean(1), self.documents(document)
        return {"q": nn.functional.normalize(q, dim=1), "d": nn.functional.normalize(d, dim=1)}


class Groups(nn.Module):
    """Queries, and a positive and two hard negatives for each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.layer = nn.EmbeddingBag(50, 16), nn.Linear(16, 16)
        self.logit_scale = nn.Parameter(torch.tensor(10.0).log())

    def forward(self, query: torch.Tensor, passages: torch.Tensor, **labels: Any) -> dict[str, torch.Tensor]:
        def embed(words: torch.Tensor) -> torch.Tensor:
            return nn.functional.normalize(self.layer(self.words(words)), dim=-1)

        return {"q": embed(query), "p": embed(passages.flatten(0, 1)).unflatten(0, passages.shape[:2])}

    def own_loss(self, query: torch.Tensor, passages: torch.Tensor) -> torch.Tensor:
        """The cross-entropy of the scores of all passages, of which that with number i·G belongs to query i."""
        q, p = self(query, passages).values()
        scores = self.logit_scale.exp() * q @ p.flatten(0, 1).T
        return nn.functional.cross_entropy(scores, torch.arange(len(q)) * passages.shape[1])


def groups(count: int) -> list[dict[str, torch.Tensor]]:
    words = torch.randint(0, 50, (count, 4, 5), generator=torch.Generator().manual_seed(3))
    return [{"query": row[0], "passages": row[1:]} for row in words]


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(7)
    images = torch.randn(count, 3, 16, 16, generator=g)
    texts = torch.randint(3, 50, (count, 6), generator=g)
    texts[:, -1] = 2
    return [{"pixel_values": image, "input_ids": text} for image, text in zip(images, texts, strict=True)]


def train(
    model: nn.Module, *, rows: int = ROWS, data: Any = None, settings: ContrastiveSettings | None = None, **arguments: Any
) -> Any:
    """Train three steps in order of the data; return the weights. Without settings, with the model's own loss."""
    from transformers import Trainer, TrainingArguments

    class InOrder:
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    class Ours(InOrder, ContrastiveTrainer):
        pass

    class Theirs(InOrder, Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            own_loss = getattr(model, "own_loss", None)
            return model(**inputs, return_loss=True).loss if own_loss is None else own_loss(**inputs)

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            **arguments,
            per_device_train_batch_size=rows,
            max_steps=STEPS,
            learning_rate=1e-3,
            optim="sgd",
            lr_scheduler_type="constant",
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            max_grad_norm=0.0,
            logging_strategy="no",
        )
        data = samples(STEPS * ROWS) if data is None else data
        # Loaders of worker processes pin memory for a device that is not here.
        args.dataloader_pin_memory = False
        trainer = (
            Theirs(model, args, train_dataset=data)
            if settings is None
            else Ours(model, args, train_dataset=data, contrastive=settings)
        )
        if settings is None:
            trainer.model_accepts_loss_kwargs = False
        trainer.train()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max((a[name].double() - b[name].double()).abs().max().item() for name in b)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_three_steps_end_at_the_weights_of_the_models_own_loss(kind, chunk):
    expected = train(tiny_model(kind))
    found = train(tiny_model(kind), settings=ContrastiveSettings(chunk=chunk))
    assert largest_difference(found, expected) < ROUNDING
    assert largest_difference(found, dict(tiny_model(kind).state_dict())) > 1e-4


@pytest.mark.slow
def test_accumulation_is_a_mean_of_losses_as_in_the_trainer_and_warns():
    expected = train(tiny_model(), rows=ROWS // 2, gradient_accumulation_steps=2)
    with pytest.warns(UserWarning, match="adds no negatives"):
        found = train(tiny_model(), rows=ROWS // 2, gradient_accumulation_steps=2, settings=ContrastiveSettings())
    assert largest_difference(found, expected) < ROUNDING


@pytest.mark.slow
def test_bf16_is_no_farther_from_fp32_than_the_models_own_loss():
    exact = train(tiny_model())
    theirs = train(tiny_model(), bf16=True)
    for chunk in (None, 3):
        ours = train(tiny_model(), bf16=True, settings=ContrastiveSettings(chunk=chunk))
        assert 0 < largest_difference(ours, exact) < 1.5 * largest_difference(theirs, exact)


@pytest.mark.slow
def test_evaluation_returns_the_loss_of_the_model():
    from transformers import TrainingArguments

    model, data = tiny_model(), samples(ROWS)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, per_device_eval_batch_size=ROWS, report_to=[], use_cpu=True, disable_tqdm=True)
        args.dataloader_pin_memory = False
        found = ContrastiveTrainer(model, args, eval_dataset=data, contrastive=ContrastiveSettings(chunk=3)).evaluate()
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    assert found["eval_loss"] == pytest.approx(model(**batch, return_loss=True).loss.item(), rel=1e-5)


def pairs(count: int) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(3)
    words = torch.randint(0, 50, (count, 2, 5), generator=g)
    return [{"query": q, "document": d} for q, d in words]


@pytest.mark.slow
def test_any_pair_of_encoders_trains_by_the_names_of_its_outputs():
    settings = ContrastiveSettings(outputs=("q", "d"))
    whole = train(OwnPair(), data=pairs(STEPS * ROWS), settings=settings)
    assert largest_difference(whole, train(OwnPair(), data=pairs(STEPS * ROWS), settings=settings._replace(chunk=2))) < ROUNDING
    assert largest_difference(whole, dict(OwnPair().state_dict())) > 1e-4
    with pytest.raises(ValueError, match="image_embeds"):
        train(OwnPair(), data=pairs(ROWS), settings=ContrastiveSettings())


def test_equal_ids_are_no_negatives():
    model, batch = OwnPair(), pairs(ROWS)
    inputs = {name: torch.stack([row[name] for row in batch]) for name in batch[0]}

    def loss(**more: Any) -> float:
        from transformers import TrainingArguments

        with tempfile.TemporaryDirectory() as folder:
            trainer = ContrastiveTrainer(
                model, TrainingArguments(folder, report_to=[], use_cpu=True), contrastive=ContrastiveSettings(outputs=("q", "d"))
            )
        return trainer.compute_loss(model, {**inputs, **more}).item()

    assert loss(ids=torch.zeros(ROWS, dtype=torch.long)) == pytest.approx(0, abs=1e-6) != pytest.approx(loss())


def test_settings_reach_the_encoder_and_the_loss():
    from transformers import TrainingArguments

    model, batch = OwnPair(), pairs(ROWS)
    inputs = {name: torch.stack([row[name] for row in batch]) for name in batch[0]}
    settings = ContrastiveSettings(outputs=("q", "d"), tokens=40, keep=2, options={"label_smoothing": 0.1})
    with tempfile.TemporaryDirectory() as folder:
        trainer = ContrastiveTrainer(model, TrainingArguments(folder, report_to=[], use_cpu=True), contrastive=settings)
    encoder = trainer._encoder(model)
    assert (encoder.unit, encoder.chunk, encoder._keep.requested) == ("tokens", 40, 2)
    assert trainer._encoder(model) is encoder is not trainer._encoder(OwnPair())
    trainer.contrastive = settings._replace(tokens=None)
    loss, outputs = trainer.compute_loss(model, {**inputs, "return_loss": True}, return_outputs=True)
    assert all(torch.equal(outputs[name], rows) for name, rows in model(**inputs).items())
    expected = megabatch.reference.clip_loss(outputs["q"], outputs["d"], model.logit_scale.exp(), label_smoothing=0.1)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_model_with_a_bias_may_train_with_the_softmax_loss():
    from transformers import TrainingArguments

    model, data = tiny_model("siglip"), samples(ROWS)
    model.logit_scale.data += 2
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, report_to=[], use_cpu=True)
        settings = ContrastiveSettings(loss=megabatch.clip_loss)
        loss, outputs = ContrastiveTrainer(model, args, contrastive=settings).compute_loss(model, batch, return_outputs=True)
    loss.backward()
    expected = megabatch.reference.clip_loss(outputs["image_embeds"], outputs["text_embeds"], model.logit_scale.exp())
    # SiglipModel's bias has the shape (1,).
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert model.logit_bias.grad == 0


def test_a_loss_of_your_own_gets_scale_and_bias_as_numbers():
    from transformers import TrainingArguments

    model, data = tiny_model("siglip"), samples(ROWS)
    assert model.logit_scale.shape == model.logit_bias.shape == (1,)
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}

    def own(x: Any, y: Any, scale: Any, bias: Any, *, group: Any) -> Any:
        assert scale.shape == bias.shape == ()
        return megabatch.siglip_loss(x, y, scale, bias, group=group)

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, report_to=[], use_cpu=True)
        found = ContrastiveTrainer(model, args, contrastive=ContrastiveSettings(loss=own)).compute_loss(model, batch)
    assert found.item() == pytest.approx(model(**batch, return_loss=True).loss.item(), rel=1e-5)


def test_data_parallel_is_refused():
    with pytest.raises(ValueError, match="torchrun"):
        adapter.unwrapped(nn.DataParallel(tiny_model()))


def test_the_model_inside_torch_compile_is_found():
    model = OwnPair()
    assert adapter.unwrapped(torch.compile(model, backend="eager")) is model


def test_a_model_without_a_scale_is_explained():
    model = OwnPair()
    del model.logit_scale
    with pytest.raises(ValueError, match="logit_scale"):
        train(model, data=pairs(ROWS), settings=ContrastiveSettings(outputs=("q", "d")))


def on_two_ranks(rank: int, size: int) -> dict[str, Any]:
    found = {}
    for kind in ("clip", "siglip"):
        for chunk in (None, 3):
            found[kind, chunk] = train(tiny_model(kind), rows=ROWS // 2, settings=ContrastiveSettings(chunk=chunk))
    found["unused"] = train(tiny_model(), rows=ROWS // 2, settings=ContrastiveSettings(chunk=3), ddp_find_unused_parameters=False)
    found["evaluation"] = evaluation(samples(ROWS)[rank :: size + 1])
    return found


def every_case(rank: int, size: int) -> tuple[dict[Any, Any], dict[Any, Any]]:
    start(rank, size)
    return on_two_ranks(rank, size), accumulated_and_mixed_on_two_ranks()


@pytest.fixture(scope="module")
def two_ranks() -> Any:
    world = World()
    yield world.run(2, every_case)
    world.close()


def start(rank: int, size: int) -> None:
    """Make the Trainer take this process for one of torchrun's."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29511",
    }
    warnings.simplefilter("ignore")


def evaluation(rows: list[dict[str, torch.Tensor]]) -> tuple[float, float]:
    """Return the loss of a batch in evaluation, and that of the model itself."""
    from transformers import TrainingArguments

    model, inputs = tiny_model().eval(), {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    with tempfile.TemporaryDirectory() as folder:
        trainer = ContrastiveTrainer(model, TrainingArguments(folder, report_to=[], use_cpu=True))
    return trainer.compute_loss(model, inputs).item(), model(**inputs, return_loss=True).loss.item()


@pytest.mark.slow
def test_two_ranks_end_at_the_weights_of_one_with_the_whole_batch(two_ranks):
    """Rank r takes batches r, r + 2, …: the same rows in another order, which does not matter to the loss."""
    expected = {kind: train(tiny_model(kind)) for kind in ("clip", "siglip")}
    for found, _ in two_ranks:
        # Each rank has its own negatives in evaluation, where ranks may have different numbers of batches.
        ours, theirs = found["evaluation"]
        assert ours == pytest.approx(theirs, rel=1e-5)
        for case, weights in ((case, value) for case, value in found.items() if case != "evaluation"):
            assert largest_difference(weights, expected["siglip" if case[0] == "siglip" else "clip"]) < ROUNDING, case


IN_GROUPS = ContrastiveSettings(outputs=("q", "p"), loss=grouped_loss)


def accumulated_and_mixed_on_two_ranks() -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for chunk in (None, 3):
        common: dict[str, Any] = {"rows": ROWS // 2, "settings": ContrastiveSettings(chunk=chunk)}
        for kind in ("clip", "siglip"):
            found["bf16", kind, chunk] = train(tiny_model(kind), **common, bf16=True)
        found["accumulation", "clip", chunk] = train(
            tiny_model(), **common, data=samples(2 * STEPS * ROWS), gradient_accumulation_steps=2
        )
        in_groups = {"rows": ROWS // 2, "settings": IN_GROUPS._replace(chunk=chunk)}
        found["hard negatives", "groups", chunk] = train(Groups(), **in_groups, data=groups(STEPS * ROWS))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 3])
def test_hard_negatives_end_at_the_weights_of_the_formula(chunk):
    found, expected = (
        train(Groups(), data=groups(STEPS * ROWS), settings=settings) for settings in (IN_GROUPS._replace(chunk=chunk), None)
    )
    assert largest_difference(found, expected) < ROUNDING
    assert largest_difference(found, dict(Groups().state_dict())) > 1e-3


@pytest.mark.slow
def test_two_ranks_with_accumulation_bf16_or_hard_negatives_end_at_the_weights_of_one_with_the_whole_batch(two_ranks):
    expected = {
        "accumulation": train(tiny_model(), data=samples(2 * STEPS * ROWS), gradient_accumulation_steps=2),
        "hard negatives": train(Groups(), data=groups(STEPS * ROWS)),
    }
    kinds = ("clip", "siglip")
    exact, rounded = ({kind: train(tiny_model(kind), bf16=bf16) for kind in kinds} for bf16 in (False, True))
    for _, found in two_ranks:
        for (case, kind, chunk), weights in found.items():
            first = two_ranks[0][1][case, kind, chunk]
            assert all(torch.equal(value, first[name]) for name, value in weights.items()), "ranks agree"
            if case in expected:
                assert largest_difference(weights, expected[case]) < ROUNDING, (case, chunk)
            else:
                error = errors(weights, rounded[kind], exact[kind], dict(tiny_model(kind).state_dict()))
                assert error.agree(), (kind, chunk, error)


def audited(**options: Any) -> adapter.AuditCallback:
    """Train three steps with an audit of arguments that have a finding: no warm-up."""
    from transformers import TrainingArguments

    callback = adapter.AuditCallback(objective="clip", gather="exact", **options)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, per_device_train_batch_size=ROWS, max_steps=2000, report_to=[], use_cpu=True, fp16=False)
        trainer = ContrastiveTrainer(tiny_model(), args, train_dataset=samples(ROWS), callbacks=[callback])
        callback.on_train_begin(
            args, trainer.state, trainer.control, model=trainer.model, train_dataloader=trainer.get_train_dataloader()
        )
    return callback


def test_the_audit_warns_or_stops_before_the_first_step():
    with pytest.warns(UserWarning, match="no-warmup"):
        callback = audited(fail_on=None)
    finding = next(finding for finding in callback.findings if finding.code == "no-warmup")
    with pytest.raises(ValueError, match="no-warmup"):
        audited(fail_on=finding.severity)


def test_the_audit_is_told_what_the_arguments_do_not_state(monkeypatch):
    from transformers import TrainingArguments

    calls: list[Any] = []

    def record(reading: Any, model: Any, *, data: Any, ranks: Any) -> Any:
        calls.append((reading.training.objective, reading.training.gather, type(model).__name__, data, ranks))
        return audit(reading, model, data=data, ranks=ranks)

    audit = adapter.audit
    monkeypatch.setattr(adapter, "audit", record)
    monkeypatch.setattr(TrainingArguments, "world_size", 4)
    # Only the first process warns: this would be an error.
    monkeypatch.setattr(TrainingArguments, "process_index", 1)
    assert audited(fail_on=None).findings
    assert calls == [("clip", "exact", "CLIPModel", ROWS, 4)]


def on_sharded_ranks(rank: int, size: int) -> dict[str, Any]:
    """Return the gradients of a model sharded by fully_shard, whose scalars have one dimension, from compute_loss."""
    from torch.distributed.fsdp import fully_shard
    from transformers import TrainingArguments

    warnings.simplefilter("ignore")
    model, data = tiny_model(), samples(ROWS)
    model.logit_scale = nn.Parameter(model.logit_scale.detach().reshape(1))
    for block in (*model.text_model.encoder.layers, *model.vision_model.encoder.layers):
        fully_shard(block)
    fully_shard(model)
    model.train()
    rows = data[rank::size]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, report_to=[], use_cpu=True)
        trainer = ContrastiveTrainer(tiny_model(), args, contrastive=ContrastiveSettings(chunk=2))
        trainer.compute_loss(model, {name: torch.stack([row[name] for row in rows]) for name in rows[0]}).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.slow
def test_sharded_ranks_have_the_gradients_of_the_whole_batch():
    world = World()
    results = world.run(2, on_sharded_ranks)
    world.close()
    model, data = tiny_model(), samples(ROWS)
    model(**{name: torch.stack([row[name] for row in data]) for name in data[0]}, return_loss=True).loss.backward()
    for found in results:
        for name, parameter in model.named_parameters():
            assert torch.allclose(found[name].reshape(parameter.shape), parameter.grad, rtol=1e-4, atol=1e-6), name
