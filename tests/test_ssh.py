from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sae_tui.ssh import by_hand, ssh_argv
from trainer.contract.errors import UserError


@pytest.mark.parametrize(
    "name", ["", "-oProxyCommand=id", "me@-x", "a b", "a;id", "$(id)", "a\nb", "ü", "a@b@c", "\x1b[2J", "a" * 300]
)
def test_host_names_that_ssh_or_a_shell_could_misinterpret_are_rejected(name) -> None:
    with pytest.raises(UserError, match=r"is not a host name; give one like gpu1 or me@gpu1") as refusal:
        ssh_argv(name, ["stream"])
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize("name", ["gpu1", "me@gpu2.lab.org", "10.0.0.7", "fe80::1%eth0", "first.last@x_1"])
def test_valid_ssh_host_names_are_accepted(name) -> None:
    *options, host, _ = ssh_argv(name, ["stream"], ["ssh", "-F", "file"])
    assert options[:3] == ["ssh", "-F", "file"]
    assert (options[-1], host) == ("--", name)
    assert {"BatchMode=yes", "ClearAllForwardings=yes", "-a", "-x"} <= set(options)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a home folder with `sae-tui` in `.local/bin`, and with an `ssh` that runs commands in a shell here."""
    program = tmp_path / ".local" / "bin" / "sae-tui"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nexec sh -c "$2"\n')
    for file in (program, ssh):
        file.chmod(0o755)
    return tmp_path


def said(line: str, home: Path) -> str:
    env = {"HOME": str(home), "PATH": f"{home}:/usr/bin:/bin"}
    return subprocess.run(["sh", "-c", line], env=env, capture_output=True, text=True).stdout


def test_arguments_reach_the_remote_program_unchanged_even_if_it_is_in_a_home_folder(home: Path) -> None:
    command = ssh_argv("gpu1", ["rename", "7", "a 'b' $(id) \"c\"; *"])[-1]
    # Run the command in a shell, because sshd runs it with the login shell.
    assert said(command, home) == "rename|7|a 'b' $(id) \"c\"; *|"


def test_a_command_shown_to_the_user_finds_a_program_in_a_home_folder(home: Path) -> None:
    assert said(by_hand("gpu1", "tag 7 --add WORD"), home) == "tag|7|--add|WORD|"
