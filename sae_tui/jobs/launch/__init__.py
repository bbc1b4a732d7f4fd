"""Launching: a job's settings, its placement, its memory need, and the start of its supervisor."""
