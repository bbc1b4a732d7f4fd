"""Whose a process on a card is, and what it runs; for every vendor, whose drivers tell only its number."""

from __future__ import annotations

import contextlib
import os.path
from collections.abc import Iterable

from sae_tui.gpu.proc_files import arguments_of
from sae_tui.gpu.secrets import masked_arguments
from trainer.contract.printable import printable


def owner(pid: int) -> tuple[str | None, str | None]:
    """Return user and command line of a process; None for what is hidden (ended, or outside the container)."""
    import psutil

    user = name = None
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        user = printable(str(process.username()))
        name = printable(command_line(arguments_of(pid)))
    return user, name


def command_line(arguments: Iterable[str], most: int | None = 200) -> str:
    """Return the command line without secrets and without the program's folder, cut to `most` characters."""
    program, *rest = (*arguments,) or ("",)
    # Mask before cutting, since a partial secret is not recognised.
    return " ".join(masked_arguments([os.path.basename(program), *rest]))[:most]
