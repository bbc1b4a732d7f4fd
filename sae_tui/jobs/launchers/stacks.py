"""Dumps Python stacks of a process that makes no progress, even one that is halted or waits in C++."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer.contract.files import write_whole
from trainer.contract.process import ProcessRef, state_of

LIMIT_S = 20.0
# Letters of /proc/<pid>/stat. "D" normally lasts only a moment, unless a disk or a driver hangs.
_ODD = {"T": "is halted (SIGSTOP)", "t": "is halted by a debugger", "D": "waits for a disk or a driver"}


def odd_state(pid: int) -> str:
    """Describe what prevents a process from running; return "" for one that runs or waits for other processes."""
    return _ODD.get(state_of(pid), "")


def is_halted(pid: int) -> bool:
    """Return whether a process is halted (SIGSTOP or a debugger) until it is continued."""
    return state_of(pid) in ("T", "t")


def dump_stacks(processes: Mapping[str, ProcessRef], file: Path) -> None:
    """Write the stacks of all processes to a file, one after the other, as far as they can be read."""
    sections = [f"== {name} (pid {ref.pid}) {odd_state(ref.pid)}\n{_stack(ref)}\n" for name, ref in processes.items()]
    write_whole(file, "\n".join(sections).encode(errors="replace"))


def _stack(process: ProcessRef) -> str:
    command = _py_spy()
    if command is None:
        return "(py-spy is not installed)"
    if not process.is_alive():
        return "(it has ended)"
    # Do not pause the process for the dump: a process that hangs must not make us hang.
    arguments = [command, "dump", "--nonblocking", "--pid", str(process.pid)]
    try:
        done = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"({error})"
    return (done.stdout or done.stderr).decode(errors="replace")


def _py_spy() -> str | None:
    """Return the path of py-spy, preferably next to this Python; None if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")
