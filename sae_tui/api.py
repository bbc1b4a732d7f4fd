"""Launches and follows jobs from Python scripts and notebooks, in the same queue as `sae-tui run`, and loads SAEs.

import sae_tui

job = sae_tui.run(["python", "probe.py", "--layer", 12], gpus=1, memory="20GiB", time="4h")
print(job.id, job.state)  # 7 queued
result = job.wait()  # Ctrl-C leaves the job running
print(result.exit_code, result.words)  # 0 finished
print(job.log(20))
"""

from __future__ import annotations

import argparse
import functools
import os
import time as clock
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import msgspec

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.interaction import Place, place_of_sae
from sae_tui.jobs import edits
from sae_tui.jobs.features import search
from sae_tui.jobs.gpus.occupancy import name_elsewhere
from sae_tui.jobs.interaction import Interaction
from sae_tui.jobs.launch import launching, placement
from sae_tui.jobs.launch.command_job import command_job, listed, named_as_arguments
from sae_tui.jobs.states import describe_state
from trainer.contract.answers.interaction import Generate, Generated, ReadText, Steered, TextRead, TextToken
from trainer.contract.errors import JobFileError, Problem, UsageError, UserError, errors
from trainer.contract.planning.check_job import propose
from trainer.contract.printable import printable
from trainer.contract.runs.features import FEATURES, Feature, Features
from trainer.contract.runs.log_tail import tail
from trainer.contract.runs.rank_exit import signal_name
from trainer.contract.settings.command import CommandJob
from trainer.contract.store.database import StoreMissing
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job as Row
from trainer.contract.store.rows import Rank

POLL_S = 0.25
RECONCILE_EVERY_S = 2.0
# By default, `Job.log()` returns at most this many lines; the whole log is in `Job.log_file`.
MOST_LINES = 100_000


class Result(msgspec.Struct, frozen=True):
    """How a job ended.

    `state` is `finished`, `stopped`, `failed` or `lost`. `exit_code` is None if the program never started, or if a
    signal killed it; `signal` is then the signal's name, like `SIGKILL`. `error` is one sentence, or "".

    >>> Result("failed", exit_code=2, error="its program ended with exit code 2").words
    'failed: its program ended with exit code 2'
    """

    state: str
    exit_code: int | None = None
    signal: str | None = None
    error: str = ""

    @property
    def words(self) -> str:
        """The state and the error, if there is one."""
        return f"{self.state}: {self.error}" if self.error else self.state


class Job:
    """A job in a data folder. Every property reads the current state."""

    def __init__(self, job_id: int, context: CommandContext) -> None:
        self.id = job_id
        self._context = context
        self._rows()

    def __repr__(self) -> str:
        row, _ = self._rows()
        return f"<job {self.id} ({printable(row.name)}): {describe_state(row).word}>"

    @property
    def state(self) -> str:
        """One of `queued`, `starting`, `running`, `stalled`, `stopping`, `stopped`, `finished`, `failed`, `lost`."""
        return str(self._rows()[0].state)

    @property
    def result(self) -> Result | None:
        """How the job ended, or None if it has not ended yet."""
        row, ranks = self._rows()
        if not row.state.is_final:
            return None
        own = [rank for rank in ranks if rank.attempt == row.attempt]
        # If a rank failed, its exit code and signal show how the job ended.
        last = next((rank for rank in own if rank.exit_code or rank.exit_signal), own[0] if own else None)
        number = last.exit_signal if last else None
        name = None if number is None else signal_name(number)
        return Result(str(row.state), last.exit_code if last else None, name, printable(row.error or ""))

    def wait(self, timeout: float | None = None) -> Result:
        """Wait until the job has ended; raise `TimeoutError` if this takes longer than `timeout` seconds.

        A `KeyboardInterrupt` leaves the job running.
        """
        deadline = None if timeout is None else clock.monotonic() + timeout
        mend_at = clock.monotonic() + RECONCILE_EVERY_S
        while (result := self.result) is None:
            if deadline is not None and clock.monotonic() >= deadline:
                raise TimeoutError(f"job {self.id} is still {self.state} after {timeout:g} s")
            if clock.monotonic() >= mend_at:
                self._context.mend()
                mend_at = clock.monotonic() + RECONCILE_EVERY_S
            clock.sleep(POLL_S)
        return result

    @property
    def log_file(self) -> str:
        """The path of the program's output."""
        return str(self._context.data.run(self.id).log(0))

    def log(self, lines: int | None = None) -> str:
        """Return the last `lines` lines of the program's output, by default 100,000, without control characters."""
        if lines is not None and lines < 0:
            raise UsageError(f"lines: must be at least 0, not {lines}")
        self._context.data.refuse_links(self.id)
        found = tail(self._context.data.run(self.id).log(0), MOST_LINES if lines is None else lines)
        return "".join(f"{printable(line)}\n" for line in found)

    def stop(self) -> str:
        """Ask the program to stop with its stop signal, and return a sentence saying what will happen."""
        return edits.stop(self._context.data, self.id)

    def kill(self) -> str:
        """Kill the program within 5 s, and return a sentence saying what will happen."""
        return edits.kill(self._context.data, self.id)

    def _rows(self) -> tuple[Row, list[Rank]]:
        try:
            control = Control(self._context.data.control_db, readonly=True)
        except StoreMissing:
            raise UserError(f"there is no job {self.id} in {self._context.data.root}") from None
        try:
            return control.job(self.id), control.ranks(self.id)
        finally:
            control.close()


