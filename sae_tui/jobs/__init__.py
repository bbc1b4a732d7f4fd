"""Chooses GPUs for jobs, and launches, supervises and reads jobs, independently of the screens."""
