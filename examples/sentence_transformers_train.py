"""Train a text-embedding model in Sentence Transformers' own trainer, at a batch size that its encoder could not hold.

    python examples/sentence_transformers_train.py                                   # offline: a small BERT with random weights
    python examples/sentence_transformers_train.py --model microsoft/mpnet-base --data pairs.csv --batch 4096
    torchrun --nproc-per-node 8 examples/sentence_transformers_train.py --model …    # negatives of all GPUs

pairs.csv has a column of anchors, one of positives, and any number of hard negatives. The one line that differs from a training
with Sentence Transformers' CachedMultipleNegativesRankingLoss is the import of the loss.
"""

from __future__ import annotations

import argparse
import random
import tempfile

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments

from megabatch.adapters.sentence_transformers import MultipleNegativesRankingLoss


def main(arguments: list[str] | None = None) -> float:
    """Train, and return the loss of the last step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model of the Hugging Face Hub or a folder; default: a small one with random weights")
    parser.add_argument("--data", help="a CSV file of texts; default: random words, each positive with most words of its anchor")
    parser.add_argument("--batch", type=int, default=256, help="pairs of one step and process")
    parser.add_argument(
        "--tokens", type=int, default=16384, help="tokens that go through the encoder at once: this decides the memory"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", help="folder for the trained model")
    options = parser.parse_args(arguments)

    data = Dataset.from_csv(options.data) if options.data else made_up_pairs(options.batch * options.steps)
    model = SentenceTransformer(options.model) if options.model else small_model()
    loss = MultipleNegativesRankingLoss(
        model,
        mini_batch_num_tokens=options.tokens,
        gather_across_devices=True,  # on one process this has no effect
        duplicates="mask",  # texts that occur twice in a batch are no negatives of each other
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = SentenceTransformerTrainer(
            model=model,
            args=SentenceTransformerTrainingArguments(
                output_dir=options.out or folder,
                per_device_train_batch_size=options.batch,
                max_steps=options.steps,
                learning_rate=2e-5 if options.model else 1e-3,
                bf16=torch.cuda.is_available(),
                logging_steps=max(1, options.steps // 10),
                report_to="none",
                save_strategy="no",
            ),
            train_dataset=data,
            loss=loss,
        )
        trainer.train()
        if options.out:
            model.save_pretrained(options.out)
    return float(next(entry["loss"] for entry in reversed(trainer.state.log_history) if "loss" in entry))


def made_up_pairs(rows: int) -> Dataset:
    """Return random texts of different lengths; a positive is its anchor in another order, without some words."""
    chooser = random.Random(0)
    words = [f"w{number}" for number in range(500)]
    anchors = [chooser.choices(words, k=3 + int(20 * chooser.random() ** 3)) for _ in range(rows)]
    positives = [chooser.sample(anchor, k=max(2, len(anchor) * 3 // 4)) for anchor in anchors]
    return Dataset.from_dict({"anchor": [" ".join(text) for text in anchors], "positive": [" ".join(text) for text in positives]})


def small_model() -> SentenceTransformer:
    """Return a BERT of two layers with random weights and a tokenizer of whole words, without a download."""
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = {word: place for place, word in enumerate(["[PAD]", "[UNK]", *(f"w{number}" for number in range(500))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    with tempfile.TemporaryDirectory() as folder:
        BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=64, **sizes)).save_pretrained(folder)
        fast = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64)
        fast.save_pretrained(folder)
        return SentenceTransformer(modules=[Transformer(folder), Pooling(64, pooling_mode="mean")])


if __name__ == "__main__":
    main()
