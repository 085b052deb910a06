"""Benchmark of the memory prediction: predicted and measured memory of training steps."""
