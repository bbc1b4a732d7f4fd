"""`sae-train interact`: answers requests on standard input, one JSON object per line, with JSON Lines."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import torch

from trainer.contract.answers.interaction import Answer, Generate, ReadText, Refused, Request
from trainer.contract.errors import UserError, first_line
from trainer.contract.json_file import decode_as
from trainer.contract.progress import Progress
from trainer.interaction.session import Interaction
from trainer.runtime.out_of_memory import is_shortage

# The maximum length of a request in bytes.
MOST_BYTES = 2**22


def serve(folder: Path, device: torch.device, model: str | None, idle_s: float) -> None:
    """Load an SAE with its language model, and answer requests until the input ends or none has come for `idle_s`.

    Raise `UserError` if the SAE or the model cannot be loaded.
    """
    requests = _Requests(sys.stdin.buffer)
    with Progress("loading"):
        interaction = Interaction(folder, device, model)
    _write(interaction.ready)
    while (line := requests.next(idle_s)) is not None:
        for answer in _answers(interaction, line, requests.has_next):
            _write(answer)


class _Requests:
    """Reads lines in a thread, so that a request can end the generation of the one before."""

    def __init__(self, stream: BinaryIO) -> None:
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._read, args=(stream,), name="requests", daemon=True).start()

    def _read(self, stream: BinaryIO) -> None:
        while line := stream.readline(MOST_BYTES):
            self._lines.put(line)
        self._lines.put(None)

    def next(self, timeout_s: float) -> bytes | None:
        """Return the next line, or None at the end of the input or after `timeout_s`."""
        try:
            return self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def has_next(self) -> bool:
        """Return whether another request, or the end of the input, has arrived."""
        return not self._lines.empty()


def _answers(interaction: Interaction, line: bytes, is_over: Callable[[], bool]) -> Iterator[Answer]:
    """Yield the answers to one request; a request that fails is answered with the reason."""
    try:
        request: Request = decode_as(line, cast(type[Any], Request))
        if isinstance(request, ReadText):
            yield interaction.read(request)
        elif isinstance(request, Generate):
            yield from interaction.generate(request, is_over)
    except UserError as error:
        yield Refused(str(error))
    except ValueError as error:
        yield Refused(f"the request is not valid: {first_line(error)}")
    except Exception as error:
        if not is_shortage(error):
            raise
        yield Refused("there is too little memory for this text; shorten it")


def _write(answer: Answer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()
