"""Tests for the user service that resumes the queue after a reboot."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sae_tui.doctor.queue_service import check_queue_service, install, name_of, unit
from sae_tui.jobs import user
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir


def level(sandbox, home: Path) -> str:
    (finding,) = check_queue_service(sandbox.box(HOME=str(home)))
    assert bool(finding.remedy) == (finding.level != "ok")
    return finding.level


def test_doctor_offers_the_service_under_systemd_and_says_what_is_missing(sandbox, tmp_path: Path) -> None:
    assert level(sandbox, tmp_path) == "ok"
    with pytest.raises(UserError, match="this machine does not run systemd"):
        install(sandbox.box(HOME=str(tmp_path)))
    assert not (tmp_path / ".config").exists()
    sandbox.file("run/systemd/system/.keep")
    assert level(sandbox, tmp_path) == "note"
    name, wants = name_of(sandbox.data), tmp_path / ".config/systemd/user/default.target.wants"
    mkdir, link = f"/bin/mkdir -p {shlex.quote(str(wants))}", f"/bin/ln -s ../{name} {shlex.quote(str(wants / name))}"
    sandbox.program("systemctl", f'[ "$*" = "--user enable {name}" ] && {mkdir} && {link}')
    install(sandbox.box(HOME=str(tmp_path)))
    assert (tmp_path / ".config/systemd/user" / name).read_text() == unit(sandbox.data)
    (finding,) = check_queue_service(sandbox.box(HOME=str(tmp_path)))
    assert (finding.level, finding.remedy) == ("note", "run `loginctl enable-linger` once")
    sandbox.file("var/lib/systemd/linger/ada")
    assert level(sandbox, tmp_path) == "ok"


def test_each_data_folder_has_its_own_service(sandbox, tmp_path: Path) -> None:
    sandbox.file("run/systemd/system/.keep")
    sandbox.program("systemctl", "exit 0")
    first = sandbox.data
    install(sandbox.box(HOME=str(tmp_path)))
    sandbox.data = DataDir(tmp_path / "other")
    install(sandbox.box(HOME=str(tmp_path)))
    folder = tmp_path / ".config/systemd/user"
    assert [(folder / name_of(data)).read_text() for data in (first, sandbox.data)] == [unit(first), unit(sandbox.data)]


def test_a_user_without_a_home_folder_gets_an_error_and_no_file(sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(user.pwd, "getpwuid", unknown)
    monkeypatch.setattr(user.os, "getuid", lambda: 987_654)
    sandbox.file("run/systemd/system/.keep")
    with pytest.raises(UserError, match="the user with id 987654 has no home folder; set HOME"):
        install(sandbox.box())
    (finding,) = check_queue_service(sandbox.box())
    assert finding.level == "note"


@pytest.mark.parametrize(
    ("systemctl", "said"),
    [
        ("echo 'Failed to connect to bus: No medium found' >&2; exit 1", "Failed to connect to bus: No medium found"),
        ("echo 'Failed to enable unit: Access denied' >&2; exit 4", "Failed to enable unit: Access denied"),
        ("exit 3", "exit code 3"),
        ("", "No such file or directory"),
    ],
)
def test_a_service_that_cannot_be_enabled_is_an_error(sandbox, tmp_path: Path, systemctl: str, said: str) -> None:
    sandbox.file("run/systemd/system/.keep")
    if systemctl:
        sandbox.program("systemctl", systemctl)
    with pytest.raises(
        UserError, match=f"was written, but cannot be enabled: systemctl: {said}; run `systemctl --user"
    ):
        install(sandbox.box(HOME=str(tmp_path)))
    assert level(sandbox, tmp_path) == "note"


def test_the_service_command_is_quoted_and_exits_with_0(tmp_path: Path) -> None:
    data = DataDir(tmp_path / 'a "data" folder')
    data.create()
    (line,) = [line for line in unit(data).splitlines() if line.startswith("ExecStart=")]
    words = shlex.split(line.removeprefix("ExecStart="))
    assert words == [sys.executable, "-P", "-m", "sae_tui.jobs.revive", str(data.root)]
    assert subprocess.run(words).returncode == 0


@pytest.mark.parametrize(
    ("folder", "written"),
    [
        ("/50%/$HOME/${X}", '"/50%%/$$HOME/$${X}"'),
        ("/a\\n 'b' \"c\"", '"/a\\\\n \'b\' \\"c\\""'),
        ("/a\nExecStart=/bin/false", '"/a\\x0aExecStart=/bin/false"'),
    ],
)
def test_any_folder_name_is_escaped_for_systemd(tmp_path: Path, folder: str, written: str) -> None:
    file = tmp_path / "queue.service"
    file.write_text(unit(DataDir(Path(folder))))
    (line,) = [line for line in file.read_text().splitlines() if line.startswith("ExecStart=")]
    assert line.endswith(f" {written}")
    if analyze := shutil.which("systemd-analyze"):
        tmp_path.chmod(0o700)
        environment = {"PATH": os.defpath, "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
        done = subprocess.run([analyze, "--user", "verify", file], env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
