"""Compares the curves, settings and results of runs, as text, pictures and tables. This package contains no UI code."""
