"""Starts and stops the processes in a run, and chooses their devices."""
