"""Checks of who owns a file or folder and who else may write to it, as ssh checks its own files."""

from __future__ import annotations

import errno
import grp
import io
import os
import pwd
import stat
from pathlib import Path

from trainer.contract.errors import UserError
from trainer.contract.paths import is_shared, open_below

# As many as Linux follows.
_MOST_LINKS = 40


def user_of(uid: int) -> str:
    """Return the login name of a user, or `uid 1234` where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def sharing(folder: Path) -> str:
    """Describe who shares a folder: `group ml (12 members)`; return "" where it is one user's."""
    if not is_shared(folder):
        return ""
    gid = folder.stat().st_gid
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return f"group {gid}"
    # A group's entry does not list those who have it as their primary group.
    members = {*group.gr_mem, *(user.pw_name for user in pwd.getpwall() if user.pw_gid == gid)}
    return f"group {group.gr_name} ({len(members)} member{'s' * (len(members) != 1)})"


def distrust_of_folder(folder: Path) -> str:
    """Explain why jobs may not be kept in a folder, or return "": whoever writes there decides what they run."""
    try:
        status = folder.stat()
    except OSError:
        return ""  # not there yet, or reported by whoever opens it
    if status.st_mode & stat.S_IWOTH:
        return f"anybody may write to {folder}; `chmod o-w` it"
    if status.st_uid not in (os.geteuid(), 0) and not is_shared(folder):
        return f"{folder} belongs to {user_of(status.st_uid)} and is shared with no group"
    return ""


def distrust_of_file(file: Path) -> str:
    """Explain why not to act on a file's content, since others may have written it; return "" where it is trusted."""
    return distrust_of_open(file, file.stat())


def distrust_of_program(program: Path) -> str:
    """Explain why not to run a program, since others may change it; return "" where only this user and root can.

    Looks at each folder and link on the way as well: whoever may write to one decides what is run. `program` is
    absolute. Raises `OSError` where there is none.
    """
    place, rest, n_links = Path("/"), list(reversed(program.parts)), 0
    while rest:
        name = rest.pop()
        if name == "..":
            # Without links in it, the way back is the way that was checked.
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
    """Explain why not to run what is found in a folder; return "" where only this user and root add to it.

    Like `distrust_of_program`, but in a folder like /tmp others can add what would be found. Raises `OSError`.
    """
    return distrust_of_program(folder) or _changed_by_others(folder, folder.stat(), may_be_sticky=False)


def _changed_by_others(step: Path, status: os.stat_result, *, may_be_sticky: bool = True) -> str:
    if status.st_uid not in (os.geteuid(), 0):
        return f"{step} belongs to {user_of(status.st_uid)}"
    # In a folder like /tmp only its owner can replace an entry.
    is_sticky = may_be_sticky and stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    # The mode of a link says nothing.
    if stat.S_ISLNK(status.st_mode) or is_sticky or not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return ""
    return f"others may write to {step}; `chmod go-w` it"


def open_own(file: Path) -> io.BufferedReader:
    """Open a file whose content is acted on with the reader's rights: only this user or root may own and write to it.

    Raises `UserError` for any other file, and `OSError` where there is none.
    """
    descriptor = open_below(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    # Checked on the open file: the name may lead to another one by now.
    if why := distrust_of_open(file, os.fstat(descriptor)):
        os.close(descriptor)
        raise UserError(f"what {file.name} says is not done, for {why}")
    return open(descriptor, "rb")


def distrust_of_open(file: Path, status: os.stat_result, *, pipes: bool = False) -> str:
    """Explain like `distrust_of_file`, by the status of a file that is open already; with `pipes` also of these."""
    if not (stat.S_ISREG(status.st_mode) or (pipes and stat.S_ISFIFO(status.st_mode))):
        return f"{file} is not a plain file"
    if status.st_uid not in (os.geteuid(), 0):
        return f"{file} belongs to {user_of(status.st_uid)}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to {file}; `chmod go-w` it"
    return ""
