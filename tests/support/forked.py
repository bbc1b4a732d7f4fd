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
# Modules that are imported late: by ranks when they end, and by `torch.testing.assert_close`.
LATE = ["trainer.evaluation.at_end", "numpy.random", "torch.distributed.tensor"]
LOADED = ["torch", "torch.distributed", "safetensors.torch", *RANK, *LATE]


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

    def __init__(
        self,
        spec_file: Path,
        environment: Mapping[str, str],
        prepare: Prepare | None = None,
        *,
        measures_in_full: bool = False,
    ) -> None:
        context = loaded_context()
        self._said = TemporaryFile("w+")  # noqa: SIM115
        error_file = f"/proc/{os.getpid()}/fd/{self._said.fileno()}"
        arguments = spec_file, dict(environment), error_file, prepare, measures_in_full
        self._process = context.Process(target=_run, args=arguments)
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


def sleep_at_once() -> None:
    """Let ranks sleep while they wait for each other. Polling would take time from the other tests on these cores."""
    from trainer.parallel import rendezvous

    vars(rendezvous)["AWAKE_S"] = 0.0


def measure_briefly() -> None:
    """Measure the speeds of this machine with little data. With the usual amount, a rank takes 0.5 core-seconds."""
    from trainer.parallel import calibrate

    brief = {"_PRODUCT": {"cpu": (128, 96, 512)}, "_COPIED": {"cpu": 2**19}, "_SUMMED": {"cpu": 2**18}}
    vars(calibrate).update(brief, WINDOW_S=0.004)


def _run(
    spec_file: Path, environment: dict[str, str], said: str, prepare: Prepare | None, measures_in_full: bool
) -> None:
    """Do the same as `python -m trainer rank` in a process with torch loaded."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir("/")
    os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), 2)
    from trainer.contract.runs.rank_spec import read_spec
    from trainer.ranks.rank import main

    sleep_at_once()
    if not measures_in_full:
        measure_briefly()
    if prepare:
        prepare(int(environment["RANK"]))
    main(read_spec(spec_file))
