"""Evaluates a job's SAEs in a separate process, and reads the evaluation's progress and results."""
