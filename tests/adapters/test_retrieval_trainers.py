"""Retrieval trainers with the overrides of docs/trainers.md end at the weights of their own losses, on one process and on two.

Each test needs its package, which the tests do not install: FlagEmbedding 1.4; ms-swift 4.6, though it asks for other versions of
some libraries; Tevatron and GradCache from their repositories, since the package indexes have Tevatron of 2022 only.
"""

from __future__ import annotations

import functools
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from offline_models import bert, texts, tokenizer

from megabatch.adapters import retrieval

pytestmark = pytest.mark.slow

STEPS, QUERIES, GROUP, RATE = 3, 6, 3, 0.05


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in b)


@contextmanager
def started_by_torchrun(rank: int, size: int) -> Iterator[None]:
    """Context in which accelerate takes this worker for a process of torchrun; the process group exists already."""
    from accelerate.state import AcceleratorState, PartialState

    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": 29519}
    os.environ |= {name: str(value) for name, value in values.items()}
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        for name in values:
            del os.environ[name]


def settings(folder: str, rate: float, **more: Any) -> dict[str, Any]:
    """Return training arguments. Not Adam, which would hide a gradient that is a multiple of the true one."""
    return {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": QUERIES,
        "learning_rate": rate,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        **more,
    }


FLAG_CASES: dict[str, dict[str, Any]] = {
    "normalised": {"normalize_embeddings": True, "temperature": 0.1},
    "inner products": {"temperature": 2.0},
    "sub-batches": {"normalize_embeddings": True, "temperature": 0.1, "sub_batch_size": 4},
    "matryoshka": {"normalize_embeddings": True, "temperature": 0.1, "use_mrl": True, "mrl_dims": [16, 8]},
    "accumulation": {"normalize_embeddings": True, "temperature": 0.1},
    "bf16": {"normalize_embeddings": True, "temperature": 0.1},
    "teacher": {"normalize_embeddings": True, "temperature": 0.1},
}
FLAG_ARGUMENTS = {"accumulation": {"gradient_accumulation_steps": 2}, "bf16": {"bf16": True}}


def flag_embedding(ours: bool, case: str, rate: float = RATE, **changed: Any) -> dict[str, torch.Tensor]:
    """Return the weights after some steps of FlagEmbedding's trainer, which has a model of its class or with our mixin."""
    from FlagEmbedding.abc.finetune.embedder import AbsEmbedderTrainingArguments
    from FlagEmbedding.abc.finetune.embedder.AbsDataset import AbsEmbedderCollator
    from FlagEmbedding.finetune.embedder.encoder_only.base.modeling import BiEncoderOnlyEmbedderModel
    from FlagEmbedding.finetune.embedder.encoder_only.base.trainer import EncoderOnlyEmbedderTrainer

    class OurModel(retrieval.InBatchLossMixin, BiEncoderOnlyEmbedderModel):
        pass

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    options, arguments = FLAG_CASES[case], {**FLAG_ARGUMENTS.get(case, {}), **changed}
    rows = STEPS * QUERIES * ranks * arguments.get("gradient_accumulation_steps", 1)
    scores = [[1.0, 0.5, -0.5]] * rows if case == "teacher" else [None] * rows
    passages = texts(rows * GROUP, seed=1)
    data = [(text, passages[i * GROUP : (i + 1) * GROUP], scores[i]) for i, text in enumerate(texts(rows))]
    words = tokenizer()
    model = (OurModel if ours else BiEncoderOnlyEmbedderModel)(
        bert(), words, negatives_cross_device=ranks > 1, sentence_pooling_method="mean", **options
    )
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = EncoderOnlyEmbedderTrainer(
            model=model,
            args=AbsEmbedderTrainingArguments(**settings(folder, rate, **arguments)),
            train_dataset=data,
            data_collator=AbsEmbedderCollator(words, sub_batch_size=options.get("sub_batch_size", -1)),
            processing_class=words,
        )
        trainer.train()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("case", FLAG_CASES)
def test_flag_embedding_ends_at_its_own_weights(case):
    pytest.importorskip("FlagEmbedding")
    ours, theirs = (flag_embedding(kind, case) for kind in (True, False))
    check(case, ours, theirs, lambda: flag_embedding(False, case, bf16=False))


def check(case: str, ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], exact: Any) -> None:
    if case == "bf16":
        # The largest of thousands of rounding errors scatters by less than a factor of two.
        reference = exact()
        assert 0 < largest_difference(ours, reference) < 2 * largest_difference(theirs, reference)
        return
    assert largest_difference(ours, theirs) < 1e-6
    start = {f"model.{name}": value for name, value in bert().state_dict().items()}
    assert largest_difference(ours, start) > 1e-3


