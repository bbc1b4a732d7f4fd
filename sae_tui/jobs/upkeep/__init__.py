"""Deletes, restores and repairs jobs, and checks the disk that stores them."""
