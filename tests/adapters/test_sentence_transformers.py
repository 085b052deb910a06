"""Our ranking loss for Sentence Transformers: the values and gradients of theirs, and what ours adds.

Cases of Sentence Transformers 6.2 (tests/sentence_transformer/losses) that are rewritten here for a model without a download:

- test_cmnrl.py: same_grad (also with a scaled loss), matryoshka, token_budget_matches_mnrl, attributes_and_config,
  hyperparameters_stay_assignable, gather_across_devices_offset (with two real processes), the mini-batches of mixed modalities (by
  the gradient of a model with images). Left out: rand_context*, which is about a class of theirs, and similarities that are a
  partial or a Module, which are refused.
- test_gradcache.py: matches_mnrl, replays_dropout, two_forwards_before_one_backward, scales_with_the_outer_backward, under_no_grad,
  under_autocast, adaptive_layer_warns, names_the_unused_column, replays_through_prompt_exclusion, backward_releases_the_hook_state,
  the token budget's versions of these, non_positive_budget; of TestMinibatchRanges, create_minibatch* and
  TestFlattenedMinibatchSlicing what a loss shows: texts longer than the budget, missing token counts, padding on the left, packed
  texts. Left out: the boundaries of their mini-batches, since ours are other ones, and query expansion, which only multi-vector
  models have.
- test_matryoshka.py: weights and dimensions, in any order, with our loss inside. Left out: the rest, about arguments that
  MatryoshkaLoss refuses, and MSELoss.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from offline_models import SPECIAL, WORDS, bert, in_sentence_transformer, load, texts
from sentence_transformers import SentenceTransformer
from sentence_transformers.multi_vector_encoder import MultiVectorEncoder
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from sentence_transformers.sparse_encoder import losses as sparse_losses
from sentence_transformers.util import dot_score, pairwise_cos_sim
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from world import Collectives

import megabatch
from megabatch.adapters.sentence_transformers import MultipleNegativesRankingLoss, SparseMultipleNegativesRankingLoss

ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"similarity_fct": dot_score, "scale": 0.5},
    {"directions": ALL},
    {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
    {"hardness_mode": "hard_negatives", "hardness_strength": 5.0},
    {"hardness_mode": "in_batch_negatives", "hardness_strength": 9.0, "directions": ALL},
    {"hardness_mode": "all_negatives", "hardness_strength": 3.0},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder):
    """A model in float64 without dropout, which both losses agree on to 12 digits."""
    return in_sentence_transformer(folder, bert()).double().train()


@pytest.fixture(scope="module")
def model_with_dropout(tmp_path_factory):
    return in_sentence_transformer(str(tmp_path_factory.mktemp("dropout")), bert(dropout=0.3)).train()


def features_of(model: Any, columns: list[list[str]], **options: Any) -> list[dict[str, Any]]:
    return [dict(model.preprocess(column, **options)) for column in columns]


def columns(count: int = 3, rows: int = 10, seed: int = 0) -> list[list[str]]:
    return [texts(rows, seed=10 * seed + place) for place in range(count)]


def value_and_gradients(loss: Any, model: nn.Module, features: list[dict[str, Any]], factor: float = 1.0) -> dict[str, Tensor]:
    model.zero_grad()
    value = loss([dict(column) for column in features], None)
    (value * factor).backward()
    return {"loss": value.detach(), **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}}


@torch.no_grad()
def value_of(loss: Any, model: Any, texts_of_columns: list[list[str]]) -> float:
    return float(loss(features_of(model, texts_of_columns), None))


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], rtol: float = 1e-9) -> None:
    assert a.keys() == b.keys()
    assert sum(bool(value.abs().max() > 0) for value in b.values()) > 10, "something was trained"
    scale = max(float(value.abs().max()) for value in b.values())
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=rtol * scale, msg=name)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("options", CONFIGURATIONS)
@pytest.mark.parametrize("chunks", [{"mini_batch_size": 3}, {"mini_batch_size": 50, "keep": 0}, {"mini_batch_num_tokens": 40}])
def test_the_gradient_is_that_of_the_uncached_loss(model, options, chunks):
    features = features_of(model, columns())
    want = value_and_gradients(losses.MultipleNegativesRankingLoss(model, **options), model, features)
    assert_close(value_and_gradients(MultipleNegativesRankingLoss(model, **options, **chunks), model, features), want)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.25, 1000.0])
def test_the_gradient_is_scaled_with_the_loss(model, factor):
    """Accumulation divides the loss, fp16's scaler multiplies it."""
    features = features_of(model, columns())
    loss = MultipleNegativesRankingLoss(model, mini_batch_size=3)
    want = {name: g * (1 if name == "loss" else factor) for name, g in value_and_gradients(loss, model, features).items()}
    assert_close(value_and_gradients(loss, model, features, factor), want)


