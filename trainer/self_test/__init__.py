"""Whether a device trains right: what only running on it can tell, checked against float64 and the CPU."""
