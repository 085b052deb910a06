"""Benchmark of whole training steps: encoders in chunks, compared with other methods for large batches."""
