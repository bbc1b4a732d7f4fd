"""Runs jobs on machines rented through SkyPilot: task files, SkyPilot's command, and progress of a rented machine."""
