"""Estimates whether a job fits, how long it takes, and how its ranks share the work; loads no torch."""