def run(
    argv: Sequence[object],
    *,
    gpus: int | str | Sequence[int] | None = None,
    memory: str | int | None = None,
    name: str | None = None,
    after: int | Job | Iterable[int | Job] = (),
    time: str | float | None = None,
    env: Mapping[str, object] | Sequence[str] = (),
    folder: str | os.PathLike[str] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    hold: bool = False,
    tags: str | Iterable[str] = (),
    clean_env: bool = False,
    stop_signal: str = "TERM",
    grace: str | float = 60.0,
    retries: int = 0,
    retry_on: int | Sequence[int] = (),
    requeue: int | Sequence[int] = (),
    backend: str | None = None,
    priority: int | None = None,
    share: bool = False,
    metrics: str | Sequence[str] = (),
    settings: str | Sequence[str] = (),
) -> Job:
    """Launch a program as a job and return at once, as `sae-tui run` does.

    `argv` is a list of words; no shell interprets them. `{gpus}`, `{gpu_list}`, `{job_id}` and `{run_dir}` are replaced
    when the program starts. The job outlives this process.

    - `gpus`: a number (0: the CPU), indices like `[0, 1]`, or `"auto:2"`. Default: one GPU if there are GPUs.
    - `memory`: the memory needed on each GPU, like `"20GiB"` or in bytes. By default, idle GPUs are used.
    - `after`: jobs or job ids that must have finished first.
    - `time`: the time limit, like `"4h"` or in seconds. `grace`: how long the program may take to stop before it is
      killed.
    - `env`: variables to set, added to the variables of this process. `folder`: the working directory.
    - `retries`: how many times the job is restarted if it fails, or if it exits with a code in `retry_on`.
    - `requeue`: exit codes after which the job is queued again.
    - `metrics`: patterns that find metrics in the output, like `"step={step} loss={loss}"`.
    - `settings`: overrides like `"launch.partition=gpu"`.

    Raise `UserError` with the sentences that `sae-tui run` would print. Warnings are issued as Python warnings.

    >>> job = run(["echo", "hello"], gpus=0)
    >>> job.wait().words
    'finished'
    >>> print(job.log(1), end="")
    hello
    >>> run(["sh", "-c", "exit 3"], gpus=0).wait().exit_code
    3
    """
    with named_as_arguments(overrides=_strings("settings", settings)):
        made = command_job(
            _words(argv),
            gpus=gpus,
            memory=memory,
            name=name,
            time=time,
            env=env,
            folder=folder,
            clean_env=clean_env,
            stop_signal=stop_signal,
            grace=grace,
            retries=retries,
            retry_on=retry_on,
            requeue=requeue,
            backend=backend,
            priority=priority,
            share=share,
            metrics=metrics,
            settings=_strings("settings", settings),
        )
        context = _context(data_dir)
        context.mend()
        return Job(_launch(context, made, after=_ids(after), hold=hold, tags=_strings("tags", tags)), context)


def job(job_id: int, *, data_dir: str | os.PathLike[str] | None = None) -> Job:
    """Return a handle to an existing job; raise `UserError` if no job has this id."""
    return Job(job_id, _context(data_dir))


