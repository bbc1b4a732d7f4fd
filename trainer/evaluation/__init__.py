"""Evaluates trained SAEs on held-out rows, and writes metrics with their standard errors to report cards."""
