"""Choosing GPUs, launching, supervising and reading jobs; knows nothing of a screen."""
