"""Evaluates trained SAEs on held-out rows, and writes the figures with their standard errors to report cards."""
