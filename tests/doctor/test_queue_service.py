"""The user service that restarts the queue after a restart of the machine."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sae_tui.doctor.queue_service import NAME, check_queue_service, install, unit
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir


def level(sandbox, home: Path) -> str:
    (finding,) = check_queue_service(sandbox.box(HOME=str(home)))
    assert bool(finding.remedy) == (finding.level != "ok")
    return finding.level


def test_doctor_offers_the_service_under_systemd_and_says_what_is_missing(sandbox, tmp_path: Path) -> None:
    assert level(sandbox, tmp_path) == "ok"
    sandbox.file("run/systemd/system/.keep")
    assert level(sandbox, tmp_path) == "note"
    wants = tmp_path / ".config/systemd/user/default.target.wants"
    mkdir, link = f"/bin/mkdir -p {shlex.quote(str(wants))}", f"/bin/ln -s ../{NAME} {shlex.quote(str(wants / NAME))}"
    sandbox.program("systemctl", f'[ "$*" = "--user enable {NAME}" ] && {mkdir} && {link}')
    message = install(sandbox.box(HOME=str(tmp_path)))
    assert message.startswith(
        f"{tmp_path}/.config/systemd/user/{NAME} starts the jobs that wait in {sandbox.data.root}"
    )
    (finding,) = check_queue_service(sandbox.box(HOME=str(tmp_path)))
    assert (finding.level, finding.remedy) == ("note", "run `loginctl enable-linger`, once")
    sandbox.file("var/lib/systemd/linger/ada")
    assert level(sandbox, tmp_path) == "ok"


def test_a_service_that_cannot_be_enabled_is_an_error(sandbox, tmp_path: Path) -> None:
    sandbox.program("systemctl", "echo 'Failed to connect to bus' >&2; exit 1")
    with pytest.raises(UserError, match="is written, but cannot be enabled: systemctl Failed to connect to bus"):
        install(sandbox.box(HOME=str(tmp_path)))


def test_the_command_of_the_service_is_quoted_and_exits_with_0(tmp_path: Path) -> None:
    data = DataDir(tmp_path / 'a "data" folder')
    data.create()
    (line,) = [line for line in unit(data).splitlines() if line.startswith("ExecStart=")]
    words = shlex.split(line.removeprefix("ExecStart="))
    assert words == [sys.executable, "-P", "-m", "sae_tui.jobs.revive", str(data.root)]
    assert unit(DataDir(Path("/50%/$HOME"))).count('"/50%%/$$HOME"') == 1
    assert subprocess.run(words).returncode == 0
