"""Halts a rank or makes files hang. Each function injects one fault, and raises an error if a guarantee is violated."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from faults.real_host import drivers, preloaded
from faults.real_job import RealJob, Result, boxed
from jobs.conftest import wait_for
from support.driver import environment
from support.terminal import Terminal

from sae_tui.jobs import detach
from trainer.contract.store.states import JobState

STALLED_AFTER_S, ENDED_AFTER_S = 3.0, 6.0
WATCHED = {"stalled_after_s": STALLED_AFTER_S, "end_stalled_after_s": ENDED_AFTER_S, "max_restarts": 1}
# The time limit, plus 5 s for a stopped process to exit, and 20 s for two stack dumps and a busy machine.
WITHIN_S = ENDED_AFTER_S + 5 + 20


def rank_halted(root: Path, dice: random.Random, rank: int, like: Result | None = None, **train: int) -> float:
    """Halt a rank with SIGSTOP. The job must be reported as stalled, with all ranks' stack traces, and be restarted.

    The job must continue from its checkpoint. Return the seconds until the next attempt begins.
    """
    with boxed(root) as box:
        job = RealJob(box, launch=WATCHED, **train).at_step(dice.randint(110, 300))
        job.kill(rank, number=signal.SIGSTOP)
        halted = time.monotonic()
        wait_for(lambda: job.row.state == JobState.STALLED, "the job to stall", WITHIN_S)
        wait_for(lambda: job.row.attempt == 2, "the second attempt", WITHIN_S)
        taken = time.monotonic() - halted
        stacks = (job.paths.attempt(1) / "stacks.txt").read_text()
        assert "rank 0 (pid" in stacks, stacks[:200]
        assert "rank 1 (pid" in stacks, stacks[:200]
        assert "is halted (SIGSTOP)" in stacks, stacks[:200]
        assert "training/loop.py" in stacks or "loop.py:" in stacks, stacks[:2000]
        job.ended()
        job.require(JobState.FINISHED)
        (message,) = [event.message for event in box.control.events(job.id) if event.kind == "restarting"]
        assert f"rank {rank} is halted (SIGSTOP)" in message, message
        assert "resumed from" in job.log()
        job.mend()
        if like is not None:
            job.require_same(like)
        return taken


def rank_halted_after_saving(root: Path, dice: random.Random) -> float:
    """Halt a rank just after rank 0 has saved a checkpoint. Saving may take a long time, but the next step may not."""
    return rank_halted(root, dice, 1, checkpoint_every=1, n_steps=400)


def processes_hang(root: Path, dice: random.Random) -> float:
    """Make reads of a GPU process's files in /proc hang while the app lists the process.

    The app must report this and still accept keys. Return the seconds from pressing the first key to stop a job until
    the job has ended.
    """
    with boxed(root) as box, subprocess.Popen(["sleep", "600"]) as other_user, contextlib.ExitStack() as stack:
        stack.callback(other_user.kill)
        job_id = box.launch("steps=100000")
        box.wait_steps(job_id)
        # If a process hangs while its memory map is locked, reads of its command line block. Block reads of either
        # the command line and the environment, or all of the process's files.
        folder = Path(f"/proc/{other_user.pid}")
        is_whole = dice.random() < 0.5
        hangs = Hangs(root, [folder] if is_whole else [folder / "cmdline", folder / "environ"])
        env = environment(drivers(), GPUS=2, PIDS=other_user.pid) | hangs.variables
        terminal = stack.enter_context(_app(["--data-dir", str(box.data.root), "--gpu-source", "nvml"], env))
        terminal.wait_for("steps=100000", 60)
        time.sleep(dice.uniform(0, 1))
        with hangs:
            terminal.send("t")
            terminal.wait_for("the system does not respond" if is_whole else " sleep", 60)
            time.sleep(dice.uniform(0, 10))
            terminal.send("\x1b")
            terminal.wait_for("steps=100000", 10)
            began = time.monotonic()
            terminal.send("s")
            terminal.wait_for("Stop", 10)
            terminal.send("y")
            box.wait(job_id, JobState.STOPPED)
            taken = time.monotonic() - began
        terminal.send("t")
        terminal.wait_for("sleep 600", 30)
        _leave(terminal)
        return taken


def disk_hangs(root: Path, dice: random.Random, like: Result, n_ranks: int = 1) -> float:
    """Make the data folder hang for a while. The job and the app must continue, and the trained SAE must be the same.

    Return the seconds until the job takes steps again.
    """
    with boxed(root) as box, contextlib.ExitStack() as stack:
        hangs = Hangs(root, [box.data.root])
        job = RealJob(box, n_ranks, start=hangs.start)
        job.at_step(dice.randint(1, 250))
        flags = ["--data-dir", str(box.data.root), "--gpu-source", "simulated"]
        terminal = stack.enter_context(_app(flags, os.environ | hangs.variables))
        terminal.wait_for("job", 60)
        with hangs:
            terminal.wait_for("have not been read for", 60)
            terminal.send("?")
            terminal.wait_for("GPUs above", 10)
            terminal.send("\x1b")
            step = job.step
        began = time.monotonic()
        wait_for(lambda: job.step > step or job.row.state.is_final, "the job to continue")
        taken = time.monotonic() - began
        job.ended()
        job.require(JobState.FINISHED)
        assert job.row.attempt == 1, "the job was restarted"
        job.require_same(like)
        terminal.wait_for(lambda text: "have not been read for" not in text, 30)
        _leave(terminal)
        job.mend()
        return taken


class Hangs:
    """While this context is active, accesses to files under these paths hang in all processes started with its
    `variables`.
    """

    def __init__(self, root: Path, paths: list[Path]) -> None:
        self._flag = root / "hangs"
        library = preloaded("hung_files")
        self.variables = {
            "LD_PRELOAD": str(library), "HUNG": ":".join(map(str, paths)), "HUNG_WHILE": str(self._flag)
        }  # fmt: skip
        names = [f"{name}={value}" for name, value in self.variables.items()]
        self.start = functools.partial(detach.start, command=["env", *names, *detach.SUPERVISOR])

    def __enter__(self) -> None:
        self._flag.touch()

    def __exit__(self, *_: object) -> None:
        self._flag.unlink()


@contextlib.contextmanager
def _app(flags: list[str], env: dict[str, str]) -> Iterator[Terminal]:
    terminal = Terminal([sys.executable, "-m", "sae_tui", *flags], env=env)
    try:
        yield terminal
    finally:
        terminal.close()


def _leave(terminal: Terminal) -> None:
    for key in ("\x1b", "q"):
        terminal.send(key)
        terminal.read(0.5)
    assert terminal.wait_for_exit(15) == 0, terminal.text
