"""The app's driver for browsers: exchanges packets with the server over standard input and output."""

from __future__ import annotations

import os
from typing import Any

from textual.drivers import web_driver
from textual.drivers.web_driver import WebDriver

from sae_tui.terminal.key_parser import PacketParser, TerminalDecoder

# Textual's input thread looks up the parser and decoder classes under these names in its own module.
vars(web_driver).update(XTermParser=PacketParser, getincrementaldecoder=lambda encoding: TerminalDecoder)
# Environment variables for this process only; launched jobs must not inherit them.
_OF_A_LOOK = ("TEXTUAL_DRIVER", "COLUMNS", "ROWS")


class BrowserDriver(WebDriver):
    """Textual's driver for browsers, extended to count written bytes and handle keys like `TerminalDriver`."""

    n_written = 0  # bytes

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for name in _OF_A_LOOK:
            os.environ.pop(name, None)

    def write(self, data: str) -> None:
        """Write to the browser, and count the bytes."""
        self.n_written += len(data if data.isascii() else data.encode("utf-8", "replace"))
        super().write(data)
