"""The ssh command line for running `sae-tui` on another host."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from trainer.contract.errors import UserError
from trainer.contract.printable import printable

# Never prompt for a password, forward nothing to the other host, and detect a dead connection within 15 s. Never let
# the user's other ssh sessions share this connection.
_OPTIONS = (
    "BatchMode=yes", "ClearAllForwardings=yes", "ForwardX11=no", "ForwardAgent=no", "PermitLocalCommand=no",
    "RemoteCommand=none", "Tunnel=no", "ControlMaster=no", "ConnectTimeout=10", "ServerAliveInterval=5",
    "ServerAliveCountMax=3", "LogLevel=ERROR",
)  # fmt: skip
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}@)?[A-Za-z0-9_][A-Za-z0-9_.:%-]{0,254}", re.ASCII)
# The PATH of a non-interactive shell often lacks ~/.local/bin, where pip, pipx and uv install programs for one user.
_FAR_PATH = 'PATH="$PATH:$HOME/.local/bin"'
_FAR_SHELL = ("sh", "-c", f'{_FAR_PATH} exec sae-tui "$@"', "sae-tui")
# Runs `sae-tui` in a login shell, so that the programs it starts get a login environment. If the login shell sets a
# PATH without sae-tui, the PATH from before the login is added. Other shells might not know the -l option.
_LOGIN_SHELL = (
    "sh", "-c",
    'SAE_TUI_PATH="$PATH"; export SAE_TUI_PATH; '
    'case "${SHELL##*/}" in bash|dash|fish|ksh|sh|zsh) exec "$SHELL" -l -c "$0" ;; *) exec sh -c "$0" ;; esac',
)  # fmt: skip
_IN_LOGIN_SHELL = (
    "sh", "-c",
    'command -v sae-tui >/dev/null || PATH="$PATH:$HOME/.local/bin:$SAE_TUI_PATH"; exec sae-tui "$@"', "sae-tui",
)  # fmt: skip
NO_SAE_TUI = 127  # a shell's exit code for "command not found"


def checked_host(name: str) -> str:
    """Return a host name, such as `gpu1` or `me@gpu1`; raise `UserError` if it is not safe to pass to ssh."""
    if not _NAME.fullmatch(name):
        shown = printable(name[:60])
        raise UserError(
            f'"{shown}" is not a host name; give one like gpu1 or me@gpu1, '
            "and set everything else, such as the port, in ~/.ssh/config"
        )
    return name


def by_hand(host: str, command: str) -> str:
    """Return a line for the user's shell that runs a `sae-tui` command on a host, with the same PATH as the app."""
    return f"ssh {host} '{_FAR_PATH} sae-tui {command}'"


def ssh_argv(host: str, words: Sequence[str], ssh: Sequence[str] = ("ssh",)) -> list[str]:
    """Return the argv for running `sae-tui` with `words` on a host; raise `UserError` if the host name is invalid.

    `words` are quoted for the remote shell.
    """
    return _argv(host, [*_FAR_SHELL, *words], ssh)


def login_argv(host: str, words: Sequence[str], ssh: Sequence[str] = ("ssh",)) -> list[str]:
    """Return an argv like `ssh_argv` that runs `sae-tui` in the environment of the user's login shell."""
    return _argv(host, [*_LOGIN_SHELL, shlex.join([*_IN_LOGIN_SHELL, *words])], ssh)


def _argv(host: str, words: Sequence[str], ssh: Sequence[str]) -> list[str]:
    options = [part for option in _OPTIONS for part in ("-o", option)]
    return [*ssh, "-T", "-a", "-x", *options, "--", checked_host(host), shlex.join(words)]
