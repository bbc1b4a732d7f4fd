"""The real app with a given user name and host name. Writes the classes of the displayed screens to `screens.txt`.

python watched_app.py USER HOST [ARGUMENTS OF sae-tui]
"""

from __future__ import annotations

import os
import pwd
import socket
import sys
from typing import Any

from textual.app import App
from textual.screen import Screen

from sae_tui.cli import main
from sae_tui.doctor import torch_build


def name_other_users(user: str, host: str) -> None:
    """Give every user the name `user`, and this machine the name `host`."""
    getpwuid = pwd.getpwuid
    pwd.getpwuid = lambda uid: pwd.struct_passwd((user, *getpwuid(uid)[1:]))
    socket.gethostname = lambda: host


def ask_no_torch() -> None:
    """Prevent the doctor from importing torch, which saves two core-seconds."""
    torch_build._ask = lambda box: (None, "no torch")


def note_screens() -> None:
    shown = open("screens.txt", "a", buffering=1)  # noqa: SIM115
    draw = App._display

    def display(app: App[Any], screen: Screen[Any], renderable: Any) -> None:
        print(type(screen).__name__, file=shown)
        draw(app, screen, renderable)

    App._display = display  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    name_other_users(*map(os.fsdecode, sys.argv[1:3]))
    ask_no_torch()
    note_screens()
    del sys.argv[1:3]
    sys.exit(main())
