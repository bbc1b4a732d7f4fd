"""Checks whether running jobs survive the user's logout.

A process can leave its Unix session, but not the control group assigned by logind. That control group belongs to either
the login session or the user's service manager. KillUserProcesses= kills the processes in the login session. The
service manager stops with the user's last login session, unless lingering is enabled for the user.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sae_tui.doctor.base import CheckedMachine, Finding
from sae_tui.gpu import load_source
from sae_tui.jobs.detach import SESSION
from sae_tui.jobs.user import user_name
from trainer.contract.paths import DataDir

_SETTINGS = ("KillUserProcesses", "KillOnlyUsers", "KillExcludeUsers")
_MANAGER = re.compile(r"/(user@\d+\.service)")
KEEP = "`loginctl enable-linger` once; later jobs then start outside your session"


def check_logout(box: CheckedMachine) -> Iterator[Finding]:
    """Report whether jobs survive a logout, based on this process's control group."""
    user = box.environ.get("USER") or user_name()
    group = _control_group(box)
    if not (box.root / "run/systemd/system").exists():
        yield Finding("ok", "logout", "jobs continue after a logout; this machine does not run systemd")
    elif manager := _MANAGER.search(group):
        yield _of_manager(manager[1], lingers=(box.root / "var/lib/systemd/linger" / user).exists())
    elif SESSION.search(group):
        yield _of_session(box, user)
    else:
        yield Finding("ok", "logout", "jobs continue after a logout; they belong to no login session")


def guarantee(data: DataDir) -> Finding:
    """Return a finding about whether a job launched now would survive the user's logout."""
    (finding,) = check_logout(CheckedMachine(data, load_source("none")))
    return finding


def _of_manager(name: str, *, lingers: bool) -> Finding:
    """Return the finding for jobs under the user's service manager, with unit `name`."""
    if lingers:
        sentence = f"jobs continue after a logout, because lingering is enabled; they belong to {name}"
        return Finding("ok", "logout", sentence)
    sentence = f"jobs are killed soon after your last logout, because they belong to {name} and linger is off"
    return Finding("warning", "logout", sentence, "run `loginctl enable-linger` once")


def _of_session(box: CheckedMachine, user: str) -> Finding:
    """Return the finding for jobs in a login session, based on logind's settings."""
    answer, failure = box.output(["loginctl", "show-session", *(f"--property={name}" for name in _SETTINGS)])
    settings = dict(line.split("=", 1) for line in answer.splitlines() if "=" in line)
    if failure or "KillUserProcesses" not in settings:
        sentence = f"it is unknown whether jobs survive a logout: loginctl {failure or 'does not report it'}"
        return Finding("note", "logout", sentence, f"check KillUserProcesses in logind.conf; if it is yes, run {KEEP}")
    if not _kills(settings, user):
        return Finding("ok", "logout", "jobs continue after a logout; logind does not kill the processes of a session")
    if (box.root / "var/lib/systemd/linger" / user).exists():
        return Finding(
            "ok", "logout", "jobs continue after a logout, because of linger: `systemd-run --user` starts them"
        )
    return Finding(
        "warning", "logout", "jobs end when you log out, because of logind's KillUserProcesses=yes", f"run {KEEP}"
    )


def _kills(settings: dict[str, str], user: str) -> bool:
    """Return whether logind kills this user's processes at logout."""
    only, exempt = (settings.get(name, "").split() for name in _SETTINGS[1:])
    return settings["KillUserProcesses"] == "yes" and user not in exempt and (not only or user in only)


def _control_group(box: CheckedMachine) -> str:
    try:
        return (box.root / "proc/self/cgroup").read_text()
    except OSError:
        return ""
