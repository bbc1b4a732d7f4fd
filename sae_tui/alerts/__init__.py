"""Alerts: lasting problems of this machine that a user should know about. It contains no UI code."""
