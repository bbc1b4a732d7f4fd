"""Chooses GPUs for jobs, and launches, supervises and reads jobs; independent of the screens."""
