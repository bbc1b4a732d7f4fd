"""A user's data folder. Tests use it to run shell commands and, in a pseudo-terminal, the demo app."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.forked_commands import run_command
from support.terminal import Terminal
from support.tui import record_job

from trainer.contract.paths import DataDir
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState

ROOT = Path(__file__).parents[2]
ESC, ENTER, CTRL_L, CTRL_O = "\x1b", "\r", "\x0c", "\x0f"
JOB = """
name = "e2e"
[data]
path = "{root}/data/sample"
[sae]
d_sae = 768
k = 16
[train]
batch_size = 512
n_steps = {steps}
log_every = 5
"""


class Box:
    """A user's data folder, with methods that run shell commands and, in a terminal, the app."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"SAE_TUI_DATA_DIR": str(folder / "data")}
        self.data = DataDir(folder / "data" / "demo")  # the folder where --demo stores its jobs
        self.terminals: list[Terminal] = []

    def app(
        self, columns: int = 120, rows: int = 40, *options: str, shows: str = "RTX 3080", colours: str = "truecolor",
        term: str = "xterm-256color", controlling: bool = False, **environment: str,
    ) -> Terminal:  # fmt: skip
        """Start the app in its own terminal and wait until it shows the GPUs; `environment` is added to the box's
        environment.
        """
        argv = [sys.executable, "-m", "sae_tui", *(options or ("--demo",))]
        terminal = Terminal(
            argv, columns=columns, rows=rows, env=self.env | environment, colours=colours, term=term,
            controlling=controlling,
        )  # fmt: skip
        self.terminals.append(terminal)
        terminal.wait_for(shows, 60)
        return terminal

    def record_job(self, name: str, state: JobState, **fields: Any) -> int:
        """Record a job on this host as its supervisor would. An unfinished job gets the pid of this test process."""
        self.data.create()
        here: dict[str, Any] = {"host": socket.gethostname()}
        return record_job(self.data, name, state, **(here | fields))

    def shell(self, *arguments: str) -> dict[str, Any]:
        done = run_command(["--demo", *arguments, "--json"], self.env, Path.cwd(), timeout=60)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def wait_for_state(self, job_id: int, *states: str, seconds: float = 120) -> dict[str, Any]:
        wait_for_state(self.data, job_id, *states, seconds=seconds)
        return self.shell("job", str(job_id))

    def job_file(self, steps: int) -> Path:
        path = self.folder / "job.toml"
        path.write_text(JOB.format(root=ROOT, steps=steps))
        return path

    def launch_by_keys(self, terminal: Terminal, steps: int) -> None:
        """Launch a job by pressing keys: open the launch screen, load a job file, select two of the three free GPUs."""
        terminal.send("n")
        terminal.wait_for("Review")
        terminal.send("\x0f")  # ctrl+o
        terminal.wait_for("Job file to open")
        terminal.send(f"{self.job_file(steps)}\r")
        terminal.wait_for("e2e")
        terminal.wait_for("3 GPUs, ")
        terminal.send("\x1b[B\x1b[B ")  # down, down, space: deselects GPU 2
        terminal.wait_for("2 GPUs, ")
        terminal.send("\x0c")  # ctrl+l
        if steps > 1000:
            terminal.wait_for("Launch anyway?")
            terminal.send("y")

    def close(self) -> None:
        """Close every terminal and kill all of this box's remaining processes."""
        for terminal in self.terminals:
            terminal.close()
        for pid in processes_of(self.folder):
            os.kill(pid, signal.SIGKILL)


def wait_for_state(data: DataDir, job_id: int, *states: str, seconds: float = 120) -> None:
    """Wait until the job is in one of these states."""
    wait_for_store(data, lambda control: control.job(job_id).state in states, seconds)


def wait_for_store(data: DataDir, condition: Callable[[Control], bool], seconds: float = 120) -> None:
    """Wait until a condition on the store is true.

    Read the store directly, because polling with commands would use a full core.
    """
    deadline = time.monotonic() + seconds
    while not (data.control_db.exists() and _holds(data, condition)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _holds(data: DataDir, condition: Callable[[Control], bool]) -> bool:
    with contextlib.closing(Control(data.control_db)) as control:
        return condition(control)


def processes_of(folder: Path, *, with_queue: bool = True) -> list[int]:
    """Return the pids of all processes whose command line contains the folder: supervisors and ranks, but not the app.

    With `with_queue=False`, leave out the queue process, which lingers for a minute.
    """
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            if str(folder).encode() in line and (with_queue or b"queue_process" not in line):
                pids.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in pids if pid != os.getpid()]
