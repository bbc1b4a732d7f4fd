"""Runs a job in the foreground: starts the ranks as a supervisor would, shows their progress, and stops them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType
from typing import Any

from tqdm import tqdm

from trainer.contract.errors import UsageError, UserError
from trainer.contract.files import write_own
from trainer.contract.output import complain
from trainer.contract.paths import RunPaths, data_dir, open_private, private_folder, refuse_link
from trainer.contract.planning.check_job import proposal_class
from trainer.contract.printable import printable_lines
from trainer.contract.process import STOP_SIGNALS
from trainer.contract.runs.checkpoint_manifest import newest_first
from trainer.contract.runs.how_far import BEST_FVU, BEST_STEP, PASSES
from trainer.contract.runs.lock import RunLock, is_held, still_going
from trainer.contract.runs.rank_exit import ChildRank, first_failed, wait_for_ends
from trainer.contract.runs.rank_spec import EXIT_FINISHED, RankSpec, rank_command, rank_environment, write_spec
from trainer.contract.runs.resume import last_spec
from trainer.contract.settings.job import AnyJob, JobConfig
from trainer.contract.settings.job_file import dump_job, members
from trainer.contract.settings.series import CRITERION, SHARES_LEFT_OUT, held_out, key_metrics, measured_names
from trainer.contract.store.database import StoreError
from trainer.contract.store.metrics_store import COOLING, TRAINING, Heartbeat, SeriesReader, best_sae, value_of_sae
from trainer.contract.store.rows import DROPPED, Event
from trainer.contract.store.seeds import as_json, seeds_in

POLL_S = 0.2
# How long a rank may take to notice a lost peer and exit, in seconds.
END_AFTER_FAILURE_S = 5.0
# A short format, because tqdm's default format takes 60 columns in addition to the bar.
BAR = "{desc}|{bar}| {n_fmt}/{total_fmt} [{remaining} left{postfix}]"


def new_run(job: JobConfig, run_dir: Path) -> RunLock:
    """Create a run folder and return its lock; raise `UsageError` if it already contains a run."""
    paths = RunPaths(run_dir)
    if paths.job_file.exists():
        raise UsageError(_occupied(run_dir))
    paths.create()
    lock = RunLock(run_dir)
    write_job(job, paths)
    return lock


def _occupied(run_dir: Path) -> str:
    """Return the error message for a folder that already contains a run, with a remedy."""
    if is_held(RunPaths(run_dir).lock_file):
        return f"--out: {still_going(run_dir)}, or choose another folder"
    if newest_first(RunPaths(run_dir).checkpoints):
        return f"--out: {run_dir} already contains a run; choose another folder, or resume the run"
    ended = f"--out: {run_dir} already contains a run, which has no checkpoint"
    return f"{ended}; remove the folder, choose another, or `resume` it from the beginning"


def write_job(job: AnyJob, paths: RunPaths) -> None:
    """Write the job file atomically."""
    write_own(paths.job_file, dump_job(job))


def own_box_file() -> Path | None:
    """Return the file in the user's data folder that holds this machine's speeds; jobs that the app starts also use it.

    Return None if the folder cannot be created.
    """
    try:
        data = data_dir()
        private_folder(data.root)
    except UserError:
        return None
    return data.box_file


def running_spec(run_dir: Path) -> RankSpec:
    """Return the spec for the attempt running in a folder.

    Raise `UserError` if no attempt is running or the app started it.
    """
    if not RunPaths(run_dir).job_file.exists():
        raise UsageError(f"RUN_DIR: there is no run in {run_dir}: it contains no job.toml")
    spec = last_spec(run_dir)
    if is_held(RunPaths(run_dir).lock_file) is False:
        raise UserError(f"the run in {run_dir} is not running; `sae-train resume {run_dir} --finish` finishes it")
    if spec.job_id is not None:
        raise UsageError(f"RUN_DIR: {run_dir} belongs to a launched job; `sae-tui stop {spec.job_id}` stops it")
    return spec


def ask_by_file(run_dir: Path, attempt: int, *, finish: bool) -> None:
    """Write a file that asks the ranks in an attempt to stop, or to cool down and finish early."""
    paths = RunPaths(run_dir)
    private_folder(paths.attempt(attempt))
    refuse_link(paths.attempt(attempt))
    write_own(paths.finish_file(attempt) if finish else paths.stop_file(attempt), "")


class Foreground:
    """One attempt at a run, with ranks that are children of this process; the attempt starts at step `first_step`."""

    def __init__(self, job: AnyJob, spec: RankSpec, lock: RunLock, first_step: int = 0) -> None:
        self._spec, self._paths, self._lock = spec, RunPaths(spec.run_dir), lock
        self._first_step, self._total_steps = first_step, proposal_class(job).total_steps(job, spec.n_devices)
        self._ranks: list[ChildRank] = []
        self._is_stopping = self._is_killing = False
        self._began = time.time()
        # The timestamp of the newest event that this process has seen.
        self._seen_until = self._began
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def run(self) -> int:
        """Train to the end and return the exit code; raise `UserError` if a rank failed.

        Ctrl-C saves a checkpoint and stops; a second Ctrl-C stops immediately.
        """
        refuse_uninstalled()
        self._paths.create()
        refuse_link(self._spec.output_dir)
        self._lock.share()
        self._take_signals()
        spec_file = write_spec(self._spec)
        for rank in range(self._spec.n_processes):
            # Append each rank as it starts, so that Ctrl-C reaches every rank that is already running.
            self._ranks.append(self._start(spec_file, rank))
        if self._is_stopping:
            self._signal_ranks()
        with self._bar() as bar:
            self._watch(bar)
        self._paths.free_reserve()
        if not any(rank.failed for rank in self._ranks):
            return max(rank.process.returncode for rank in self._ranks)
        heartbeat, _ = read_progress(self._paths.metrics_db)
        if heartbeat and heartbeat.timestamp > self._began and heartbeat.is_complete(heartbeat.total_steps):
            return EXIT_FINISHED
        raise UserError(self._cause())

    def cards(self) -> list[str]:
        """Return the messages about the report cards, one line per SAE."""
        return [event.message for event in self._events(self._began) if event.kind == "card"]

    def _start(self, spec_file: Path, rank: int) -> ChildRank:
        with open(open_private(self._paths.log(rank), os.O_APPEND), "ab") as log:
            process = subprocess.Popen(
                rank_command(spec_file, any_owner=True),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=rank_environment(self._spec, rank),
                preexec_fn=_ignore_the_terminal,
            )
        return ChildRank(rank, process, self._paths.rank_exit(self._spec.attempt, rank), self._paths.log(rank))

    def _take_signals(self) -> None:
        for number in (signal.SIGINT, *STOP_SIGNALS):
            signal.signal(number, self._on_stop)
        # Under nohup, SIGHUP is ignored and must stay ignored.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._on_hangup)

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        # Only a second Ctrl-C kills the ranks, not just any second signal: ending a session sends both SIGTERM and
        # SIGHUP.
        self._is_killing |= self._is_stopping and number == signal.SIGINT
        self._is_stopping = True
        self._signal_ranks()

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        """Stop as on SIGTERM, but print nothing more, because the terminal is gone."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in self._terminals:
            os.dup2(nowhere, descriptor)
        self._on_stop(number, frame)

    def _signal_ranks(self) -> None:
        if self._is_killing:
            self._kill()
            return
        for rank in self._ranks:
            rank.process.send_signal(signal.SIGTERM)

    def _bar(self) -> tqdm[Any]:
        first, total = self._first_step, self._total_steps
        return tqdm(total=total, initial=first, disable=None, dynamic_ncols=True, bar_format=BAR)

    def _watch(self, bar: tqdm[Any]) -> None:
        """Wait until all ranks have exited; if one fails, kill the other ranks after `END_AFTER_FAILURE_S`."""
        failed_since = None
        while any(rank.ended is None for rank in self._ranks):
            self._show(bar)
            wait_for_ends(self._ranks, POLL_S)
            if failed_since is None and any(rank.failed for rank in self._ranks):
                failed_since = time.monotonic()
            has_failed = failed_since is not None and time.monotonic() - failed_since > END_AFTER_FAILURE_S
            if self._is_killing or has_failed:
                self._kill()
        self._show(bar)

    def _show(self, bar: tqdm[Any]) -> None:
        heartbeat, latest = read_progress(self._paths.metrics_db)
        self._tell_warnings(bar)
        if heartbeat:
            is_stepping = heartbeat.phase in (TRAINING, COOLING)
            phase = "stopping" if self._is_stopping and is_stepping else heartbeat.phase
            # A run that finishes early has fewer steps. Ignore heartbeats from an earlier attempt.
            bar.total = heartbeat.total_steps if heartbeat.timestamp > self._began else bar.total
            bar.set_description_str(phase, refresh=False)
            bar.set_postfix(_shown_in_bar(latest), refresh=False)
            # While a resumed run starts up, its heartbeats contain step 0.
            bar.update(max(heartbeat.step, self._first_step) - bar.n)
            bar.refresh()

    def _tell_warnings(self, bar: tqdm[Any]) -> None:
        """Write each new warning about the run to stderr, above the bar."""
        for event in self._events(self._seen_until):
            self._seen_until = event.timestamp
            # Skip report cards here, because they are printed with the result.
            if event.level == "warning" and event.kind != "card":
                with bar.external_write_mode(sys.stderr):
                    complain(f"{printable_lines(event.message)}\n")

    def _events(self, after: float) -> list[Event]:
        """Return the events recorded after a time, or [] if the store cannot be read."""
        with contextlib.suppress(StoreError), contextlib.closing(SeriesReader(self._paths.metrics_db)) as reader:
            return [event for event in reader.events() if event.timestamp > after]
        return []

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.ended is None:
                rank.kill()

    def _cause(self) -> str:
        """Return the error from the rank that failed first; the other ranks only lost their connection to it."""
        first = first_failed(self._ranks)
        if self._is_killing and not (first and first.hangs):
            return "stopped immediately, without saving a checkpoint of the latest steps"
        if self._is_stopping and not (first and (first.recorded_error or first.was_killed)):
            return "interrupted before a checkpoint was saved"
        if not first:
            return f"training failed; the logs are in {self._paths.logs}"
        error = first.error(len(self._ranks))
        if not (first.was_killed and newest_first(self._paths.checkpoints)):
            return error
        what, *log_line = error.split("; ", 1)
        return "; ".join([what, f"resume it: sae-train resume {self._spec.run_dir}", *log_line])


