"""Reads the headers of shards in formats that require torch or pyarrow, using a separate trainer process.

The results are cached in the data folder until the files change so that other commands and supervisors can use them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path

import msgspec

from sae_tui.jobs import named_python
from trainer.contract.errors import JobFileError, Problem, UserError, sentence
from trainer.contract.extras import elsewhere
from trainer.contract.failure import failure_in
from trainer.contract.files import write_whole
from trainer.contract.json_file import decode_as, load_json
from trainer.contract.object_paths import url_of
from trainer.contract.paths import DataDir, private_folder
from trainer.contract.planning.gpu_vendors import hide_all
from trainer.contract.settings.shards import ShardSet

POLL_S = 0.2
# The time limit for reading shard headers. The first import of torch from a network disk can take half a minute.
LIMIT_S = 120.0
# Failed reads are retried after this many seconds, in case a missing package has been installed.
FAILED_FOR_S = 10.0
# The headers at a URL are read again after at most this many seconds.
URL_KEPT_S = 300.0
# The trainer's error messages start with the name of this setting.
_FIELD = "data.path"

# Each file's path, size and modification time.
Fingerprint = tuple[tuple[str, int, int], ...]
_when_reading: ContextVar[Callable[[Path], object]] = ContextVar("when_reading", default=lambda _: None)


class _Known(msgspec.Struct, frozen=True):
    """The shards in the files with fingerprint `state`, or why reading them failed and when (`failed_at`)."""

    state: Fingerprint
    shards: ShardSet | None = None
    failure: str = ""
    failed_at: float = 0.0


class ShardHeaders:
    """Reads shard headers in a trainer process, and caches them until the files change."""

    def __init__(self, data: DataDir, command: Sequence[str] = ()) -> None:
        self._folder, self._command = data.headers, command
        self._known: dict[str, _Known] = {}
        self._locks: dict[str, threading.Lock] = {}

    def inspect(self, root: Path, files: Sequence[Path], field: str) -> ShardSet:
        """Return the shards at a data path; raise `JobFileError` for the setting `field` if they cannot be read."""
        place = os.path.abspath(root)
        try:
            state = fingerprint(files) if url_of(place) is None else of_url(place)
        except OSError as error:
            raise JobFileError([Problem(field, f"{root} cannot be read: {error.strerror}")]) from None
        with self._locks.setdefault(place, threading.Lock()):
            known = self._remembered(place, state)
            if known is None:
                _when_reading.get()(root)
                known = self._known[place] = self._ask(place, state)
                self._keep(place, known)
        if known.shards is None:
            raise JobFileError([Problem(field, known.failure)])
        return known.shards

    def _remembered(self, place: str, state: Fingerprint) -> _Known | None:
        known = self._known.get(place) or self._kept(place)
        if known is None or known.state != state:
            return None
        if known.shards is None and time.monotonic() - known.failed_at > FAILED_FOR_S:
            return None
        self._known[place] = known
        return known

    def _ask(self, place: str, state: Fingerprint) -> _Known:
        python = there.python if (there := elsewhere()) else None
        try:
            named_python.refuse(python)
            command = self._command or named_python.command(python, "inspect", "--headers")
            answer = answer_of([*command, "--json", "--", place], python, limit_s=LIMIT_S)
            shards = decode_as(answer or b"", ShardSet, _as_path)
        except (UserError, OSError) as error:
            return _Known(state, failure=sentence(error).removeprefix(f"{_FIELD}: "), failed_at=time.monotonic())
        except ValueError as error:
            reason = f"the output of `trainer inspect` cannot be read: {error}"
            return _Known(state, failure=reason, failed_at=time.monotonic())
        return _Known(state, shards)

    def _file(self, place: str) -> Path:
        return self._folder / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:32]}.json"

    def _kept(self, place: str) -> _Known | None:
        try:
            known = load_json(self._file(place), _Known, _as_path)
        except (OSError, ValueError):
            return None
        return known if known.shards and known.shards.shards else None

    def _keep(self, place: str, known: _Known) -> None:
        # Ignore errors. If the result cannot be saved, other commands simply reread the headers.
        with contextlib.suppress(OSError, UserError, UnicodeError):
            if known.shards is not None:
                private_folder(self._folder)
                write_whole(self._file(place), msgspec.json.encode(known, enc_hook=str), durable=False)


def fingerprint(files: Sequence[Path]) -> Fingerprint:
    """Return a value that changes if any of the files changes; raise `OSError` if a file cannot be accessed."""
    return tuple((str(file), status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()])


def of_url(place: str) -> Fingerprint:
    """Return a value that changes every few minutes, because only a request would show that objects have changed."""
    return ((place, 0, int(time.time() // URL_KEPT_S)),)


@contextlib.contextmanager
def announcing(when_reading: Callable[[Path], object]) -> Iterator[None]:
    """Within the context, call `when_reading` with each data path before the trainer reads its headers.

    This applies only to reads requested by this thread.
    """
    token = _when_reading.set(when_reading)
    try:
        yield
    finally:
        _when_reading.reset(token)


def answer_of(
    argv: Sequence[str],
    python: str | None,
    is_over: Callable[[], bool] = lambda: False,
    limit_s: float = float("inf"),
) -> bytes | None:
    """Return the last line printed by a trainer command, or None if `is_over` returns True before the command exits.

    `python` is the interpreter that runs the command, or None for the app's own. Raise `UserError` if the command
    fails.
    """
    # Hide the GPUs because no GPU is reserved for this command.
    environment: Mapping[str, str] = {**named_python.variables(python), **hide_all()}
    ends = time.monotonic() + limit_s
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/", env=environment
    ) as process:
        while True:
            try:
                output, errors = process.communicate(timeout=POLL_S)
                break
            except subprocess.TimeoutExpired:
                if is_over():
                    process.kill()
                    return None
                if time.monotonic() > ends:
                    process.kill()
                    raise UserError(f"the trainer has not read the data within {limit_s:g} s; try again") from None
    if reason := failure_in(output):
        raise UserError(reason)
    if output:
        return output.splitlines()[-1]
    lines = errors.decode(errors="replace").strip().splitlines()
    raise UserError(lines[-1] if lines else f"`trainer inspect` exited with code {process.returncode} without output")


def _as_path(kind: type, value: object) -> object:
    return kind(value)
