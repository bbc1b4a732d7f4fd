"""Arithmetic and memory of a rank's device."""