def refuse_uninstalled() -> None:
    """Raise `UsageError` if this package is importable only from the working folder, where ranks do not look for it."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        # The working folder was deleted, so it cannot be the first entry of sys.path.
        here = ""
    elsewhere = sys.path[1:] if sys.path[0] in ("", here) else sys.path
    if not sys.flags.safe_path and PathFinder.find_spec("trainer", [folder for folder in elsewhere if folder]) is None:
        checkout = Path(__file__).parents[2]
        raise UsageError(f"the trainer is not installed in {sys.prefix}; install it first: pip install -e {checkout}")


def read_progress(metrics_db: Path) -> tuple[Heartbeat | None, dict[str, float]]:
    """Return rank 0's newest heartbeat and metric values, or (None, {}) if its store cannot be read.

    An unreadable store does not fail the run.
    """
    try:
        with contextlib.closing(SeriesReader(metrics_db)) as reader:
            return reader.heartbeat(), reader.latest()
    except StoreError:
        return None, {}


def _shown_in_bar(latest: Mapping[str, float]) -> dict[str, str]:
    """Return the values to show in the bar, with short names; show the batch FVU only until there is a held-out FVU."""
    names = {series.short or name: name for name, series in key_metrics().items() if name != CRITERION}
    fvu = {"held-out FVU": held_out(CRITERION)} if held_out(CRITERION) in latest else {"batch FVU": CRITERION}
    values = {label: value_of_sae(latest, name, best_sae(latest)) for label, name in (fvu | names).items()}
    return {label: f"{value:.3g}" for label, value in values.items() if value is not None}


def result(job: JobConfig, spec: RankSpec) -> dict[str, Any]:
    """Return a run's result for `--json`: paths, steps, tokens and metrics.

    For a sweep, the metrics describe the best SAE, and `saes` contains the metrics for each SAE. An SAE dropped by
    `train.halving` has no folder.
    """
    heartbeat, latest = read_progress(RunPaths(spec.run_dir).metrics_db)
    labels = members(job) if job.sweep else ()
    dropped = {label: int(latest[name]) for label in labels if (name := f"{DROPPED}@{label}") in latest}
    saes: dict[str, dict[str, Any]] = {
        label: {"output_path": None if label in dropped else str(spec.output_dir / label)}
        | {DROPPED: dropped.get(label)}
        | {name: latest.get(f"{name}@{label}") for name in measured_names()}
        for label in labels
    }
    return {
        "run_dir": str(spec.run_dir),
        "output_path": str(spec.output_dir),
        "steps": heartbeat.step if heartbeat else None,
        "tokens": heartbeat.tokens if heartbeat else None,
        "tokens_per_s": latest.get("tokens_per_s"),
        **{name: latest.get(name) for name in (PASSES, BEST_FVU)},
        BEST_STEP: int(latest[BEST_STEP]) if BEST_STEP in latest else None,
        **{name: value_of_sae(latest, name, best_sae(latest)) for name in (*measured_names(), *SHARES_LEFT_OUT)},
        **({"best_sae": best_sae(latest) or None, "saes": saes} if saes else {}),
        **_seeds(latest),
    }


def _seeds(latest: Mapping[str, float]) -> dict[str, Any]:
    """Return the spread over the seeds for `--json`, or {} if the run does not have several seeds.

    If all SAEs differ only in the seed, none of them is the best.
    """
    seeds = seeds_in(latest, best_sae(latest))
    if seeds is None:
        return {}
    return {"seeds": as_json(seeds)} | ({"best_sae": None} if seeds.are_all else {})


def _ignore_the_terminal() -> None:
    """Ignore SIGINT and SIGHUP in a rank before its program starts.

    Ctrl-C signals the entire process group, but this process decides what to send to the ranks.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
