"""Tests whether a device trains correctly, by comparison with float64 and with training on the CPU."""
