"""Which packages the trainer has: those of this Python, or of the one that a job names, which has told what it has."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple


class Elsewhere(NamedTuple):
    """The packages of another Python: `names` of those that were asked for, None where that is not known.

    Of its torch the version, "" where that is not known, and what it is built for: "cuda", "hip" or "" for neither.
    """

    names: frozenset[str] | None = None
    torch_version: str = ""
    torch_runtime: str = ""


_ELSEWHERE: ContextVar[Elsewhere | None] = ContextVar("elsewhere", default=None)


def is_installed(name: str) -> bool:
    """Tell whether a job could import a package; True where it is not known."""
    if (there := _ELSEWHERE.get()) is not None:
        return there.names is None or name in there.names
    return importlib.util.find_spec(name) is not None


def elsewhere() -> Elsewhere | None:
    """Return what the other Python has in which jobs are judged just now; None where that is this one."""
    return _ELSEWHERE.get()


@contextlib.contextmanager
def judged_by(there: Elsewhere | None) -> Iterator[None]:
    """Judge jobs, in this thread, by what another Python has."""
    token = _ELSEWHERE.set(there)
    try:
        yield
    finally:
        _ELSEWHERE.reset(token)
