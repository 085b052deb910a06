"""Towers: rows are independent, seeds decide augmentations, weights can be saved and loaded, and errors name the reason."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from megabatch.config import Tower as Config
from megabatch.towers import LIBRARIES, BuiltTower, TowerLibrary, build_tower, find_library, load_weights, names_code
from megabatch.towers.built_in import ngram_buckets
from megabatch.towers.inputs import END, PADDING, ByteTokenizer, NormalizePixels, PrepareImage

DIM = 12
BUILT_IN = {
    "cnn": Config("cnn"),
    "cnn, deep": Config("cnn", {"size": 64, "channels": 1, "depth": 1, "width": 8}),
    "vit": Config("vit"),
    "vit, class": Config("vit", {"width": 32, "heads": 2, "pool": "class", "channels": 1}),
    "vit, flat": Config("vit", {"width": 32, "heads": 2, "pool": "flat", "patch": 16}),
    "text": Config("text"),
    "text, deep": Config("text", {"depth": 2, "width": 32, "length": 45}),
}
CAPTIONS = ("greek small letter alpha with tonos, serif bold", "", "ы", "x" * 10_000, "👩‍🚀 naïve", "latin capital letter a")


def build(config: Config, side: str = "x") -> BuiltTower:
    torch.manual_seed(0)
    return build_tower(config, DIM, side=side)


def image(seed: int, width: int = 40, height: int = 32) -> Image.Image:
    noise = torch.randint(0, 256, (height * width * 3,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.frombytes("RGB", (width, height), bytes(noise.tolist()))


def rows(tower: BuiltTower, seed: int | None = None) -> Tensor:
    raw = CAPTIONS if tower.kind == "text" else [image(i) for i in range(len(CAPTIONS))]
    return torch.stack([tower.prepare(entry, seed) for entry in raw])


@pytest.fixture(params=BUILT_IN.values(), ids=BUILT_IN)
def config(request) -> Config:
    return request.param


def test_rows_do_not_depend_on_their_neighbours(config):
    tower = build(config)
    # In fp64, where the rounding of products of different sizes is far below the effect of a mistake.
    module, batch = tower.module.double(), rows(tower)
    together = module(batch)
    assert together.shape == (len(CAPTIONS), DIM)
    assert together.dtype == torch.float64
    alone = torch.cat([module(row[None]) for row in batch])
    assert torch.allclose(together, alone, rtol=1e-9, atol=1e-11)
    assert torch.pdist(together).min() > 1e-3


def test_every_parameter_learns(config):
    tower = build(config)
    # Squares, because the sum of a layer-normalised vector is constant.
    tower.module(rows(tower)).square().sum().backward()
    assert [name for name, p in tower.module.named_parameters() if p.grad is None or not p.grad.any()] == []


def gradients(config: Config) -> tuple[list[Tensor], int]:
    """Return the gradient of every parameter, and how many numbers were saved for the backward pass."""
    tower = build(config)
    batch, kept = rows(tower), []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = tower.module(batch)
    out.square().sum().backward()
    return [p.grad for p in tower.module.parameters()], sum(kept)


def test_checkpointing_gives_the_same_gradients_and_saves_less(config):
    plain, kept = gradients(config)
    again, kept_again = gradients(Config(config.name, config.options, checkpointing=True))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert kept_again < kept


def test_autocast_in_half_precision_is_close(config):
    tower = build(config)
    batch = rows(tower)
    with torch.autocast("cpu", torch.bfloat16):
        half = tower.module(batch)
    half.float().square().sum().backward()
    whole = tower.module(batch)
    # bf16 has 8 bits of precision: after some layers the direction is right to a few hundredths.
    assert torch.cosine_similarity(half.float(), whole).min() > 0.99


def test_weights_can_be_loaded_from_both_formats(config, tmp_path):
    from safetensors.torch import save_file

    saved = build(config)
    save_file(saved.module.state_dict(), tmp_path / "w.safetensors")
    torch.save({"state_dict": {f"module.{k}": v for k, v in saved.module.state_dict().items()}}, tmp_path / "w.pt")
    batch = rows(saved)
    for file in ("w.safetensors", "w.pt"):
        torch.manual_seed(1)
        other = build_tower(Config(config.name, config.options, weights=str(tmp_path / file)), DIM, side="x")
        assert torch.equal(other.module(batch), saved.module(batch))


class Payload:
    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


@pytest.mark.parametrize(
    ("write", "complaint"),
    [
        (lambda path: torch.save({"head.weight": torch.zeros(1)}, path), "missing: .* and .* more; different shape: head.weight"),
        (lambda path: torch.save({"nonsense": torch.zeros(1)}, path), "unexpected: nonsense. Give the name and options"),
        (lambda path: torch.save([1, 2], path), "does not hold a state dict"),
        (lambda path: torch.save({"head.weight": Payload()}, path), "could execute code"),
        (lambda path: path.write_bytes(b"PK\x03\x04 cut off"), "cannot be read"),
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (lambda path: path.with_suffix(".safetensors").write_bytes(b"\xff" * 9), "cannot be read as safetensors"),
        (lambda path: None, "there is no such file"),
    ],
)
def test_weights_that_do_not_fit_are_refused(write, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "w.pt")
    path = next(tmp_path.glob("w.*"), tmp_path / "w.pt")
    with pytest.raises(ValueError, match=complaint):
        load_weights(build(BUILT_IN["cnn"]).module, path)
    assert not Path("executed").exists()


def test_preparation_depends_only_on_the_seed_and_can_be_pickled():
    for prepare, raw in (
        (PrepareImage(16, crop=0.3, flip=True), image(0)),
        (ByteTokenizer(60, drop=0.5), CAPTIONS[0]),
    ):
        again = pickle.loads(pickle.dumps(prepare))
        for seed in (None, 3, 2**63):
            assert torch.equal(prepare(raw, seed), again(raw, seed))
        seen = {tuple(prepare(raw, seed).flatten().tolist()) for seed in range(8)}
        assert len(seen) == 8


def test_without_augmentation_a_seed_changes_nothing():
    assert torch.equal(PrepareImage(16)(image(0), 7), PrepareImage(16)(image(0), None))
    prepared = ByteTokenizer(60, drop=0.5)(CAPTIONS[0], None)
    assert torch.equal(prepared, ByteTokenizer(60)(CAPTIONS[0], 7))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("size", [(96, 41), (24, 24), (20, 33)])
def test_an_image_that_is_a_tensor_is_prepared_alike(channels, mode, size):
    raw = image(1, *size).convert(mode)
    pixels = torch.frombuffer(bytearray(raw.tobytes()), dtype=torch.uint8).view(raw.height, raw.width, len(mode))
    before = pixels.clone()
    for prepare in (PrepareImage(24, channels), PrepareImage(24, channels, crop=0.4, flip=True)):
        for seed in (None, *range(8)):
            assert torch.equal(prepare(pixels, seed), prepare(raw, seed))
    assert torch.equal(pixels, before)


def test_a_preparation_of_ones_own_is_not_given_tensors():
    class Inverted(PrepareImage):
        def __call__(self, raw, seed):
            return 255 - super().__call__(raw, seed)

    assert PrepareImage(8).takes_tensors
    assert not Inverted(8).takes_tensors


def test_the_middle_of_an_image_is_taken_and_resized():
    wide = Image.new("RGB", (96, 32), (255, 0, 0))
    # The filter reads a little beyond the square.
    wide.paste((10, 20, 30), (24, 0, 72, 32))
    for size in (8, 32, 50):
        assert (PrepareImage(size)(wide, None) == torch.tensor([10, 20, 30], dtype=torch.uint8).view(3, 1, 1)).all()
    grey = PrepareImage(8, channels=1)(wide, None)
    assert grey.shape == (1, 8, 8) and grey.dtype == torch.uint8


def test_images_shrink_with_antialiasing():
    stripes = Image.frombytes("L", (64, 64), bytes([0, 255] * 2048))
    shrunk = PrepareImage(8, channels=1)(stripes, None)
    # Every pixel is a mean of both colours, up to the filter's edge; a pixel without antialiasing would be off by 127.
    assert (shrunk.float() - 127.5).abs().max() < 8


def test_palettes_and_transparency_become_colours():
    for mode in ("P", "RGBA", "LA", "1", "CMYK"):
        prepared = PrepareImage(8)(Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode), None)
        assert (prepared == 255).all(), mode


def test_crops_stay_inside_the_image_and_cover_the_fraction():
    # Red encodes the column, green the row: their ranges give the size of the crop.
    ramp = Image.new("RGB", (100, 60))
    ramp.putdata([(column, row, 0) for row in range(60) for column in range(100)])
    areas = []
    for seed in range(50):
        crop = PrepareImage(200, crop=0.25)(ramp, seed).float()
        assert crop[0].max() <= 99 and crop[1].max() <= 59
        areas.append((crop[0].max() - crop[0].min() + 1) * (crop[1].max() - crop[1].min() + 1) / 6000)
    # Rounded to pixels: up to one more or less in either direction.
    assert 0.2 < min(areas) < 0.5 < max(areas) <= 1


def test_a_narrow_image_is_cropped_too():
    assert PrepareImage(8, crop=0.9)(image(0, width=300, height=2), 1).shape == (3, 8, 8)


def test_half_the_images_are_mirrored():
    prepare = PrepareImage(8, flip=True)
    plain = prepare(image(0, 8, 8), None)
    mirrored = [torch.equal(prepare(image(0, 8, 8), seed), plain.flip(2)) for seed in range(100)]
    assert 30 < sum(mirrored) < 70
    assert all(m or torch.equal(prepare(image(0, 8, 8), seed), plain) for seed, m in enumerate(mirrored))


def test_pixels_are_normalised_by_mean_and_standard_deviation():
    pixels = NormalizePixels((0.5, 0.4, 0.3), (0.1, 0.2, 0.3))
    values = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2).expand(1, 3, 1, 2)
    expected = torch.tensor([[-5, 5], [-2, 3], [-1, 7 / 3]])
    assert torch.allclose(pixels(values)[0, :, 0], expected, atol=1e-6)
    assert not pixels.state_dict()


@pytest.mark.parametrize("text", [*CAPTIONS, "日本語", "\x00 tab\t", "\ud800 half a character"])
def test_decoded_texts_are_whole_or_cut_between_characters(text):
    tokenizer = ByteTokenizer(80)
    tokens = tokenizer(text, None)
    assert tokens.shape == (80,)
    assert tokenizer(text, 5).equal(tokens)
    back = tokenizer.decode(tokens)
    assert text.replace("\ud800", "?").startswith(back)
    assert back == text.replace("\ud800", "?") or len(back.encode()) == 79
    end = int((tokens == END).nonzero())
    assert (tokens[:end] > END).all() and (tokens[end + 1 :] == PADDING).all()


def test_a_cut_never_leaves_half_a_character():
    for length in range(2, 12):
        tokens = ByteTokenizer(length)("👩é日x", None)
        assert "👩é日x".startswith(ByteTokenizer(length).decode(tokens))
        assert (tokens == END).sum() == 1


def test_dropped_bytes_are_a_fraction_and_still_decode_to_the_text():
    prepared = ByteTokenizer(1000, drop=0.25)("a" * 999, 3)
    assert 0.2 < (prepared < 0).float().mean() < 0.3
    assert ByteTokenizer(1000).decode(prepared) == "a" * 999


@pytest.mark.parametrize("depth", [0, 1])
def test_texts_do_not_depend_on_their_padding(depth):
    tower = build(Config("text", {"length": 96, "depth": depth, "width": 32}))
    module = tower.module.double()
    tokens = tower.prepare("latin capital letter a", None)[None]
    same = module(tokens)
    if not depth:
        assert torch.allclose(module(tokens[:, :24]), same, rtol=1e-9, atol=1e-11)
    # Nor on the embedding of padding, nor on empty stretches: the text and its end token fill three stretches of eight.
    with torch.no_grad():
        module.ngrams.vectors[0] = 100.0
        if depth:
            module.positions[3:] = 100.0
    assert torch.equal(module(tokens), same)


def test_a_word_has_the_same_n_grams_wherever_it_stands():
    tokenizer, sizes = ByteTokenizer(40), [2, 4]
    buckets = {text: ngram_buckets(tokenizer(text, None).long()[None], sizes, 10_000)[0] for text in ("alpha beta", "greek alpha")}
    assert torch.equal(buckets["alpha beta"][:2], buckets["greek alpha"][6:8])
    assert not torch.equal(buckets["alpha beta"][:2], buckets["alpha beta"][2:4])
    assert (buckets["alpha beta"][:11] > 0).all() and not buckets["alpha beta"][11:].any()


def test_a_dropped_byte_begins_no_n_gram_but_stays_part_of_others():
    tokens = ByteTokenizer(40)("alpha beta", None).long()[None]
    dropped = tokens.clone()
    dropped[:, 3] *= -1
    plain, found = ngram_buckets(tokens, [2, 4], 10_000), ngram_buckets(dropped, [2, 4], 10_000)
    assert not found[:, 3].any() and plain[:, 3].all()
    plain[:, 3] = 0
    assert torch.equal(found, plain)


def test_hashes_spread_over_all_buckets():
    every = torch.arange(2, 258)
    pairs = torch.cartesian_prod(every, every)
    counts = ngram_buckets(pairs, [2], 1025)[:, 0, 0].bincount(minlength=1025)
    assert counts[0] == 0
    # 65,536 pairs in 1,024 buckets, 64 each: the standard deviation of random ones is 8.
    assert counts[1:].float().std() < 16


def test_texts_for_images_and_images_for_texts_are_refused():
    with pytest.raises(ValueError, match="was given a Image"):
        ByteTokenizer(8)(image(0), None)
    with pytest.raises(ValueError, match="was given a str"):
        PrepareImage(8)("text", None)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (Config("resnet"), "tower x: there is no tower 'resnet'; towers are named vit, cnn, text, timm:NAME"),
        (Config("timm:"), "there is no tower"),
        (Config("cnn", {"widht": 3}), "cnn has no option 'widht'; its options are size, channels, width"),
        (Config("cnn", {"checkpointing": True}), "cnn has no option 'checkpointing'"),
        (Config("cnn", {"width": "32"}), "option width is '32': must be of the type of its default, 32"),
        (Config("cnn", {"width": True}), "option width is True"),
        (Config("cnn", {"width": 0}), "option width is 0: must be at least 1"),
        (Config("text", {"depth": -1}), "option depth is -1: must be at least 0"),
        (Config("cnn", {"size": 30}), "patch must be even and divide size"),
        (Config("vit", {"size": 30}), "patch must divide size"),
        (Config("vit", {"heads": 5}), "divide width"),
        (Config("vit", {"pool": "max"}), "must be one of mean, class, flat"),
        (Config("vit", {"channels": 4}), "must be 1 .grey. or 3"),
        (Config("vit", {"crop": 0.0}), "fraction of the area"),
        (Config("text", {"length": 1}), "at least 2 bytes"),
        (Config("text", {"drop": 1.0}), r"in \[0, 1\)"),
        (Config("text", {"ngrams": [0]}), "each at least 1"),
        (Config("text", {"ngrams": 3}), "option ngrams is 3"),
        (Config("text", {"buckets": 1}), "one of them for padding"),
        (Config("text", weights="nowhere.safetensors"), "there is no such file"),
        (Config("test_towers:missing"), "cannot be called"),
        (Config("no_such_package:tower"), "cannot be called with"),
        (Config("test_towers:plain", {"width": 3}), "returned a Module: give the option kind"),
        (Config("test_towers:plain", {"kind": "sound"}), "kind is 'sound'"),
        (Config("test_towers:plain", {"kind": "image", "widht": 3}), "unexpected keyword argument 'widht'"),
        (Config("test_towers:plain", {"kind": "image", "length": 3}), "unexpected keyword argument 'length'"),
        (Config("test_towers:plain", {"kind": "text"}), "cannot take what was prepared"),
        (Config("test_towers:plain", {"kind": "image"}, checkpointing=True), "is your function"),
        (Config("test_towers:flat", {"kind": "image"}), r"returned \(2, 3, 32, 32\) for two rows"),
        (Config("builtins:dict"), "cannot be called|returned a dict"),
        (Config("transformers:no/such"), "neither a folder with a config.json"),
        (Config("open_clip:ViT-B-33"), "did you mean ViT-B-32"),
        (Config("open_clip:ViT-B-16-SigLIP", {"part": "text"}), "would have to be downloaded"),
        (Config("open_clip:roberta-ViT-B-32"), "would have to be downloaded"),
        (Config("timm:resnet10t", {"size": "32"}), "size is '32'"),
        (Config("timm:resnet10x"), "did you mean resnet10t"),
        (Config("timm:resnet10t", {"colour": 3}), "does not take the options"),
    ],
)  # fmt: skip
def test_towers_that_cannot_be_built_raise_with_the_reason(config, complaint):
    with pytest.raises(ValueError, match=complaint):
        build(config)


def plain(width: int = 5, size: int = 32) -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, width))
    module.unused = nn.Linear(2, 2)
    module.forward = lambda x: module[1](module[0](x))
    return module


def flat() -> nn.Module:
    return nn.Identity()


def whole(width: int) -> BuiltTower:
    return BuiltTower(nn.Sequential(nn.Embedding(258, width), nn.Flatten(), nn.Linear(8 * width, DIM)), Long(8), "text")


class Long(ByteTokenizer):
    def __call__(self, raw, seed):
        return super().__call__(raw, seed).long()


def test_a_function_returns_a_module_or_a_tower():
    tower = build(Config("test_towers:plain", {"kind": "image", "width": 4, "size": 16}))
    assert tower.prepare == PrepareImage(16)
    assert tower.module(rows(tower)).shape == (len(CAPTIONS), DIM)
    assert "head.weight" in tower.module.state_dict()
    # DDP waits for the gradients of all parameters that are not frozen.
    assert not tower.module.encoder.unused.weight.requires_grad
    assert tower.module.encoder[1].weight.requires_grad and tower.module.encoder[1].weight.grad is None
    tower = build(Config("test_towers:whole", {"width": 4}))
    assert tower.kind == "text" and tower.module.training
    assert tower.module(rows(tower)).shape == (len(CAPTIONS), DIM)
    assert "head.weight" not in tower.module.state_dict()


@pytest.fixture
def bert(tmp_path) -> Path:
    from transformers import BertConfig

    config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=258)
    config.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.mark.parametrize("pool", [None, "mean", "class"])
def test_a_text_model_of_transformers_from_its_configuration(bert, pool):
    tower = build(Config(f"transformers:{bert}", {} if pool is None else {"pool": pool}))
    assert tower.kind == "text"
    batch = [tower.prepare(text, None) for text in CAPTIONS]
    stacked = {key: torch.stack([row[key] for row in batch]) for key in batch[0]}
    tower.module.eval()
    out = tower.module(stacked)
    assert out.shape == (len(CAPTIONS), DIM)
    row = {key: value[1:2, :8] for key, value in stacked.items()}
    # Rounding of fp32 over 77 positions, one of which is not padding.
    assert torch.allclose(tower.module(row), out[1:2], atol=1e-5)
    assert tower.module.encoder.model.pooler.dense.weight.requires_grad == (pool is None)
    pickle.dumps(tower.prepare)


def test_a_tokenizer_in_the_folder_is_used(bert):
    (bert / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "greek", "letter"]), "utf-8")
    (bert / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}', "utf-8")
    tower = build(Config(f"transformers:{bert}", {"length": 6}))
    prepared = pickle.loads(pickle.dumps(tower.prepare))("greek letter nothing", None)
    assert prepared["input_ids"].tolist() == [2, 5, 6, 1, 3, 0]
    assert prepared["attention_mask"].tolist() == [1, 1, 1, 1, 1, 0]
    assert tower.prepare("greek " * 10_000, None)["input_ids"].shape == (6,)


def test_weights_in_a_folder_of_transformers_are_used_and_pickles_refused(bert):
    from transformers import AutoConfig, AutoModel

    model = AutoModel.from_config(AutoConfig.from_pretrained(bert))
    (bert / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match="pickled weights, which are not read"):
        build(Config(f"transformers:{bert}"))
    model.save_pretrained(bert)
    loaded = build(Config(f"transformers:{bert}")).module.encoder.model
    assert torch.equal(loaded.pooler.dense.weight, model.pooler.dense.weight)


def test_checkpointing_uses_the_switch_of_transformers(bert):
    tower = build(Config(f"transformers:{bert}", checkpointing=True))
    assert tower.module.encoder.model.is_gradient_checkpointing


def test_a_vocabulary_too_small_for_bytes_is_refused(bert):
    (bert / "config.json").write_text((bert / "config.json").read_text("utf-8").replace("258", "257"), "utf-8")
    with pytest.raises(ValueError, match="vocabulary of 257 is too small for bytes, which need 258"):
        build(Config(f"transformers:{bert}"))
    with pytest.raises(ValueError, match="has no option 'size'; its options are pool, length"):
        build(Config(f"transformers:{bert}", {"size": 3}))


def test_an_image_model_of_transformers_from_its_configuration(tmp_path):
    from transformers import ResNetConfig, ViTConfig

    vit = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8)
    vit.save_pretrained(tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_text('{"image_mean": [0.0, 0.0, 0.0], "image_std": [1, 1, 1]}', "utf-8")
    ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1]).save_pretrained(tmp_path / "resnet")
    tower = build(Config(f"transformers:{tmp_path / 'vit'}", {"pool": "mean"}))
    assert tower.prepare == PrepareImage(16)
    assert not tower.module.pixels.offset.any()
    assert tower.module(rows(tower)).shape == (len(CAPTIONS), DIM)
    for pool in ("mean", "pooler"):
        tower = build(Config(f"transformers:{tmp_path / 'resnet'}", {"size": 32, "crop": 0.5, "pool": pool}))
        assert tower.prepare == PrepareImage(32, crop=0.5)
        assert tower.module(rows(tower)).shape == (len(CAPTIONS), DIM)


def test_a_model_of_timm_with_its_own_size_and_weights(tmp_path):
    import timm

    torch.manual_seed(5)
    theirs = timm.create_model("test_vit", num_classes=10).eval()
    torch.save(theirs.state_dict(), tmp_path / "theirs.pt")
    tower = build(Config("timm:test_vit", {"crop": 0.5}, weights=str(tmp_path / "theirs.pt"), checkpointing=True))
    assert tower.prepare == PrepareImage(theirs.pretrained_cfg["input_size"][-1], crop=0.5)
    assert tower.module(rows(tower)).shape == (len(CAPTIONS), DIM)
    x = torch.randn(2, 3, 160, 160)
    assert torch.equal(tower.module.encoder.eval()(x), theirs.forward_head(theirs.forward_features(x), pre_logits=True))
    tower = build(Config("timm:vit_tiny_patch16_224", {"size": 32, "channels": 1, "depth": 1}))
    assert tower.module(rows(tower)).shape == (len(CAPTIONS), DIM)


def test_both_towers_of_open_clip_with_their_weights(tmp_path):
    import open_clip

    options = {
        "vision_cfg": {"layers": 1, "width": 32, "image_size": 32, "patch_size": 16, "head_width": 16},
        "text_cfg": {"layers": 1, "width": 32, "heads": 2, "vocab_size": 49408},
    }
    theirs = open_clip.create_model("ViT-S-32", embed_dim=8, **options).eval()
    torch.save(theirs.state_dict(), tmp_path / "theirs.pt")
    options |= {"embed_dim": 8}
    image_tower, text_tower = (
        build(Config("open_clip:ViT-S-32", options, weights=str(tmp_path / "theirs.pt"), checkpointing=True), side) for side in "xy"
    )
    assert image_tower.prepare == PrepareImage(32)
    tokens = torch.stack([pickle.loads(pickle.dumps(text_tower.prepare))(text, None) for text in CAPTIONS])
    assert torch.allclose(text_tower.module.eval().encoder(tokens), theirs.encode_text(tokens), atol=1e-6)
    x = torch.randn(2, 3, 32, 32)
    assert torch.allclose(image_tower.module.eval().encoder(x), theirs.encode_image(x), atol=1e-6)
    assert image_tower.module(rows(image_tower)).shape == text_tower.module(tokens).shape == (len(CAPTIONS), DIM)
    assert build(Config("open_clip:ViT-S-32", {**options, "part": "text"}), "x").kind == "text"


def test_a_library_in_the_table_is_found_by_its_prefix(monkeypatch):
    library = TowerLibrary("mine:NAME", lambda request: pytest.fail("nothing is built here"))
    assert names_code("mine:small")
    monkeypatch.setitem(LIBRARIES, "mine", library)
    assert find_library("mine:small") is library and not names_code("mine:small")
