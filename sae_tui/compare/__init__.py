"""Comparing runs without a screen: their curves, settings and results, as text, pictures and tables."""
