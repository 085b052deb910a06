"""Seconds of a step, predicted and measured side by side."""
