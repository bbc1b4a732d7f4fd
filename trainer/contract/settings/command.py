"""Settings for command jobs, which run any program. The job file contains `kind = "command"`."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from trainer.contract.errors import Problem
from trainer.contract.printable import is_utf8
from trainer.contract.settings.declare import about, show
from trainer.contract.settings.job import AnyJob, Launch
from trainer.contract.settings.metrics_pattern import MOST_PATTERNS, parse_pattern
from trainer.contract.settings.typed import SIZES, parse_size

ExitCode = Annotated[int, msgspec.Meta(ge=1, le=255)]
StopSignal = Literal["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"]
_LONGEST_NAME = 80
# Names that, written in braces in an argument, are replaced with values when the program starts.
PLACEHOLDERS = ("gpus", "gpu_list", "job_id", "run_dir")
# A job file may be at most 1 MiB in size.
MOST_BYTES = 1_000_000
_ENTRY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_CODES = "a list of exit codes from 1 to 255, like [75]"


class Command(msgspec.Struct, frozen=True):
    """The `[command]` section: the program, its environment, and how it is stopped."""

    argv: Annotated[
        list[str],
        about(
            "Program and arguments; {gpus}, {gpu_list}, {job_id} and {run_dir} are replaced.",
            wanted='a list like ["python", "train.py"]',
            is_command_line=True,
        ),
    ]
    folder: Annotated[str, about("Working directory of the program.", min_length=1)] = "."
    memory: (
        Annotated[str, about("Memory needed on each GPU, like 20GiB; empty: idle GPUs are used.", wanted=SIZES)] | None
    ) = None
    env: (
        Annotated[
            list[str],
            about("Environment variables to set.", advanced=True, wanted='a list like ["SEED=1", "MODE=fast"]'),
        ]
        | None
    ) = None
    clean_env: Annotated[
        bool, about("Starts without the environment of the shell that launches it.", advanced=True)
    ] = False
    stop_signal: Annotated[StopSignal, about("Signal that asks the program to stop.", advanced=True)] = "TERM"
    grace_s: Annotated[
        float, about("Time to stop after this signal, before the program is killed.", unit="s", advanced=True, ge=0)
    ] = 60.0
    retry_on: (
        Annotated[
            list[ExitCode],
            about("Exit codes after which the program is restarted; empty: any failure.", advanced=True, wanted=_CODES),
        ]
        | None
    ) = None
    requeue_on: (
        Annotated[
            list[ExitCode],
            about(
                "Exit codes after which the job is queued again, for programs that save and exit.",
                advanced=True,
                wanted=_CODES,
            ),
        ]
        | None
    ) = None
    metrics: (
        Annotated[
            list[str],
            about(
                "Patterns that find metrics in the output, like step={step} loss={loss}; empty: the usual formats.",
                advanced=True,
                wanted='a list like ["step={step} loss={loss}"]',
            ),
        ]
        | None
    ) = None
    log_limit_mib: Annotated[
        int, about("Size above which the middle of the log is removed.", unit="MiB", advanced=True, ge=1)
    ] = 256

    @property
    def words(self) -> str:
        """The command line as it would be typed in a shell."""
        return shlex.join(self.argv)

    @property
    def memory_bytes(self) -> int | None:
        """The memory needed on each GPU in bytes, or None if it is unknown."""
        return None if self.memory is None else parse_size(self.memory)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables set by the job file."""
        return dict(entry.split("=", 1) for entry in self.env or ())


def name_of(argv: Sequence[str]) -> str:
    """Return a name for a command: its script and arguments, or its program and arguments."""
    if not argv:
        return CommandJob.kind
    words = [os.path.basename(argv[0]), *argv[1:]]
    is_runner = words[0].rstrip("0123456789.") in ("python", "sh", "bash") and words[1:] and words[1][0:1] != "-"
    words = [os.path.basename(words[1]), *words[2:]] if is_runner else words
    return " ".join(" ".join(words).split())[:_LONGEST_NAME] or CommandJob.kind


J = TypeVar("J", bound="CommandJob")


class CommandJob(AnyJob, frozen=True, kw_only=True):
    """A complete command job, with all defaults filled in."""

    kind: ClassVar[str] = "command"
    sections: ClassVar[Mapping[str, type[msgspec.Struct]]] = {"command": Command, "launch": Launch}
    needs_trainer: ClassVar[bool] = False

    command: Command
    name: Annotated[str, about("Name of the job.", min_length=1, max_length=_LONGEST_NAME)] = "command"

    @classmethod
    def conflicts(cls, sections: Mapping[str, Any], raw: Mapping[str, Any]) -> list[Problem]:
        command = sections["command"]
        return list(_problems_of(command)) if isinstance(command, Command) else []

    def with_paths(self: J, bases: Sequence[Path]) -> J:
        return self.replace("command", folder=os.path.abspath(bases[0] / os.path.expanduser(self.command.folder)))


def _problems_of(command: Command) -> list[Problem]:
    problems = []
    if not command.argv or not command.argv[0]:
        problems.append(Problem("command.argv", "is empty; write a program and its arguments, like python train.py"))
    texts = {"argv": command.argv, "env": command.env, "folder": [command.folder], "metrics": command.metrics}
    for name, words in texts.items():
        for word in words or ():
            if "\0" in word or not is_utf8(word):
                problems.append(
                    Problem(f"command.{name}", f"must be UTF-8 without zero bytes, not {show(ascii(word))}")
                )
                break
    if len(json.dumps(list(texts.values()), ensure_ascii=False).encode(errors="replace")) > MOST_BYTES:
        problems.append(Problem("command", f"has more than {MOST_BYTES:,} bytes; pass long arguments in a file"))
    wrong = next((entry for entry in command.env or () if not _ENTRY.fullmatch(entry)), None)
    if wrong is not None:
        problems.append(Problem("command.env", f"must be NAME=VALUE, not {show(wrong)}"))
    if command.memory is not None:
        try:
            if not parse_size(command.memory):
                problems.append(Problem("command.memory", "must be more than 0; leave it out to use idle GPUs"))
        except ValueError as error:
            problems.append(Problem("command.memory", str(error)))
    return problems + _problems_of_patterns(command.metrics or [])


def _problems_of_patterns(patterns: Sequence[str]) -> list[Problem]:
    if len(patterns) > MOST_PATTERNS:
        return [Problem("command.metrics", f"has more than {MOST_PATTERNS} patterns")]
    for pattern in patterns:
        try:
            parse_pattern(pattern)
        except ValueError as error:
            return [Problem("command.metrics", f"{show(pattern)} {error}")]
    return []
