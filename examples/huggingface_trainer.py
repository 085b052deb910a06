"""Train CLIP with Hugging Face's Trainer: negatives of all GPUs, a batch larger than memory, and an audit of the arguments.

python examples/huggingface_trainer.py                                         # a tiny model on random pairs, without a download
torchrun --nproc-per-node 2 examples/huggingface_trainer.py
python examples/huggingface_trainer.py --model openai/clip-vit-base-patch32 --batch 1024 --chunk 128
"""

import argparse
import tempfile

import torch
from transformers import AutoModel, CLIPConfig, CLIPModel, TrainingArguments

from megabatch.adapters.transformers import AuditCallback, ContrastiveSettings, ContrastiveTrainer

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**SHAPE, "vocab_size": 512, "max_position_embeddings": 16, "eos_token_id": 2}


def tiny() -> CLIPModel:
    torch.manual_seed(0)
    return CLIPModel(CLIPConfig(text_config=TEXT, vision_config={**SHAPE, "image_size": 32, "patch_size": 8}, projection_dim=32))


class Pairs(torch.utils.data.Dataset):
    """Random pairs: put your data set here, with a processor's `pixel_values`, `input_ids` and `attention_mask`."""

    def __init__(self, model: CLIPModel, count: int) -> None:
        self.count, self.text, self.size = count, model.config.text_config, model.config.vision_config.image_size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(index)
        tokens = torch.randint(3, self.text.vocab_size, (self.text.max_position_embeddings,), generator=g)
        tokens[-1] = self.text.eos_token_id
        return {"pixel_values": torch.randn(3, self.size, self.size, generator=g), "input_ids": tokens}


def main(words: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="A name or folder of a CLIP or SigLIP model.")
    parser.add_argument("--batch", type=int, default=32, help="Pairs of a step on each rank.")
    parser.add_argument("--chunk", type=int, default=8, help="Pairs that go through the model at once.")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args(words)

    model = AutoModel.from_pretrained(args.model) if args.model else tiny()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=args.batch,
            max_steps=args.steps,
            learning_rate=1e-3,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = ContrastiveTrainer(
            model,
            arguments,
            train_dataset=Pairs(model, 4 * args.batch),
            contrastive=ContrastiveSettings(chunk=args.chunk),
            callbacks=[AuditCallback(fail_on=None, objective="clip", gather="exact")],
        )
        return trainer.train().training_loss


if __name__ == "__main__":
    main()
