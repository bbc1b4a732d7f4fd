"""`sae-train interact`: answers requests on standard input, one JSON object per line, with JSON Lines."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgspec
import torch

from trainer.contract.answers.interaction import (
    MOST_REQUEST_BYTES,
    Answer,
    Generate,
    ReadText,
    Refused,
    Request,
    Stop,
)
from trainer.contract.errors import UserError
from trainer.contract.json_file import decode_as
from trainer.contract.progress import Progress
from trainer.interaction.session import ModelSession
from trainer.runtime.out_of_memory import is_shortage


def serve(folder: Path, device: torch.device, model: str | None, idle_s: float) -> None:
    """Load an SAE with its language model, and answer requests until the input ends or none has come for `idle_s`.

    Raise `UserError` if the SAE or the model cannot be loaded.
    """
    # Python would abort at the end if the thread were still waiting for a buffered stream.
    requests = _Requests(open(sys.stdin.fileno(), "rb", buffering=0, closefd=False))  # noqa: SIM115
    with Progress("loading"):
        interaction = ModelSession(folder, device, model)
    _write(interaction.ready)
    while (request := requests.next(idle_s)) is not None:
        for answer in _answers(interaction, request, requests.is_stopped.is_set):
            _write(answer)


class _Requests:
    """Reads requests in a thread, so that `Stop` ends a generation; `is_stopped` is set once it has arrived."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.is_stopped = threading.Event()
        self._read: queue.Queue[Request | Refused | None] = queue.Queue()
        threading.Thread(target=self._read_all, args=(stream,), name="requests", daemon=True).start()

    def _read_all(self, stream: IO[bytes]) -> None:
        while line := stream.readline(MOST_REQUEST_BYTES):
            request = _parsed(line)
            if isinstance(request, Stop):
                self.is_stopped.set()
            else:
                self._read.put(request)
        self._read.put(None)

    def next(self, timeout_s: float) -> Request | Refused | None:
        """Return the next request, or None at the end of the input or after `timeout_s`.

        A line that is not a request is returned as `Refused`.
        """
        with contextlib.suppress(queue.Empty):
            request = self._read.get(timeout=timeout_s)
            self.is_stopped.clear()
            return request
        return None


def _parsed(line: bytes) -> Request | Refused:
    try:
        request: Request = decode_as(line, cast(type[Any], Request))
        return request
    except ValueError as error:
        return Refused(f"the request is not valid: {error}")


def _answers(interaction: ModelSession, request: Request | Refused, is_stopped: Callable[[], bool]) -> Iterator[Answer]:
    """Yield the answers to one request; a request that fails is answered with the reason."""
    try:
        if isinstance(request, ReadText):
            yield interaction.read(request)
        elif isinstance(request, Generate):
            yield from interaction.generate(request, is_stopped)
        elif isinstance(request, Refused):
            yield request
    except UserError as error:
        yield Refused(str(error))
    except Exception as error:
        if not is_shortage(error):
            raise
        yield Refused("there is too little memory for this text; shorten it")


def _write(answer: Answer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()
