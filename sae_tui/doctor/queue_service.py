"""Checks whether the queue continues after a restart of the machine, and installs the user service for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from sae_tui.doctor.base import Box, Finding
from sae_tui.jobs.user import user_name
from trainer.contract.errors import UserError, sentence
from trainer.contract.files import write_own
from trainer.contract.paths import DataDir, private_folder

NAME = "sae-tui-queue.service"
_INSTALL = "`sae-tui doctor --install-service` installs a user service for that"
_LINGER = "run `loginctl enable-linger`, once"
# The supervisors belong to the service's control group, and must outlive its first process.
_UNIT = """\
[Unit]
Description=Start the jobs of sae-tui that wait in line again after a restart

[Service]
Type=oneshot
RemainAfterExit=yes
KillMode=process
ExecStart={command}

[Install]
WantedBy=default.target
"""


def check_queue_service(box: Box) -> Iterator[Finding]:
    """Report what happens to queued jobs when the machine restarts."""
    by_command = "after a restart of the machine, jobs in line go on with your next command or app"
    if not (box.root / "run/systemd/system").exists():
        yield Finding("ok", "restart", f"{by_command}; systemd does not run here")
    elif not _is_installed(box):
        yield Finding("note", "restart", by_command, _INSTALL)
    elif (box.root / "var/lib/systemd/linger" / (box.environ.get("USER") or user_name())).exists():
        yield Finding("ok", "restart", f"after a restart of the machine, jobs in line go on by themselves, by {NAME}")
    else:
        yield Finding("note", "restart", f"after a restart of the machine, {NAME} starts at your first login", _LINGER)


def install(box: Box) -> str:
    """Write and enable the user service; return a sentence on what it does. Raise `UserError` if that fails."""
    file = _folder(box) / NAME
    try:
        private_folder(file.parent, "--install-service")
        write_own(file, unit(box.data).encode())
    except OSError as error:
        raise UserError(f"--install-service: {file} cannot be written: {sentence(error)}") from None
    _, failure = box.output(["systemctl", "--user", "enable", NAME])
    if failure:
        raise UserError(f"--install-service: {file} is written, but cannot be enabled: systemctl {failure}")
    return f"{file} starts the jobs that wait in {box.data.root} again after a restart of this machine"


def unit(data: DataDir) -> str:
    """Return the text of the user service for a data folder."""
    words = [sys.executable, "-P", "-m", "sae_tui.jobs.revive", str(data.root)]
    return _UNIT.format(command=" ".join(map(_quoted, words)))


def _quoted(word: str) -> str:
    """Quote a word for systemd.service(5), which expands %, $ and backslashes."""
    for char, written in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(char, written)
    return f'"{word}"'


def _is_installed(box: Box) -> bool:
    """Return whether the service is enabled for this data folder."""
    folder = _folder(box)
    try:
        return (folder / NAME).read_text() == unit(box.data) and os.path.lexists(folder / "default.target.wants" / NAME)
    except OSError:
        return False


def _folder(box: Box) -> Path:
    home = Path(box.environ.get("XDG_CONFIG_HOME") or Path(box.environ.get("HOME") or "/") / ".config")
    return home / "systemd" / "user"
