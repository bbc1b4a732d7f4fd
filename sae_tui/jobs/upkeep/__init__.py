"""Deletes, restores and repairs jobs, and checks the disk on which jobs are stored."""
