"""A stub of SkyPilot's command and of ssh: a rented machine is a folder, and its jobs are real processes here.

    python sky.py STATE sky launch -c NAME --yes --detach-run task.yaml
    python sky.py STATE ssh -o BatchMode=yes NAME COMMAND

The output has the format of SkyPilot 0.14. A file STATE/faults.json maps a command such as `queue` to a fault: the exit
code and the output to print, or "hang".
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]
# The folder whose path is the same on all machines; on a stub machine, it is in the home folder.
THERE = "/tmp/sae-tui"
ENDED = {"SUCCEEDED": 0, "FAILED": 100, "CANCELLED": 103}


class Sky:
    """Installs the stub on $PATH, and shows tests what it was asked for."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.home = folder, folder / "home"
        programs = folder / "bin"
        programs.mkdir(parents=True)
        for name in ("sky", "ssh"):
            # Without site-packages, Python starts much faster.
            self._put(programs / name, f"{sys.executable} -S {__file__} {folder} {name}")
        venv = self.home / "sae-tui" / "venv" / "bin"
        venv.mkdir(parents=True)
        self._put(venv / "python", sys.executable)
        self._put(venv / "sae-train", f"{sys.executable} -m trainer")
        monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))

    @staticmethod
    def _put(file: Path, command: str) -> None:
        file.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        file.chmod(0o755)

    def fault(self, command: str, code: int = 1, output: str = "", *, hangs: bool = False) -> None:
        """Have a command fail from now on; `code` 0 and no output end the fault."""
        faults = _read(self.folder / "faults.json")
        faults[command] = "hang" if hangs else [code, output]
        _write(self.folder / "faults.json", faults)

    def asked(self, command: str) -> list[list[str]]:
        """Return the arguments of all calls of a command."""
        file = self.folder / "calls"
        calls = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [words for name, *words in calls if name == command]

    def take_back(self) -> None:
        """End the machine with its files, as a cloud does with a spot machine."""
        for job in _jobs(self.folder):
            _signal(job, signal.SIGKILL)
        (self.folder / "machine.json").unlink()
        for name in ("runs", "data", "job.toml"):
            there = self.home / "sae-tui" / name
            shutil.rmtree(there) if there.is_dir() else there.unlink(missing_ok=True)

    def close(self) -> None:
        for job in _jobs(self.folder):
            _signal(job, signal.SIGKILL)


def local_text(run: str, home: Path) -> str:
    """Return the script of a task with the link to the machine's folder inside its home folder."""
    return run.replace(THERE, str(home / "there"))


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def _write(file: Path, value: object) -> None:
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(value))
    part.replace(file)


def _jobs(state: Path) -> list[Path]:
    return sorted((state / "jobs").glob("*"), key=lambda job: int(job.name))


def _signal(job: Path, number: int) -> None:
    """Send a signal to a job's processes, as SkyPilot does; a job is a session."""
    with contextlib.suppress(OSError, ValueError):
        leader = int((job / "pid").read_text())
        for process in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.getsid(int(process)) == leader:
                    os.kill(int(process), number)


def launch(state: Path, words: Sequence[str]) -> int:
    import site

    site.main()
    import yaml

    task = yaml.safe_load(Path(words[-1]).read_text())
    home = state / "home"
    for there, here in task.get("file_mounts", {}).items():
        if isinstance(here, str):
            target = home / there.removeprefix("~/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(here, target, dirs_exist_ok=True) if os.path.isdir(here) else shutil.copy(here, target)
    _write(state / "machine.json", {"name": words[words.index("-c") + 1]})
    job = state / "jobs" / str(len(_jobs(state)) + 1)
    job.mkdir(parents=True)
    (job / "run.sh").write_text(local_text(task["run"], home))
    (job / "status").write_text("PENDING")
    subprocess.Popen([sys.executable, "-S", __file__, str(state), "job", job.name], start_new_session=True)
    print(f"\x1b[2m⚙︎ Job submitted, ID: {job.name}\x1b[0m")
    return 0


def run_job(state: Path, number: str) -> None:
    """Run a job as SkyPilot's driver does: each line of its output gets a prefix."""
    job, home = state / "jobs" / number, state / "home"
    gpus = {"SKYPILOT_NUM_GPUS_PER_NODE": "0", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"}
    environment = os.environ | gpus | {"SKYPILOT_NODE_IPS": "127.0.0.1", "HOME": str(home)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        ["bash", str(job / "run.sh")],
        cwd=home,
        env=environment,
        stdout=pipe,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    (job / "pid").write_text(str(process.pid))
    (job / "status").write_text("RUNNING")
    assert process.stdout
    with (job / "log").open("ab", buffering=0) as log:
        for line in process.stdout:
            log.write(b"\x1b[36m(sae, pid=%d)\x1b[0m %s" % (process.pid, line))
    code = process.wait()
    if (job / "status").read_text() == "RUNNING":
        (job / "status").write_text("FAILED" if code else "SUCCEEDED")


def logs(job: Path) -> int:
    print("Tailing logs of the last job...", flush=True)
    offset = 0
    while True:
        status = (job / "status").read_text()
        with contextlib.suppress(FileNotFoundError):
            text = (job / "log").read_bytes()[offset:]
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()
            offset += len(text)
        if status in ENDED:
            return ENDED[status]
        time.sleep(0.05)


def sky(state: Path, command: str, words: Sequence[str]) -> int:
    fault = _read(state / "faults.json").get(command)
    if fault == "hang":
        time.sleep(600)
    if fault and fault != [0, ""]:
        print(fault[1])
        return int(fault[0])
    name = _read(state / "machine.json").get("name")
    if command == "launch":
        return launch(state, words)
    if command == "cost-report":
        print(json.dumps([{"name": name or "", "total_cost": 1.234, "duration": 60}]))
    elif command == "status":
        gone = "Cluster(s) not found: \x1b[1mx\x1b[0m.\n"
        print(json.dumps([{"name": name, "status": "UP", "nodes": 1}]) if name else f"{gone}[]")
    elif command == "queue":
        queue = [{"job_id": int(job.name), "status": (job / "status").read_text()} for job in _jobs(state)]
        failed = "Failed to get the job queue for cluster 'x'.\n  ClusterDoesNotExist: Cluster 'x' does not exist.\n"
        print(json.dumps({name: queue}, indent=2) if name else f"{failed}{{}}")
    elif not name:
        print("Cluster(s) not found: x.", file=sys.stderr)
        return 1
    elif command == "logs":
        return logs(state / "jobs" / words[1])
    elif command == "cancel":
        (state / "jobs" / words[-1] / "status").write_text("CANCELLED")
        _signal(state / "jobs" / words[-1], signal.SIGTERM)
    elif command == "down":
        (state / "machine.json").unlink()
    return 0


def ssh(state: Path, words: Sequence[str]) -> int:
    while words[0] == "-o":
        words = words[2:]
    command, home = " ".join(words[1:]), state / "home"
    return subprocess.run(
        ["bash", "-c", local_text(command, home)], cwd=home, env=os.environ | {"HOME": str(home)}
    ).returncode


def main() -> int:
    state, program, *words = Path(sys.argv[1]), *sys.argv[2:]
    if program == "job":
        run_job(state, words[0])
        return 0
    with (state / "calls").open("a") as calls:
        calls.write(json.dumps(words if program == "sky" else ["ssh", *words]) + "\n")
    return ssh(state, words) if program == "ssh" else sky(state, words[0], words[1:])


if __name__ == "__main__":
    sys.exit(main())
