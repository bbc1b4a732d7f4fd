"""Runs the user's command for alerts, which receives the alert as JSON on standard input."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

import msgspec

from trainer.contract.errors import UserError

LIMIT_S = 30
KILL_AFTER_S = 5


def run_hook(command: Sequence[str], message: Mapping[str, object], limit_s: float = LIMIT_S) -> None:
    """Run a command without a shell, in a new session; raise `UserError` if it fails or takes too long.

    `timeout` ends the command even after this process has exited. The message is kept in memory rather than in a
    temporary file, since the disk may be full.
    """
    bounded = ["timeout", "-k", f"{KILL_AFTER_S}", f"{limit_s:g}", *command]
    try:
        with os.fdopen(os.memfd_create("alert"), "wb+", buffering=0) as file:
            file.write(msgspec.json.encode(message) + b"\n")
            file.seek(0)
            process = subprocess.Popen(
                bounded, stdin=file, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
    except (OSError, ValueError) as error:
        raise UserError(f"on_alert: {error}") from None
    if code := process.wait():
        raise UserError(f"on_alert: {_FAILURES.get(code, f'{command[0]} ended with exit code {code}')}")


_FAILURES = {
    124: f"it took longer than {LIMIT_S} s and was ended",
    126: "its first word is not an executable program",
    127: "its first word names no program; give its path",
}
