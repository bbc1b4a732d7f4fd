"""Inspects stored activations with `sae-train inspect`, in a process because that needs torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs import named_python
from trainer.contract.errors import UserError
from trainer.contract.failure import failure_in
from trainer.contract.json_file import decode_as
from trainer.contract.planning.gpu_vendors import hide_all
from trainer.contract.settings.shards import inspect_shards

POLL_S = 0.2

# Path, size and modification time of each file.
Fingerprint = tuple[tuple[str, int, int], ...]


class DataFinding(msgspec.Struct, frozen=True):
    """One finding about the data, and its remedy; "" if there is nothing to do."""

    severity: str
    sentence: str
    remedy: str = ""


class Inspected(msgspec.Struct, frozen=True):
    """The properties of stored activations, measured on `n_looked_at` of their rows; `gamma` is ‖mean‖/‖std‖."""

    n_tokens: int
    d_in: int
    dtype: str
    n_looked_at: int
    gamma: float
    median_norm: float
    largest_norm: float
    findings: tuple[DataFinding, ...] = ()


class Inspections:
    """Inspects data, and keeps each result until the files change."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        self._command = command
        self._of: dict[Fingerprint, Inspected] = {}

    def inspect(
        self, place: str, is_over: Callable[[], bool] = lambda: False, python: str | None = None
    ) -> Inspected | None:
        """Return the properties of the activations at `place`; None if `is_over` becomes true before they are known.

        `python` is the interpreter to use instead of the app's. Raise `UserError` if the activations cannot be read.
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
    """Return a value that changes whenever a file of this folder of shards changes.

    Raise `JobFileError` if the folder contains no valid shards.
    """
    files = [shard.file for shard in inspect_shards(place).shards]
    return tuple((str(file), status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()])


def _run(argv: Sequence[str], is_over: Callable[[], bool], variables: Mapping[str, str]) -> Inspected | None:
    # On the CPU: an inspection reserves no GPU.
    environment = {**variables, **hide_all()}
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
    return _understood(process.returncode, output, errors)


def _understood(code: int, output: bytes, errors: bytes) -> Inspected:
    """Return the command's answer; the command also answers when it reports bad data by exit code 1."""
    if reason := failure_in(output):
        raise UserError(reason)
    if output:
        try:
            return decode_as(output.splitlines()[-1], Inspected)
        except ValueError as error:
            raise UserError(f"the output of `trainer inspect` cannot be read: {error}") from None
    lines = errors.decode(errors="replace").strip().splitlines()
    raise UserError(lines[-1] if lines else f"`trainer inspect` ended with {code} without output")
