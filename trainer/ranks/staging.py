"""Restarts a rank with transfers through host memory if the GPUs cannot reach each other directly."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from trainer.contract.planning.hardware import read_box, write_box
from trainer.contract.runs.nccl import STAGED

_MARK = "SAE_TUI_STAGED"
SENTENCE = "the GPUs could not reach each other directly, so transfers go through the host's memory"
LATER = "also in later jobs on this host, until `sae-tui doctor --probe` finds that direct transfers work"
HOPELESS = "the GPUs cannot exchange data, either directly or through the host's memory"
OVER_NETWORK = "; between hosts, a firewall or the wrong interface (NCCL_SOCKET_IFNAME) may be the cause"


def is_staged() -> bool:
    """Return whether this process was restarted to use transfers through host memory."""
    return _MARK in os.environ


def restart(give_up: Callable[[str], object], *, on_one_host: bool = True) -> None:
    """Restart this process with the variables in `STAGED`; call `give_up` if that would not help or is impossible.

    The process keeps its pid, its parent and its inherited files. All other threads and their pending GPU operations
    are lost.
    """
    if is_staged() or all(os.environ.get(name) == value for name, value in STAGED.items()):
        give_up(HOPELESS if on_one_host else HOPELESS + OVER_NETWORK)
        return
    with contextlib.suppress(OSError):  # The disk holding the log may be full.
        sys.stderr.flush()
    try:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | STAGED | {_MARK: "1"})
    except OSError as error:
        give_up(f"{SENTENCE}, but the rank could not be restarted ({error})")


def remember(box_file: Path) -> None:
    """Record for later jobs on this host that direct transfers fail."""
    write_box(box_file, msgspec.structs.replace(read_box(box_file), peers_fail=True))
