"""Measures and estimates a job before it runs."""
