"""Acts on jobs on another host: runs a `sae-tui` command there and returns the command's output."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence

from sae_tui.hosts.causes import has_ssh_failed, no_connection
from sae_tui.hosts.link import end, signal_all
from sae_tui.ssh import NO_SAE_TUI, ssh_argv
from trainer.contract.errors import UserError
from trainer.contract.printable import printable

LIMIT_S = 60.0
_MOST_BYTES = 16 << 10
_LEAVE_S = 1.0  # how long to wait for the exit code once the output has ended or is too long


class Errands:
    """Runs `sae-tui` commands on other hosts, each in the caller's thread. `end_all` stops all of them."""

    def __init__(self, ssh: Sequence[str]) -> None:
        self._ssh = tuple(ssh)
        # This lock is held while a process starts, so that `end_all` cannot miss the process.
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_over = False

    def run(self, host: str, words: Sequence[str], given: str = "") -> str:
        """Run `sae-tui` with these arguments on a host and return the last output line; raise `UserError` on failure.

        `given` is the command's standard input.
        """
        process = self._start(host, words, given)
        late = threading.Timer(LIMIT_S, signal_all, (process, signal.SIGKILL))
        late.daemon = True
        late.start()
        try:
            assert process.stdout is not None
            answer = process.stdout.read(_MOST_BYTES)
            process.stdout.close()
            is_late = late.finished.is_set()
        finally:
            late.cancel()
            self._running.discard(process)
            code = end(process, _LEAVE_S)
        if is_late:
            raise UserError(f"host {host} did not respond within {LIMIT_S:.0f} s; check it with ssh {host}")
        return _outcome(host, code, [printable(line) for line in answer.decode(errors="replace").splitlines() if line])

    def _start(self, host: str, words: Sequence[str], given: str) -> subprocess.Popen[bytes]:
        argv = ssh_argv(host, words, self._ssh)
        with tempfile.TemporaryFile() as file, self._lock:
            if self._is_over:
                raise UserError(f"host {host} was not contacted, since sae-tui is exiting")
            file.write(given.encode())
            file.seek(0)
            process = subprocess.Popen(
                argv, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
            )
            self._running.add(process)
        return process

    def end_all(self) -> None:
        """Stop all running commands, which then fail, and refuse new ones."""
        with self._lock:
            self._is_over = True
            for process in tuple(self._running):
                signal_all(process, signal.SIGKILL)


def _outcome(host: str, code: int, lines: Sequence[str]) -> str:
    last = lines[-1][:300] if lines else ""
    if code == 0:
        return f"on {host}: {last or 'done'}"
    if has_ssh_failed(code) or code == NO_SAE_TUI:
        raise UserError(f"host {host} {no_connection(host, code, lines).sentence}")
    raise UserError(f"on {host}: {last.removeprefix('sae-tui: ').removeprefix('error: ') or f'exit code {code}'}")
