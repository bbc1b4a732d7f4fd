"""Seeing GPUs: sources, sampler, ring and history; knows nothing of a screen."""
