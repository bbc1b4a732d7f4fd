"""Tells of both environments: that of the app, and that of the Python which trains, where it is another one."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from sae_tui.doctor.base import Box, Finding
from sae_tui.jobs.environment import PACKAGE, look
from trainer.contract.printable import printable


def check_environments(box: Box) -> Iterator[Finding]:
    """Report which Python the app runs by and, where another one trains, what that has or lacks."""
    trains = "" if box.python else ", which trains as well"
    yield Finding("ok", "app", f"Python {platform.python_version()}, {PACKAGE} {version(PACKAGE)}{trains}")
    if not box.python:
        return
    if lack := lack_of(box):
        sentence, _, remedy = lack.partition("; ")
        yield Finding("error", "trainer", sentence, remedy or "name another Python in the settings")
    else:
        yield Finding("ok", "trainer", f"{look(box.python).words}: {printable(box.python_path)}")


def lack_of(box: Box) -> str:
    """Return what keeps the other Python from training; "" where nothing does, or there is none."""
    return look(box.python).lack() if box.python else ""


def both(box: Box) -> dict[str, dict[str, Any] | None]:
    """Return the facts on both environments; None for that of the trainer where it is the app's."""
    app = {"python": sys.executable, "version": platform.python_version(), "sae_tui": version(PACKAGE)}
    if not box.python:
        return {"app": app, "trainer": None}
    there = look(box.python)
    told = there.answer
    torch = told.torch if told else None
    trainer = {
        "python": box.python_path,
        "version": ".".join(map(str, told.version)) if told else None,
        "sae_tui": told.trainer if told else None,
        "torch": torch.version if torch else None,
        "gpus": torch.gpus if torch else None,
        "problem": there.lack() or None,
    }
    return {"app": app, "trainer": trainer}
