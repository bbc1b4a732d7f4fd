"""Compares the curves, settings and results of runs, as text, SVG and CSV. This package contains no UI code."""
