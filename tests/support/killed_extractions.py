"""Extraction jobs that are killed and restarted in forks of this process, which has already imported transformers.

`killed_extractions.py JOB.toml DIR SEED N [url]` runs one job undisturbed, in DIR/whole, and then N jobs, each in its
own folder. Each of these N jobs is killed at an interpreter event, such as opening or replacing a file. The job is
then restarted and killed after a random time, and finally restarted and run to completion. One more job, in
DIR/interrupted, gets SIGINT after its first shard. With `url`, the output is a file:// URL, and each run starts with
an empty cache folder, as on another machine. Prints the exit codes of each job as JSON; a negative code is a signal.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import trainer.ranks.foreground_extraction  # noqa: F401
from trainer.cli import main
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.job_file import load_as
from trainer.extraction.language_model import LanguageModel


def run(job: str, output: Path, prepare: Callable[[], object]) -> int:
    """Run the job in a forked process, and return its exit code, which is negative if the process was killed."""
    if not (pid := os.fork()):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        with (output.parent / f"{output.name}.errors").open("a") as errors:
            os.dup2(errors.fileno(), 2)
        if is_url := "url" in sys.argv[5:]:
            os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=output.parent, prefix=".")
        prepare()
        os._exit(main(["extract", job, "--set", f"extract.output={'file://' if is_url else ''}{output}"]))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def interrupt_at_first_shard() -> None:
    """Send SIGINT to this process once its first shard has been written, long before the last shard."""

    def look(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.rename" and str(arguments[1]).endswith("shard-00000.safetensors"):
            os.kill(os.getpid(), signal.SIGINT)

    sys.addaudithook(look)


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


def events_of(job: str, output: Path) -> int:
    """Run the job undisturbed, and return the number of interpreter events that involve the folder."""
    counted = output.parent / "events"

    def count(event: str, arguments: tuple[object, ...]) -> None:
        if str(output) in " ".join(map(str, arguments)):
            os.write(descriptor, b".")

    descriptor = os.open(counted, os.O_WRONLY | os.O_CREAT)
    assert run(job, output, lambda: sys.addaudithook(count)) == 0
    return counted.stat().st_size


if __name__ == "__main__":
    job, root, choose, n = sys.argv[1], Path(sys.argv[2]), random.Random(int(sys.argv[3])), int(sys.argv[4])
    # nohup makes processes ignore SIGINT, and children inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    # Import this model's modules here, because the import would take two seconds in each forked process.
    LanguageModel(load_as(ExtractJob, job), torch.device("cpu"))
    began = time.monotonic()
    n_events = events_of(job, root / "whole")
    lasted, codes = time.monotonic() - began, []
    for number in range(n):
        output = root / str(number)
        codes.append([run(job, output, kill_at(choose.randint(1, n_events), output))])
        while codes[-1][-1] < 0:
            codes[-1].append(run(job, output, kill_after(choose.uniform(0.2, 1.2) * lasted)))
    output = root / "interrupted"
    codes.append([run(job, output, interrupt_at_first_shard), run(job, output, lambda: None)])
    print(json.dumps(codes))
