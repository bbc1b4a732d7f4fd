"""Errors shown to the user; each message is one sentence that names the affected field and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec


class Problem(msgspec.Struct, frozen=True):
    """A problem with a job: the setting (such as `train.batch_size`), the message and the severity."""

    path: str
    message: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class UserError(Exception):
    """A failure that the user can fix; its text is the complete message, and no traceback is shown."""


class UsageError(UserError):
    """A request that cannot be carried out and is refused before any work starts."""


class BadUsage(UsageError):
    """Arguments that a command does not accept; `sentence` is for people, and `message` is for scripts."""

    def __init__(self, message: str, sentence: str, fix: str) -> None:
        self.message, self.sentence, self.fix = message, sentence, fix
        super().__init__(sentence)


class JobFileError(UsageError):
    """An error listing all the reasons why a job cannot run.

    `is_usage` says whether the command line itself is wrong; by default, it is true if all problems concern flags.
    """

    def __init__(self, problems: Iterable[Problem], *, is_usage: bool | None = None) -> None:
        self.problems = tuple(problems)
        about_flags = all(problem.path.startswith("--") for problem in self.problems)
        self.is_usage = about_flags if is_usage is None else is_usage
        super().__init__("\n".join(str(problem) for problem in self.problems))


def sentence(error: Exception) -> str:
    """Return the message to show to the user: an error's text, or an `OSError`'s reason without the error number."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def first_line(error: BaseException) -> str:
    """Return the first line of a library error's message, or the error's class name if it has no message.

    If the first line ends with a colon, the second line is appended to it.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = " ".join(map(str.strip, lines[: 1 + lines[0].rstrip().endswith(":")]))[:200]
    # If a pickle contains more than tensors, torch's message recommends `weights_only=False`, which would let the file
    # run code, so replace the message.
    return "it is a pickle that contains more than tensors, so it could run code" if "weights_only" in line else line


def errors(problems: Iterable[Problem]) -> list[Problem]:
    """Return only the problems that prevent a job from running."""
    return [problem for problem in problems if problem.severity == "error"]