@pytest.mark.slow
@pytest.mark.parametrize("dims, weights", [([16, 8, 4], None), ([4, 16, 8], [0.5, 1.0, 0.25])])
@pytest.mark.parametrize("learnable", [False, True])
def test_matryoshka_weights_every_width(model, dims, weights, learnable):
    features = features_of(model, columns(2))
    ours = MultipleNegativesRankingLoss(model, mini_batch_size=3, learnable_scale=learnable)
    theirs = losses.MultipleNegativesRankingLoss(model)
    found = value_and_gradients(losses.MatryoshkaLoss(model, ours, dims, weights), model, features, 3.0)
    assert_close(found, value_and_gradients(losses.MatryoshkaLoss(model, theirs, dims, weights), model, features, 3.0))
    if learnable:
        step = 1e-6
        values = []
        for change in (step, -step):
            plain = losses.MultipleNegativesRankingLoss(model, scale=20.0 * (1 + change))
            values.append(value_of(losses.MatryoshkaLoss(model, plain, dims, weights), model, columns(2)))
        assert float(ours.norm.log_scale.grad) == pytest.approx(3.0 * (values[0] - values[1]) / (2 * step), rel=1e-5)


def test_a_learnable_scale_gets_its_gradient_from_the_outer_backward(model):
    features = features_of(model, columns())
    loss = MultipleNegativesRankingLoss(model, mini_batch_size=3, learnable_scale=True)
    for factor in (0.5, 0.25):
        value_and_gradients(loss, model, features, factor)
    step, values = 1e-6, []
    for change in (step, -step):
        values.append(value_of(losses.MultipleNegativesRankingLoss(model, scale=20.0 * (1 + change)), model, columns()))
    assert float(loss.norm.log_scale.grad) == pytest.approx(0.75 * (values[0] - values[1]) / (2 * step), rel=1e-5)
    assert loss.scale == pytest.approx(20.0)
    loss.scale = 5.0
    assert loss.scale == pytest.approx(5.0) and loss.temperature == pytest.approx(0.2)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [{"mini_batch_size": 3}, {"mini_batch_num_tokens": 40}])
def test_dropout_is_replayed_in_backward(model_with_dropout, chunks):
    """Chunks that are recomputed give the gradient of those that are kept."""
    model, found = model_with_dropout, []
    for keep in (0, 100):
        torch.manual_seed(5)
        loss = MultipleNegativesRankingLoss(model, keep=keep, **chunks)
        found.append(value_and_gradients(loss, model, features_of(model, columns())))
    assert_close(*found, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [{"mini_batch_size": 3}, {"mini_batch_num_tokens": 40}])
def test_two_forwards_before_one_backward(model, chunks):
    loss, batches = MultipleNegativesRankingLoss(model, **chunks), [features_of(model, columns(seed=seed)) for seed in (1, 2)]
    want = [value_and_gradients(loss, model, batch) for batch in batches]
    model.zero_grad()
    sum(loss(batch, None) for batch in batches).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, want[0][name] + want[1][name])


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_without_gradients_the_loss_is_a_number(model, training):
    features = features_of(model, columns())
    model.train(training)
    with torch.no_grad():
        found = MultipleNegativesRankingLoss(model, mini_batch_size=3)(features, None)
        want = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3)(features_of(model, columns()), None)
    model.train()
    assert not found.requires_grad and torch.allclose(found, want)


