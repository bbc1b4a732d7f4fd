"""Determines who holds which GPU: other processes, our jobs, and the locks that reserve GPUs."""
