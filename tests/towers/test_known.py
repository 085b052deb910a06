"""Models that are named as on Hugging Face or in papers: their records agree with published sizes and with the libraries."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megabatch import config
from megabatch.costs.models import SkipCompute
from megabatch.towers import BuiltTower, build_tower, find_library, full_name, size_options, without_torchvision
from megabatch.towers.known import IMAGE_MODELS, TEXT_MODELS, KnownText, find_text_model
from megabatch.towers.transformers import language_model, sequence_length

pytest.importorskip("transformers")


def built(record: KnownText) -> nn.Module:
    with without_torchvision.hidden():
        import transformers

        maker = transformers.AutoModelForCausalLM if record.causal else transformers.AutoModel
        with torch.device("meta"):
            return maker.from_config(getattr(transformers, record.config)(**record.shape))


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


FEW = (
    "bert-base-uncased",
    "sentence-transformers/all-MiniLM-L6-v2",
    "gpt2",
    "Qwen/Qwen3-Embedding-0.6B",
    "meta-llama/Llama-3.1-8B",
)


@pytest.mark.parametrize("name", FEW)
def test_a_record_has_the_published_number_of_parameters(name: str) -> None:
    record = find_text_model(name)
    assert record is not None and parameters(built(record)) == pytest.approx(record.parameters, rel=0.004)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_every_text_record_has_the_published_number_of_parameters() -> None:
    off = {record.name: parameters(built(record)) / record.parameters - 1 for record in TEXT_MODELS}
    assert len(off) > 80 and not {name: error for name, error in off.items() if abs(error) > 0.004}


@pytest.mark.slow
def test_every_image_record_names_a_model_of_its_library() -> None:
    timm, open_clip = without_torchvision.import_timm(), without_torchvision.import_open_clip()
    for name, tower in IMAGE_MODELS.items():
        library, _, model = tower.partition(":")
        assert timm.is_model(model) if library == "timm" else model in open_clip.list_models(), name
        assert full_name(name) == tower


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("ViT-L/14@336px", "open_clip:ViT-L-14-336"),
        ("RN50x4", "open_clip:RN50x4"),
        ("google-bert/bert-base-uncased", "transformers:google-bert/bert-base-uncased"),
        ("all-MiniLM-L6-v2", "transformers:all-MiniLM-L6-v2"),
        ("meta-llama/Llama-3.1-8B-Instruct", "transformers:meta-llama/Llama-3.1-8B-Instruct"),
        ("resnet50", "timm:resnet50"),
        ("google/siglip-so400m-patch14-384", "open_clip:ViT-SO400M-14-SigLIP-384"),
        ("my.towers:small", "my.towers:small"),
        ("text", "text"),
    ],
)
def test_names_as_people_write_them(name: str, full: str) -> None:
    assert full_name(name) == full and find_library(full)


def test_a_misspelt_model_gets_similar_names() -> None:
    with pytest.raises(ValueError, match=r"Did you mean .*bert-base-uncased"):
        find_library(full_name("bert-base-uncasd"))


def test_a_known_model_is_built_for_its_shape_and_not_for_training(tmp_path) -> None:
    tower = config.Tower("transformers:sentence-transformers/all-MiniLM-L6-v2", {"length": 32})
    with SkipCompute():
        shape = build_tower(tower, 384, side="x", shapes_only=True)
    assert shape.kind == "text" and shape.prepare("a text", None)["input_ids"].shape == (32,)
    assert parameters(shape.module) == pytest.approx(22.7e6, rel=0.01)
    with pytest.raises(ValueError, match=r"neither a folder with a config\.json nor a name in the cache"):
        build_tower(tower, 384, side="x")


def test_sizes_become_options_of_the_towers_that_read_them() -> None:
    assert size_options("transformers:bert-base-uncased", "x", 128, 384) == {"length": 128}
    assert size_options("timm:resnet50", "x", 128, 160) == {"size": 160}
    assert size_options("text", "y", 40, None) == {"length": 40} and size_options("x", "y", 40, 224) == {}


def test_a_language_model_is_built_by_name_with_its_head() -> None:
    with SkipCompute():
        model = language_model("HuggingFaceTB/SmolLM2-135M")
    assert model.get_output_embeddings().out_features == 49152
    with pytest.raises(ValueError, match="did you mean"):
        language_model("HuggingFaceTB/SmolLM2-136M")


def shape_of(name: str, **options: object) -> BuiltTower:
    with SkipCompute():
        return build_tower(config.Tower(f"transformers:{name}", options), 64, side="x", shapes_only=True)


@pytest.mark.parametrize(
    "name", ["intfloat/e5-small-v2", "distilroberta-base", "sentence-transformers/all-mpnet-base-v2", "distilbert-base-uncased"]
)
def test_a_text_is_not_longer_than_the_models_positions(name: str) -> None:
    assert shape_of(name, length=512).prepare("a text", None)["input_ids"].shape == (512,)
    with pytest.raises(ValueError, match=r"length is 513: .* 512 or less"):
        shape_of(name, length=513)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_computed_positions_have_no_end() -> None:
    for name in ("microsoft/deberta-v3-small", "HuggingFaceTB/SmolLM2-135M"):
        assert shape_of(name, length=10_000).prepare("a text", None)["input_ids"].shape == (10_000,)
    assert sequence_length("HuggingFaceTB/SmolLM2-135M", 10_000, 1024) == 10_000


@pytest.mark.parametrize("length", [0, -1, "64", 1.5, True])
def test_a_text_length_is_a_number_of_tokens(length: object) -> None:
    with pytest.raises(ValueError, match="length is"):
        shape_of("intfloat/e5-small-v2", length=length)


@pytest.mark.parametrize(
    ("name", "shape", "most"),
    [
        ("BertConfig", {"max_position_embeddings": 48}, 48),
        # Positions of RoBERTa begin behind the padding's, those of OPT with the third row of a longer table.
        ("RobertaConfig", {"max_position_embeddings": 48, "pad_token_id": 1}, 46),
        ("OPTConfig", {"max_position_embeddings": 48, "ffn_dim": 32, "word_embed_proj_dim": 16}, 48),
        ("GPT2Config", {"n_positions": 48}, 48),
    ],
)
def test_a_language_model_in_a_folder_reads_as_many_tokens_as_it_has_positions(name: str, shape: dict, most: int, tmp_path) -> None:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 300}
    getattr(transformers, name)(**{**sizes, **shape}).save_pretrained(tmp_path)
    folder = str(tmp_path)
    assert sequence_length(folder, None, 1024) == sequence_length(folder, most, 1024) == most
    assert sequence_length(folder, None, 32) == 32 and shape_of(folder).prepare("a text", None)["input_ids"].shape == (most,)
    with pytest.raises(ValueError, match=f"length is {most + 1}: .* {most} or less"):
        sequence_length(folder, most + 1, 1024)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    assert model(torch.full((1, most), 5)).logits.shape[1] == most
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, most + 1), 5))
