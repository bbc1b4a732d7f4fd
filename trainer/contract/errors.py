"""How bad input and failed actions are told: one sentence that names the field and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec


class Problem(msgspec.Struct, frozen=True):
    """One thing wrong with a job: where (`train.batch_size`), what, and how bad."""

    path: str
    message: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class UserError(Exception):
    """A failure the user can act on; its text is the whole message, shown without a traceback."""


class UsageError(UserError):
    """What was asked for cannot be; nothing was begun."""


class JobFileError(UsageError):
    """A job that cannot run, with every reason at once."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def sentence(error: Exception) -> str:
    """What a person is told of a failure: of the system's, its reason without the number."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def errors(problems: Iterable[Problem]) -> list[Problem]:
    """Only the problems that keep a job from running."""
    return [problem for problem in problems if problem.severity == "error"]
