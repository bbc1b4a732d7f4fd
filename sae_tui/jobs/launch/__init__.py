"""Launches jobs: determines a job's settings, placement and memory need, and starts its supervisor."""
