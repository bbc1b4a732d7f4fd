"""The state and helpers shared by all commands: data folder, settings, GPUs and job files."""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sae_tui.cli_commands.output import warn
from sae_tui.cli_commands.values import job_id_in
from sae_tui.threads import on_thread, warn_when_slow
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir, data_dir
from trainer.contract.printable import is_utf8
from trainer.contract.trust import distrust_of_folder

if TYPE_CHECKING:
    from sae_tui.cli_commands.snapshot import Snapshot
    from sae_tui.settings import Settings
    from trainer.contract.store.rows import Job

# How long the data folder may take to respond. A sleeping disk or a restarting file server needs some time.
_LIMIT_S = 60.0


class CommandContext:
    """A command's data folder, settings and GPUs, as selected by the flags shared by all commands."""

    def __init__(self, flags: argparse.Namespace) -> None:
        demo: bool = getattr(flags, "demo", False)
        base = data_dir(getattr(flags, "data_dir", None))
        # Why the data folder cannot be used, for example because its disk hangs, or "" if it can be used.
        self.hung = _check_folder(base.root, getattr(flags, "folder_limit_s", _LIMIT_S))
        if self.hung and not hasattr(flags, "folder_limit_s"):
            raise UserError(self.hung)
        self.data = DataDir(base.root / "demo") if demo else base
        # Commands read and write job folders, so check the folders of all jobs named on the command line once, here.
        for job_id in _jobs_named(flags):
            self.data.refuse_links(job_id)
        self.source_name: str = getattr(flags, "gpu_source", "simulated" if demo else "auto")
        self.gpu_count: int | None = getattr(flags, "demo_gpus", None)
        # The indices of the GPUs to show; if empty, all are shown.
        self.only: tuple[int, ...] = getattr(flags, "only_gpus", ())
        # Flags that make another sae-tui process use the same jobs and GPUs.
        self.words = [f"--data-dir={base.root}", f"--gpu-source={self.source_name}", *(["--demo"] if demo else [])]
        self.words += [f"--demo-gpus={self.gpu_count}"] if self.gpu_count else []
        self.as_json: bool = getattr(flags, "json", False)
        # Whether the command needs GPUs and warns if there are none.
        self.wants_gpus = True

    @functools.cached_property
    def settings(self) -> Settings:
        from sae_tui.settings import load_settings

        settings, problems = load_settings(self.data.settings_file)
        for problem in problems:
            warn(f"{self.data.settings_file}: {problem}")
        return settings

    @functools.cached_property
    def gpus(self) -> Snapshot:
        """The current GPUs. If the command needs GPUs, warns on stderr if there are none or if some are hidden."""
        if self.wants_gpus and (message := self._read.problem or self._read.note):
            warn(message)
        return self._read

    @functools.cached_property
    def _read(self) -> Snapshot:
        from sae_tui.cli_commands.snapshot import take
        from sae_tui.jobs.gpus.occupancy import Occupancy, gpu_source

        occupancy = Occupancy(self.data)
        source = gpu_source(self.source_name, occupancy, count=self.gpu_count)
        return take(source, occupancy, self.data, warn).limited_to(self.only)

    def refuse_missing_gpus(self) -> None:
        """Raise `UserError` if `--only` names a GPU that does not exist."""
        if self.only:
            self._read  # noqa: B018

    def has_broken_driver(self) -> bool:
        """Return whether GPUs exist but cannot be read; if so, report the reason, as JSON for scripts."""
        if self.as_json and self._read.is_broken:
            from trainer.contract.failure import show_failure

            show_failure(self._read.problem)
            return True
        return self.gpus.is_broken

    def watch_gpus(self, every_s: float) -> Iterator[Snapshot]:
        """Yield a snapshot every `every_s` seconds until the output is closed. The driver stays open in between."""
        from sae_tui.cli_commands.snapshot import watch
        from sae_tui.jobs.gpus.occupancy import Occupancy, gpu_source

        occupancy = Occupancy(self.data)
        source = gpu_source(self.source_name, occupancy, count=self.gpu_count)
        return (snapshot.limited_to(self.only) for snapshot in watch(source, occupancy, self.data, every_s))

    def past(self) -> list[Job]:
        """Return all jobs, latest first, or [] if the store cannot be read."""
        from trainer.contract.store.job_store import Control

        with (
            contextlib.suppress(UserError),
            contextlib.closing(Control(self.data.control_db, readonly=True)) as control,
        ):
            jobs = control.jobs()
            if control.problem:
                warn(control.problem)
            return jobs
        return []

    def mend(self) -> None:
        """Repair inconsistencies left by a crash or reboot, if the store is writable."""
        from sae_tui.jobs.revive import reconcile_and_revive

        with contextlib.suppress(UserError):
            reconcile_and_revive(self.data)


def _jobs_named(flags: argparse.Namespace) -> list[int]:
    given = [getattr(flags, "id", None), *(getattr(flags, "ids", None) or ()), getattr(flags, "log", None)]
    return [one for one in (*given, job_id_in(str(getattr(flags, "run", "")))) if isinstance(one, int)]


def _check_folder(root: Path, limit_s: float) -> str:
    """Raise `UserError` if the data folder cannot be used; return a message if it does not respond, or ""."""

    def check() -> None:
        _refuse_unusable(root)
        with contextlib.suppress(OSError):  # `stat` may use a cache, but listing a folder does not
            os.listdir(root)

    # Run the check in a thread, because a call hanging in the kernel cannot be interrupted, not even with Ctrl-C.
    answer, words = on_thread(check), f"the data folder {root} does not respond"
    try:
        with warn_when_slow(lambda: warn(f"{words} yet")):
            answer.result(limit_s)
    except TimeoutError:
        return f"{words} within {limit_s:g} s: its disk or file server hangs; choose another with --data-dir"
    return ""


def _refuse_unusable(root: Path) -> None:
    """Raise `UserError` if the path is too long, not UTF-8 or not a folder, or if other users can write to it."""
    if not is_utf8(str(root)):
        raise UserError(f"the data folder {str(root)!a} is not UTF-8; choose another with --data-dir")
    try:
        os.stat(root / "runs" / "1" / "checkpoints")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            reason = f"the path of the data folder is too long ({len(str(root))} characters)"
            raise UserError(f"{reason}; choose another with --data-dir") from None
    if os.path.exists(root) and not os.path.isdir(root):
        raise UserError(f"{root} is not a folder; choose another with --data-dir")
    if why := distrust_of_folder(root):
        raise UserError(f"{why}, or choose another with --data-dir")