@pytest.mark.slow
def test_autocast_is_used_in_both_passes(tmp_path):
    model = in_sentence_transformer(str(tmp_path), bert()).train()
    features = features_of(model, columns())
    exact = value_and_gradients(losses.MultipleNegativesRankingLoss(model), model, features)
    errors = []
    for kind in (MultipleNegativesRankingLoss, losses.CachedMultipleNegativesRankingLoss):
        with torch.autocast("cpu", torch.bfloat16):
            found = value_and_gradients(kind(model, mini_batch_size=3), model, features)
        errors.append(torch.stack([(found[name] - exact[name]).norm() for name in exact]).norm())
    # Both round every layer to bf16; the chunks are different ones.
    assert 0 < errors[0] < 1.5 * errors[1]


@pytest.mark.slow
def test_adaptive_layers_warn_of_gradient_caching(model):
    with pytest.warns(UserWarning, match="not compatible"):
        losses.AdaptiveLayerLoss(model, MultipleNegativesRankingLoss(model))


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [{"mini_batch_size": 3}, {"mini_batch_num_tokens": 40}, {"mini_batch_num_tokens": 5}])
def test_padding_on_the_left_and_texts_longer_than_the_budget(tmp_path, chunks):
    """The model has a position for each column, so that padding in front of a text must stay where it is."""
    model = in_sentence_transformer(str(tmp_path), bert()).double().train()
    model.tokenizer.padding_side = "left"
    features = features_of(model, columns())
    assert features[0]["attention_mask"][:, 0].min() == 0 and features[0]["attention_mask"][:, -1].min() == 1
    want = value_and_gradients(losses.MultipleNegativesRankingLoss(model), model, features)
    assert_close(value_and_gradients(MultipleNegativesRankingLoss(model, keep=0, **chunks), model, features), want)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [{"mini_batch_size": 3}, {"mini_batch_num_tokens": 40}])
def test_prompts_that_pooling_leaves_out(tmp_path, chunks):
    model = in_sentence_transformer(str(tmp_path), bert(), include_prompt=False).double().train()
    features = features_of(model, columns(2), prompt="w1 w2 ")
    assert any("prompt_length" in column for column in features)
    want = value_and_gradients(losses.MultipleNegativesRankingLoss(model), model, features)
    assert_close(value_and_gradients(MultipleNegativesRankingLoss(model, **chunks), model, features), want)


@pytest.mark.slow
def test_backward_releases_the_batch(model):
    features = features_of(model, columns())
    references = [weakref.ref(column["input_ids"]) for column in features]
    loss = MultipleNegativesRankingLoss(model, mini_batch_size=3)
    value = loss(features, None)
    value.backward()
    del features
    gc.collect()
    assert all(reference() is None for reference in references)


