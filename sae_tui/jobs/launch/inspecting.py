"""What is wrong with stored activations, as `sae-train inspect` tells: it needs torch, and so a process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs import named_python
from trainer.contract.errors import UserError
from trainer.contract.failure import told_failure
from trainer.contract.json_file import decode_as
from trainer.contract.planning.gpu_vendors import hide_all
from trainer.contract.settings.shards import inspect_shards

POLL_S = 0.2

# Of each file its path, size and time of change.
Fingerprint = tuple[tuple[str, int, int], ...]


class Finding(msgspec.Struct, frozen=True):
    """One thing that is worth knowing of the data, and what to do about it; "" where nothing is to be done."""

    severity: str
    sentence: str
    remedy: str = ""


class Inspected(msgspec.Struct, frozen=True):
    """What stored activations are like, by `n_looked_at` rows of them; `gamma` is ‖mean‖/‖std‖."""

    n_tokens: int
    d_in: int
    dtype: str
    n_looked_at: int
    gamma: float
    median_norm: float
    largest_norm: float
    findings: tuple[Finding, ...] = ()


class Inspections:
    """Inspects data, each state of its files once."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        self._command = command
        self._of: dict[Fingerprint, Inspected] = {}

    def inspect(
        self, place: str, is_over: Callable[[], bool] = lambda: False, python: str | None = None
    ) -> Inspected | None:
        """Return what the activations at `place` are like; None where it `is_over` before that is known.

        By another Python where one is named. Raise `UserError` where they cannot be read.
        """
        place = os.path.abspath(place)
        fingerprint = fingerprint_of(Path(place))
        if fingerprint not in self._of:
            named_python.refuse(python)
            command = self._command or named_python.command(python, "inspect")
            answer = _run([*command, place, "--json"], is_over, named_python.variables(python))
            if answer is None:
                return None
            self._of[fingerprint] = answer
        return self._of[fingerprint]


def fingerprint_of(place: Path) -> Fingerprint:
    """Return what changes with the files of a folder of shards; raise `JobFileError` where it is none."""
    files = [shard.file for shard in inspect_shards(place).shards]
    return tuple((str(file), status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()])


def _run(argv: Sequence[str], is_over: Callable[[], bool], variables: Mapping[str, str]) -> Inspected | None:
    # On the CPU: GPUs are not taken for a look.
    environment = {**variables, **hide_all()}
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/", env=environment
    ) as process:
        while True:
            try:
                told, errors = process.communicate(timeout=POLL_S)
                break
            except subprocess.TimeoutExpired:
                if is_over():
                    process.kill()
                    return None
    return _understood(process.returncode, told, errors)


def _understood(code: int, told: bytes, errors: bytes) -> Inspected:
    """Return the answer of the command, which ends with 1 too where the data is bad."""
    if reason := told_failure(told):
        raise UserError(reason)
    if told:
        try:
            return decode_as(told.splitlines()[-1], Inspected)
        except ValueError as error:
            raise UserError(f"`trainer inspect` answered what is not understood: {error}") from None
    lines = errors.decode(errors="replace").strip().splitlines()
    raise UserError(lines[-1] if lines else f"`trainer inspect` ended with {code} and told nothing")
