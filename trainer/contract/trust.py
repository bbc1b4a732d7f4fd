"""Checks who owns a file or folder and who else can write to it, as ssh does for its own files."""

from __future__ import annotations

import errno
import grp
import io
import os
import pwd
import stat
from collections.abc import Collection
from pathlib import Path

from trainer.contract.errors import UserError
from trainer.contract.paths import is_shared, open_below

# The maximum number of links in a path, as in Linux.
_MOST_LINKS = 40


def user_of(uid: int) -> str:
    """Return the login name of a user, or `uid 1234` if there is no user with this id."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def sharing(folder: Path) -> str:
    """Return who is sharing a folder, such as `group ml (12 members)`; "" if the folder is not shared."""
    if not is_shared(folder):
        return ""
    gid = folder.stat().st_gid
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return f"group {gid}"
    # A group's entry does not list the users for whom it is the primary group.
    members = {*group.gr_mem, *(user.pw_name for user in pwd.getpwall() if user.pw_gid == gid)}
    return f"group {group.gr_name} ({len(members)} member{'s' * (len(members) != 1)})"


def distrust_of_folder(folder: Path) -> str:
    """Return why jobs must not be stored in a folder, or ""; anyone who can write to the folder controls the jobs."""
    try:
        status = folder.stat()
    except OSError:
        return ""  # the file is missing, or opening it reports the error
    if status.st_mode & stat.S_IWOTH:
        return f"any user may write to {folder}; `chmod o-w` it"
    if status.st_uid not in (os.geteuid(), 0) and not is_shared(folder):
        return f"{folder} belongs to {user_of(status.st_uid)} and is shared with no group"
    return ""


def distrust_of_file(file: Path) -> str:
    """Return why a file's content must not be trusted, for example because of its owner; "" if it can be trusted."""
    return distrust_of_open(file, file.stat())


def distrust_of_program(program: Path) -> str:
    """Return why a program must not be run, or "" if only this user and root can change it.

    Each folder and link on the path is also checked: anyone who can change one of them controls which program is run.
    `program` is an absolute path. Raise `OSError` if the program does not exist.
    """
    place, rest, n_links = Path("/"), list(reversed(program.parts)), 0
    while rest:
        name = rest.pop()
        if name == "..":
            # `place` contains no links, so its parent has already been checked.
            place = place.parent
            continue
        step = place / name
        status = step.lstat()
        if why := _changed_by_others(step, status):
            return why
        if stat.S_ISLNK(status.st_mode):
            n_links += 1
            if n_links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(program))
            rest += reversed(step.readlink().parts)
        else:
            place = step
    return ""


def distrust_of_searched(folder: Path) -> str:
    """Return why programs found in a folder must not be run, or "" if only this user and root can add programs.

    This check is stricter than `distrust_of_program` because others can add programs to a sticky folder such as /tmp.
    Raise `OSError` if the folder does not exist.
    """
    return distrust_of_program(folder) or _changed_by_others(folder, folder.stat(), may_be_sticky=False)


def _changed_by_others(step: Path, status: os.stat_result, *, may_be_sticky: bool = True) -> str:
    if status.st_uid not in (os.geteuid(), 0):
        return f"{step} belongs to {user_of(status.st_uid)}"
    # In a sticky folder such as /tmp, only the owner of an entry can replace it.
    is_sticky = may_be_sticky and stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    # The mode of a link is meaningless.
    if stat.S_ISLNK(status.st_mode) or is_sticky or not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return ""
    return f"others may write to {step}; `chmod go-w` it"


def open_own(file: Path, owners: Collection[int] = ()) -> io.BufferedReader:
    """Open a file that controls what programs do on behalf of this user.

    Raise `UserError` if anyone other than this user and root (or, if given, the users in `owners`) can write to the
    file, and `OSError` if it is missing.
    """
    descriptor = open_below(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    # Check the open file, because the path may refer to a different file by now.
    if why := distrust_of_open(file, os.fstat(descriptor), owners=owners):
        os.close(descriptor)
        raise UserError(f"{file.name} is ignored, because {why}")
    return open(descriptor, "rb")


def distrust_of_open(file: Path, status: os.stat_result, *, pipes: bool = False, owners: Collection[int] = ()) -> str:
    """Return the same as `distrust_of_file` for an open file with this status; with `pipes`, also allow pipes.

    `owners` replaces this user and root as the users whose files are trusted.
    """
    if not (stat.S_ISREG(status.st_mode) or (pipes and stat.S_ISFIFO(status.st_mode))):
        return f"{file} is not a plain file"
    if status.st_uid not in (owners or (os.geteuid(), 0)):
        return f"{file} belongs to {user_of(status.st_uid)}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to {file}; `chmod go-w` it"
    return ""
