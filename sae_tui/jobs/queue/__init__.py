"""Queued jobs: their order, their reasons for waiting, and their start."""
