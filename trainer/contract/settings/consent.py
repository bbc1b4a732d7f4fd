"""Finds the code that a job file would run; this code needs consent from outside the file.

A job file may come from another person. A file's owner says nothing about its author: unpacked files belong to the user
who unpacked them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainer.contract.errors import JobFileError, Problem
from trainer.contract.paths import working_folder

FLAG = "--allow-code"
FLAG_HELP = "let the job file run code as you: [command], launch.python or package, remote_code, any sbatch options"
SETTING = "trusted_code"
COMMAND, PYTHON, SBATCH = "command.argv", "launch.python", "launch.sbatch_options"
# SkyPilot copies the user's credentials for the cloud to rented machines, so code there can act as the user.
PACKAGE = "launch.package"
# These settings choose which code a command runs, for example through `PATH`, `LD_PRELOAD` or a `Makefile` in the
# folder.
ENV, FOLDER = "command.env", "command.folder"
# Maps each setting that runs a model's own code to the setting in the same section that names the model.
_MODELS = {"model.remote_code": "path", "data.remote_code": "model"}
# Options of sbatch that choose resources and run no code. Abbreviations are not included.
_HARMLESS = re.compile(
    "--(acctg-freq|begin|comment|constraint|contiguous|core-spec|cores-per-socket|cpu-freq|cpus-per-(gpu|task)|deadline"
    "|delay-boot|distribution|exclude|exclusive|gpu-freq|gpus|gpus-per-(node|socket)|gres|gres-flags|hint|licenses"
    "|mail-type|mail-user|mem|mem-bind|mem-per-(cpu|gpu)|mincpus|nice|no-kill|nodelist|ntasks-per-(gpu|core|socket)"
    "|oversubscribe|overcommit|prefer|priority|qos|reservation|sockets-per-node|spread-job|switches|thread-spec"
    "|threads-per-core|time-min|tmp|use-min-nodes|wait-all-nodes|wckey)"
)


class Code(NamedTuple):
    """A setting that runs code, the name used to trust the code, and a description."""

    path: str
    name: str
    does: str


class Consent(NamedTuple):
    """The consent given outside the job file: to all code, to code with certain names, or to settings from `--set`."""

    to_all: bool = False
    names: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    def given(self, overrides: Iterable[str]) -> Consent:
        """Return the consent with these `--set` overrides added."""
        return self._replace(overrides=(*self.overrides, *overrides))


NO_CONSENT = Consent()


def sets(overrides: Iterable[str], *paths: str) -> bool:
    """Return whether one of the overrides, such as `train.lr=3e-4`, sets one of these settings."""
    return any(override.partition("=")[0].strip() in paths for override in overrides)


def code_in(table: Mapping[str, Any]) -> Iterator[Code]:
    """Yield the code that a job file would run."""
    argv = _at(table, COMMAND)
    if isinstance(argv, list) and argv:
        line = shlex.join(map(str, argv))
        yield Code(COMMAND, line, f"runs `{line}` as you")
    variables = _at(table, ENV)
    for entry in map(str, variables if isinstance(variables, list) else ()):
        yield Code(ENV, entry, f"sets {_quoted(entry)} for a program that runs as you")
    folder, here = str(_at(table, FOLDER) or "."), working_folder()
    if (there := os.path.normpath(here / os.path.expanduser(folder))) != str(here):
        yield Code(FOLDER, there, f"runs a program as you in the folder {_quoted(there)}")
    if python := _at(table, PYTHON):
        whole = os.path.expanduser(str(python))
        yield Code(PYTHON, whole, f"runs `{whole} -P -m trainer rank ...` as you")
    if package := _at(table, PACKAGE):
        yield Code(PACKAGE, str(package), f"installs {_quoted(str(package))} on rented machines, and runs it there")
    for path, named in _MODELS.items():
        if _at(table, path):
            models = _at(table, f"{path.partition('.')[0]}.{named}")
            for model in map(str, models if isinstance(models, list) else [models]):
                yield Code(path, model, f"runs the Python code that comes with {_quoted(model)} as you")
    options = _at(table, SBATCH)
    for option in options if isinstance(options, list) else ():
        if not _HARMLESS.fullmatch(str(option).partition("=")[0]):
            yield Code(SBATCH, str(option), f"passes {_quoted(str(option))} to sbatch, which can run code as you")


def refused(table: Mapping[str, Any], consent: Consent, distrust: str = "") -> list[Code]:
    """Return the code that a job file would run, and that the user has not allowed.

    `distrust` is the reason why other users may have written the file, or "". If a reason is given, only overrides from
    `--set` count as consent.
    """
    if distrust:
        consent = Consent(overrides=consent.overrides)
    trusted = {os.path.expanduser(name) for name in consent.names if name}
    return [
        code
        for code in code_in(table)
        if not (consent.to_all or sets(consent.overrides, code.path) or os.path.expanduser(code.name) in trusted)
    ]


def problems_of(refusals: Iterable[Code], distrust: str = "", *, has_settings: bool = True) -> list[Problem]:
    """Convert refused code to problems that say how to allow it."""
    if distrust:
        paths = dict.fromkeys(code.path for code in refusals)
        return [Problem(path, f"is not taken from a file, only from --set, because {distrust}") for path in paths]
    listed = f", or list {{}} in the setting {SETTING}," if has_settings else ""
    return [
        Problem(
            code.path, f"{code.does}; add {FLAG}{listed.format(_quoted(code.name))} if you trust who wrote the file"
        )
        for code in refusals
    ]


def refuse_code(table: Mapping[str, Any], *, allows: bool, overrides: Sequence[str] = ()) -> None:
    """Raise `JobFileError` if a job file runs a model's own code and neither the flag nor `--set` allows it.

    Only the trainer uses this function because the trainer runs no other code from a job file.
    """
    refusals = [code for code in refused(table, Consent(allows, (), tuple(overrides))) if code.path in _MODELS]
    if refusals:
        raise JobFileError(problems_of(refusals, has_settings=False))


def without(table: Mapping[str, Any], refusals: Iterable[Code]) -> dict[str, Any]:
    """Return a job file's table without the refused settings, so that their harmless defaults apply."""
    left = {name: dict(value) if isinstance(value, Mapping) else value for name, value in table.items()}
    for code in refusals:
        section, _, key = code.path.partition(".")
        left[section].pop(key, None)
    return left


def _quoted(name: str) -> str:
    # Do not shorten the name: a truncated path would not show what is run.
    return json.dumps(name, ensure_ascii=False)


def _at(table: Mapping[str, Any], path: str) -> Any:
    section, _, key = path.partition(".")
    values = table.get(section)
    return values.get(key) if isinstance(values, Mapping) else None
