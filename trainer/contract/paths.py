"""Where everything is kept: the data folder and the folders of one run."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from trainer.contract.problems import UsageError, UserError

ENV_DATA_DIR = "SAE_TUI_DATA_DIR"


class RunPaths:
    """The files of one run below `root`; nothing is created by asking for a name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.job_file = root / "job.toml"
        self.metrics_db = root / "metrics.db"
        self.logs = root / "logs"
        self.checkpoints = root / "checkpoints"
        self.exit_file = root / "exit.json"
        # The job's row as it was last started, from which a lost store is made again.
        self.record_file = root / "record.json"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank{rank}.log"

    @property
    def supervisor_log(self) -> Path:
        return self.logs / "supervisor.log"

    def attempt(self, number: int) -> Path:
        """Where the ranks of one attempt meet and leave how they ended."""
        return self.root / f"attempt{number}"

    def rank_exit(self, attempt: int, rank: int) -> Path:
        """Written by a rank that fails: `{"error": "one sentence", "traceback": "..."}`."""
        return self.attempt(attempt) / f"rank{rank}.exit.json"

    def rank_mark(self, attempt: int, rank: int) -> Path:
        """Where a rank on another host runs and how it ended: a `RankMark`."""
        return self.attempt(attempt) / f"rank{rank}.json"

    def progress_file(self, attempt: int) -> Path:
        """What rank 0 on another host says of the run, line by line."""
        return self.attempt(attempt) / "progress.jsonl"

    def stop_file(self, attempt: int) -> Path:
        """It being there asks an attempt on other hosts to stop."""
        return self.attempt(attempt) / "stop"

    def create(self) -> None:
        for folder in (self.root, self.logs, self.checkpoints):
            private_folder(folder)


class DataDir:
    """The folder that holds the stores, the runs and the finished SAEs of one user."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.control_db = root / "control.db"
        self.gpu_db = root / "gpu.db"
        self.locks = root / "locks"
        self.settings_file = root / "settings.toml"
        self.box_file = root / "box.json"
        self.trash = root / "trash"

    def run(self, job_id: int) -> RunPaths:
        return RunPaths(self.root / "runs" / str(job_id))

    def sae(self, job_id: int) -> Path:
        """Where the finished SAE of a job goes (`sae_weights.safetensors`, `cfg.json`)."""
        return self.root / "saes" / str(job_id)

    def last_id(self) -> int:
        """The highest number of a run whose files are there, known to the store or not; 0 without any."""
        folders = (self.root / "runs", self.root / "saes", self.trash)
        names = [entry.name for folder in folders if folder.is_dir() for entry in numbered(folder)]
        return max(map(int, names), default=0)

    def exported(self, job_id: int) -> str | None:
        """The folder of a job's SAE, or of those of a sweep, where there is one yet."""
        folder = self.sae(job_id)
        found = (folder / "cfg.json").exists() or any(folder.glob("*/cfg.json"))
        return str(folder) if found else None

    def create(self) -> None:
        """Makes the folders, mode 0700; raises `UserError` where that is not allowed."""
        for folder in (self.root, self.root / "runs", self.root / "saes", self.locks):
            private_folder(folder)


def numbered(folder: Path) -> list[Path]:
    """What is in it under the number of a job, as nothing of more than nine digits is."""
    return [entry for entry in folder.iterdir() if re.fullmatch("[0-9]{1,9}", entry.name)]


def data_dir(chosen: str | os.PathLike[str] | None = None) -> DataDir:
    """`chosen`, else $SAE_TUI_DATA_DIR, else the platform's user data folder."""
    path = chosen or os.environ.get(ENV_DATA_DIR)
    if not path:
        import platformdirs

        path = platformdirs.user_data_dir("sae-tui", appauthor=False)
    return DataDir(working_folder() / os.path.expanduser(path))


def is_shared(folder: Path) -> bool:
    """Whether a group was let in on purpose: `chmod 2770`, whose first digit nobody sets by chance."""
    try:
        mode = folder.stat().st_mode
    except OSError:
        return False
    return bool(mode & stat.S_ISGID and mode & stat.S_IWGRP)


def file_mode(folder: Path) -> int:
    """The mode of files in a folder: for its owner alone, unless a group shares it."""
    return 0o660 if is_shared(folder) else 0o600


def open_private(file: Path, flags: int) -> int:
    """A descriptor to write a file of that mode, which is made where there is none, whatever the umask."""
    descriptor = os.open(file, flags | os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(PermissionError):  # another user's, which is as it should be already
        os.fchmod(descriptor, file_mode(file.parent))
    return descriptor


def umask_of(root: Path) -> int:
    """The umask of processes that write below a data folder."""
    return 0o007 if is_shared(root) else 0o077


def keep_own_access() -> None:
    """Lets this program use what it makes, whatever the umask: a folder of mode 000 would be of no use to anybody."""
    os.umask(os.umask(0o077) & ~0o700)


def working_folder() -> Path:
    """The current one, or / where somebody has deleted it."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("/")


def leave_deleted_folder(given: Mapping[str, Path]) -> None:
    """Goes to / where somebody has deleted the working folder: neither a child nor torch could be started in it.

    Raises `UsageError` where a path that was given, by what it is called, begins there.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        if relative := [name for name, path in given.items() if not path.is_absolute()]:
            way_out = "change to another one, or give an absolute path"
            raise UsageError(f"{relative[0]}: the working folder was deleted; {way_out}") from None
        os.chdir("/")


def private_folder(path: Path) -> Path:
    """Makes the folder with mode 0700, or 2770 in one that a group shares, and so every missing parent.

    `parents=True` would leave those open.
    """
    try:
        for folder in (*reversed(path.parents), path):
            if folder.exists():
                continue
            shared = is_shared(folder.parent)
            folder.mkdir(mode=0o700, exist_ok=True)
            if shared:
                # Not by `mode`, from which the umask would take what the group needs.
                folder.chmod(0o2770)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot create the folder {path}: {reason}; choose another with --data-dir") from None
    return path
