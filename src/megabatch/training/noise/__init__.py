"""The noise of the gradient: how it is seen while training, and what it says of the batch."""
