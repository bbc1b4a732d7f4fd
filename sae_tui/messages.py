"""What the background threads tell the app: only that something is new, the data is pulled."""

from __future__ import annotations

from textual.message import Message


class _Changed(Message, bubble=False):
    """A message that replaces an older one of its type in the queue, so that a backlog is one repaint."""

    def can_replace(self, message: Message) -> bool:
        return type(message) is type(self)


class JobsChanged(_Changed):
    """The job store has something new."""


class Launched(Message):
    """A job has been recorded, or could not be, and why."""

    def __init__(self, job_id: int | None, text: str = "") -> None:
        super().__init__()
        self.job_id = job_id
        self.text = text


class Done(Message):
    """The outcome of an action on a job, as a sentence."""

    def __init__(self, text: str, *, failed: bool = False) -> None:
        super().__init__()
        self.text = text
        self.failed = failed
