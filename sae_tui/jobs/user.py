"""The login name recorded as a job's owner."""

from __future__ import annotations

import functools
import getpass
import os


@functools.cache
def user_name() -> str:
    """Return the login name, or `uid 1234` for a uid without a name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"
