"""Activation sources, and the order in which their rows are used for training."""
