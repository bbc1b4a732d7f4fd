"""A job's environment: the variables, limits and umask of the shell that launched it.

The job may start days later, from the queue process, whose own environment comes from another shell.

The file may contain secrets, so it has mode 0600 even in a shared folder, and no screen or command shows it.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Mapping

import msgspec

from trainer.contract.files import replacing
from trainer.contract.json_file import load_json
from trainer.contract.paths import RunPaths
from trainer.contract.planning.command import KEPT, USUAL_PATH
from trainer.contract.printable import printable
from trainer.contract.trust import open_own

FILE = "environment.json"
_LIMITS = {name: getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")}
# Variables set for a command, which a job launched by that command must not inherit.
OF_COMMAND = frozenset(
    b"SAE_TUI_" + name
    for name in (b"RUN_DIR", b"JOB_ID", b"GPUS", b"GPU_LIST", b"ATTEMPT", b"ARRAY_INDEX", b"ARRAY_ID")
)


class ProgramEnvironment(msgspec.Struct, frozen=True):
    """The names and values of variables, the soft and hard limits by name (see `setrlimit`), and the umask.

    Variables are bytes because they need not be UTF-8. The file stores them in base64.
    """

    variables: list[tuple[bytes, bytes]]
    limits: dict[str, tuple[int, int]]
    umask: int

    @property
    def of_program(self) -> dict[bytes, bytes]:
        """The variables for a program, excluding any set for another command."""
        return {name: value for name, value in self.variables if name not in OF_COMMAND}

    @classmethod
    def read(cls, paths: RunPaths) -> ProgramEnvironment | None:
        """Return a run's stored environment, or None if it is missing or may be from another user."""
        try:
            return load_json(paths.root / FILE, cls, None, open_own)
        except (OSError, ValueError):
            return None

    def write(self, paths: RunPaths) -> None:
        with replacing(paths.root / FILE, 0o600) as stream:
            stream.write(msgspec.json.encode(self))

    def apply_limits(self) -> None:
        """Set this process's umask and limits; if a limit may not be changed, keep its current value."""
        os.umask(self.umask)
        for name, limits in self.limits.items():
            with contextlib.suppress(KeyError, ValueError, OSError):
                resource.setrlimit(_LIMITS[name], limits)


def active_environment(variables: Mapping[bytes, bytes]) -> str:
    """Describe the active virtual or conda environment, like `conda environment base`; return "" if none is active."""
    if folder := variables.get(b"VIRTUAL_ENV"):
        return f"virtual environment {printable(os.fsdecode(folder))}"
    name = variables.get(b"CONDA_DEFAULT_ENV") or variables.get(b"CONDA_PREFIX")
    return f"conda environment {printable(os.fsdecode(name))}" if name else ""


def snapshot(environ: Mapping[bytes, bytes] = os.environb, *, clean: bool = False) -> ProgramEnvironment:
    """Return this process's environment; with `clean`, only variables that say who runs the program and where."""
    kept = {os.fsencode(name) for name in KEPT}
    variables = {name: value for name, value in environ.items() if not clean or name in kept}
    if clean:
        variables[b"PATH"] = os.fsencode(USUAL_PATH)
    umask = os.umask(0o077)
    os.umask(umask)
    return ProgramEnvironment(
        [*variables.items()], {name: resource.getrlimit(number) for name, number in _LIMITS.items()}, umask
    )
