"""What a rank does where GPUs do not reach each other directly: it starts again, with transfers through host memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from trainer.contract.planning.hardware import read_box, write_box
from trainer.contract.runs.nccl import STAGED

_MARK = "SAE_TUI_STAGED"
SENTENCE = "the GPUs did not answer each other directly, so transfers go through the host's memory, also in later jobs"
HOPELESS = "the GPUs do not exchange data, neither directly nor through the host's memory"


def is_staged() -> bool:
    """Whether this process was started again for transfers through the host's memory."""
    return _MARK in os.environ


def restart(give_up: Callable[[str], object]) -> None:
    """Start this process again with `STAGED`; call `give_up` where that would not help.

    The process keeps its pid, parent, signals and locks, so that whoever waits for it notices nothing; its threads, and
    what they wait for on the GPU, are gone.
    """
    if is_staged() or all(os.environ.get(name) == value for name, value in STAGED.items()):
        give_up(HOPELESS)
        return
    _start_again()


def _start_again() -> NoReturn:
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | STAGED | {_MARK: "1"})


def remember(box_file: Path | None) -> None:
    """Record for later jobs of this host that direct transfers fail."""
    if box_file:
        write_box(box_file, msgspec.structs.replace(read_box(box_file), peers_fail=True))
