"""CHOOSE, by running: the largest chunk, the throughput curve, the noise of the gradient, the sweep over batches."""
