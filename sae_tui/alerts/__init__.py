"""Raises alerts about persistent problems on this machine. This package contains no UI code."""
