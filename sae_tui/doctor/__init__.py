"""Checks this machine, session and terminal for problems with training. It contains no UI code."""
