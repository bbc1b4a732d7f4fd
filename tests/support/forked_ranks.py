"""Runs several attempts in sequence, each with ranks forked from this process, which has torch loaded.

Usage: `forked_ranks.py SPEC.json...`. In the ranks, the environment variable WRITTEN_DOWN names a file next to the
spec.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from support.forked import LOADED, measure_briefly, sleep_at_once

from trainer.contract.runs.rank_spec import RankSpec, rank_environment, read_spec


def rank(spec_file: Path, spec: RankSpec, number: int) -> None:
    os.environ.update(rank_environment(spec, number), WRITTEN_DOWN=str(spec_file.with_name("written-down")))
    from trainer.ranks.rank import main

    main(spec)


def codes_of(spec_file: Path) -> list[int]:
    """Fork all ranks of an attempt, and return their exit codes."""
    spec, pids = read_spec(spec_file), []
    for number in range(spec.n_processes):
        if not (pid := os.fork()):
            rank(spec_file, spec, number)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


if __name__ == "__main__":
    for name in LOADED:
        importlib.import_module(name)
    sleep_at_once()
    measure_briefly()
    sys.exit(any([code for file in sys.argv[1:] for code in codes_of(Path(file))]))