def test_options_have_the_names_and_order_of_sentence_transformers(model):
    import inspect

    theirs = inspect.signature(losses.CachedMultipleNegativesRankingLoss).parameters
    ours = inspect.signature(MultipleNegativesRankingLoss).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[name].default == theirs[name].default for name in theirs)
    options = dict(scale=42.0, mini_batch_size=4, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction")
    configuration = MultipleNegativesRankingLoss(model, **options).get_config_dict()
    assert configuration.items() >= losses.CachedMultipleNegativesRankingLoss(model, **options).get_config_dict().items()


@pytest.mark.parametrize(
    "options",
    [
        {"scale": -1.0},
        {"similarity_fct": pairwise_cos_sim},
        {"mini_batch_num_tokens": 0},
        {"mini_batch_size": 0},
        {"directions": ("doc_to_query",)},
        {"directions": ("query_to_doc", "sideways")},
        {"partition_mode": "both"},
        {"partition_mode": "per_direction", "directions": ALL},
        {"hardness_mode": "some"},
        {"hardness_mode": "hard_negatives", "hardness_strength": -1.0},
        {"duplicates": "drop"},
    ],
)
def test_options_that_are_refused(model, options):
    with pytest.raises(ValueError):
        MultipleNegativesRankingLoss(model, **options)


def test_hyperparameters_stay_assignable(model):
    changes = {"scale": 5.0, "similarity_fct": dot_score, "directions": ALL, "hardness_mode": "all_negatives"}
    changes |= {"hardness_strength": 2.0, "mini_batch_size": 2}
    assigned, batch = MultipleNegativesRankingLoss(model), columns(rows=4)
    before = value_of(assigned, model, batch)
    for name, value in changes.items():
        setattr(assigned, name, value)
    constructed = MultipleNegativesRankingLoss(model, **changes)
    assert assigned.get_config_dict() == constructed.get_config_dict()
    assert before != pytest.approx(value_of(constructed, model, batch)) == value_of(assigned, model, batch)


def test_a_column_without_influence_is_named(model):
    class FirstColumns(MultipleNegativesRankingLoss):
        def calculate_loss(self, reps: Any, *args: Any, **options: Any) -> Any:
            return super().calculate_loss(reps[:2], *args, **options)

    with pytest.raises(ValueError, match="column 2"):
        FirstColumns(model)(features_of(model, columns(3, rows=4)), None)


def test_models_without_one_embedding_are_refused(model):
    with pytest.raises(ValueError, match="MaxSim"):
        MultipleNegativesRankingLoss(MultiVectorEncoder.__new__(MultiVectorEncoder))
    with pytest.raises(ValueError, match="at least 2"):
        MultipleNegativesRankingLoss(model)(features_of(model, columns(1)), None)


@torch.no_grad()
def embeddings(model: Any, texts_of_columns: list[list[str]]) -> list[Tensor]:
    return [F.normalize(model(features)["sentence_embedding"], dim=-1) for features in features_of(model, texts_of_columns)]


def test_duplicate_texts_are_no_negatives(model):
    """Equal positives, equal anchors, and a hard negative that is another's positive, whatever the padding."""
    anchors = ["w1", "w2 w3", "w2 w3", "w4", "w5 w6 w7"]
    positives = ["w10 w11", "w12", "w13 w14 w15", "w10 w11", "w16"]
    negatives = ["w20", "w16", "w21", "w22 w23 w24 w25", "w10 w11"]
    batch = [anchors, positives, negatives]
    # Texts by class: pairs 0 and 3 share a positive, pairs 1 and 2 an anchor.
    ids = torch.tensor([0, 1, 1, 0, 2, 3, 2, 4, 5, 0])
    x, *y = embeddings(model, batch)
    want = megabatch.reference.infonce_loss(
        x, torch.cat(y), 20.0, ids=ids, negatives_of=torch.arange(5), directions=("x_to_y", "y_to_x")
    )
    loss = MultipleNegativesRankingLoss(model, duplicates="mask", mini_batch_size=2, directions=("query_to_doc", "doc_to_query"))
    assert value_of(loss, model, batch) == pytest.approx(float(want), rel=1e-9)
    assert float(want) != pytest.approx(value_of(MultipleNegativesRankingLoss(model), model, batch), rel=1e-3)


def test_pairs_are_joined_through_any_number_of_equal_texts_and_the_order_of_words_counts(model):
    # Each pair shares a text with the next one, so no text of another pair is a negative.
    chain = [["w1", "w2", "w2", "w3", "w3", "w4", "w4"], ["w10", "w10", "w11", "w11", "w12", "w12", "w13"]]
    assert value_of(MultipleNegativesRankingLoss(model, duplicates="mask"), model, chain) == pytest.approx(0.0, abs=1e-12)
    turned = [["w1", "w2", "w3"], ["w10 w11", "w11 w10", "w10 w11 w11"]]
    whole, masked = (value_of(MultipleNegativesRankingLoss(model, duplicates=kind), model, turned) for kind in (None, "mask"))
    assert masked == pytest.approx(whole, rel=1e-12) != pytest.approx(0.0)
    with pytest.raises(ValueError, match="duplicates"):
        MultipleNegativesRankingLoss(model, duplicates="mask").compute_loss_from_embeddings([torch.ones(2, 4)] * 2)


def test_chunks_have_as_many_rows_as_the_limit_allows(model):
    # Ten tokens each, with those that begin and end a text.
    batch, shapes = [[" ".join(["w1"] * 8)] * 12] * 2, list[tuple[int, ...]]()
    hook = model.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0]["input_ids"].shape)))
    # A budget of tokens replaces the number of rows.
    for options, rows in (({"mini_batch_size": 5}, [2, 5, 5]), ({"mini_batch_size": 2, "mini_batch_num_tokens": 49}, [4, 4, 4])):
        shapes.clear()
        value_of(MultipleNegativesRankingLoss(model, **options), model, batch)
        assert shapes == [(count, 10) for count in rows * 2]
    hook.remove()


