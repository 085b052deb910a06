"""Benchmark of the time prediction: predicted and measured seconds of training steps."""
