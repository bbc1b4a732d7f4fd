"""Reads the metrics that a command's program reports, and measures its processes, while it runs."""
