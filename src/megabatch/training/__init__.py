"""One run: pairs in, two encoders trained at the batch that the problem needs, checkpoints, an evaluation and a report out."""
