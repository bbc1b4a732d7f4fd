"""Forwards a connection with a delay and limited bandwidth in both directions; tests use it as ssh's ProxyCommand.

python slow_line.py PORT DELAY_S BYTES_S
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable

_CHUNK = 2048


def carry(read: Callable[[int], bytes], write: Callable[[bytes], object], delay_s: float, bytes_s: float) -> None:
    """Forward data until the input ends. Delay each chunk by `delay_s`; forward at most `bytes_s` bytes per second."""
    while piece := read(_CHUNK):
        time.sleep(delay_s + len(piece) / bytes_s)
        write(piece)
    os._exit(0)


def main(port: int, delay_s: float, bytes_s: float) -> None:
    line = socket.create_connection(("127.0.0.1", port))
    back = (line.recv, lambda piece: os.write(1, piece), delay_s, bytes_s)
    threading.Thread(target=carry, args=back, daemon=True).start()
    carry(lambda n: os.read(0, n), line.sendall, delay_s, bytes_s)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
