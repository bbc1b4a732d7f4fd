"""Tests that a supervisor starts outside the login session if the user has lingering enabled."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from sae_tui.jobs import detach
from tests.jobs.conftest import FAKE_SUPERVISOR
from trainer.contract.errors import UserError
from trainer.contract.store.states import JobState

# Replaces systemd-run, which needs systemd. Logs its arguments, and runs the command or fails.
SYSTEMD_RUN = """#!/bin/sh
echo "$@" >> "{log}"
{refuses}
while [ "$1" != "--" ]; do shift; done
shift
exec "$@"
"""


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Set up a login session with lingering enabled; return `begin(refuses)`, which puts a fake systemd-run on PATH."""
    monkeypatch.setattr(detach, "LINGER", tmp_path)
    (tmp_path / "ada").touch()
    monkeypatch.setenv("USER", "ada")
    monkeypatch.setattr(detach, "SESSION", re.compile(""))

    def begin(refuses: bool = False) -> Path:
        log, programs = tmp_path / "asked", tmp_path / "bin"
        programs.mkdir()
        program = programs / "systemd-run"
        program.write_text(SYSTEMD_RUN.format(log=log, refuses="exit 1" if refuses else ""))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(programs), prepend=":")
        return log

    return begin


@pytest.mark.parametrize("refuses", [False, True])
def test_a_supervisor_starts_in_its_own_systemd_scope_if_systemd_allows_it(box, session, refuses):
    log = session(refuses)
    job_id = box.launch("steps=1")
    assert box.wait_ended(job_id).state == JobState.FINISHED
    assert log.read_text().startswith(f"--user --scope --quiet --collect -- {FAKE_SUPERVISOR[0]}")


def test_systemd_is_not_used_if_lingering_is_not_enabled(box, session, monkeypatch):
    log = session()
    monkeypatch.setenv("USER", "bob")
    assert box.wait_ended(box.launch("steps=1")).state == JobState.FINISHED
    assert not log.exists()


@pytest.mark.parametrize("starts", ["by fork", "as a new process"])
def test_a_forked_supervisor_looks_like_a_started_one(box, request, starts):
    if starts == "as a new process":
        request.getfixturevalue("no_forks")
    job_id = box.launch("steps=1", place={"hold": True})
    supervisor = Path(f"/proc/{box.job(job_id).supervisor.pid}")
    argv = [*FAKE_SUPERVISOR, str(box.data.root), str(job_id)]
    assert (supervisor / "cmdline").read_bytes().rstrip(b"\0") == b"\0".join(map(str.encode, argv))
    assert (supervisor / "cwd").readlink() == Path("/")
    assert [(supervisor / "fd" / name).readlink() for name in "12"] == [box.data.run(job_id).supervisor_log] * 2
    assert os.getsid(int(supervisor.name)) not in (0, os.getsid(0))


def test_a_supervisor_that_is_slow_to_start_is_not_started_twice(box, session, tmp_path, monkeypatch):
    session()
    monkeypatch.setattr(detach, "START_TIMEOUT_S", 0.5)
    started = tmp_path / "started"
    box.data.run(1).create()
    with pytest.raises(UserError, match=r"its supervisor did not start within 0\.5 s"):
        detach.start(box.data, 1, ["/bin/sh", "-c", f"echo >> {started}; exec sleep 5"])
    assert started.read_text() == "\n"