class Latents:
    """An SAE's latents with their texts, names, notes and explanations, and the SAE in its language model.

    `latents[7]` is latent 7: `contexts`, `density`, `largest`, `name`, `note`, `explanation`, `effect` and more. The
    first call of `read` or `steer` loads the language model in another process, which `close` ends.
    """

    def __init__(self, find: Callable[[], Place]) -> None:
        # The GPU is chosen when the process starts, since a job may have taken it until then.
        self._find = find
        place = find()
        self.folder = str(place.folder)
        if not (file := place.folder / FEATURES).exists():
            raise UserError(f"{place.folder} has no {FEATURES}; `sae-tui eval` writes it")
        self._features = Features(file)
        self._interaction: Interaction | None = None

    def __len__(self) -> int:
        return self._features.n_latents

    def __getitem__(self, latent: int) -> Feature:
        if not 0 <= latent < len(self):
            raise IndexError(f"the SAE has latents 0 to {len(self) - 1:,}, not {latent}")
        return self._features.feature(latent)

    def search(self, words: str, limit: int = 20) -> list[Feature]:
        """Return the latents that `sae-tui features --search` would list first, at most `limit`.

        Raise `UserError` if there are none.
        """
        found = search(self._features, words)
        return [self[latent] for latent in [*found.noted, *found.firing, *found.others][:limit]]

    @functools.cached_property
    def sae(self) -> Any:
        """The SAE, a `trainer.api.Loaded`: `encode` and `reconstruct` run on tensors of raw activations."""
        # This package must not import torch, so the module is imported only on request.
        return import_module("trainer.api").load(self.folder)

    def read(self, text: str, *, chat: bool = False) -> tuple[TextToken, ...]:
        """Return the tokens of a text with the latents that fire on them, strongest first."""
        (answer,) = self._running().ask(ReadText(text, chat))
        assert isinstance(answer, TextRead)
        return answer.tokens

    def steer(self, prompt: str, latents: int | Sequence[int], strength: float = 2.0, **options: Any) -> Generated:
        """Continue a prompt without and with steering: each latent is set to `strength` times its largest activation.

        A strength of 0 ablates the latents. `options` are the other fields of `Generate`, such as `n_tokens`.
        """
        numbers = [latents] if isinstance(latents, int) else latents
        request = Generate(prompt, tuple(Steered(latent, strength) for latent in numbers), **options)
        *_, last = self._running().ask(request)
        assert isinstance(last, Generated)
        return last

    def close(self) -> None:
        """End the process with the language model."""
        if self._interaction:
            self._interaction.close()
            self._interaction = None

    def __enter__(self) -> Latents:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> Interaction:
        if self._interaction is None or self._interaction.has_ended:
            self.close()
            self._interaction = Interaction(*self._find())
            self._interaction.start()
        return self._interaction


def load(
    run: int | str | os.PathLike[str],
    *,
    sae: str | None = None,
    cpu: bool = False,
    data_dir: str | os.PathLike[str] | None = None,
) -> Latents:
    """Return the latents of a job's SAE, or of the SAE in a folder; `sae` is the label of an SAE in a sweep.

    The language model uses a free GPU if the job ran on one, unless `cpu` is set. Raise `UserError` if there is no such
    SAE, or if it has not been evaluated yet.
    """
    name = str(run) if isinstance(run, int) else os.fspath(run)
    return Latents(lambda: place_of_sae(_context(data_dir), name, sae, on_cpu=cpu))


def _context(data_dir: str | os.PathLike[str] | None) -> CommandContext:
    flags = {} if data_dir is None else {"data_dir": os.fspath(data_dir)}
    return CommandContext(argparse.Namespace(**flags))


def _words(argv: Sequence[object]) -> list[str]:
    if isinstance(argv, (str, bytes)) or not isinstance(argv, Sequence):
        raise UsageError('argv: must be a list like ["python", "x.py"]; for a shell line, run ["sh", "-c", line]')
    return [os.fsdecode(word) if isinstance(word, (bytes, os.PathLike)) else str(word) for word in argv]


def _strings(name: str, values: str | Iterable[str]) -> list[str]:
    texts = listed(values)
    if wrong := [one for one in texts if not isinstance(one, str)]:
        raise UsageError(f"{name}: must be strings, not {wrong[0]!r}")
    return texts


def _ids(after: int | Job | Iterable[int | Job]) -> tuple[int, ...]:
    ids = [one.id if isinstance(one, Job) else one for one in listed(after)]
    if wrong := [one for one in ids if not isinstance(one, int) or isinstance(one, bool)]:
        raise UsageError(f"after: must be jobs or job ids, not {wrong[0]!r}")
    return tuple(ids)


def _launch(context: CommandContext, made: CommandJob, **options: Any) -> int:
    """Check a job on this machine, launch it, and return its id."""
    context.wants_gpus = not (made.on_cpu or made.cluster)
    gpus = context.gpus
    proposal = propose(made, placement.machine(gpus.choices, context.data, cuda=gpus.cuda))
    problems: list[Problem] = proposal.problems()
    if wrong := errors(problems):
        raise JobFileError(wrong)
    for problem in problems:
        warnings.warn(str(problem), stacklevel=3)
    where = placement.place(proposal, gpus.choices, multi_gpu_enabled=context.settings.multi_gpu_enabled)
    source = name_elsewhere(gpus.source_name, len(gpus.choices))
    try:
        return launching.launch(context.data, made, where, gpu_source=source, **options)
    except launching.NotStarted as error:
        warnings.warn(str(error), stacklevel=3)
        return error.job_ids[0]


__all__ = ["Job", "Latents", "Result", "UserError", "job", "load", "run"]
