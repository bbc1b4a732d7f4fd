"""Checks this machine, session and terminal for problems with training. This package contains no UI code."""
