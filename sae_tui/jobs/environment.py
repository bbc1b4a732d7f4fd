"""Checks whether another Python interpreter can run the trainer.

The interpreter is run with a time limit, and reports its version and packages. The result is cached until the
executable or one of its package folders changes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from sae_tui.jobs import named_python
from trainer.contract.errors import JobFileError, Problem, errors
from trainer.contract.extras import OF_TRAINER, OtherInterpreter, judged_by, refuse_without_trainer
from trainer.contract.json_file import decode_as
from trainer.contract.object_store import STORE_PACKAGES
from trainer.contract.printable import printable
from trainer.contract.settings.catalog import MIRRORS
from trainer.contract.settings.job import AnyJob
from trainer.contract.settings.job_file import to_table
from trainer.contract.settings.known import unknown_settings
from trainer.contract.settings.typed import cut
from trainer.contract.wording import join_words

SETTING = "launch.python"
PACKAGE = "sae-tui"
OLDEST = (3, 11)
# The time limit for an interpreter check. The first import of torch from a network disk can take half a minute.
LIMIT_S = 60.0
# An interpreter whose check failed is checked again after this time.
FAILED_FOR_S = 10.0
_OF_USE = (
    *OF_TRAINER, "transformers", "datasets", "pyarrow", *STORE_PACKAGES, *(one.package for one in MIRRORS.values())
)  # fmt: skip
# A script that reports the properties of the interpreter that runs it. Even Python 2 can run the script, and then
# reports its own version. The alarm stops the script even if the app has exited.
_ASK = """
import gc, json, os, signal, sys
gc.disable()
signal.alarm(int(sys.argv[1]))
answer = {"version": list(sys.version_info[:3]), "paths": [path for path in sys.path if path]}
def first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
def installed(name):
    try:
        return importlib.util.find_spec(name) is not None
    except Exception:
        return False
