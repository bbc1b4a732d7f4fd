"""What is done to a job on another host: a command of `sae-tui` there, and its answer."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import threading
from collections.abc import Sequence

from sae_tui.hosts.causes import SSH_FAILED, no_connection
from sae_tui.ssh import NO_SAE_TUI, ssh_argv
from trainer.contract.errors import UserError
from trainer.contract.printable import printable

LIMIT_S = 60.0
_MOST_BYTES = 16 << 10


def run_there(host: str, words: Sequence[str], ssh: Sequence[str], given: str = "") -> str:
    """Run `sae-tui` with these words on a host and return its last line; raise `UserError` where that fails.

    `given` is what it reads from its standard input.
    """
    argv = ssh_argv(host, words, ssh)
    with tempfile.TemporaryFile() as file:
        file.write(given.encode())
        file.seek(0)
        process = subprocess.Popen(
            argv, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    late = threading.Timer(LIMIT_S, process.kill)
    late.daemon = True
    late.start()
    try:
        assert process.stdout is not None
        answer = process.stdout.read(_MOST_BYTES)
        process.stdout.close()
        code = process.wait()
        is_late = late.finished.is_set()
    finally:
        late.cancel()
        with contextlib.suppress(OSError):
            process.kill()
    if is_late:
        raise UserError(f"host {host} did not answer within {LIMIT_S:.0f} s; look there with ssh {host}")
    return _outcome(host, code, [printable(line) for line in answer.decode(errors="replace").splitlines() if line])


def _outcome(host: str, code: int, lines: Sequence[str]) -> str:
    last = lines[-1][:300] if lines else ""
    if code == 0:
        return f"on {host}: {last or 'done'}"
    if code in (SSH_FAILED, NO_SAE_TUI):
        raise UserError(f"host {host} {no_connection(host, code, lines).sentence}")
    raise UserError(f"on {host}: {last.removeprefix('sae-tui: ').removeprefix('error: ') or f'exit code {code}'}")
