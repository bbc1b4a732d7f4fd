"""A real sshd on a loopback port, run by this user for tests, with its own keys and commands."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

SSHD = next((path for path in ("/usr/sbin/sshd", shutil.which("sshd")) if path and os.path.exists(path)), None)
_PRIVILEGED = Path("/run/sshd")  # sshd requires this folder if it is started by root


def why_not() -> str:
    """Return why no sshd can be started on this machine, or "" if one can."""
    if SSHD is None or shutil.which("ssh") is None:
        return "OpenSSH's server is not installed"
    if os.getuid() == 0 and not _PRIVILEGED.exists():
        try:
            _PRIVILEGED.mkdir(mode=0o755)
        except OSError as error:
            return f"{_PRIVILEGED} cannot be made: {error}"
    return ""


class Sshd:
    """An SSH server that accepts one key; `ssh` is the command that connects to it under any host name."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        self.folder, self.port = folder, _free_port()
        for name in ("host_key", "key", "other_key"):
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
        (folder / "authorized").write_text((folder / "key.pub").read_text())
        self.programs = folder / "programs"
        self.programs.mkdir()
        self.know(folder / "host_key.pub")
        (folder / "sshd.conf").write_text(
            f"ListenAddress 127.0.0.1\nPort {self.port}\nHostKey {folder}/host_key\nPidFile none\nStrictModes no\n"
            f"AuthorizedKeysFile {folder}/authorized\nUsePAM no\n"
            f"SetEnv PATH={self.programs}:/usr/bin:/bin HOME={folder}\n"
        )
        self.use_key("key")
        argv = [str(SSHD), "-D", "-e", "-f", str(folder / "sshd.conf")]
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=self._log, start_new_session=True)
        self._wait()

    @property
    def ssh(self) -> list[str]:
        return ["ssh", "-F", str(self.folder / "ssh.conf")]

    def use_key(self, name: str) -> None:
        """Use this key for logins from now on."""
        (self.folder / "ssh.conf").write_text(
            f"Host *\nHostName 127.0.0.1\nPort {self.port}\nIdentityFile {self.folder}/{name}\nIdentitiesOnly yes\n"
            f"IdentityAgent none\nUserKnownHostsFile {self.folder}/known\nGlobalKnownHostsFile /dev/null\n"
        )

    def know(self, key: Path | None) -> None:
        """From now on, let the client know this key, or no key, as the server's host key."""
        kind, text, *_ = key.read_text().split() if key else ("", "")
        (self.folder / "known").write_text(f"[127.0.0.1]:{self.port} {kind} {text}\n" if key else "")

    def install(self, data: Path) -> None:
        """Install `sae-tui` on the server's PATH, with this folder as its data folder."""
        root = Path(__file__).parents[2]
        self.program(f'export PYTHONPATH={root} SAE_TUI_DATA_DIR={data}\nexec {sys.executable} -m sae_tui "$@"')

    def program(self, script: str) -> None:
        """Install a script on the server as `sae-tui`."""
        file = self.programs / "sae-tui"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def halt(self) -> None:
        """Stop the server but leave all connections open, like a host after a power cut."""
        for pid in _children(self._process.pid):
            os.kill(pid, signal.SIGSTOP)

    def cut(self) -> None:
        """Cut all connections; new connections are still accepted."""
        for pid in _children(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
                os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        if self._process.poll() is not None:
            return
        self.cut()
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                assert time.monotonic() < deadline, (self.folder / "log").read_text()
                assert self._process.poll() is None, (self.folder / "log").read_text()
                time.sleep(0.02)
            else:
                return


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
