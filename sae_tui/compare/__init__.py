"""Comparison of runs without a screen: curves, settings and results, as text, pictures and tables."""
