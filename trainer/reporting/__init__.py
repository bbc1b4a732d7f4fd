"""Writes a run's metrics, progress and log."""