def flag_embedding_on_two_ranks(rank: int, size: int, case: str) -> list[dict[str, torch.Tensor]]:
    with started_by_torchrun(rank, size):
        # FlagEmbedding's gradient is that of the mean, divided by the number of ranks; with a teacher, the loss is theirs in both.
        rate = RATE if case == "teacher" else RATE / size
        results = [flag_embedding(True, case, rate), flag_embedding(False, case)]
        return [*results, flag_embedding(False, case, bf16=False)] if case == "bf16" else results


@pytest.mark.parametrize("case", FLAG_CASES)
def test_flag_embedding_on_two_processes_ends_at_its_own_weights(world, case):
    pytest.importorskip("FlagEmbedding")
    results = world.run(2, flag_embedding_on_two_ranks, case)
    for ours, theirs, *exact in results:
        check(case, ours, theirs, lambda exact=exact: exact[0])
        assert largest_difference(ours, results[0][0]) == 0.0, "ranks agree"


# Numbers of negatives of successive queries, and training arguments.
SWIFT_CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "pairs": ((0,), {}),
    "hard negatives": ((2,), {}),
    "unequal numbers of negatives": ((1, 3, 2), {}),
    "accumulation": ((2,), {"gradient_accumulation_steps": 2}),
    "matryoshka": ((1,), {"mrl_dims": {16: 1.0, 8: 0.5}}),
    "bf16": ((2,), {"bf16": True}),
}


def tiny_decoder(folder: str) -> str:
    """Save a decoder of 5,000 weights; ms-swift makes an encoder of it. Before a process group exists: then only one rank would."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64}
    words = tokenizer()
    words.eos_token, words.bos_token = "[SEP]", "[CLS]"
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(words), tie_word_embeddings=True, **shape, **heads)).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def ms_swift(ours: bool, saved: str, case: str, **changed: Any) -> dict[str, torch.Tensor]:
    """Return the weights after some steps of ms-swift's trainer with its loss, or with ours in its table."""
    from swift.loss import loss_map
    from swift.model import get_model_processor
    from swift.template import get_template
    from swift.trainers import EmbeddingTrainer, TrainingArguments

    counts, arguments = SWIFT_CASES[case]
    arguments = {"gradient_accumulation_steps": 1, **arguments, **changed}
    rows = STEPS * QUERIES * arguments["gradient_accumulation_steps"] * int(os.environ.get("WORLD_SIZE", "1"))
    columns = [texts(rows, seed=seed, longest=8) for seed in range(2 + max(counts))]
    model, processor = get_model_processor(
        saved, model_type="qwen3_emb", task_type="embedding", torch_dtype=torch.float32, use_hf=True
    )
    template = get_template(processor, max_length=64)
    template.set_mode("train")
    template.task_type = "embedding"

    class Groups(torch.utils.data.Dataset):
        # Encoded at each access: the collator changes what it gets.
        def __len__(self) -> int:
            return rows

        def __getitem__(self, row: int) -> Any:
            anchor, *passages = ([{"role": "user", "content": column[row]}] for column in columns)
            group = {"messages": anchor, "positive_messages": passages[:1]}
            negatives = passages[1 : 1 + counts[row % len(counts)]]
            return template.encode(group | ({"negative_messages": negatives} if negatives else {}))

    theirs = loss_map["infonce"]
    loss_map["infonce"] = retrieval.InfonceLoss if ours else theirs
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = settings(folder, RATE, loss_type="infonce", check_model=False, dataloader_num_workers=0, **arguments)
            args = TrainingArguments(**options)
            EmbeddingTrainer(model=model, args=args, template=template, train_dataset=Groups()).train()
    finally:
        loss_map["infonce"] = theirs
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> str:
    return tiny_decoder(str(tmp_path_factory.mktemp("decoder")))


@pytest.fixture
def swift() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("swift.trainers", reason="needs ms-swift")


def check_swift(case: str, ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], exact: Any) -> None:
    if case == "bf16":
        reference = exact()
        assert 0 < largest_difference(ours, reference) < 2 * largest_difference(theirs, reference)
    else:
        assert largest_difference(ours, theirs) < 1e-6


@pytest.mark.parametrize("case", SWIFT_CASES)
def test_ms_swift_ends_at_its_own_weights(swift, decoder, case):
    ours, theirs = (ms_swift(kind, decoder, case) for kind in (True, False))
    check_swift(case, ours, theirs, lambda: ms_swift(False, decoder, case, bf16=False))


