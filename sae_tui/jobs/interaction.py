"""Reads texts with an SAE and steers its language model, in a trainer process that keeps both in memory."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from sae_tui.jobs import named_python
from sae_tui.jobs.evaluation.request import ReservedGpu
from sae_tui.jobs.gpus.locks import GpuLocks
from sae_tui.threads import on_thread
from trainer.contract.answers.interaction import (
    MOST_REQUEST_BYTES,
    Answer,
    Continued,
    Ready,
    Refused,
    Request,
    Stop,
)
from trainer.contract.errors import UserError
from trainer.contract.failure import failure_in
from trainer.contract.json_file import decode_as
from trainer.contract.planning.gpu_vendors import VENDORS, hide_all
from trainer.contract.printable import printable
from trainer.contract.progress import ENV_DESCRIPTOR, Reached, read_reached

# How long the process may take to end once its input is closed.
PATIENCE_S = 2.0
# The maximum length of an answer in bytes.
_MOST_BYTES = 2**26
# If other processes use the cores, threads that spin while they wait delay the others: with 8 processes on 2 cores, a
# token took 3 s instead of 0.3 s.
_PASSIVE = {"OMP_WAIT_POLICY": "passive"}
_ENDED = "the model's process was ended"


def _whole(model: str) -> str:
    """Return the absolute path of a model's folder or file; a name on the hub is returned unchanged."""
    path = os.path.expanduser(model)
    return os.path.abspath(path) if os.path.exists(path) else model


class Interaction:
    """A process with an SAE and its language model, which ends once its input is closed, as when this process ends.

    Another thread may call `stop` and `close` while one thread reads answers. `gpu` must be free; without it, the
    process runs on the CPU. `command` replaces the trainer's command.
    """

    def __init__(
        self,
        folder: Path,
        python: str = "",
        gpu: ReservedGpu | None = None,
        model: str | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self._locks = GpuLocks(Path(gpu.locks), [gpu.uuid]) if gpu else None
        if self._locks and not self._locks.take():
            raise UserError("another process took the free GPU; try again, or use the CPU")
        pinned = VENDORS[gpu.vendor].pin([gpu.uuid]) if gpu else {}
        argv = [*(command or named_python.command(python, "interact")), "--json"]
        argv += [
            "--device",
            "cuda" if gpu else "cpu",
            *(["--model", _whole(model)] if model else []),
            "--",
            str(folder),
        ]
        reading, writing = os.pipe()
        environment = {
            **_PASSIVE,
            **named_python.variables(python),
            **hide_all(),
            **pinned,
            ENV_DESCRIPTOR: str(writing),
        }
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._progress = open(reading, "rb", buffering=0)  # noqa: SIM115
        self._asking, self._writing = threading.Lock(), threading.Lock()
        # The number of latents, known once `start` has returned.
        self.n_latents = 0
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, cwd="/", env=environment,
                pass_fds=[writing], start_new_session=True,  # Ctrl+C in the terminal must not reach the process
            )  # fmt: skip
        except OSError as error:
            self._release()
            raise UserError(f"the trainer cannot be started: {error.strerror or error}") from None
        finally:
            os.close(writing)

    def __enter__(self) -> Interaction:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, on_progress: Callable[[Reached], object] = lambda _: None) -> Ready:
        """Wait until the SAE and the language model are loaded; raise `UserError` if they cannot be loaded."""
        assert self._process.stdout
        kept = b""
        with self._asking, selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            selector.register(self._progress, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._process.stdout in ready:
                    answer = self._answer()
                    assert isinstance(answer, Ready)
                    self.n_latents = answer.n_latents
                    return answer
                try:
                    read = self._progress.read(4096)
                except ValueError:  # closed by another thread
                    raise UserError(_ENDED) from None
                if not read:
                    selector.unregister(self._progress)
                *lines, kept = (kept + (read or b"")).split(b"\n")
                for line in lines:
                    if reached := read_reached(line):
                        on_progress(reached)

    def ask(self, request: Request) -> Iterator[Answer]:
        """Send a request, and yield the answers to it; raise `UserError` if it is refused or if the process has ended.

        The last answer is a `TextRead` or a `Generated`.
        """
        with self._asking:
            self._send(request)
            is_answered = False
            try:
                while not is_answered:
                    answer = self._answer()
                    is_answered = not isinstance(answer, Continued)
                    if isinstance(answer, Refused):
                        raise UserError(answer.message)
                    yield answer
            finally:
                if not is_answered:
                    # The next request would get the answers to this one.
                    self._process.kill()
                    self._process.wait()

    def stop(self) -> None:
        """End the current generation early; `ask` then yields its last answer."""
        with contextlib.suppress(UserError):
            self._send(Stop())

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """End the process, and kill it after `patience_s`; a thread that waits for an answer gets a `UserError`."""
        # Writing blocks if the process hangs and reads nothing.
        on_thread(self._close_input)
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._release()

    def _close_input(self) -> None:
        assert self._process.stdin
        self.stop()
        with self._writing, contextlib.suppress(OSError):
            self._process.stdin.close()

    def _release(self) -> None:
        self._progress.close()
        if self._locks:
            self._locks.release()

    def _send(self, request: Request) -> None:
        assert self._process.stdin
        try:
            line = msgspec.json.encode(request) + b"\n"
        except UnicodeEncodeError:
            raise UserError("the text contains bytes that are not UTF-8; leave them out") from None
        if len(line) > MOST_REQUEST_BYTES:
            raise UserError("the text is too long; shorten it")
        try:
            with self._writing:
                self._process.stdin.write(line)
                self._process.stdin.flush()
        except (OSError, ValueError):
            raise UserError(self._ending()) from None

    def _answer(self) -> Answer:
        """Return the next answer; raise `UserError` if the process has ended or its answer cannot be read."""
        assert self._process.stdout
        try:
            line = self._process.stdout.readline(_MOST_BYTES)
        except ValueError:
            raise UserError(_ENDED) from None
        if reason := failure_in(line):
            raise UserError(printable(reason))
        if not line.endswith(b"\n"):
            raise UserError(self._ending())
        try:
            answer: Answer = decode_as(line, cast(type[Any], Answer))
        except ValueError as error:
            raise UserError(f"the output of `trainer interact` cannot be read: {error}") from None
        return answer

    def _ending(self) -> str:
        """Describe how the process ended, with the last line of its error output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_S)
        self._errors.seek(0)
        lines = self._errors.read()[-10_000:].decode(errors="replace").strip().splitlines()
        code = self._process.returncode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        remedy = "; it may have run out of memory" if code == -9 else ""
        return f"the model's process {how}{remedy}{f': {printable(lines[-1])}' if lines else ''}"
