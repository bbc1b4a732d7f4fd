"""The message with which a supervisor gives a rank that it started early the rank's turn.

The message contains everything that depends on the turn: the environment, which names the GPUs, and the descriptors of
the log and of the GPU locks. If the channel is closed without a message, the turn never comes.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# The environment variable with the number of the descriptor on which a rank that was started early waits for its turn.
CHANNEL = "SAE_TUI_CHANNEL"
# The kernel passes at most this many descriptors in one message.
_MOST_DESCRIPTORS = 253


class Grant(NamedTuple):
    environment: dict[str, str]
    descriptors: list[int]


def send_grant(channel: socket.socket, environment: Mapping[str, str], descriptors: Sequence[int]) -> None:
    """Send a grant and close the channel; raise `OSError` if the rank has exited."""
    with channel:
        # Descriptors must accompany at least one byte.
        socket.send_fds(channel, [b"\n"], descriptors)
        # JSON can represent environment variables that are not UTF-8.
        channel.sendall(json.dumps(dict(environment)).encode())


def receive_grant(descriptor: int) -> Grant | None:
    """Wait for a grant; return None if the supervisor has closed the channel or died before sending all of it."""
    with socket.socket(fileno=descriptor) as channel:
        text, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, _MOST_DESCRIPTORS)
        while more := channel.recv(1 << 16):
            text += more
    for one in descriptors:
        # A rank may restart itself, and must then keep its locks.
        os.set_inheritable(one, True)
    try:
        return Grant(json.loads(text), descriptors)
    except ValueError:
        return None