def test_the_encoder_is_that_of_the_model_at_each_call(model):
    loss = MultipleNegativesRankingLoss(model, keep=2)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    for each in (model, other):
        loss.model = each
        found = value_and_gradients(loss, each, features_of(model, columns()))
        want = value_and_gradients(MultipleNegativesRankingLoss(each), each, features_of(model, columns()))
        assert_close(found, want)
        assert loss._cached[1]._keep.requested == 2


@pytest.mark.slow
def test_the_trainer_optimizes_a_learnable_scale_without_weight_decay(model, tmp_path):
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    data = Dataset.from_dict({"anchor": texts(4), "positive": texts(4, seed=1)})
    arguments = SentenceTransformerTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", weight_decay=0.1)
    loss = MultipleNegativesRankingLoss(model, learnable_scale=True)
    groups = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=data, loss=loss).create_optimizer().param_groups
    decays = [group["weight_decay"] for group in groups for parameter in group["params"] if parameter is loss.norm.log_scale]
    assert decays == [0.0] and {group["weight_decay"] for group in groups} == {0.0, 0.1}


@pytest.mark.slow
def test_negatives_above_the_margin_are_left_out(model):
    batch = columns(2)
    x, y = embeddings(model, batch)
    want = megabatch.reference.infonce_loss(x, y, 20.0, drop_above=0.05)
    loss = MultipleNegativesRankingLoss(model, drop_above=0.05, mini_batch_size=3)
    assert value_of(loss, model, batch) == pytest.approx(float(want), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("strategy, margin", [("absolute", 0.0), ("absolute", 0.1), ("relative", 0.1)])
@pytest.mark.parametrize("same_tokens", [True, False])
def test_a_guide_decides_as_in_gist(model, tmp_path, strategy, margin, same_tokens):
    guide = in_sentence_transformer(str(tmp_path), bert(seed=3)).double().eval()
    if not same_tokens:
        guide.max_seq_length = 20
    batch = columns(2, rows=12)
    options = {"mini_batch_size": 3, "directions": ("query_to_doc", "query_to_query", "doc_to_doc")}
    ours = MultipleNegativesRankingLoss(
        model, scale=100.0, guide=guide, guide_margin=margin, guide_margin_strategy=strategy, **options
    )
    theirs = losses.CachedGISTEmbedLoss(model, guide, temperature=0.01, margin_strategy=strategy, margin=margin, mini_batch_size=3)
    want = value_and_gradients(theirs, model, features_of(model, batch))
    # Guide similarities are compared with a threshold, in float32 here and in float64 there.
    assert_close(value_and_gradients(ours, model, features_of(model, batch)), want, rtol=1e-6)


@pytest.mark.slow
def test_static_embeddings_run_without_mini_batches():
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate([*SPECIAL, *WORDS])}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    model = SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=8)], device="cpu").double()
    batch = columns()
    batch[1][3] = batch[1][0]
    found = value_and_gradients(MultipleNegativesRankingLoss(model), model, features_of(model, batch))
    want = value_and_gradients(losses.MultipleNegativesRankingLoss(model), model, features_of(model, batch))
    torch.testing.assert_close(found, want)
    masked = value_of(MultipleNegativesRankingLoss(model, duplicates="mask"), model, batch)
    ids = torch.tensor([0, 1, 2, 0, *range(4, 20)])
    x, *y = embeddings(model, batch)
    assert masked == pytest.approx(float(megabatch.reference.infonce_loss(x, torch.cat(y), 20.0, ids=ids)))


