"""The timed steps: the models that the efficiencies of the time model were fitted on, and models that were held out."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.memory_accuracy.cases import Case

# The models that the shares of `costs.devices.Efficiency` were fitted on; every other model is held out.
CALIBRATION = ("resnet50", "vit_base_patch16_224", "bert-base", "gpt2", "clip-vit-b-32", "clip-vit-l-14")


def cases() -> Iterator[Case]:
    """Yield steps of images, texts and pairs, in both precisions, whole, checkpointed and in chunks."""
    for rows in (64, 256):
        yield Case("resnet50", rows, "bf16")
        yield Case("vit_base_patch16_224", rows, "bf16")
    yield Case("resnet50", 128)
    yield Case("vit_base_patch16_224", 64)
    for precision in ("fp32", "bf16"):
        yield Case("bert-base", 32, precision)
        yield Case("gpt2", 8, precision)
    yield Case("gpt2", 16, "bf16", checkpointing=True)
    yield Case("clip-vit-b-32", 512, "bf16", objective="clip")
    yield Case("clip-vit-b-32", 4096, "bf16", objective="clip", chunk=256)
    yield Case("clip-vit-l-14", 128, "bf16", objective="clip")
    yield Case("clip-vit-l-14", 1024, "bf16", objective="clip", chunk=64)
    yield Case("clip-vit-b-16", 256, "bf16", objective="clip")
    yield Case("clip-vit-b-16", 2048, "bf16", objective="siglip", chunk=128, keep=2)
    yield Case("clip-vit-b-16", 1024, "bf16", objective="clip", chunk=256)
    yield Case("vit_large_patch14_224", 64, "bf16")
    yield Case("vit_large_patch14_224", 64, "bf16", checkpointing=True)
    yield Case("gpt2-medium", 8, "bf16")
    yield Case("gpt2-medium", 4)
    for name in ("vit_small_patch16_224", "swin_tiny_patch4_window7_224", "mixer_b16_224", "convnext_tiny"):
        yield Case(name, 128, "bf16")
    for name in ("resnext50_32x4d", "densenet121", "efficientnet_b0", "mobilenetv3_large_100", "regnety_032", "resnet101"):
        yield Case(name, 128, "bf16")
    for name in ("vgg16", "convnext_tiny", "resnet101"):
        yield Case(name, 64)


def fresh_cases() -> Iterator[Case]:
    """Yield steps of models that were added after the fit: they were predicted before they were measured."""
    yield Case("resnet18", 256, "bf16")
    for name in ("seresnet50", "regnetx_032", "mobilenetv2_100", "gmlp_s16_224", "tf_efficientnetv2_s"):
        yield Case(name, 128, "bf16")
    for name in ("convnextv2_tiny", "beit_base_patch16_224", "pvt_v2_b2"):
        yield Case(name, 128, "bf16")
    yield Case("resmlp_24_224", 256, "bf16")
    yield Case("vit_base_patch32_224", 512, "bf16")
    for name in ("wide_resnet50_2", "deit3_small_patch16_224"):
        yield Case(name, 64)
    yield Case("roberta-base", 32, "bf16")
    yield Case("distilbert", 32)
    for name in ("pythia-160m", "llama-small"):
        yield Case(name, 16, "bf16")


def diagnosed_cases() -> Iterator[Case]:
    """Yield steps of models whose operations the other models do not have; large errors of theirs led to classes of operations."""
    for name in ("xcit_small_12_p16_224", "cait_s24_224", "poolformer_s24", "twins_svt_small", "edgenext_small"):
        yield Case(name, 128, "bf16")
    yield Case("deit_tiny_patch16_224", 64, "bf16")
    yield Case("qwen3-0.6b", 8, "bf16")


def held_out(case: Case) -> bool:
    return case.model not in CALIBRATION