if sys.version_info >= (3, 11):
    import importlib.metadata, importlib.util
    answer["packages"] = [name for name in sys.argv[2].split(",") if installed(name)]
    try:
        answer["trainer"] = importlib.metadata.version("sae-tui")
        from trainer.contract.settings.known import known_settings
        answer["settings"] = known_settings()
    except importlib.metadata.PackageNotFoundError:
        pass
    except Exception as error:
        answer["trainer_error"] = first_line(error)
    try:
        if installed("torch"):
            import torch
            hip = getattr(torch.version, "hip", None)
            answer["torch"] = {
                "version": str(torch.__version__), "cuda": torch.version.cuda, "hip": hip,
                "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0}
    except Exception as error:
        answer["torch_error"] = first_line(error)
print(json.dumps(answer))
sys.stdout.flush()
os._exit(0)
"""


class Torch(msgspec.Struct, frozen=True):
    """An installed torch: its version, the CUDA or ROCm version it was built for, and how many GPUs it sees."""

    version: str
    cuda: str | None
    hip: str | None
    gpus: int

    @property
    def runtime(self) -> str:
        """The runtime that torch was built for, as named in a vendor's `torch_runtime`."""
        return "hip" if self.hip else "cuda" if self.cuda else ""

    @property
    def words(self) -> str:
        built = f"ROCm {self.hip}" if self.hip else f"CUDA {self.cuda}" if self.cuda else ""
        sees = f"{self.gpus} GPU{'s' * (self.gpus != 1)}" if self.gpus else "no GPU"
        return f"torch {self.version}, {f'built for {built}, which sees {sees}' if built else 'built without CUDA'}"


class InterpreterReport(msgspec.Struct, frozen=True):
    """An interpreter's report about itself.

    `trainer` is the version of its sae-tui package, and `settings` contains the settings supported by its trainer.
    """

    version: list[int]
    paths: list[str]
    packages: list[str] = []
    trainer: str | None = None
    trainer_error: str = ""
    settings: dict[str, list[str]] = {}
    torch: Torch | None = None
    torch_error: str = ""


class Environment(msgspec.Struct, frozen=True):
    """What is known about an interpreter's environment.

    `failure` explains why there is no report. `is_asked` is True while the check is running.
    """

    python: str
    answer: InterpreterReport | None = None
    failure: str = ""
    is_asked: bool = False

    @property
    def words(self) -> str:
        """Text like `Python 3.12.1, sae-tui 0.2.0, torch 2.9.0+cu128, built for CUDA 12.8, which sees 8 GPUs`."""
        if (answer := self.answer) is None:
            return printable(self.failure)
        trainer = f"{PACKAGE} {answer.trainer}" if answer.trainer else "no trainer"
        torch = answer.torch.words if answer.torch else "no torch"
        return printable(f"Python {_dotted(answer.version)}, {trainer}, {torch}")

    @property
    def packages(self) -> OtherInterpreter:
        """The installed packages, in the form that the job checks require."""
        if (answer := self.answer) is None:
            return OtherInterpreter(self.python)
        build = (answer.torch.version, answer.torch.runtime) if answer.torch else ("", "")
        return OtherInterpreter(self.python, frozenset(answer.packages), *map(printable, build))

    def lack(self) -> str:
        """Return why the trainer cannot run in this environment, with a remedy, or "" if it can."""
        if (answer := self.answer) is None:
            return printable(self.failure or f"{self.python} is being checked; wait a moment")
        install = f"run `{self.python} -m pip install"
        if tuple(answer.version) < OLDEST:
            wanted = f"the trainer needs {_dotted(OLDEST)} or newer"
            return f"{self.python} is Python {_dotted(answer.version)}, and {wanted}; choose a newer environment"
        if answer.trainer is None:
            return f"{self.python} has no trainer; {install} '{PACKAGE}[train]'`"
        if answer.trainer_error:
            return printable(f"its trainer cannot be imported: {answer.trainer_error}; {install} '{PACKAGE}[train]'`")
        # Importing `importlib.metadata` takes as long as running an entire command, so import it only here.
        from importlib.metadata import version

        if wrong := _wrong_version(answer.trainer, version(PACKAGE), install):
            return printable(wrong)
        if missing := [name for name in OF_TRAINER if name not in answer.packages]:
            return f"{self.python} lacks {join_words(missing)}; {install} '{PACKAGE}[train]'`"
        if answer.torch is None:
            return printable(f"its torch cannot be imported: {answer.torch_error}; {install} --force-reinstall torch`")
        return ""

    def problems(self, job: AnyJob, *, wants_gpus: bool = False) -> list[Problem]:
        """Return the reasons why this environment cannot run a job.

        If the job needs GPUs, but the environment's torch sees none, return a warning.
        """
        if lack := self.lack():
            return [Problem(SETTING, lack)]
        assert self.answer is not None
        if unknown := unknown_settings(to_table(job), self.answer.settings):
            upgrade = f"run `{self.python} -m pip install --upgrade {PACKAGE}`"
            message = (
                f"its trainer, {PACKAGE} {self.answer.trainer}, does not know {join_words(unknown[:3])}; {upgrade}"
            )
            return [Problem(SETTING, printable(message))]
        torch = self.answer.torch
        if wants_gpus and torch and torch.runtime and not torch.gpus:
            remedy = f"see `{self.python} -c 'import torch; torch.cuda.init()'`"
            return [Problem(SETTING, f"its torch {printable(torch.version)} sees no GPU here; {remedy}", "warning")]
        return []


def look(python: str, limit_s: float = LIMIT_S) -> Environment:
    """Return an interpreter's environment; if it is not cached, run the interpreter for at most `limit_s`."""
    path = named_python.whole(python)
    if why := named_python.refusal(python):
        return Environment(path, failure=why)
    with _lock_of(path):
        if (seen := _remembered(path)) is None:
            seen = _ask(path, limit_s)
            _SEEN[path] = (_fingerprint(path, seen), time.monotonic(), seen)
        return seen


def glance(python: str, then: Callable[[], object]) -> Environment:
    """Return what is known about an interpreter, without waiting.

    If the interpreter has not been checked yet, check it on a new thread, and then call `then` on that thread.
    """
    path = named_python.whole(python)
    if why := named_python.refusal(python):
        return Environment(path, failure=why)
    if seen := _remembered(path):
        return seen

    def ask() -> None:
        look(python)
        then()

    threading.Thread(target=ask, name="environment", daemon=True).start()
    return Environment(path, is_asked=True)


@contextlib.contextmanager
def judged_there(job: AnyJob, *, wants_gpus: bool = False) -> Iterator[list[Problem]]:
    """Yield the problems with the interpreter named by a job, or an empty list if the job names none.

    Within the context, all checks of the job use that interpreter's packages.
    """
    if not (python := job.launch.python) or not job.needs_trainer:
        yield []
        return
    there = look(python)
    with judged_by(there.packages):
        yield there.problems(job, wants_gpus=wants_gpus)


@contextlib.contextmanager
def required(job: AnyJob) -> Iterator[None]:
    """Check a job as `judged_there` does; raise `UserError` if a package or the job's interpreter is missing."""
    with judged_there(job) as problems:
        if wrong := errors(problems):
            raise JobFileError(wrong)
        if job.needs_trainer:
            refuse_without_trainer()
        yield


# Maps each checked interpreter's path to its fingerprint, the time of the check, and the result.
_SEEN: dict[str, tuple[object, float, Environment]] = {}
_LOCKS: dict[str, threading.Lock] = {}


def _lock_of(path: str) -> threading.Lock:
    return _LOCKS.setdefault(path, threading.Lock())


def _remembered(path: str) -> Environment | None:
    if path not in _SEEN:
        return None
    fingerprint, asked, seen = _SEEN[path]
    is_old = bool(seen.failure) and time.monotonic() - asked > FAILED_FOR_S
    return None if is_old or fingerprint != _fingerprint(path, seen) else seen


def _fingerprint(path: str, seen: Environment) -> object:
    """Return a value that changes when a package is installed or the environment is recreated."""
    times = []
    for place in (path, *(seen.answer.paths if seen.answer else ())):
        with contextlib.suppress(OSError, ValueError):
            status = os.stat(place)
            times.append((place, status.st_ino, status.st_mtime_ns))
    return tuple(times)


def _ask(path: str, limit_s: float) -> Environment:
    argv = [path, "-c", _ASK, str(max(1, round(limit_s))), ",".join(_OF_USE)]
    # Older interpreters lack the -P option and import modules from their working folder, so run the script in a folder
    # owned by root.
    environment = {**named_python.variables(path), "PYTHONSAFEPATH": "1", "PYTHONIOENCODING": "utf-8"}
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, cwd="/", env=environment, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return Environment(
            path, failure=f"{path} did not respond within {limit_s:g} s; name another interpreter, or try again"
        )
    except OSError as error:
        return Environment(path, failure=f"{path} cannot be run: {error.strerror or error}")
    try:
        return Environment(path, decode_as(done.stdout.strip().rpartition(b"\n")[2], InterpreterReport))
    except ValueError:
        said = (done.stdout or done.stderr).decode(errors="replace").strip().splitlines()
        is_answer = done.stdout or not done.returncode
        why = "did not return valid JSON" if is_answer else f"exited with code {done.returncode}"
        quoted = f", saying {cut(printable(said[-1]))}" if said else ""
        return Environment(path, failure=f"{path} {why}{quoted}; name the Python interpreter of an environment")


def _wrong_version(theirs: str, ours: str, install: str) -> str:
    """Return why the trainer's version does not match the app's, or "" if the major and minor versions are equal."""
    wanted, has = _minor(ours), _minor(theirs)
    if has == wanted:
        return ""
    other = f"its trainer is {PACKAGE} {theirs}, but the app is {PACKAGE} {ours}"
    upgrade = f"{install} '{PACKAGE}[train]=={'.'.join(map(str, wanted))}.*'`"
    return f"{other}; {upgrade}" if has < wanted else f"{other}; upgrade the app, or {upgrade}"


def _minor(text: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else 0 for part in text.split(".")[:2])


def _dotted(numbers: list[int] | tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
