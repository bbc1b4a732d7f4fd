"""Raises alerts about persistent problems of this machine. This package contains no UI code."""
