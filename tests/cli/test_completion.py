"""Tests for `sae-tui completion --install`: where it writes its file, and which files it leaves alone."""

from __future__ import annotations

import os
import pwd
import shlex
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def home(shell):
    home = shell.folder / "home"
    home.mkdir()
    return home


@pytest.mark.parametrize(
    ("program", "place"),
    [
        ("bash", ".local/share/bash-completion/completions/sae-tui"),
        ("zsh", ".local/share/zsh/site-functions/_sae-tui"),
        ("fish", ".config/fish/completions/sae-tui.fish"),
    ],
)
def test_completion_is_installed_once_in_the_shells_folder_and_can_be_undone(shell, home, program, place) -> None:
    env = {"HOME": str(home), "SHELL": f"/usr/bin/{program}", "XDG_DATA_HOME": "", "XDG_CONFIG_HOME": ""}
    told = shell.json("completion", "--install", **env)
    assert (told["shell"], told["file"], told["changed"]) == (program, str(home / place), True)
    written = (home / place).read_text()
    script = shell.run("completion", program).stdout
    assert set(script.splitlines()) <= set(written.splitlines())
    assert written.startswith("#compdef sae-tui") is (program == "zsh")
    assert shell.json("completion", "--install", **env)["changed"] is False
    assert "undoes this" in shell.run("completion", "--install", program, **env).stdout
    subprocess.run(shlex.split(told["undo"]), check=True)
    assert not (home / place).exists()


def test_completion_replaces_neither_a_link_nor_an_existing_file(shell, home) -> None:
    env = {"HOME": str(home), "XDG_DATA_HOME": "", "BASH_COMPLETION_USER_DIR": ""}
    file = home / ".local/share/bash-completion/completions/sae-tui"
    file.parent.mkdir(parents=True)
    file.write_text("# mine\n")
    assert shell.errors("completion", "--install", "bash", code=1, **env)[0].endswith("remove it first")
    assert file.read_text() == "# mine\n"
    file.rename(home / "mine")
    file.symlink_to(home / "mine")
    assert "is a symbolic link" in shell.errors("completion", "--install", "bash", code=1, **env)[0]
    assert (home / "mine").read_text() == "# mine\n"


def test_an_unknown_shell_is_rejected_and_nothing_is_written(shell, home) -> None:
    (line,) = shell.errors("completion", "--install", code=2, HOME=str(home), SHELL="/bin/tcsh")
    assert line == "sae-tui: error: SHELL: the shell is unknown; give bash, zsh or fish"
    assert list(home.iterdir()) == []


def test_the_default_shell_is_the_login_shell(shell, home) -> None:
    program = Path(pwd.getpwuid(os.getuid()).pw_shell).name
    if program not in ("bash", "zsh", "fish"):
        pytest.skip(f"the login shell of this user is {program!r}")
    assert shell.json("completion", "--install", HOME=str(home), SHELL="")["shell"] == program
