"""Repeatedly injects each job fault into real processes, and prints how often and how fast its guarantees are met.

python tests/benchmarks/faults.py [--trials 50] [--only NAME ...] [--seed 0] [--list]

Every trial has its own data folder and launches jobs with one or two CPU ranks just as the app does. A row is printed
after each fault, followed by any violated guarantees. On a busy machine, the times are upper bounds. One trial of all
faults takes about 10 minutes on two idle cores. Injecting host faults requires gcc, and root privileges to create
namespaces.
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

# Remove this folder from the import path, because this file would shadow the package `faults`.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).parents[1]))

from faults import clock, hangs, hosts, kills, queues, stops
from faults.real_job import Result, undisturbed


class Fault(msgspec.Struct, frozen=True):
    """A fault, its guarantees, what its measured seconds mean, and the function that injects it once."""

    what: str
    seconds: str
    once: Callable[..., float]
    options: dict[str, object] = {}


ALONE = {"n_ranks": 1}
FAULTS = {
    "launcher": Fault(
        "kill -9 of `sae-tui launch`, early or late; the job continues", "to its end", kills.launcher_killed
    ),
    "terminal": Fault("the terminal is closed (SIGHUP); the job continues", "to its end", kills.terminal_closed),
    "supervisor": Fault(
        "kill -9 of the supervisor; the job saves, is lost, and resumes", "until gone", kills.supervisor_killed
    ),
    "rank-0": Fault(
        "kill -9 of rank 0; the job restarts and is bit-identical", "to training", kills.rank_killed, {"rank": 0}
    ),
    "rank-1": Fault(
        "kill -9 of rank 1; the job restarts and is bit-identical", "to training", kills.rank_killed, {"rank": 1}
    ),
    "raises": Fault("a shard is missing for a while; the job restarts", "to restart", kills.rank_raises),
    "not-finite": Fault("activations are NaN; this is reported without restarts", "to its end", kills.rank_finds_nan),
    "memory": Fault("rank 1 is OOM-killed; no restart", "to its end", kills.rank_out_of_memory),
    "halted-0": Fault(
        "SIGSTOP of rank 0; reported with stacks, restarted", "to restart", hangs.rank_halted, {"rank": 0}
    ),
    "halted-1": Fault(
        "SIGSTOP of rank 1; reported with stacks, restarted", "to restart", hangs.rank_halted, {"rank": 1}
    ),
    "halted-saving": Fault("SIGSTOP of rank 1 right after a save", "to restart", hangs.rank_halted_after_saving),
    "random": Fault("kill -9 of a rank, the supervisor or all", "until gone", kills.killed_at_random),
    "random-single": Fault(
        "kill -9 of a process of a job with one rank", "until gone", kills.killed_at_random, {"n_ranks": 1}
    ),
    "random-saving": Fault(
        "kill -9 of a job that saves after every step", "until gone", kills.killed_at_random,
        {"n_ranks": 1, "checkpoint_every": 1},
    ),
    "stop-starting": Fault("the job is stopped in the first 3 s", "to its end", stops.stop_in_start),
    "stop-evaluating": Fault("the job is stopped during an evaluation", "to its end", stops.stop_in_evaluation),
    "stop-saving": Fault("the job is stopped during a checkpoint", "to its end", stops.stop_in_checkpoint),
    "stop-reading": Fault("the job is stopped while it only trains", "to its end", stops.stop_while_reading),
    "two": Fault("two jobs are launched in one second; both train", "to their end", kills.two_at_once),
    "restarted": Fault(
        "the machine restarts; jobs are lost, other pids not signalled", "to mend", clock.machine_restarted
    ),
    "queue": Fault("the machine restarts; the queue keeps its order", "to the queue", clock.queue_restarted),
    "renamed": Fault("the machine is renamed after a kill; the job resumes", "until gone", clock.renamed),
    "pids": Fault("pids are reused; jobs are lost, and no process is signalled", "to mend", clock.pids_reused),
    "power": Fault("the power fails; the next command continues the queue", "to the queue", hosts.power_cut),
    "name": Fault("a running host is renamed; its jobs can be stopped", "to new name", hosts.renamed_running),
    "container": Fault("a container is recreated; jobs are repaired and resume", "of repair", hosts.made_again),
    "hosts": Fault("two hosts share a folder but not GPUs or jobs", "to all ends", hosts.two_on_one_folder),
    "upgrade": Fault("the package is replaced while jobs wait; all jobs finish", "to all ends", queues.upgraded),
    "head": Fault("SIGSTOP of the first job in the queue; it is skipped", "GPU is free", queues.head_halted),
    "gpu": Fault("one of two GPUs hangs; the other GPU is used", "of `gpus`", queues.gpu_hangs),
    "driver": Fault("the driver hangs while jobs wait; they start later", "to a start", queues.driver_hangs),
    "proc": Fault("reads of /proc hang in the app; keys still work", "to the stop", hangs.processes_hang),
    "disk": Fault("the data folder hangs; the job is bit-identical", "to a step", hangs.disk_hangs, ALONE),
    "clock-steps": Fault(
        "the clock jumps a day ahead and back; the job is bit-identical", "to both ends", clock.clock_steps, ALONE
    ),
    "clock": Fault("the clock goes back an hour; crashed jobs restart", "to restart", clock.clock_set_back),
    "clock-orphans": Fault(
        "the clock goes back while ranks are orphans; they exit", "until gone", clock.orphans_while_clock_is_set_back
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the names of the faults")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name:<18} {fault.what}" for name, fault in FAULTS.items()))
        return
    _print_row("fault", "fault; guarantee [meaning of the seconds]", "held", "median s", "worst s")
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
    """Return the result of an undisturbed job; the job runs only once for each number of ranks."""
    if n_ranks not in references:
        references[n_ranks] = undisturbed(folder / f"undisturbed-{n_ranks}", n_ranks)
    return references[n_ranks]


def _print_row(*cells: str) -> None:
    name, what, *numbers = cells
    print(f"{name:<16} {what:<76}" + "".join(f"{cell:>10}" for cell in numbers), flush=True)


if __name__ == "__main__":
    main()
