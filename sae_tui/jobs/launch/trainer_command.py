"""Runs a trainer command that prints its result as JSON, and forwards the command's progress."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from sae_tui.jobs import named_python
from trainer.contract.errors import UserError
from trainer.contract.failure import failure_in
from trainer.contract.json_file import decode_as
from trainer.contract.planning.gpu_vendors import hide_all
from trainer.contract.progress import ENV_DESCRIPTOR, Reached, read_reached

T = TypeVar("T")
OnReached = Callable[[Reached], object]


def answer_of(
    command: str,
    words: Sequence[str],
    kind: type[T],
    *,
    python: str = "",
    on_reached: OnReached | None = None,
    shows_errors: bool = False,
) -> T:
    """Run a trainer command and return its result, decoded as `kind`; raise `UserError` if the command fails.

    The command does little computation, so it runs on the CPU. `on_reached` is called on another thread. If
    `shows_errors`, the command inherits this program's standard error.
    """
    reading, writing = os.pipe()
    env = {**named_python.variables(python), **hide_all(), ENV_DESCRIPTOR: str(writing)}
    process = subprocess.Popen(
        [*named_python.command(python, command, *words), "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if shows_errors else subprocess.PIPE,
        env=env,
        pass_fds=[writing],
    )
    os.close(writing)
    threading.Thread(target=_hand_on, args=(reading, on_reached), daemon=True).start()
    output, errors = process.communicate()
    if process.returncode:
        lines = (errors or b"").decode(errors="replace").strip().splitlines()
        reason = failure_in(output) or (lines[-1] if lines else "")
        raise UserError(reason or f"`trainer {command}` exited with code {process.returncode} without a message")
    try:
        return decode_as(output.splitlines()[-1], kind)
    except (ValueError, IndexError) as error:
        raise UserError(f"the output of `trainer {command}` cannot be read: {error}") from None


def _hand_on(descriptor: int, on_reached: OnReached | None) -> None:
    with open(descriptor, "rb") as lines:
        for line in lines:
            if on_reached and (reached := read_reached(line)):
                on_reached(reached)
