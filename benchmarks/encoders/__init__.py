"""The benchmark of whole training steps: encoders in chunks, beside other ways to reach a batch."""
