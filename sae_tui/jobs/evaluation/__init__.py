"""Evaluates a job's SAEs in a separate process: request, progress and result."""
