"""Checks that no other user can read or write the user's data or act as the user, as SECURITY.md promises."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from sae_tui.doctor.base import CheckedMachine, Finding
from sae_tui.settings import load_settings
from trainer.contract.errors import UserError
from trainer.contract.paths import is_shared, numbered
from trainer.contract.trust import distrust_of_folder, sharing, user_of
from trainer.contract.wording import plural

OTHERS, GROUP_AND_OTHERS = 0o007, 0o077


def check_owner(box: CheckedMachine) -> Iterator[Finding]:
    """Report the data folder's owner, and the group that shares it."""
    root = box.data.root
    if not os.path.exists(root):
        return
    if why := distrust_of_folder(root):
        sentence, _, remedy = why.partition("; ")
        yield Finding("error", "owner", sentence, remedy or "choose a folder that you own with --data-dir")
    elif members := sharing(root):
        remedy = f"any member can act as any other member there; `chmod 700 {root}` restricts it to you"
        yield Finding("note", "owner", f"{root} is shared with {members}", remedy)
    else:
        yield Finding("ok", "owner", f"{root} belongs to {user_of(root.stat().st_uid)}")


def check_readers(box: CheckedMachine) -> Iterator[Finding]:
    """Check file modes: new files are accessible only to their owner, but older or copied ones may be exposed."""
    root = box.data.root
    if not os.path.exists(root):
        return
    whom, closed = ("others", "o=") if is_shared(root) else ("group and others", "go=")
    mask = OTHERS if is_shared(root) else GROUP_AND_OTHERS
    exposed = list(_open_to(root, mask)) if all(_lets_in(folder, mask) for folder in root.resolve().parents) else []
    if not exposed:
        yield Finding("ok", "readers", f"no other user can access {root}")
        return
    are = "is" if len(exposed) == 1 else "are"
    sentence = f"{plural(len(exposed), 'file')} in {root} {are} open to {whom}, such as {exposed[0].relative_to(root)}"
    yield Finding("warning", "readers", sentence, f"`chmod -R {closed} {root}`")


def _open_to(folder: Path, whom: int) -> Iterator[Path]:
    """Yield the files under a folder that the users in `whom`, a mask of mode bits, have permission to read or write.

    Skip folders that these users may not enter.
    """
    with contextlib.suppress(OSError):  # a running job may create and remove files during this check
        if _lets_in(folder, whom):
            for entry in sorted(folder.iterdir()):
                yield from _open_entry(entry, whom)


def _open_entry(entry: Path, whom: int) -> Iterator[Path]:
    """Yield a file if it is open to the users in `whom`; for a folder, yield the open files under it."""
    with contextlib.suppress(FileNotFoundError):
        mode = entry.lstat().st_mode
        if stat.S_ISDIR(mode):
            yield from _open_to(entry, whom)
        elif stat.S_ISREG(mode) and mode & whom & 0o666:
            yield entry


def _lets_in(folder: Path, whom: int) -> bool:
    """Return whether others may enter a folder; even if they cannot list it, they can guess names such as job ids."""
    return bool(folder.stat().st_mode & whom & 0o111)


def check_links(box: CheckedMachine) -> Iterator[Finding]:
    """Report symbolic links that stand in for folders in which sae-tui writes and deletes files."""
    runs = box.data.root / "runs"
    ids = [int(folder.name) for folder in numbered(runs)] if runs.is_dir() and not runs.is_symlink() else []
    for job_id in (None, *sorted(ids)):
        try:
            box.data.refuse_links(job_id)
        except UserError as error:
            sentence, _, remedy = str(error).partition("; ")
            yield Finding("error", "links", sentence, remedy)
            return


def check_hook(box: CheckedMachine) -> Iterator[Finding]:
    """Report a command in the settings that is not run because another user may have written it."""
    file = box.data.settings_file
    for problem in load_settings(file)[1]:
        if problem.path == "on_job_end":
            sentence, _, remedy = problem.message.partition("; ")
            yield Finding("warning", "on_job_end", sentence, remedy or f"write it to a {file} that you own")
