"""Estimates, without torch, whether a job fits into memory, how long it takes, and how its ranks share the work."""
