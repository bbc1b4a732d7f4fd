"""Alerts about lasting problems of this machine. This package contains no UI code."""
