"""Passes bytes to a reader and checks the outcome."""

from __future__ import annotations

import contextlib
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from fuzz.readers import Reader
from fuzz.uses import Home

from trainer.contract.errors import JobFileError, UserError
from trainer.contract.printable import printable
from trainer.contract.store import database

# The limit is in CPU seconds of this process, so that no test fails because the machine is busy. Readers take
# milliseconds.
MOST_S = 15.0
MOST_BYTES = 400 << 20
LONGEST_SENTENCE = 3000


class Wrong(AssertionError):
    """Raised if a reader breaks its contract."""


def judge(reader: Reader, home: Home, content: bytes) -> None:
    """Pass bytes to a reader; raise `Wrong`, or the reader's own error, if it breaks its contract."""
    home.put(reader.seeds, content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    try:
        with _bounded():
            value = reader.read(home)
    except (UserError, *reader.raises) as error:
        _judge_sentence(error)
    else:
        if not isinstance(value, reader.kinds):
            raise Wrong(f"{reader.name} returned {value!r:.200}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
    if grown > MOST_BYTES:
        raise Wrong(f"{reader.name} used {grown >> 20} MiB of memory")


def _judge_sentence(error: Exception) -> None:
    sentences = [str(problem) for problem in error.problems] if isinstance(error, JobFileError) else [str(error)]
    for text in map(printable, sentences):
        if not text.strip() or len(text) > LONGEST_SENTENCE:
            raise Wrong(f"the error message has {len(text)} characters: {text:.300}") from error


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    def too_slow(*_: object) -> None:
        raise Wrong(f"the reader took more than {MOST_S:g} s")

    before = signal.signal(signal.SIGPROF, too_slow)
    signal.setitimer(signal.ITIMER_PROF, MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def home() -> Iterator[Home]:
    """Yield a data folder to read, on an in-memory file system if there is one."""
    in_memory = Path("/dev/shm")
    # `network_file_system` would start a process for every opened store.
    local = mock.patch.object(database, "network_file_system", return_value=None)
    with local, tempfile.TemporaryDirectory(prefix="fuzz-", dir=in_memory if in_memory.is_dir() else None) as folder:
        yield Home(Path(folder))
