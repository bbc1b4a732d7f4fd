"""The command line of ssh, the user's own, that runs `sae-tui` on another host."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from trainer.contract.errors import UserError
from trainer.contract.printable import printable

# No password is asked for, nothing of this machine is lent to the other one, a dead line is noticed within 15 s, and no
# other session of the user comes to depend on ours.
_OPTIONS = (
    "BatchMode=yes", "ClearAllForwardings=yes", "ForwardX11=no", "ForwardAgent=no", "PermitLocalCommand=no",
    "RemoteCommand=none", "Tunnel=no", "ControlMaster=no", "ConnectTimeout=10", "ServerAliveInterval=5",
    "ServerAliveCountMax=3", "LogLevel=ERROR",
)  # fmt: skip
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}@)?[A-Za-z0-9_][A-Za-z0-9_.:%-]{0,254}", re.ASCII)
# A shell that nobody types into seldom has on its PATH what pip, pipx and uv install for one user.
_FAR_SHELL = ("sh", "-c", 'PATH="$PATH:$HOME/.local/bin" exec sae-tui "$@"', "sae-tui")
NO_SAE_TUI = 127  # as a shell ends that finds no such program


def checked_host(name: str) -> str:
    """Return the name of a host, `gpu1` or `me@gpu1`; raise `UserError` where it is none that ssh should be given."""
    if not _NAME.fullmatch(name):
        shown = printable(name[:60])
        raise UserError(
            f'"{shown}" cannot be the name of a host; give one like gpu1 or me@gpu1, '
            "and all else, such as its port, in ~/.ssh/config"
        )
    return name


def ssh_argv(host: str, words: Sequence[str], ssh: Sequence[str] = ("ssh",)) -> list[str]:
    """Return the argv that runs `sae-tui` with these words on a host; raise `UserError` for a host of another form.

    `words` are quoted for the shell there.
    """
    options = [part for option in _OPTIONS for part in ("-o", option)]
    return [*ssh, "-T", "-a", "-x", *options, "--", checked_host(host), shlex.join([*_FAR_SHELL, *words])]
