"""The exit codes of `sae-tui` and `sae-train`, in one table."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """An exit code with two descriptions: `short`, for the end of help texts, and the full `meaning`."""

    short: str
    meaning: str

    def __new__(cls, number: int, short: str, meaning: str) -> Exit:
        made = int.__new__(cls, number)
        made._value_ = number
        made.short, made.meaning = short, meaning
        return made

    DONE = 0, "done", "Success; a job that the command waited for has finished."
    FAILED = 1, "failed", "Failure or a negative answer: a job that cannot run, too few GPUs, an error in the findings."
    USAGE = 2, "bad usage", "Invalid flags or, for `sae-train`, an invalid job file; nothing was started."
    STOPPED = 3, "stopped", "The training was stopped before its end, with a checkpoint from which it can be resumed."
    JOB_FAILED = 4, "job failed", "The job that the command waited for has failed; `sae-tui job ID` says why."
    JOB_LOST = 5, "job lost", "The job that the command waited for was lost: its machine or all its processes are gone."
    UNTOLD = (
        6,
        "done, output lost",
        "The request, such as a launch, was carried out, but the output could not be written.",
    )
    HUNG_UP = (
        129,
        "terminal gone",
        "The app's terminal is gone, or the app received SIGHUP (128 + SIGHUP); jobs continue.",
    )
    INTERRUPTED = 130, "interrupted", "Ended by Ctrl-C (128 + SIGINT); jobs continue."
    UNREAD = 141, "reader gone", "The reader of the output closed the pipe (128 + SIGPIPE), as `head` does."
    TERMINATED = 143, "terminated", "Ended by SIGTERM (128 + SIGTERM); jobs continue."


def in_short(*exits: Exit) -> str:
    """Return one line listing the given exit codes, such as `Exit codes: 0 done, 1 failed.`."""
    return f"Exit codes: {', '.join(f'{int(one)} {one.short}' for one in exits)}."
