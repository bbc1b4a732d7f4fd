"""Tests for a rank that waits for its turn; torch is left out, because these tests concern only the process."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.contract.locks import try_lock
from trainer.contract.runs.grant import CHANNEL, send_grant

RANK = """
import mmap, os, sys
from trainer.contract.runs.grant import CHANNEL
from trainer.ranks import loading
is_early = CHANNEL in os.environ
loading._NEEDED, loading._EARLY = tuple(os.environ["IMPORTS"].split()), ()
if driver := os.environ.get("DRIVER"):
    mapped = mmap.mmap(os.open(driver, os.O_RDWR), 4096)
loading.wait_for_turn()
print("early" if is_early else "again", os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("OTHER"), flush=True)
sys.stdin.read()
"""


class Early:
    """A rank that was started early, with a pipe for its standard input."""

    def __init__(self, folder: Path, *, cwd: str | None = None, **variables: str) -> None:
        self.log, self.lock = folder / "log", folder / "lock"
        self.channel, theirs = socket.socketpair()
        self.environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "IMPORTS": "", **variables}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RANK],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                cwd=cwd,
                env=self.environment | {CHANNEL: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
            )

    def run(self, **variables: str) -> str:
        """Give the rank its turn with these variables, and return its output; check that it holds the lock."""
        with self.log.open("ab") as log, self.lock.open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            send_grant(self.channel, self.environment | variables, [log.fileno(), lock.fileno()])
        while not (text := self.log.read_text()).endswith("\n"):
            assert self.process.poll() is None
        with self.lock.open("ab") as lock:
            assert not try_lock(lock.fileno())
        self.process.communicate()
        assert self.process.returncode == 0
        return text.strip()


def test_an_early_rank_gets_its_gpus_log_and_locks_with_its_turn(tmp_path: Path) -> None:
    assert Early(tmp_path).run(CUDA_VISIBLE_DEVICES="GPU-1") == "early GPU-1 None"


@pytest.mark.parametrize(
    ("of_rank", "of_turn"),
    [({}, {"OTHER": "1"}), ({"IMPORTS": "no_such_module"}, {}), ({"DRIVER": "libcuda.so.1"}, {})],
    ids=["another variable", "a failed import", "a driver in use"],
)
def test_an_early_rank_starts_again_if_it_may_differ(
    tmp_path: Path, of_rank: dict[str, str], of_turn: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "libcuda.so.1").write_bytes(bytes(4096))
    text = Early(tmp_path, **of_rank).run(CUDA_VISIBLE_DEVICES="GPU-1", **of_turn)
    assert text == f"again GPU-1 {of_turn.get('OTHER')}"


def test_an_early_rank_starts_again_if_a_package_was_installed(tmp_path: Path) -> None:
    (packages := tmp_path / "packages" / "torch").mkdir(parents=True)
    (packages / "__init__.py").write_text("open('loaded', 'w').close()")
    path = os.pathsep.join([str(packages.parent), str(Path(__file__).parents[3])])
    early = Early(tmp_path, IMPORTS="torch", PYTHONPATH=path, cwd=str(tmp_path))
    while not (tmp_path / "loaded").exists():
        assert early.process.poll() is None
    (packages.parent / "torch-2.dist-info").mkdir()
    assert early.run(CUDA_VISIBLE_DEVICES="GPU-1") == "again GPU-1 None"


def test_an_early_rank_exits_if_its_turn_never_comes(tmp_path: Path) -> None:
    early = Early(tmp_path)
    early.channel.close()
    assert early.process.wait() == 0
    early.process.communicate()


def test_an_early_rank_exits_if_its_supervisor_dies_while_it_gives_the_turn(tmp_path: Path) -> None:
    early = Early(tmp_path)
    with early.channel, early.lock.open("ab") as lock:
        socket.send_fds(early.channel, [b'\n{"CUDA_VISIBLE'], [lock.fileno(), lock.fileno()])
    assert early.process.wait() == 0
    early.process.communicate()


# A supervisor that gives a rank its turn, and dies before the rank has imported its modules.
DYING_SUPERVISOR = """
import os, socket, subprocess, sys
from trainer.contract.runs.grant import CHANNEL, send_grant
ours, theirs = socket.socketpair()
log = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "IMPORTS": "imported_late"}
subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=0, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                 env=environment | {CHANNEL: str(theirs.fileno())})
while not os.path.exists("importing"):
    pass
send_grant(ours, environment, [log])
os.kill(os.getpid(), 9)
"""
# Imports last until the supervisor is dead, which changes the parent.
SLOW_IMPORT = """
import os
parent = os.getppid()
open("importing", "w").close()
while os.getppid() == parent:
    pass
"""


def test_an_early_rank_exits_if_its_supervisor_dies_right_after_giving_the_turn(tmp_path: Path) -> None:
    (tmp_path / "imported_late.py").write_text(SLOW_IMPORT)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    reading, writing = os.pipe()
    with open(reading, "rb") as alive:
        subprocess.run(
            [sys.executable, "-c", DYING_SUPERVISOR, RANK, str(tmp_path / "log")],
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, stdin=writing, check=False,
        )  # fmt: skip
        os.close(writing)
        # The rank holds the other end of the pipe until it exits.
        assert alive.read() == b""
    assert (tmp_path / "log").read_text() == ""
