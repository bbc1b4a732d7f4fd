"""Tests whether a device trains correctly, by comparing it with float64 and with training on the CPU."""
