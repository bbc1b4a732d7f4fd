"""Where everything is kept: the data folder and the folders of one run."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainer.contract.errors import UsageError, UserError

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
        # Held by all processes of the run for as long as they live.
        self.lock_file = root / "run.lock"
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

    def rank_spec(self, attempt: int) -> Path:
        """What the ranks of an attempt are to do."""
        return self.attempt(attempt) / "ranks.json"

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
        self.refuse_links()

    def refuse_links(self) -> None:
        """Raise `UserError` where a link stands for a folder in which we write and delete."""
        for folder in (self.logs, self.checkpoints, *self.root.glob("attempt*")):
            refuse_link(folder)


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
        """Make the folders, mode 0700; raises `UserError` where that is not allowed."""
        self.refuse_links()
        private_folder(self.root)
        for folder in (self.root / "runs", self.root / "saes", self.locks):
            with _told(folder):
                _make(folder, shared=is_shared(self.root))

    def refuse_links(self, job_id: int | None = None) -> None:
        """Raise `UserError` where a link stands for one of the folders, or for one of a job's."""
        for folder in (self.root / "runs", self.root / "saes", self.locks, self.trash):
            refuse_link(folder)
        if job_id is not None:
            for folder in (self.run(job_id).root, self.sae(job_id), self.trash / str(job_id)):
                refuse_link(folder)
            self.run(job_id).refuse_links()


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
    """A descriptor to write a file of that mode, which is made where there is none, whatever the umask.

    Raises `OSError` where a link stands there, or what is no plain file: it would be somebody else's that is written.
    """
    flags |= (0 if flags & os.O_RDWR else os.O_WRONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(file, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _open_existing(file, flags)
    os.fchmod(descriptor, file_mode(file.parent))
    return descriptor


def _open_existing(file: Path, flags: int) -> int:
    """Keep its mode; nothing is cut before it is known to be our own."""
    if file.is_symlink():
        raise OSError(errno.ELOOP, f"{file.name} is a link, which is not followed; remove it", str(file))
    # A pipe that nobody reads would keep us waiting.
    descriptor = os.open(file, (flags & ~os.O_TRUNC) | os.O_NONBLOCK)
    found = os.fstat(descriptor)
    # Another name of the same file is a link as well, where others may put one.
    if not stat.S_ISREG(found.st_mode) or (found.st_nlink > 1 and is_shared(file.parent)):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{file.name} is not a plain file of its own; remove it", str(file))
    if flags & os.O_TRUNC:
        os.ftruncate(descriptor, 0)
    os.set_blocking(descriptor, True)
    return descriptor


def refuse_link(folder: Path) -> None:
    """Raise `UserError` where a link stands for a folder of ours: what it leads to may be somebody else's."""
    if folder.is_symlink():
        reason = f"{folder} is a link, which is not followed; remove it"
        raise UserError(f"{reason}, or to keep everything on another disk make the data folder itself a link")


def umask_of(root: Path) -> int:
    """The umask of processes that write below a data folder."""
    return 0o007 if is_shared(root) else 0o077


def keep_own_access() -> None:
    """Let this program use what it makes, whatever the umask: a folder of mode 000 would be of no use to anybody."""
    os.umask(os.umask(0o077) & ~0o700)


def working_folder() -> Path:
    """The current one, or / where somebody has deleted it."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("/")


def leave_deleted_folder(given: Mapping[str, Path]) -> None:
    """Go to / where somebody has deleted the working folder: neither a child nor torch could be started in it.

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
    """Make the folder with mode 0700, or 2770 in a data folder that a group shares, and so every missing parent.

    `parents=True` would leave those open. Of any other folder nothing is inherited: those of a lab are often its
    group's, and who makes a folder there has not asked for company.
    """
    with _told(path):
        for folder in (*reversed(path.parents), path):
            if not folder.exists():
                _make(folder, shared=is_shared(folder.parent) and _is_in_data_folder(folder))
    return path


def _make(folder: Path, *, shared: bool) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        # Not by `mode`, from which the umask takes, and to which the parent adds.
        folder.chmod(0o2770 if shared else 0o700)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Raise `UserError` where a folder cannot be made."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot create the folder {path}: {reason}; choose another with --data-dir") from None


def _is_in_data_folder(folder: Path) -> bool:
    return any((parent / "control.db").exists() for parent in folder.parents)
