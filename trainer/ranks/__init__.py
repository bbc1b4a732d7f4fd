"""Starts and stops a run's processes, and chooses their devices."""
