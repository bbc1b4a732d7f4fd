"""Controls arithmetic and memory on a rank's device."""
