"""Kills child processes at each of their disk calls."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
from collections.abc import Callable

# Python functions that write, rename or delete files and folders.
CALLS = {"fsync": os, "replace": os, "rename": pathlib.Path, "unlink": pathlib.Path, "rmtree": shutil}


def kill_at_every_moment(before: Callable[[str], object], act: Callable[[str], object]) -> int:
    """Call `before`, then `act` in a child that is killed at its nth disk call, for n = 1, 2, ...

    `before` and `act` get n as a string. Return the number of killed children; the last child runs to completion. This
    process must have only one thread, because it forks.
    """
    for moment in range(1, 100):
        before(str(moment))
        if (pid := os.fork()) == 0:
            _die_at(moment)
            act(str(moment))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status == 0:
            return moment - 1
        assert os.WTERMSIG(status) == signal.SIGKILL
    raise AssertionError("the function never ran to completion")


def _die_at(moment: int) -> None:
    left = [moment]
    for name, owner in CALLS.items():
        setattr(owner, name, _count(getattr(owner, name), left))


def _count(plain: Callable[..., object], left: list[int]) -> Callable[..., object]:
    def counted(*arguments: object, **named: object) -> object:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments, **named)

    return counted
