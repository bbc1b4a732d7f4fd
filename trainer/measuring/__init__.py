"""Measures and estimates a job before it is trained."""
