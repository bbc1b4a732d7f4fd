"""Injects each job fault into real processes repeatedly, and prints how often its guarantees held, and how fast.

python tests/benchmarks/faults.py [--trials 50] [--only NAME ...] [--seed 0] [--list]

Every trial launches jobs of one or two CPU ranks in the same way as the app, in its own data folder. A row is printed
after each fault, followed by the guarantees that failed. On a busy machine, the times are upper bounds. One trial of
all faults takes about 10 minutes on two idle cores. Host faults need gcc, and root rights to create namespaces.
"""

from __future__ import annotations

import argparse
import inspect
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

# Replace this folder on the import path, since this file would shadow the package `faults`.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).parents[1]))

from faults import clock, hangs, hosts, kills, queues, stops
from faults.real_job import Result, undisturbed


class Fault(msgspec.Struct, frozen=True):
    """A fault, its guarantees, the meaning of its measured seconds, and the function that injects it once."""

    what: str
    seconds: str
    once: Callable[..., float]
    options: dict[str, object] = {}


ALONE = {"n_ranks": 1}
FAULTS = {
    "launcher": Fault("sae-tui launch: kill -9 during and after; job continues", "to its end", kills.launcher_killed),
    "terminal": Fault("its terminal is closed (SIGHUP); the job continues", "to its end", kills.terminal_closed),
    "supervisor": Fault(
        "supervisor: kill -9; saved, lost, nothing held, resumed alike", "until gone", kills.supervisor_killed
    ),
    "rank-0": Fault("rank 0: kill -9; named, restarted, same bits", "to training", kills.rank_killed, {"rank": 0}),
    "rank-1": Fault("rank 1: kill -9; named, restarted, same bits", "to training", kills.rank_killed, {"rank": 1}),
    "raises": Fault("a shard is missing and comes back; restarted to the end", "to restart", kills.rank_raises),
    "not-finite": Fault("activations that are NaN; reported, not restarted", "to its end", kills.rank_finds_nan),
    "memory": Fault("rank 1: killed by the kernel for memory; not restarted", "to its end", kills.rank_out_of_memory),
    "halted-0": Fault("rank 0: SIGSTOP; stalled, stacks, restarted", "to restart", hangs.rank_halted, {"rank": 0}),
    "halted-1": Fault("rank 1: SIGSTOP; stalled, stacks, restarted", "to restart", hangs.rank_halted, {"rank": 1}),
    "halted-saving": Fault("rank 1: SIGSTOP right after a save", "to restart", hangs.rank_halted_after_saving),
    "random": Fault("any of two ranks and supervisor, or all: kill -9", "until gone", kills.killed_at_random),
    "random-single": Fault(
        "the same of a job on one process", "until gone", kills.killed_at_random, {"n_ranks": 1}
    ),
    "random-saving": Fault(
        "the same while it saves after every step", "until gone", kills.killed_at_random,
        {"n_ranks": 1, "checkpoint_every": 1},
    ),
    "stop-starting": Fault("stop in the first 3 s", "to its end", stops.stop_in_start),
    "stop-evaluating": Fault("stop during an evaluation", "to its end", stops.stop_in_evaluation),
    "stop-saving": Fault("stop during a checkpoint", "to its end", stops.stop_in_checkpoint),
    "stop-reading": Fault("stop between all of these", "to its end", stops.stop_while_reading),
    "two": Fault("two jobs in one second; both train", "to their end", kills.two_at_once),
    "restarted": Fault("the machine restarts; lost, no other process signalled", "to mend", clock.machine_restarted),
    "queue": Fault("the same with queued jobs; places kept, continues", "to the queue", clock.queue_restarted),
    "renamed": Fault("killed, and the machine has another name; lost, resumed", "until gone", clock.renamed),
    "pids": Fault("pids belong to other processes; lost, not signalled", "to mend", clock.pids_reused),
    "power": Fault("the power is cut with queued jobs; the next command continues", "to the queue", hosts.power_cut),
    "name": Fault("a running host gets another name; one queue, stoppable", "to new name", hosts.renamed_running),
    "container": Fault("a container is made again; repaired, resumed here", "of repair", hosts.made_again),
    "hosts": Fault("two hosts on one folder; own GPUs, own jobs", "to all ends", hosts.two_on_one_folder),
    "upgrade": Fault("the package is replaced while jobs wait; all finish", "to all ends", queues.upgraded),
    "head": Fault("SIGSTOP at the head of the queue; passed over, then first", "GPU is free", queues.head_halted),
    "gpu": Fault("one of two GPUs hangs; named, the other is used", "of `gpus`", queues.gpu_hangs),
    "driver": Fault("the driver hangs while jobs wait; said, starts after it", "to a start", queues.driver_hangs),
    "proc": Fault("reads of /proc hang in the app; it says so, and keys work", "to the stop", hangs.processes_hang),
    "disk": Fault("the data folder hangs under job and app; same bits", "to a step", hangs.disk_hangs, ALONE),
    "clock-steps": Fault("the clock is set a day ahead and back; same bits", "to both ends", clock.clock_steps, ALONE),
    "clock": Fault("the clock goes back an hour; crash restarts, order kept", "to restart", clock.clock_set_back),
    "clock-orphans": Fault(
        "the same while ranks are orphans; ended all the same", "until gone", clock.orphans_while_clock_is_set_back
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="the names of the faults")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name:<18} {fault.what}" for name, fault in FAULTS.items()))
        return
    _print_row("fault", "what is done; what must hold", "held", "median s", "worst s")
    with tempfile.TemporaryDirectory(prefix="sae-tui-faults-") as folder:
        references: dict[int, Result] = {}
        for name in options.only:
            _measure(name, options, Path(folder), references)


def _measure(name: str, options: argparse.Namespace, folder: Path, references: dict[int, Result]) -> None:
    fault, times, broken = FAULTS[name], [], []
    wanted = inspect.signature(fault.once).parameters
    for trial in range(options.trials):
        seed = options.seed + trial
        arguments = dict(fault.options)
        if "like" in wanted:
            arguments["like"] = _reference(int(str(arguments.get("n_ranks", 2))), folder, references)
        if "dice" in wanted:
            arguments["dice"] = random.Random(f"{name} {seed}")
        try:
            times.append(fault.once(folder / f"{name}-{trial}", **arguments))
        except AssertionError as error:
            broken.append(f"seed {seed}: {error}")
    times.sort()
    median, worst = (f"{times[len(times) // 2]:.1f}", f"{times[-1]:.1f}") if times else ("-", "-")
    held = f"{options.trials - len(broken)}/{options.trials}"
    _print_row(name, f"{fault.what} [{fault.seconds}]", held, median, worst)
    for reason in broken:
        print(f"    {reason}", flush=True)


def _reference(n_ranks: int, folder: Path, references: dict[int, Result]) -> Result:
    """Return the result of an undisturbed job, trained once per number of ranks."""
    if n_ranks not in references:
        references[n_ranks] = undisturbed(folder / f"undisturbed-{n_ranks}", n_ranks)
    return references[n_ranks]


def _print_row(*cells: str) -> None:
    name, what, *numbers = cells
    print(f"{name:<16} {what:<76}" + "".join(f"{cell:>10}" for cell in numbers), flush=True)


if __name__ == "__main__":
    main()
