"""Determines the user's login name, which is recorded as each job's owner, and the user's home folder."""

from __future__ import annotations

import functools
import getpass
import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from trainer.contract.errors import UserError


@functools.cache
def user_name() -> str:
    """Return this user's login name, or text like `uid 1234` if the user has no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def home_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return this user's home folder; raise `UserError` if the user has none, as in some containers."""
    try:
        home = Path(environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        home = Path()
    if not home.is_absolute():
        raise UserError(f"the user with id {os.getuid()} has no home folder; set HOME")
    return home
