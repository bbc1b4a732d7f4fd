"""Starts a supervisor on this machine, in a session of its own that outlives app and terminal."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sae_tui.jobs.user import user_name
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir, open_private
from trainer.contract.runs.log_tail import last_line

SUPERVISOR = (sys.executable, "-P", "-m", "sae_tui.jobs.supervisor.supervise")
START_TIMEOUT_S = 30.0
LINGER = Path("/var/lib/systemd/linger")
SESSION = re.compile(r"/session-[^/]+\.scope")


class SlowStart(UserError):
    """A supervisor that has not answered in time."""


def start(data: DataDir, job_id: int, command: Sequence[str] = SUPERVISOR) -> None:
    """Start the supervisor of a job; return once it lives and has put itself into the job's row (0.1 s).

    Raise `UserError` where it does not start. The process started here forks the supervisor proper and ends, so that
    the caller has no child left to wait for and the supervisor can never get a controlling terminal.
    """
    arguments = [*command, str(data.root), str(job_id)]
    outside = _scope_prefix()
    if outside:
        try:
            _start(data, job_id, [*outside, *arguments])
            return
        except UserError as error:
            # One that is slow may still come up, and a job has one supervisor.
            if isinstance(error, SlowStart):
                raise
    _start(data, job_id, arguments)


def _scope_prefix() -> tuple[str, ...]:
    """Return the words before a command that has to outlive the login session; () where that is impossible or needless.

    They start it in a scope of the user's service manager, which linger keeps whatever logind does to the session.
    """
    try:
        group = Path("/proc/self/cgroup").read_text()
    except OSError:
        return ()
    lingers = os.path.exists(LINGER / (os.environ.get("USER") or user_name()))
    if not (lingers and SESSION.search(group) and shutil.which("systemd-run")):
        return ()
    return ("systemd-run", "--user", "--scope", "--quiet", "--collect", "--")


def _start(data: DataDir, job_id: int, arguments: Sequence[str]) -> None:
    log_file = data.run(job_id).supervisor_log
    log = open_private(log_file, os.O_APPEND)
    try:
        done = subprocess.run(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
            timeout=START_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise SlowStart(f"its supervisor did not start within {START_TIMEOUT_S:g} s; see {log_file}") from None
    except OSError as error:
        raise UserError(f"its supervisor could not be started: {error.strerror or error}") from None
    finally:
        os.close(log)
    if done.returncode:
        raise UserError(f"its supervisor did not start: {last_line(log_file) or f'see {log_file}'}")