def ms_swift_on_two_ranks(rank: int, size: int, saved: str, case: str) -> list[dict[str, torch.Tensor]]:
    with started_by_torchrun(rank, size):
        results = [ms_swift(kind, saved, case) for kind in (True, False)]
        return [*results, ms_swift(False, saved, case, bf16=False)] if case == "bf16" else results


@pytest.mark.parametrize("case", SWIFT_CASES)
def test_ms_swift_on_two_processes_ends_at_its_own_weights(swift, world, decoder, case):
    results = world.run(2, ms_swift_on_two_ranks, decoder, case)
    for ours, theirs, *exact in results:
        check_swift(case, ours, theirs, lambda exact=exact: exact[0])
        assert largest_difference(ours, results[0][0]) == 0.0, "ranks agree"


# The temperature, whether Tevatron's own training caches gradients, and training arguments. With a cache, Tevatron ignores the
# temperature: ours, which has a cache and the temperature, is compared with its training without a cache.
TEVATRON_CASES: dict[str, tuple[float, bool, dict[str, Any]]] = {
    "cached": (1.0, True, {}),
    "temperature": (0.1, False, {}),
    "accumulation": (1.0, True, {"gradient_accumulation_steps": 2}),
}


def tevatron(ours: bool, case: str) -> dict[str, torch.Tensor]:
    """Return the weights after some steps of Tevatron's trainer; ours: with --grad_cache and the override of docs/trainers.md."""
    from tevatron.retriever import gc_trainer
    from tevatron.retriever.arguments import TevatronTrainingArguments
    from tevatron.retriever.modeling import DenseModel
    from tevatron.retriever.trainer import TevatronTrainer

    temperature, caches, arguments = TEVATRON_CASES[case]
    rows = STEPS * QUERIES * int(os.environ.get("WORLD_SIZE", "1")) * arguments.get("gradient_accumulation_steps", 1)
    passages, words = texts(rows * GROUP, seed=1), tokenizer()
    data = [(text, passages[i * GROUP : (i + 1) * GROUP]) for i, text in enumerate(texts(rows))]

    def collate(features: list[tuple[str, list[str]]]) -> list[Any]:
        columns = [query for query, _ in features], [passage for _, group in features for passage in group]
        return [words(column, padding=True, return_tensors="pt") for column in columns]

    classes = gc_trainer.SimpleContrastiveLoss, gc_trainer.DistributedContrastiveLoss
    if ours:
        gc_trainer.SimpleContrastiveLoss, gc_trainer.DistributedContrastiveLoss = (
            functools.partial(kind, temperature=temperature)
            for kind in (retrieval.SimpleContrastiveLoss, retrieval.DistributedContrastiveLoss)
        )
    model = DenseModel(bert(), pooling="mean", normalize=True, temperature=temperature)
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args = TevatronTrainingArguments(
                **settings(folder, RATE, warmup_ratio=0.0, gc_q_chunk_size=4, gc_p_chunk_size=5, **arguments)
            )
            kind = gc_trainer.GradCacheTrainer if ours or caches else TevatronTrainer
            kind(model=model, args=args, train_dataset=data, data_collator=collate).train()
    finally:
        gc_trainer.SimpleContrastiveLoss, gc_trainer.DistributedContrastiveLoss = classes
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def check_tevatron(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert largest_difference(ours, theirs) < 1e-6
    start = {f"encoder.{name}": value for name, value in bert().state_dict().items()}
    assert largest_difference(ours, start) > 1e-3


@pytest.fixture
def tevatron_package() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("grad_cache", reason="needs GradCache")
        pytest.importorskip("tevatron.retriever.gc_trainer", reason="needs Tevatron")


@pytest.mark.parametrize("case", TEVATRON_CASES)
def test_tevatron_ends_at_its_own_weights(tevatron_package, case):
    check_tevatron(*(tevatron(kind, case) for kind in (True, False)))


def tevatron_on_two_ranks(rank: int, size: int, case: str) -> list[dict[str, torch.Tensor]]:
    with started_by_torchrun(rank, size):
        return [tevatron(kind, case) for kind in (True, False)]


@pytest.mark.parametrize("case", TEVATRON_CASES)
def test_tevatron_on_two_processes_ends_at_its_own_weights(tevatron_package, world, case):
    results = world.run(2, tevatron_on_two_ranks, case)
    for ours, theirs in results:
        check_tevatron(ours, theirs)
        assert largest_difference(ours, results[0][0]) == 0.0, "ranks agree"
