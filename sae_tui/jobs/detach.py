"""Starts a job's supervisor or evaluation in a new session on this host so that it outlives the app and terminal."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sae_tui.jobs.program_environment import OF_COMMAND, ProgramEnvironment
from sae_tui.jobs.user import user_name
from trainer.contract.errors import UserError, sentence
from trainer.contract.paths import DataDir, open_private
from trainer.contract.runs.lock import is_held
from trainer.contract.runs.log_tail import last_line

SUPERVISOR = (sys.executable, "-P", "-m", "sae_tui.jobs.supervisor.supervise")
QUEUE = (sys.executable, "-P", "-m", "sae_tui.jobs.queue_process")
START_TIMEOUT_S = 30.0
LINGER = Path("/var/lib/systemd/linger")
SESSION = re.compile(r"/session-[^/]+\.scope")


class SlowStart(UserError):
    """Raised when a program does not start in time."""


def start(data: DataDir, job_id: int, command: Sequence[str] = SUPERVISOR) -> None:
    """Start a job's supervisor; return once it has registered itself in the job's row (after about 0.1 s).

    Raise `UserError` if the supervisor does not start.
    """
    stored = ProgramEnvironment.read(data.run(job_id))
    start_detached(
        [*command, str(data.root), str(job_id)],
        data.run(job_id).supervisor_log,
        "its supervisor",
        dict(stored.variables) if stored else os.environb,
    )


def start_queue(data: DataDir, command: Sequence[str] = QUEUE) -> None:
    """Start this user's queue process unless it is already running; return once it is running (after about 0.1 s).

    Raise `UserError` if it does not start.
    """
    if is_held(data.queue_lock(socket.gethostname(), user_name())) is not True:
        start_detached([*command, str(data.root)], data.root / "queue.log", "the queue")


def start_detached(
    arguments: Sequence[str], log_file: Path, who: str, environment: Mapping[bytes, bytes] = os.environb
) -> None:
    """Start a background program and append its output to a log; `who` is the program's name in error messages.

    Raise `UserError` if the program does not start. The process started here forks the actual program and exits.
    Therefore, the caller need not wait for a child, and the program can never acquire a controlling terminal.
    """
    outside = _scope_prefix()
    if outside:
        try:
            _start([*outside, *arguments], log_file, who, environment)
            return
        except UserError as error:
            # A slow supervisor may still start, and a job must never have two supervisors.
            if isinstance(error, SlowStart):
                raise
    _start(arguments, log_file, who, environment)


def _scope_prefix() -> tuple[str, ...]:
    """Return a command prefix that makes a program outlive the login session; () if this is impossible or unnecessary.

    The prefix starts the program in a scope of the user's service manager. If lingering is enabled, that manager keeps
    running after the session ends.
    """
    try:
        group = Path("/proc/self/cgroup").read_text()
    except OSError:
        return ()
    lingers = os.path.exists(LINGER / (os.environ.get("USER") or user_name()))
    if not (lingers and SESSION.search(group) and shutil.which("systemd-run")):
        return ()
    return ("systemd-run", "--user", "--scope", "--quiet", "--collect", "--")


def _start(arguments: Sequence[str], log_file: Path, who: str, environment: Mapping[bytes, bytes]) -> None:
    try:
        log = open_private(log_file, os.O_APPEND)
    except OSError as error:
        raise UserError(f"{who} could not be started: {log_file} cannot be written: {sentence(error)}") from None
    try:
        done = subprocess.run(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={name: value for name, value in environment.items() if name not in OF_COMMAND},
            start_new_session=True,
            timeout=START_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise SlowStart(f"{who} did not start within {START_TIMEOUT_S:g} s; see {log_file}") from None
    except OSError as error:
        raise UserError(f"{who} could not be started: {error.strerror or error}") from None
    finally:
        os.close(log)
    if done.returncode:
        raise UserError(f"{who} did not start: {last_line(log_file) or f'see {log_file}'}")