class PackedModel(nn.Module):
    """The mean of word embeddings over texts that are packed one after the other, without padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(64, 8).double()

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = self.words(features["input_ids"][0]).tensor_split(features["cu_seq_lens_q"][1:-1].tolist())
        features["sentence_embedding"] = torch.stack([part.mean(0) for part in parts])
        return features


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [{"mini_batch_size": 2}, {"mini_batch_num_tokens": 9}])
def test_packed_inputs_are_divided_between_texts(chunks):
    model, generator = PackedModel(), torch.Generator().manual_seed(1)
    features = []
    for _ in range(2):
        lengths = torch.randint(1, 6, (7,), generator=generator)
        ids = torch.randint(0, 64, (1, int(lengths.sum())), generator=generator)
        features.append({"input_ids": ids, "cu_seq_lens_q": F.pad(lengths.cumsum(0), (1, 0))})
    loss = MultipleNegativesRankingLoss(model, keep=0, **chunks)
    found = loss([dict(column) for column in features], None)
    found.backward()
    gradient = model.words.weight.grad.clone()
    model.zero_grad()
    x, y = (F.normalize(model(dict(column))["sentence_embedding"], dim=-1) for column in features)
    want = megabatch.reference.infonce_loss(x, y, 20.0)
    want.backward()
    assert loss._cached[1].chunks > 4
    assert torch.allclose(found, want) and torch.allclose(gradient, model.words.weight.grad)


class ModelWithImages(nn.Module):
    """Texts with any number of images each: the mean of the words, and the sum of the images' patches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.patches = nn.Embedding(64, 8).double(), nn.Linear(5, 8).double()

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        images = []
        # A chunk of texts alone comes without these inputs.
        if "pixel_values" in features:
            sizes = features["image_grid_thw"].prod(1).tolist()
            images = [part.sum(0) for part in self.patches(features["pixel_values"]).split(sizes)]
        groups = iter(images)
        sums = [sum((next(groups) for _ in range(count)), torch.zeros(8)) for count in features["num_images_per_sample"].tolist()]
        features["sentence_embedding"] = self.words(features["input_ids"]).mean(1) + torch.stack(sums)
        return features


@pytest.mark.slow
# In the second case there are as many images as texts, in the third as many patches too.
@pytest.mark.parametrize("images, patches", [([2, 1, 0, 0, 3], 4), ([2, 1, 0, 1, 1], 4), ([2, 1, 0, 1, 1], 2)])
@pytest.mark.parametrize("chunks", [{"mini_batch_size": 1}, {"mini_batch_size": 2}, {"mini_batch_num_tokens": 12}])
def test_images_go_with_their_texts(images, patches, chunks):
    model, generator = ModelWithImages(), torch.Generator().manual_seed(1)
    features = []
    for counts in (images, images[::-1]):
        grid = torch.randint(1, patches, (sum(counts), 3), generator=generator)
        ids = torch.randint(0, 64, (len(counts), 6), generator=generator)
        pixels = torch.randn(int(grid.prod(1).sum()), 5, generator=generator).double()
        features.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels})
        features[-1] |= {"image_grid_thw": grid, "num_images_per_sample": torch.tensor(counts)}
    loss = MultipleNegativesRankingLoss(model, keep=0, **chunks)
    found = value_and_gradients(loss, model, features)
    want = value_and_gradients(losses.MultipleNegativesRankingLoss(model), model, features)
    assert loss._cached[1].chunks > 4
    torch.testing.assert_close(found, want)


@pytest.mark.slow
def test_a_budget_of_tokens_needs_their_numbers():
    features = [{"pixel_values": torch.ones(4, 3), "sentence_embedding": torch.ones(4, 2)}] * 2
    with pytest.raises(ValueError, match="attention_mask"):
        MultipleNegativesRankingLoss(ModelWithImages(), mini_batch_num_tokens=8)(features, None)


@pytest.mark.slow
def test_sparse_encoders_use_the_loss_inside_splade(model):
    generator = torch.Generator().manual_seed(0)
    batch = [torch.rand(6, 40, generator=generator).double() for _ in range(3)]
    ours = SparseMultipleNegativesRankingLoss(model).compute_loss_from_embeddings(batch)
    theirs = sparse_losses.SparseMultipleNegativesRankingLoss(model).compute_loss_from_embeddings(batch, None)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-12)
    sparse_losses.SpladeLoss(model, SparseMultipleNegativesRankingLoss(model), document_regularizer_weight=1e-3)


