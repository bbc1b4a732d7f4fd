"""Deletes, restores and repairs jobs, and checks the disk they are stored on."""
