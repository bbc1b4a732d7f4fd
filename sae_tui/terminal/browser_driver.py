"""The driver of the app in a browser: packets on standard output and input, which the server passes on."""

from __future__ import annotations

import os
from typing import Any

from textual.drivers import web_driver
from textual.drivers.web_driver import WebDriver

from sae_tui.terminal.key_parser import PacketParser, TerminalDecoder

# Textual's input thread takes the classes of its parser and decoder from these names of its module.
vars(web_driver).update(XTermParser=PacketParser, getincrementaldecoder=lambda encoding: TerminalDecoder)
# What only this process is told by its environment, and not the jobs that it launches.
_OF_A_LOOK = ("TEXTUAL_DRIVER", "COLUMNS", "ROWS")


class BrowserDriver(WebDriver):
    """Textual's own driver for browsers; it counts what it writes, and takes keys as the terminal's does."""

    n_written = 0  # bytes

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for name in _OF_A_LOOK:
            os.environ.pop(name, None)

    def write(self, data: str) -> None:
        """Write to the browser, and count it."""
        self.n_written += len(data if data.isascii() else data.encode("utf-8", "replace"))
        super().write(data)
