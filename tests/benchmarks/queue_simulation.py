"""Simulates several days of a queue with many users, and measures how long the queue takes to decide.

`PYTHONPATH=tests python tests/benchmarks/queue_simulation.py` prints, for 1,000 jobs from 8 users on 8 GPUs, how long
each user's jobs waited, the GPU hours of each day, and how long one decision about 1,000 waiting jobs takes.
"""

from __future__ import annotations

import argparse
import statistics
import time

from support.queue_simulation import (
    BEGIN,
    HOUR_S,
    Simulation,
    crowd,
    oldest_since,
    promised_s,
    shares_by_day,
    waits_by_user,
)

from sae_tui.jobs.queue.order import turns

ROUNDS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    jobs = crowd(flags.jobs, flags.users, seed=flags.seed)
    print_decisions(flags, [job.row for job in jobs])
    simulation = Simulation(jobs, flags.gpus)
    ran = simulation.run()
    busy = sum(one.gpu_s for one in ran) / flags.gpus / (simulation.now - BEGIN)
    print(
        f"\n{len(ran)} jobs ran in {(simulation.now - BEGIN) / HOUR_S:.0f} h; GPUs were in use {busy:.0%} of the time"
    )
    print("\nhours of waiting   jobs  median     p90     max")
    for user, waits in waits_by_user(ran).items():
        places = (waits[len(waits) // 2], waits[int(0.9 * (len(waits) - 1))], waits[-1])
        print(f"{user:17} {len(waits):6}" + "".join(f"{wait / HOUR_S:8.1f}" for wait in places))
    since = oldest_since(ran)
    for n_gpus in sorted({one.row.gpus_wanted for one in ran}):
        alike = [one for one in ran if one.row.gpus_wanted == n_gpus and one.row.priority == 0]
        waits = {one.row.id: one.started - since[one.row.id] for one in alike}
        worst = max(waits[one.row.id] / promised_s(one, since[one.row.id], ran, flags.users) for one in alike)
        longest = f"at most {max(waits.values()) / HOUR_S:.1f} h as the oldest job of their user"
        print(f"{n_gpus}-GPU jobs waited {longest}, {worst:.0%} of the promise")
    print("\nGPU hours of each day, of the users who always had a job in the queue")
    for number, day in enumerate(shares_by_day(ran), 1):
        print(f"day {number:3}  " + "  ".join(f"{user} {hours:5.1f}" for user, hours in day.items()))


def print_decisions(flags: argparse.Namespace, line: list) -> None:
    """Print how long one decision takes with all jobs waiting, first with all GPUs in use, then with all GPUs free."""
    idle = Simulation([], flags.gpus)
    idle.now = BEGIN + 240 * HOUR_S
    busy = Simulation(crowd(flags.gpus + 1, flags.users, days=0.0, seed=flags.seed + 1), flags.gpus)
    busy._advance()
    busy._plan()
    for words, simulation in (("GPUs in use", busy), ("GPUs free", idle)):
        board, standing = simulation.board(), simulation.standing()
        times = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            turns(line, board, simulation.now, standing)
            times.append(1000 * (time.perf_counter() - begun))
        print(f"one decision about {len(line)} jobs, {words}: median {statistics.median(times):.1f} ms")


if __name__ == "__main__":
    main()
