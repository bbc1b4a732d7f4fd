"""Disturbs queued jobs with an upgrade, a halted supervisor or a hung driver. Each function injects one fault."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

from faults.real_host import RealHost, drivers, require_nothing_left, require_order
from faults.real_job import boxed
from jobs.conftest import wait_for

from trainer.contract.store.states import JobState

ENDLESS, SHORT, QUICK = "steps=100000", "steps=100", "steps=20"
# Functions that a supervisor calls when its job starts or ends.
RENAMED = (
    "is_gone",
    "run_hook",
    "write_ending",
    "write_record",
    "describe_state",
    "with_other_users",
    "end_descendants",
)


def upgraded(root: Path, dice: random.Random) -> float:
    """While jobs wait, replace the package, file by file, with a version in which some functions have other names.

    Return the seconds from the upgrade until the queue is empty.
    """
    with boxed(root) as box, RealHost(box, "gpu1") as host:
        runs, waits, last = host.launch(SHORT, QUICK, QUICK)
        (held,), (after,) = host.launch(QUICK, hold=True), host.launch(QUICK, after=runs, gpus="cpu")
        host.trains(runs)
        time.sleep(dice.uniform(0, 2))
        began = time.monotonic()
        for name in dice.sample(RENAMED, 3):
            _rename(host.package / "sae_tui", name, dice)
        host.run("release", held)
        require_order(*host.ended(runs, waits, last))
        host.ended(held, after)
        taken = time.monotonic() - began
        require_nothing_left(box)
        return taken


def _rename(package: Path, name: str, dice: random.Random) -> None:
    files = [file for file in package.rglob("*.py") if re.search(rf"\b{name}\b", file.read_text())]
    dice.shuffle(files)
    for file in files:
        file.write_text(re.sub(rf"\b{name}\b", f"new_{name}", file.read_text()))
        time.sleep(dice.uniform(0, 0.2))


def head_halted(root: Path, dice: random.Random) -> float:
    """Halt the supervisor of the first job in the queue. The next job in the queue must start first.

    Return how many seconds the GPU was idle.
    """
    with boxed(root) as box, RealHost(box, "gpu1") as host:
        (runs,) = host.launch(ENDLESS)
        host.trains(runs)
        head, second, third = host.launch(QUICK, ENDLESS, QUICK)
        time.sleep(dice.uniform(0, 2))
        halted = box.job(head).supervisor
        assert halted
        host.signal(halted, signal.SIGSTOP)
        host.run("stop", runs)
        began = time.monotonic()
        box.wait_ended(runs)
        wait_for(lambda: box.job(second).started, "the second job to start", 90)
        taken = time.monotonic() - began
        words = f"its supervisor (pid {halted.pid}) does not respond; other jobs go first"
        wait_for(lambda: box.job(head).waits_for == words, "the reason to name the halted supervisor", 90)
        assert "does not respond" in host.run("job", head)
        host.signal(halted, signal.SIGCONT)
        wait_for(lambda: box.job(head).waits_for != words, "the halted supervisor to continue", 30)
        host.run("stop", second)
        require_order(box.wait_ended(second), *host.ended(head, third))
        assert [event.kind for event in box.control.events(head)].count("silent") == 1
        require_nothing_left(box)
        return taken


def gpu_hangs(root: Path, dice: random.Random) -> float:
    """Make all driver calls for one of two GPUs hang. The fault must be reported soon, and the queue must use the other
    GPU.

    Return how many seconds the `gpus` command takes.
    """
    hung = dice.randrange(2)
    with boxed(root) as box, RealHost(box, "gpu1", faults=f"{hung}:hang", gpus=2) as host:
        began = time.monotonic()
        said = host.run("gpus")
        taken = time.monotonic() - began
        assert f"  {hung}  GPU {hung} " in said, said
        assert "did not respond within 5 s" in said, said
        assert taken < 20, f"gpus took {taken:.0f} s"
        jobs = host.launch(QUICK, QUICK, QUICK)
        rows = host.ended(*jobs, timeout_s=120)
        require_order(*rows)
        assert {row.gpu_ids for row in rows} == {(1 - hung,)}
        require_nothing_left(box)
        return taken


def driver_hangs(root: Path, dice: random.Random) -> float:
    """Make the driver hang while jobs wait. Jobs must show why they wait, and start once the driver has recovered.

    Return the seconds from the recovery until the first job starts.
    """
    with boxed(root) as box, RealHost(box, "gpu1") as host:
        (runs,) = host.launch(ENDLESS)
        host.trains(runs)
        first, second = host.launch(QUICK, QUICK)
        time.sleep(dice.uniform(0, 2))
        _put_driver(host, "hangs")
        host.run("stop", runs)
        box.wait_ended(runs)
        why = "the GPUs cannot be read: "
        wait_for(lambda: (box.job(first).waits_for or "").startswith(why), "the reason why the job waits", 90)
        host.require(JobState.QUEUED, first, second)
        _put_driver(host, "new")
        began = time.monotonic()
        wait_for(lambda: box.job(first).started, "the first job to start", 90)
        taken = time.monotonic() - began
        require_order(*host.ended(first, second))
        require_nothing_left(box)
        return taken


def _put_driver(host: RealHost, name: str) -> None:
    """Replace the driver library for all processes that load it from now on."""
    other = host.driver.with_name("other")
    other.symlink_to(drivers() / name)
    other.replace(host.driver)
