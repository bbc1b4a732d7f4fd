"""Activation sources, and the order in which training uses their rows."""
