"""Checks this machine, session and terminal for problems affecting training. This package contains no UI code."""
