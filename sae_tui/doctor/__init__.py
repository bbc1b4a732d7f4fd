"""Checks this machine, session and terminal for problems that affect training. This package contains no UI code."""
