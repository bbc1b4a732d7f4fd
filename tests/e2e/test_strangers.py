"""What somebody else has written does not steer the terminal, on any screen and by any command."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.box import CTRL_O, ENTER, ESC, ROOT, Box
from support.driver import environment
from support.tui import record_metrics

from trainer.contract.control import Control
from trainer.contract.states import JobState

# Clipboard, title, link, device control, C1, right to left, and the bell that ends some of them.
EVIL = "\x1b]52;c;UFdORUQ=\x07\x1b]2;owned\x1b\\\x1b]8;;evil\x1b\\\x1bPq\x1b\\\x9b31m\x90\u202e\u2066\rx"
BELL = b"\x07"
FORBIDDEN = [b"\x1b]52", b"\x1b]2;", b"\x1b]8;", b"\x1bPq"]
FORBIDDEN += [char.encode() for char in "\x9b\x90\u202e\u2066"]
TEXTS = ("name", "user", "note", "error", "waits_for", "output_path")
FOREIGN = """
name = "x"
[data]
path = "shards"
[sae]
d_sae = 768
k = 16
[launch]
gpus = [0]
"""
COMMANDS = (
    """
gpus; metrics; jobs; job 1; job 2; job 3; logs 2; compare 1 2; clone 1 --print
resume 1; hold 3; release 3; pause 3; priority 3 5; after 3 1; tag 1 new; note 1 new; rename 3 new; stop 3
recommend; validate evil.toml; launch evil.toml; validate foreign.toml; launch foreign.toml; doctor foreign.toml
repair; rm 1 --yes
""".strip()
    .replace("\n", "; ")
    .split("; ")
)


def leaked(raw: bytes) -> list[bytes]:
    return [found for found in FORBIDDEN if found in raw]


def recorded(box: Box) -> list[int]:
    """Jobs of a member of the group who writes into the store what no command would."""
    states = (JobState.FINISHED, JobState.FAILED, JobState.QUEUED)
    jobs = [box.record_job("job", state, total_steps=400, attempt=1) for state in states]
    for job in jobs[:2]:
        record_metrics(box.data, job, steps=50, ranks=1)
        box.data.run(job).log(0).write_text(f"a line {EVIL}\nValueError: {EVIL}\n")
    with closing(Control(box.data.control_db)) as control:
        for job in jobs:
            control.add_event(job, "failed", f"rank 0: {EVIL}")
    with closing(sqlite3.connect(box.data.control_db)) as db, db:
        for name in TEXTS:
            db.execute(f"UPDATE jobs SET {name} = '{name} ' || ?", [EVIL])
        db.execute("UPDATE jobs SET tags = json_array(?)", [f"tag{EVIL}"])
    return jobs


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen]:
    """A process that has the GPUs, with a command line of its own choice."""
    code = "import time; time.sleep(600)"
    process = subprocess.Popen([f"train {EVIL}", "-c", code], executable=sys.executable)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def hostile(box: Box, drivers: Path, stranger: subprocess.Popen) -> dict[str, str]:
    """The environment of an app on a box where every text is a stranger's."""
    box.data = type(box.data)(box.folder / "data")
    escaped = "".join(f"\\U{ord(char):08x}" for char in EVIL)
    (box.folder / "evil.toml").write_text(f'name = "x"\n"{escaped}" = 1\n')
    shards = box.folder / "shards"
    shutil.copytree(ROOT / "data" / "sample", shards)
    first = next(shards.glob("*.safetensors"))
    first.rename(shards / f"a{EVIL}{first.name}")
    (shards / f"b{EVIL}.safetensors").write_bytes(b"no shard")
    (box.folder / "foreign.toml").write_text(FOREIGN)
    recorded(box)
    return environment(drivers, GPUS=2, NAME=f"H200 {EVIL[:18]}", PIDS=stranger.pid)


ALL = """
import sys, contextlib
import sae_tui.cli, trainer.cli
for argv in map(str.split, sys.stdin.read().splitlines()):
    main = trainer.cli.main if argv[0] == "trainer" else sae_tui.cli.main
    with contextlib.suppress(SystemExit):
        main(argv[1:])
    for stream in (sys.stdout, sys.stderr):
        print("<after>", *argv, file=stream, flush=True)
"""


def test_no_command_lets_a_strangers_escape_sequence_through(box: Box, hostile: dict[str, str]) -> None:
    lines = [f"app --gpu-source nvml {line}{form}" for line in COMMANDS for form in ("", " --json")]
    lines += [f"trainer {line}" for line in ("run evil.toml", "run foreign.toml", "estimate foreign.toml")]
    done = subprocess.run(
        [sys.executable, "-c", ALL],
        input="\n".join(lines).encode(),
        env=box.env | hostile,
        cwd=box.folder,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"UFdORUQ") > 20
    assert b"Traceback" not in done.stderr
    for output in (done.stdout, done.stderr):
        said = output.split(b"<after> ")
        assert len(said) == len(lines) + 1
        for raw, line in zip(said, lines, strict=False):
            assert leaked(raw) == [], line
            assert BELL not in raw, line


def test_no_screen_lets_a_strangers_escape_sequence_through(box: Box, hostile: dict[str, str]) -> None:
    (box.folder / "data" / "settings.toml").write_text('monitor_view_default = "per_gpu"\n')
    terminal = box.app(120, 40, "--gpu-source", "nvml", shows="H200", **hostile)
    terminal.wait_for("name ")

    def goes(*keys: str, to: str) -> None:
        """The screen that these keys open; a screen before it has gone by then."""
        terminal.press(*keys, gap_s=0.3)
        terminal.wait_for(to)
        assert leaked(bytes(terminal.raw)) == [], to

    goes("D", to="Delete job 3")
    goes(ESC, "R", to="Name of job 3")
    goes(ESC, "N", to="Note of job 3")
    goes(ESC, "#", to="Tags of job 3")
    goes(ESC, "\x10", *"open 2", to="Open job 2")
    goes(ESC, "/", *"name", ENTER, to="Filter")
    goes(ESC, "\x1b[B", ENTER, to="log of rank")
    terminal.press("i", "i")
    goes("l", to="& Only")
    goes("/", *"line", ENTER, to="with 'line'")
    goes(ESC, ESC, " ", "\x1b[B", " ", "c", to="Pareto")
    goes(ESC, "y", to="Not cloned")
    goes(ESC, "n", to="F4")
    goes("\x1bOQ", " ", to="is busy")
    goes("n", CTRL_O, to="Job file to open")
    goes(f"{box.folder}/foreign.toml", ENTER, to="✗ data.path")
    goes(CTRL_O, to="Job file to open")
    goes(f"{box.folder}/evil.toml", ENTER, to="Not opened")
    goes(ESC, "d", to="Look again")
    goes(ESC, "!", to="Messages")
    goes(ESC, "?", to="GPUs above")


def test_the_first_start_in_a_shared_folder_says_with_whom(box: Box) -> None:
    box.data.root.mkdir(parents=True)
    box.data.root.chmod(0o2770)
    terminal = box.app(120, 40)
    terminal.wait_for(f"{box.data.root} is shared with group ")
