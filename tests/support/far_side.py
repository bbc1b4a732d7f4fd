"""Replaces ssh and the remote host: writes messages as `sae-tui stream` would, without a connection.

python far_side.py FOLDER [ARGUMENTS OF ssh]

`FOLDER/1` is the Python program for the first connection, and `FOLDER/2` is the program for the second. Further
connections use the last program. Each program can use `say(message)`, `words` (the remote command) and `stay()`, which
waits for the end of standard input, as `stream` does.
"""

from __future__ import annotations

import json
import select
import shlex
import sys
from pathlib import Path
from typing import Any

DATA = "SAE_TUI_DATA_DIR"
HELLO = {"type": "hello", "protocol": 1, "version": "0.2.0"}
CARD = {
    "index": 0, "uuid": "GPU-1", "name": "NVIDIA H100", "utilization": 40, "memory_used_bytes": 8 << 30,
    "memory_total_bytes": 80 << 30, "temperature_c": 50, "power_w": 300.0, "power_limit_w": 700.0, "holder": "idle",
}  # fmt: skip
JOB = {"id": 7, "name": "theirs", "state": "running", "gpu_ids": [0], "step": 10, "total_steps": 20, "progress": 0.5}


def far_side(folder: Path, *programs: str) -> list[str]:
    """Return the argument list of the command that replaces `ssh`. Each connection runs the next of these programs."""
    folder.mkdir(exist_ok=True)
    for place, program in enumerate(programs, start=1):
        (folder / str(place)).write_text(program)
    return [sys.executable, __file__, str(folder)]


def real_side(folder: Path, data: Path) -> list[str]:
    """Return a command that replaces `ssh` and runs the real `sae-tui` with another data folder."""
    argv = "[sys.executable, '-P', '-m', 'sae_tui', *words]"
    return far_side(folder, f"import os; os.environ[{DATA!r}] = {str(data)!r}; os.execv(sys.executable, {argv})")


def runs_of(folder: Path) -> list[list[str]]:
    """Return the remote commands that have run so far, each as the words after `sae-tui`."""
    file = folder / "runs"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _say(message: Any) -> None:
    sys.stdout.write((message if isinstance(message, str) else json.dumps(message)) + "\n")
    sys.stdout.flush()


def _stay() -> None:
    """Send an empty message every second until standard input ends."""
    while not select.select([sys.stdin], [], [], 1.0)[0]:
        _say({"type": "log"})


def _main(folder: Path, command: str) -> None:
    words = shlex.split(command)[4:]
    with (folder / "runs").open("a") as runs:
        runs.write(json.dumps(words) + "\n")
    asked = len([run for run in runs_of(folder) if run[0] == words[0]])
    programs = sorted((file for file in folder.iterdir() if file.name.isdecimal()), key=lambda file: int(file.name))
    program = programs[min(asked, len(programs)) - 1] if words[0] == "stream" else folder / words[0]
    known = {
        "say": _say,
        "words": words,
        "stay": _stay if words == ["stream"] else sys.stdin.read,
        "sys": sys,
        "HELLO": HELLO,
        "CARD": CARD,
        "JOB": JOB,
    }
    exec(program.read_text(), known)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[-1])
