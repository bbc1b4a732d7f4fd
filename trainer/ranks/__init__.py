"""Starts and ends the processes of a run, and chooses their devices."""
