"""Queued jobs: their order, their reasons to wait, and their start."""
