"""Launches jobs: determines a job's settings, placement and memory requirement, and starts its supervisor."""
