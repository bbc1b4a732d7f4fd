"""Extraction jobs on several ranks, where one rank is killed. Ranks are forked from this process, which has imported
all modules.

`killed_ranks.py JOB.toml DIR SEED N SIZE` runs one job undisturbed, in DIR/whole, and then N jobs, each in its own
folder. In each of these N jobs, a rank is killed at an interpreter event, such as opening or replacing a file, and the
other ranks get SIGTERM, as from a supervisor. After a restart, a rank is killed after a random time. The third start
runs to completion. Prints the ranks' exit codes for each start as JSON; a negative code is a signal.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.job_file import load_as
from trainer.extraction.extraction import extract
from trainer.extraction.language_model import LanguageModel
from trainer.extraction.peers import Peers

FINISHED, FAILED, STOPPED = 0, 1, 3


def start(job: ExtractJob, rank: int, size: int, folder: Path, prepare: Callable[[], object]) -> int:
    """Start a rank in a forked process and return its pid."""
    if pid := os.fork():
        return pid
    code = FAILED
    try:
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        prepare()
        result = extract(job, torch.device("cpu"), Peers(folder, rank, size, stop), lambda sentence: None)
        code = FINISHED if result.state == "finished" else STOPPED
    finally:
        os._exit(code)


def run(job: ExtractJob, folder: Path, prepare: list[Callable[[], object]]) -> list[int]:
    """Run one rank per element of `prepare`. If a rank is killed, stop the others. Return all exit codes."""
    ranks = [start(job, rank, len(prepare), folder, one) for rank, one in enumerate(prepare)]
    codes: dict[int, int] = {}
    while len(codes) < len(ranks):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] not in (FINISHED, STOPPED):
            for other in {*ranks} - {*codes}:
                os.kill(other, signal.SIGTERM)
    return [codes[pid] for pid in ranks]


def nothing() -> None:
    """Leave a rank undisturbed."""


def kill_at(number: int, folder: Path) -> Callable[[], None]:
    """Return a function that kills this process at event number `number`, counting only events in the folder."""
    left = [number]

    def count(event: str, arguments: tuple[object, ...]) -> None:
        if str(folder) in " ".join(map(str, arguments)):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return lambda: sys.addaudithook(count)


def kill_after(seconds: float) -> Callable[[], object]:
    """Return a function that sets a timer to kill this process with SIGALRM after `seconds`."""
    return lambda: signal.setitimer(signal.ITIMER_REAL, seconds)


def at_one(rank: int, size: int, prepare: Callable[[], object]) -> list[Callable[[], object]]:
    return [prepare if one == rank else nothing for one in range(size)]


if __name__ == "__main__":
    file, root, choose = Path(sys.argv[1]), Path(sys.argv[2]), random.Random(int(sys.argv[3]))
    n, size = int(sys.argv[4]), int(sys.argv[5])
    torch.set_num_threads(1)
    asked = load_as(ExtractJob, file)
    # Import this model's modules here, because the import would take two seconds in each forked process.
    LanguageModel(asked, torch.device("cpu"))

    def to(output: Path) -> ExtractJob:
        return msgspec.structs.replace(asked, extract=msgspec.structs.replace(asked.extract, output=str(output)))

    began = time.monotonic()
    assert run(to(root / "whole"), root / "meet-whole", at_one(0, size, nothing)) == [FINISHED] * size
    lasted, codes = time.monotonic() - began, []
    for number in range(n):
        output, victim = root / str(number), number % size
        starts = [
            at_one(victim, size, kill_at(choose.randint(1, 120), output)),
            at_one(choose.randrange(size), size, kill_after(choose.uniform(0.1, 1.0) * lasted)),
            at_one(0, size, nothing),
        ]
        codes.append([run(to(output), root / f"meet-{number}-{at}", one) for at, one in enumerate(starts)])
    print(json.dumps(codes))
