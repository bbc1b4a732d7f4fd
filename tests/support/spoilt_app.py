"""The real app with two injected faults: SIGUSR1 makes a library write to file descriptor 2, and ctrl+f12 crashes the
app.

python spoilt_app.py [ARGUMENTS OF sae-tui]
"""

from __future__ import annotations

import os
import signal
import sys

from sae_tui.cli import main
from sae_tui.terminal.key_parser import PacketParser

FAILING_KEY = "\x1b[24;5~"
COMPLAINT = b"libfake: a complaint over the screen\n"
_knows = PacketParser._knows


def fail(self: PacketParser, sequence: str) -> bool:
    """Raise an unexpected error for one key sequence."""
    if sequence == FAILING_KEY:
        raise RuntimeError("unforeseen")
    return _knows(self, sequence)


if __name__ == "__main__":
    PacketParser._knows = fail  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, lambda *_: os.write(2, COMPLAINT) and None)
    sys.exit(main())
