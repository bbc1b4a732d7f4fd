"""Forks real processes from a process with torch loaded, which saves two core-seconds per start."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Callable, Mapping
from io import StringIO
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

# A forked rank calls this function with the rank's number before it starts working.
Prepare = Callable[[int], object]

RANK = ["trainer.ranks.rank", "trainer.ranks.training_work", "trainer.training.loop", "trainer.reporting.progress"]
LOADED = ["torch", "torch.distributed", "safetensors.torch", *RANK]


def loaded_context() -> ForkServerContext:
    """Return the multiprocessing context that forks processes from a process with torch loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context


def in_loaded_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a separate process with torch loaded and one thread; return its result."""
    with loaded_context().Pool(1) as pool:
        return pool.apply(function, arguments)


class ForkedRank:
    """A forked rank with the subset of the `subprocess.Popen` interface that the tests use."""

    def __init__(self, spec_file: Path, environment: Mapping[str, str], prepare: Prepare | None = None) -> None:
        context = loaded_context()
        self._said = TemporaryFile("w+")  # noqa: SIM115
        error_file = f"/proc/{os.getpid()}/fd/{self._said.fileno()}"
        self._process = context.Process(target=_run, args=(spec_file, dict(environment), error_file, prepare))
        self._process.start()

    @property
    def stderr(self) -> StringIO:
        """Everything that the rank has written."""
        self._said.seek(0)
        return StringIO(self._said.read())

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self) -> None:
        self._process.join()
        self._said.close()


def _run(spec_file: Path, environment: dict[str, str], said: str, prepare: Prepare | None) -> None:
    """Do the same as `python -m trainer rank` in a process with torch loaded."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir("/")
    os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), 2)
    from trainer.contract.runs.rank_spec import read_spec
    from trainer.ranks.rank import main

    if prepare:
        prepare(int(environment["RANK"]))
    main(read_spec(spec_file))
