"""Controls the arithmetic and memory of a rank's device."""
