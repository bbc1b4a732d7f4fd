"""Starts the app with a data folder and a GPU source, and ensures that it exits even if a thread or terminal hangs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import select
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from sae_tui.app import SaeApp
from sae_tui.format import BLOCKS
from sae_tui.gpu.monitor import Monitor
from sae_tui.gpu.upkeep import Retention
from sae_tui.jobs.gpus.occupancy import Occupancy, gpu_source
from sae_tui.jobs.upkeep import trash
from sae_tui.settings import Settings, load_settings, save_settings
from sae_tui.terminal.plain import Look, Plain, is_colourless, is_plain
from sae_tui.threads import on_thread
from trainer.contract.errors import Problem, UserError
from trainer.contract.exits import Exit
from trainer.contract.output import can_show
from trainer.contract.paths import DataDir
from trainer.contract.printable import printable_lines
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState
from trainer.contract.trust import sharing
from trainer.contract.wording import join_words, plural

if TYPE_CHECKING:
    from sae_tui.hosts.hosts import Hosts

# How long the app waits for the data folder on exit, in seconds.
_ANSWER_S = 2.0
# Parameters of mallopt(3): M_ARENA_MAX, so that all threads share one arena; M_MMAP_THRESHOLD and M_TRIM_THRESHOLD in
# bytes. Setting a threshold also stops glibc from raising it to the size of the largest freed block.
_MALLOC = {-8: 1, -3: 128 * 1024, -1: 128 * 1024}


def run_app(
    *,
    data: DataDir,
    source_name: str,
    gpu_count: int | None = None,
    only: Collection[int] = (),
    command: str = "sae-tui",
    readonly: bool = False,
    plain: bool = False,
    hosts: Sequence[str] = (),
    in_browser: bool = False,
) -> int:
    """Run the app until it quits, print which jobs keep running, and return the exit code.

    If `only` is not empty, only the GPUs with these indices are shown. `command` is the command printed for reopening
    the app. With `in_browser`, standard output goes to a web page that can show every character, and the app prints
    nothing after it exits.
    """
    data.create()
    settings, problems = load_settings(data.settings_file)
    first_words = ""
    if not data.settings_file.exists():
        if members := sharing(data.root):
            first_words = f"{data.root} is shared with {members}: all members have the same permissions there."
        if not readonly:
            with contextlib.suppress(OSError):  # the app also shows the jobs in a read-only folder
                save_settings(data.settings_file, settings)
    occupancy = Occupancy(data)
    monitor = Monitor(
        gpu_source(source_name, occupancy, count=gpu_count),
        data,
        occupancy.jobs_by_uuid,
        interval_s=settings.sampling_interval_s,
        retention=Retention(settings.history_hours, settings.history_days),
        only=only,
    )
    if not readonly:
        with contextlib.suppress(UserError, OSError):
            # Remove files left in the trash, possibly half deleted, by a killed app.
            trash.empty(data)
    hosts_of = functools.partial(other_hosts, hosts, demo=source_name == "simulated")
    others, wrong_hosts = hosts_of(settings)
    look = _plain_look("plain" if plain else settings.look, in_browser=in_browser)
    app = SaeApp(
        data,
        monitor,
        settings,
        [*problems, *wrong_hosts],
        first_words,
        readonly=readonly,
        plain=look,
        colourless=not in_browser and is_colourless(os.environ),
        hosts=others,
        make_hosts=hosts_of,
        given=_given(plain, look, settings, hosts),
    )
    threading.Thread(target=_leave_on_hangup, name="hangup", daemon=True).start()
    # A screen consists of thousands of objects with almost no reference cycles.
    # With Python's default thresholds, garbage collection took an eighth of the time needed to handle a key press.
    gc.freeze()
    gc.set_threshold(10_000, 5, 3)
    gc.enable()
    _return_freed_memory()
    app.run()
    staying = _in_time(functools.partial(_staying, data, command))
    if staying is not None:
        # Empty the trash after restoring the terminal, because deleting many checkpoints takes a while.
        app.session.actions.empty_trash()
    if staying and not in_browser:
        sys.stdout.write(printable_lines(staying))
        sys.stdout.flush()
    if monitor.stuck:
        # A thread hanging in the driver cannot be stopped, and the interpreter would wait for it.
        os._exit(app.return_code or 0)
    return app.return_code or 0


def _return_freed_memory() -> None:
    """Configure glibc's malloc so that freed memory is returned to the system.

    By default, each thread may keep the largest buffer it has freed. After opening all screens eight times, these
    buffers took up 40 MiB.
    """
    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        libc = ctypes.CDLL(None)
        for setting, value in _MALLOC.items():
            libc.mallopt(setting, value)


def _plain_look(look: Look, *, in_browser: bool) -> Plain | None:
    """Return a filter for replacing non-ASCII symbols if the setting or terminal requires it; otherwise None."""
    if not is_plain(look, os.environ.get("TERM", ""), has_blocks=in_browser or can_show(BLOCKS, sys.stdout)):
        return None
    return Plain(letters=in_browser or can_show("é", sys.stdout))


def _given(plain: bool, look: Plain | None, settings: Settings, hosts: Sequence[str]) -> dict[str, str]:
    """Return a dict mapping each setting overridden by the command line or terminal to a note on the override."""
    given = {}
    if look and settings.look != "plain":
        given["look"] = f"plain now, because of {'--plain' if plain else 'this terminal'}"
    if is_colourless(os.environ):
        cause = "NO_COLOR" if "NO_COLOR" in os.environ else "this terminal"
        given["theme"] = f"without colours now, because of {cause}"
    if hosts:
        given["hosts"] = f"and {join_words(list(hosts))} now, because of --host"
    return given


def other_hosts(named: Sequence[str], settings: Settings, *, demo: bool) -> tuple[Hosts | None, list[Problem]]:
    """Return the other hosts to monitor, or None, and the problems with the host names in the settings.

    With `demo`, their GPUs are simulated.
    """
    problems: list[Problem] = []
    if not (named or settings.hosts):
        return None, problems
    from sae_tui.hosts.hosts import Hosts
    from sae_tui.ssh import checked_host

    names = []
    for name in settings.hosts:
        try:
            names.append(checked_host(name))
        except UserError as error:
            problems.append(Problem("hosts", f"one host was skipped: {error}"))
    names += named
    return Hosts(names, settings.ssh_command or ("ssh",), demo=demo) if names else None, problems


def _in_time(read: Callable[[], str]) -> str | None:
    """Return the result of `read`, or None if the data folder's disk hangs, so that the app can still exit."""
    try:
        return on_thread(read).result(_ANSWER_S)
    except TimeoutError:
        return None


