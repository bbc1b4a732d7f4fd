"""Opens a job file in the user's own editor, which uses the terminal until it exits."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sae_tui.jobs.launch.job_form import read_job_table
from trainer.contract.errors import JobFileError, UserError
from trainer.contract.printable import printable

_WRONG, _REMEDY = "# ✗", "# → correct it and save; if you change nothing, the form remains unchanged"


def edit_by_hand(text: str, wrong: Sequence[str] = ()) -> dict[str, Any] | None:
    """Open a job file in the editor until it is valid, and return its table; return None if the user changed nothing.

    Comments at the top of the file describe the problems, as in `kubectl edit`. Raise `UserError` if the editor cannot
    be run or reports failure, or if the user leaves an invalid file unchanged. In the last two cases, the message names
    a file containing the edited text.
    """
    command, first = _editor(), text
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.toml"
        refused: list[str] = []
        while True:
            file.write_text(_with_comments(text, refused or wrong), encoding="utf-8")
            code = _run([*command, str(file)])
            written = _without_comments(_read(file))
            if code:
                raise UserError(f"{command[0]} exited with code {code}; {_keep_text(written, first)}")
            if written == text:
                if refused:
                    raise UserError(f"{refused[0]}; {_keep_text(written, first)}")
                return None
            file.write_text(written, encoding="utf-8")
            try:
                return read_job_table(file)
            except JobFileError as error:
                text, refused = written, _objections(error, file)


def _editor() -> list[str]:
    try:
        return shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi") or ["vi"]
    except ValueError as error:
        raise UserError(f"$EDITOR is not a command: {error}") from None


def _run(command: Sequence[str]) -> int:
    # With a timeout, Python checks 20 times per second whether the editor has exited. Without one, it would block in a
    # single call, and a ctrl+z arriving just before that call would stop the editor but not the app.
    try:
        return subprocess.run(command, timeout=math.inf).returncode
    except OSError as error:
        raise UserError(f"{command[0]} cannot be run: {error.strerror}; set $EDITOR") from None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"the edited job file cannot be read: {error.strerror}") from None


def _objections(error: JobFileError, file: Path) -> list[str]:
    """Return a message for each problem; line numbers account for the comments that will be inserted at the top."""
    shift = len(error.problems) + 1
    messages = [str(problem).replace(str(file), "this file") for problem in error.problems]
    return [re.sub(r"at line (\d+)", lambda match: f"at line {int(match[1]) + shift}", one) for one in messages]


def _with_comments(text: str, problems: Sequence[str]) -> str:
    # Remove control characters: the file may come from another user, and an editor may pass them to the terminal.
    comments = [f"{_WRONG} {' '.join(printable(problem).split())}\n" for problem in problems]
    return "".join([*comments, f"{_REMEDY}\n", text]) if comments else text


def _without_comments(text: str) -> str:
    lines = text.splitlines(keepends=True)
    while lines and lines[0].startswith((_WRONG, _REMEDY)):
        lines.pop(0)
    return "".join(lines)


def _keep_text(written: str, first: str) -> str:
    """Save the edited text to a file, and return a message that names the file and says that the form is unchanged.

    If the user changed nothing, write no file.
    """
    if written == first:
        return "the form is unchanged"
    handle, path = tempfile.mkstemp(prefix="sae-tui-job-", suffix=".toml")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(written)
    return f"the form is unchanged; your text is in {path}"
