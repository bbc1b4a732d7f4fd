"""Checks whether the queue restarts after a reboot, and installs a user service that restarts it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from sae_tui.doctor.base import CheckedMachine, Finding
from sae_tui.jobs.user import home_folder, user_name
from trainer.contract.errors import UserError, sentence
from trainer.contract.files import write_own
from trainer.contract.paths import DataDir, private_folder

_INSTALL = "`sae-tui doctor --install-service` installs a user service that restarts them"
_LINGER = "run `loginctl enable-linger` once"
# KillMode=process is needed because supervisors belong to the service's control group but must outlive its main
# process.
_UNIT = """\
[Unit]
Description=Restart the queue of sae-tui after a restart of the machine

[Service]
Type=oneshot
RemainAfterExit=yes
KillMode=process
ExecStart={command}

[Install]
WantedBy=default.target
"""


def check_queue_service(box: CheckedMachine) -> Iterator[Finding]:
    """Report what happens to queued jobs when the machine reboots."""
    by_command = "after a reboot, queued jobs continue when you next run a command or the app"
    if not _has_systemd(box):
        yield Finding("ok", "restart", f"{by_command}; this machine does not run systemd")
    elif not _is_installed(box):
        yield Finding("note", "restart", by_command, _INSTALL)
    elif (box.root / "var/lib/systemd/linger" / (box.environ.get("USER") or user_name())).exists():
        yield Finding("ok", "restart", f"after a reboot, {name_of(box.data)} restarts queued jobs")
    else:
        late = f"after a reboot, {name_of(box.data)} starts at your first login"
        yield Finding("note", "restart", late, _LINGER)


def install(box: CheckedMachine) -> None:
    """Write and enable the user service; raise `UserError` on failure."""
    if not _has_systemd(box):
        raise UserError(
            "--install-service: this machine does not run systemd; queued jobs continue with your next command"
        )
    name = name_of(box.data)
    file = _folder(box) / name
    try:
        private_folder(file.parent, "--install-service")
        write_own(file, unit(box.data).encode())
    except OSError as error:
        raise UserError(f"--install-service: {file} cannot be written: {sentence(error)}") from None
    _, failure = box.output(["systemctl", "--user", "enable", name])
    if failure:
        later = f"run `systemctl --user enable {name}` after a login without su or sudo"
        raise UserError(f"--install-service: {file} was written, but cannot be enabled: systemctl: {failure}; {later}")


def name_of(data: DataDir) -> str:
    """Return the name of a data folder's user service; each folder has its own."""
    return f"sae-tui-queue-{hashlib.sha256(os.fsencode(data.root)).hexdigest()[:8]}.service"


def unit(data: DataDir) -> str:
    """Return the unit file for a data folder's user service."""
    program, *words = map(_quoted, [sys.executable, "-P", "-m", "sae_tui.jobs.revive", str(data.root)])
    # systemd expands variables only in arguments, not in the program path.
    return _UNIT.format(command=" ".join([program, *(word.replace("$", "$$") for word in words)]))


def _quoted(word: str) -> str:
    """Quote an argument for systemd.service(5), which expands % and escapes; a line break would start a new setting."""
    for char, written in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%")):
        word = word.replace(char, written)
    return '"' + "".join(char if char.isprintable() else _escaped(char) for char in word) + '"'


def _escaped(char: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in char.encode())


def _has_systemd(box: CheckedMachine) -> bool:
    return (box.root / "run/systemd/system").exists()


def _is_installed(box: CheckedMachine) -> bool:
    """Return whether the service is enabled for this data folder."""
    name = name_of(box.data)
    with contextlib.suppress(OSError, UserError):
        enabled = os.path.lexists(_folder(box) / "default.target.wants" / name)
        return enabled and (_folder(box) / name).read_text() == unit(box.data)
    return False


def _folder(box: CheckedMachine) -> Path:
    config = box.environ.get("XDG_CONFIG_HOME") or home_folder(box.environ) / ".config"
    return Path(config) / "systemd" / "user"
