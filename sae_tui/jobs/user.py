"""Who we are."""

from __future__ import annotations

import functools
import getpass
import os


@functools.cache
def user_name() -> str:
    """The login name, or `uid 1234` of a container's uid without a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"
