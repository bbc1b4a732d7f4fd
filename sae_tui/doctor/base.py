"""The result of a check, and the machine being checked."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from sae_tui.gpu.base import OPEN_LIMIT_S, GpuFacts, GpuSample, GpuSource, SourceUnavailable
from sae_tui.gpu.once import close_source, open_source, read_all
from sae_tui.gpu.visible import visible
from sae_tui.jobs import named_python
from sae_tui.threads import on_thread
from trainer.contract.failure import failure_in
from trainer.contract.paths import DataDir

Level = Literal["ok", "note", "warning", "error"]
SIGNS: dict[Level, str] = {"ok": "✓", "note": "•", "warning": "!", "error": "✗"}
PROGRAM_LIMIT_S = 5.0
GPU_LIMIT_S = OPEN_LIMIT_S
FOLDER_LIMIT_S = 10.0


class Finding(msgspec.Struct, frozen=True):
    """A check result and, for a problem, a remedy."""

    level: Level
    subject: str
    sentence: str
    remedy: str = ""


class GpuReadings(msgspec.Struct, frozen=True):
    """One reading of all GPUs, or the `problem` that prevents it, with a `remedy`. `cuda` is False for simulated GPUs.

    `samples` contains only the visible GPUs; the environment may hide some of the `n_gpus` GPUs.
    """

    source_name: str
    cuda: bool
    samples: tuple[GpuSample, ...] = ()
    facts: GpuFacts = GpuFacts()
    problem: str = ""
    remedy: str = ""
    n_gpus: int = 0


class CheckedMachine:
    """The machine being checked.

    Each property is read once, on first use; system files are read from under `root`.
    """

    def __init__(
        self,
        data: DataDir,
        source: GpuSource,
        *,
        environ: Mapping[str, str] | None = None,
        root: Path = Path("/"),
        python: str = "",
    ) -> None:
        self.data = data
        # True once the data folder has failed to respond, for example because its file server hangs.
        self.is_silent = False
        # The Python interpreter used for training, if it is in another environment, or "" for this one.
        self.python = python
        self.environ = environment_at_start() if environ is None else environ
        self.root = root
        self._source = source

    @functools.cached_property
    def gpus(self) -> GpuReadings:
        return look_at(self._source, self.environ)

    @functools.cached_property
    def size(self) -> tuple[int, int] | None:
        """The terminal's size in columns and lines, or None without a terminal."""
        for stream in (sys.__stdout__, sys.__stderr__, sys.__stdin__):
            try:
                terminal_size = os.get_terminal_size(stream.fileno() if stream else -1)
            except (OSError, ValueError):
                continue
            return terminal_size.columns, terminal_size.lines
        return None

    def program(self, name: str) -> str | None:
        """Return the path to a program found in the user's PATH, or None if it is not there."""
        return shutil.which(name, path=self.environ.get("PATH"))

    def output(self, command: Sequence[str], limit_s: float = PROGRAM_LIMIT_S, **environ: str) -> tuple[str, str]:
        """Run a program; return its output and the failure reason ("" on success)."""
        return self._run(command, limit_s, {**self.environ, **environ})

    def trainer(self, *words: str, limit_s: float = PROGRAM_LIMIT_S, **environ: str) -> tuple[str, str]:
        """Run the trainer, or the code after "-c", with the Python used for training; return what `output` returns."""
        if self.python and (why := named_python.refusal(self.python)):
            return "", why
        variables = named_python.variables(self.python, self.environ)
        return self._run(named_python.command(self.python, *words), limit_s, {**variables, **environ})

    @property
    def python_path(self) -> str:
        """The path to the Python interpreter used for training."""
        return named_python.whole(self.python) or sys.executable

    def _run(self, command: Sequence[str], limit_s: float, environ: Mapping[str, str]) -> tuple[str, str]:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                env=environ, timeout=limit_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "", f"did not respond within {limit_s:g} s"
        except OSError as error:
            return "", error.strerror or str(error)
        messages = done.stderr.strip().splitlines()
        failure = failure_in(done.stdout) or (messages[-1] if messages else f"exit code {done.returncode}")
        return done.stdout.strip(), failure if done.returncode else ""


def look_at(source: GpuSource, environ: Mapping[str, str]) -> GpuReadings:
    """Read all GPUs once, with a time limit for the driver; variables in `environ` may hide GPUs."""
    try:
        count = open_source(source, GPU_LIMIT_S)
    except SourceUnavailable as error:
        return GpuReadings(source.name, source.cuda, problem=error.reason, remedy=error.remedy)
    samples = visible(read_all(source, count), source.name, environ)
    facts = GpuFacts()
    # Facts are optional: without facts, the report is merely shorter, because the samples already contain GPU faults.
    with contextlib.suppress(Exception):
        facts = on_thread(source.facts).result(GPU_LIMIT_S)
    close_source(source)
    shown = {sample.index for sample in samples}
    return GpuReadings(source.name, source.cuda, samples, _facts_of(shown, facts), n_gpus=count)


def _facts_of(shown: Collection[int], facts: GpuFacts) -> GpuFacts:
    """Return facts about visible GPUs only; list positions still match the GPU indices."""
    return replace(
        facts,
        capabilities=tuple(one if index in shown else None for index, one in enumerate(facts.capabilities)),
        nvlinks=tuple(one if index in shown else 0 for index, one in enumerate(facts.nvlinks)),
        pairs=tuple(pair for pair in facts.pairs if pair.first in shown and pair.second in shown),
    )


def environment_at_start() -> dict[str, str]:
    """Return the environment as the shell passed it, because Python itself adds LC_CTYPE under LANG=C."""
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        return dict(os.environ)
    pairs = [os.fsdecode(entry).partition("=") for entry in raw.split(b"\0") if b"=" in entry]
    return {name: value for name, _, value in pairs}