def _staying(data: DataDir, command: str) -> str:
    """Return a line like `2 jobs keep running and 1 is queued; ...`, or "" if all jobs have ended."""
    try:
        with contextlib.closing(Control(data.control_db, readonly=True)) as control:
            jobs = control.active_jobs()
    except UserError:
        return ""
    queued = [job for job in jobs if job.state == JobState.QUEUED]
    n_held = sum(job.held for job in queued)
    counts = {
        ("keeps running", "keep running"): len(jobs) - len(queued),
        ("is queued", "are queued"): len(queued) - n_held,
        ("is held or paused", "are held or paused"): n_held,
    }
    parts = [(count, one if count == 1 else many) for (one, many), count in counts.items() if count]
    if not parts:
        return ""
    (first, what), *others = parts
    words = join_words([f"{plural(first, 'job')} {what}", *(f"{count} {what}" for count, what in others)])
    return f"{words}; `{command}` shows {'it' if len(jobs) == 1 else 'them'} again\n"


def _leave_on_hangup() -> None:
    """Exit when the terminal is gone. The kernel sends SIGHUP only if it was the controlling terminal."""
    terminal = select.poll()
    terminal.register(sys.__stdin__.fileno(), 0)  # type: ignore[union-attr]
    while not any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in terminal.poll()):
        pass
    os._exit(Exit.HUNG_UP)
