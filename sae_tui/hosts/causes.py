"""Reasons why ssh, or `sae-tui` on the other host, has exited, each as one sentence with a remedy."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from sae_tui.ssh import NO_SAE_TUI

SSH_FAILED = 255  # ssh's exit code if it cannot connect or if the connection breaks
# The wait in seconds after a rejected login. The wait is long because servers block an address after a few rejected
# logins.
_REFUSED_AGAIN_S = 300.0


class Cause(NamedTuple):
    """A sentence without its subject (the host's name), and the wait in seconds before the next attempt.

    If `wait_s` is 0, the caller chooses the wait.
    """

    sentence: str
    wait_s: float = 0.0


def has_ssh_failed(exit_code: int) -> bool:
    """Return whether ssh itself has failed; an exit code is negative if a signal ended the process."""
    return exit_code == SSH_FAILED or exit_code < 0


def no_connection(host: str, exit_code: int, complaints: Sequence[str]) -> Cause:
    """Return why a host sent no greeting, from the exit code and the last lines of standard error."""
    output = "\n".join(complaints)
    if exit_code < 0:
        return Cause(f"cannot be reached: ssh was ended by {_signal_name(-exit_code)}")
    if exit_code == SSH_FAILED:
        return _of_ssh(host, output, complaints)
    if exit_code == NO_SAE_TUI:
        return Cause("has no sae-tui on its PATH; install it there, with a link to it in ~/.local/bin")
    if "unrecognized arguments: --job" in output:
        return Cause("has an older sae-tui, which sends only the logs of its jobs (l); update sae-tui there")
    if re.search("invalid choice: '?(stream|receive)", output):
        return Cause("has a version of sae-tui that is too old; update sae-tui there")
    return Cause(f"ended sae-tui: {_last(complaints) or f'exit code {exit_code}'}")


def other_protocol(theirs: int, version: str, ours: int) -> Cause:
    """Return the cause for a host with a different protocol version, including a remedy."""
    older, where = ("too old", "there") if theirs < ours else ("newer than the one here", "here")
    return Cause(f"has sae-tui {version}, which is {older}; update it {where}")


def no_message(reason: str) -> Cause:
    return Cause(f"sent an invalid message: {reason}", _REFUSED_AGAIN_S)


def _of_ssh(host: str, output: str, complaints: Sequence[str]) -> Cause:
    if "IDENTIFICATION HAS CHANGED" in output:
        return Cause(
            f"has a different host key than before: if you expect that, run ssh-keygen -R {bare(host)}",
            _REFUSED_AGAIN_S,
        )
    if "Host key verification failed" in output or "host key is known" in output:
        return Cause(f"is not known to ssh yet; run ssh {host} once and check its key", _REFUSED_AGAIN_S)
    if "Permission denied" in output or "Too many authentication failures" in output:
        return Cause(
            f"accepts none of your keys; make ssh {host} work without a password, for example with ssh-add",
            _REFUSED_AGAIN_S,
        )
    if "Could not resolve" in output:
        return Cause("was not found; correct its name or add it to ~/.ssh/config")
    return Cause(f"cannot be reached: {_last(complaints) or 'ssh printed no error'}")


def bare(host: str) -> str:
    """Return the host name without the user name."""
    return host.rpartition("@")[2]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last(complaints: Sequence[str]) -> str:
    return complaints[-1][:200] if complaints else ""