@pytest.mark.slow
def test_adapters_are_trained_and_frozen_encoders_are_not_run_again(tmp_path):
    from peft import LoraConfig

    model = in_sentence_transformer(str(tmp_path), bert()).train()
    model.add_adapter(LoraConfig(r=2, target_modules=["query", "value"], lora_dropout=0.0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    model.double()
    features = features_of(model, columns(2))
    want = value_and_gradients(losses.MultipleNegativesRankingLoss(model), model, features)
    assert all("lora" in name for name in want if name != "loss")
    found = value_and_gradients(MultipleNegativesRankingLoss(model, mini_batch_size=3, keep=0), model, features)
    torch.testing.assert_close(found, want)
    model.requires_grad_(False)
    runs = Counter[str]()
    model.register_forward_hook(lambda *_: runs.update(["forward"]))
    scale = MultipleNegativesRankingLoss(model, mini_batch_size=5, keep=0, learnable_scale=True)
    scale(features, None).backward()
    assert runs["forward"] == 4 and scale.norm.log_scale.grad is not None


@pytest.mark.slow
def test_the_model_card_names_the_loss(model, tmp_path):
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    data = Dataset.from_dict({"anchor": texts(4), "positive": texts(4, seed=1)})
    arguments = SentenceTransformerTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    loss = MultipleNegativesRankingLoss(model, duplicates="mask")
    SentenceTransformerTrainer(model=model, args=arguments, train_dataset=data, loss=loss)
    model.save_pretrained(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "MultipleNegativesRankingLoss" in card and "gao2021scaling" in card and '"duplicates": "mask"' in card


# The ranks hold different numbers of rows.
SHARDS = (slice(0, 4), slice(4, 10))


def with_repetitions() -> list[list[str]]:
    """Return columns in which positives occur twice on a rank, and on both."""
    batch = columns()
    batch[1][5] = batch[1][8]
    batch[1][9] = batch[1][2]
    return batch


def on_ranks(rank: int, size: int, folder: str, gather: bool, options: dict[str, Any]) -> dict[str, Any]:
    model = load(folder).double().train()
    loss = MultipleNegativesRankingLoss(
        model, mini_batch_size=2, gather_across_devices=gather, learnable_scale=True, duplicates="mask", **options
    )
    # As the trainer does after it has wrapped the model.
    loss.model = DDP(model, find_unused_parameters=True)
    batch = [column[SHARDS[rank]] for column in with_repetitions()]
    value = loss(features_of(model, batch), None)
    value.backward()
    counts = []
    for size in (2, 100):
        loss.mini_batch_size = size
        with Collectives() as collectives:
            loss(features_of(model, batch), None).backward()
        counts.append(collectives.counts)
    with torch.no_grad(), Collectives() as evaluation:
        loss(features_of(model, batch), None)
    return {
        "loss": float(value.detach()),
        "gradients": [p.grad / 3 for p in model.parameters() if p.grad is not None],
        "scale": float(loss.norm.log_scale.grad) / 3,
        "collectives with chunks and without": counts,
        "collectives in evaluation": sum(evaluation.counts.values()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("gather", [True, False])
def test_ranks_train_as_one_process_with_one_exchange(world, model, folder, gather):
    options = {"directions": ALL, "hardness_mode": "hard_negatives", "hardness_strength": 5.0}
    results = world.run(2, on_ranks, folder, gather, options)
    loss = MultipleNegativesRankingLoss(model, learnable_scale=True, duplicates="mask", **options)
    model.zero_grad()
    parts = [with_repetitions()] if gather else [[column[shard] for column in with_repetitions()] for shard in SHARDS]
    for part in parts:
        (loss(features_of(model, part), None) / len(parts)).backward()
    want = [p.grad for p in model.parameters() if p.grad is not None]
    for found in results:
        assert found["scale"] == pytest.approx(float(loss.norm.log_scale.grad), rel=1e-6)
        for a, b in zip(found["gradients"], want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
        assert found["collectives in evaluation"] == 0
        chunked, whole = found["collectives with chunks and without"]
        assert chunked == whole and chunked["allreduce_"] > 0


def with_different_losses(rank: int, size: int, folder: str, learnable: bool) -> str:
    """Return what is raised if each rank computes another loss, as they may with a dict of losses."""
    model = load(folder).double().train()
    every = [MultipleNegativesRankingLoss(model, learnable_scale=learnable) for _ in range(size)]
    wrapped = DDP(model, find_unused_parameters=True)
    for loss in every:
        loss.model = wrapped
    try:
        every[rank](features_of(model, columns(rows=4)), None).backward()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_learnable_scales_of_different_losses_in_one_step_are_refused(world, model, folder):
    """Without negatives of other ranks, only the ranks' agreement on the loss keeps their scales equal."""
    assert world.run(2, with_different_losses, folder, False) == ["", ""]
    assert all("learnable_scale=False" in message for message in world.run(2, with_different_losses, folder, True))
