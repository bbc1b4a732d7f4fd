"""Starts a supervisor on this machine, in a session of its own that outlives app and terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from sae_tui.jobs.files import last_line, open_log
from trainer.contract.paths import DataDir
from trainer.contract.problems import UserError

SUPERVISOR = (sys.executable, "-P", "-m", "sae_tui.jobs.supervise")
START_TIMEOUT_S = 30.0


def start(data: DataDir, job_id: int, command: Sequence[str] = SUPERVISOR) -> None:
    """Returns once the supervisor lives and has put itself into the job's row (0.1 s); else raises `UserError`.

    The process started here forks the supervisor proper and ends, so that the caller has no child left
    to wait for and the supervisor can never get a controlling terminal.
    """
    log_file = data.run(job_id).supervisor_log
    log = open_log(log_file)
    try:
        done = subprocess.run(
            [*command, str(data.root), str(job_id)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
            timeout=START_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"its supervisor did not start within {START_TIMEOUT_S:g} s; see {log_file}") from None
    except OSError as error:
        raise UserError(f"its supervisor could not be started: {error.strerror or error}") from None
    finally:
        os.close(log)
    if done.returncode:
        raise UserError(f"its supervisor did not start: {last_line(log_file) or f'see {log_file}'}")
