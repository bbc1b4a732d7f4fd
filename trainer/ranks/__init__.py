"""Starts and stops the processes of a run, and chooses their devices."""
