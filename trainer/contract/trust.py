"""Whose files these are, and who else may write to them; as ssh looks at its own."""

from __future__ import annotations

import grp
import io
import os
import pwd
import stat
from pathlib import Path

from trainer.contract.errors import UserError
from trainer.contract.paths import is_shared


def user_of(uid: int) -> str:
    """The login name, or `uid 1234` where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def sharing(folder: Path) -> str:
    """Who shares a folder: `group ml (12 members)`; nothing where it is for one user."""
    if not is_shared(folder):
        return ""
    gid = folder.stat().st_gid
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return f"group {gid}"
    # Those who have it as their first group are not listed with it.
    members = {*group.gr_mem, *(user.pw_name for user in pwd.getpwall() if user.pw_gid == gid)}
    return f"group {group.gr_name} ({len(members)} member{'s' * (len(members) != 1)})"


def distrust_of_folder(folder: Path) -> str:
    """Why jobs may not be kept in a folder: who may write there can have them run what he likes. Nothing is ''."""
    try:
        found = folder.stat()
    except OSError:
        return ""  # not there yet, or told by who opens it
    if found.st_mode & stat.S_IWOTH:
        return f"anybody may write to {folder}; `chmod o-w` it"
    if found.st_uid not in (os.geteuid(), 0) and not is_shared(folder):
        return f"{folder} belongs to {user_of(found.st_uid)} and is shared with no group"
    return ""


def distrust_of_file(file: Path) -> str:
    """Why what a file says is not done as its reader: somebody else may have written it. Nothing is ''."""
    return _distrust(file, file.stat())


def open_own(file: Path) -> io.BufferedReader:
    """Open a file of which what it says is done as its reader: of this user, or root, who alone may write to it.

    Raises `UserError` for any other, and `OSError` where there is none.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    # Of what was opened: the name may be another file's by now.
    if why := _distrust(file, os.fstat(descriptor)):
        os.close(descriptor)
        raise UserError(f"what {file.name} says is not done, for {why}")
    return open(descriptor, "rb")


def _distrust(file: Path, found: os.stat_result) -> str:
    if not stat.S_ISREG(found.st_mode):
        return f"{file} is not a plain file"
    if found.st_uid not in (os.geteuid(), 0):
        return f"{file} belongs to {user_of(found.st_uid)}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to {file}; `chmod go-w` it"
    return ""
