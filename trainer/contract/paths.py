"""Paths for all files in the data folder and in run folders."""

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
DATA_RECORD = "data.json"
# The name of a file next to the checkpoints that reserves disk space for the last checkpoint.
RESERVE = ".reserved-for-the-last"
# Links under these folders are not followed, because other users may create links there. The folders themselves may be
# links.
_KEPT: set[str] = set()


class RunPaths:
    """Paths for a run's files under `root`; methods returning a path do not create it.

    The paths are properties, so that each is computed only when used: the queue may go through a thousand runs, but
    looks at only one or two files in each.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def job_file(self) -> Path:
        return self.root / "job.toml"

    @property
    def metrics_db(self) -> Path:
        return self.root / "metrics.db"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def exit_file(self) -> Path:
        return self.root / "exit.json"

    @property
    def lock_file(self) -> Path:
        """The lock that every process in the run holds until it exits."""
        return self.root / "run.lock"

    @property
    def supervisor_lock(self) -> Path:
        """The lock that only the run's supervisor holds."""
        return self.root / "supervisor.lock"

    @property
    def evaluation_lock(self) -> Path:
        """The lock that the process evaluating the run's SAEs holds until it exits."""
        return self.root / "evaluation.lock"

    @property
    def record_file(self) -> Path:
        """The file with the job's database row as of its last start; a lost store is restored from all such files."""
        return self.root / "record.json"

    def free_reserve(self) -> None:
        """Free the disk space that a killed process in the run had reserved for the last checkpoint."""
        with contextlib.suppress(OSError):
            folder = open_below(self.checkpoints, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.unlink(RESERVE, dir_fd=folder)
            finally:
                os.close(folder)

    def log(self, rank: int) -> Path:
        return self.logs / f"rank{rank}.log"

    @property
    def supervisor_log(self) -> Path:
        return self.logs / "supervisor.log"

    @property
    def evaluation_log(self) -> Path:
        return self.logs / "evaluation.log"

    def attempt(self, number: int) -> Path:
        """Return an attempt's folder, where its ranks find each other and record their exit status."""
        return self.root / f"attempt{number}"

    def rank_spec(self, attempt: int) -> Path:
        """Return the path of the `RankSpec` that configures an attempt's ranks."""
        return self.attempt(attempt) / "ranks.json"

    def data_record(self, attempt: int) -> Path:
        """Return the path of the `DataRecord` that describes the shards at the start of an attempt."""
        return self.attempt(attempt) / DATA_RECORD

    def rank_exit(self, attempt: int, rank: int) -> Path:
        """Return the path of a failing rank's report: `{"error": "one sentence", "traceback": "..."}`."""
        return self.attempt(attempt) / f"rank{rank}.exit.json"

    def begun_file(self, attempt: int) -> Path:
        """Return the path of the file that is created just before an attempt's program starts."""
        return self.attempt(attempt) / "begun"

    def first_rank(self, attempt: int) -> Path:
        """Return the path of the file identifying rank 0's process."""
        return self.attempt(attempt) / "first.json"

    def rank_mark(self, attempt: int, rank: int) -> Path:
        """Return the path of a rank's `RankMark`, a record of its host and exit status."""
        return self.attempt(attempt) / f"rank{rank}.json"

    def progress_file(self, attempt: int) -> Path:
        """Return the path of the JSON Lines file with rank 0's progress, used if rank 0 runs on another host."""
        return self.attempt(attempt) / "progress.jsonl"

    def stop_file(self, attempt: int) -> Path:
        """Return the path of the file whose existence makes ranks without access to the job store stop."""
        return self.attempt(attempt) / "stop"

    def finish_file(self, attempt: int) -> Path:
        """Return the path of the file whose existence makes ranks without access to the job store finish early."""
        return self.attempt(attempt) / "finish"

    def create(self) -> None:
        for folder in (self.root, self.logs, self.checkpoints):
            private_folder(folder)
        self.refuse_links()

    def refuse_links(self) -> None:
        """Raise `UserError` if a folder in which this program writes and deletes files is a symbolic link."""
        for folder in (self.logs, self.checkpoints, *self.root.glob("attempt*"), *self.checkpoints.glob("step-*")):
            refuse_link(folder)


class DataDir:
    """A user's data folder, containing the stores, runs and finished SAEs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        follow_no_link_below(root)
        self.control_db = root / "control.db"
        self.locks = root / "locks"
        self.settings_file = root / "settings.toml"
        self.trash = root / "trash"
        # The folder with one progress file per running evaluation.
        self.evaluations = root / "evaluations"
        # The folder for cached shard headers, with one file per data path.
        self.headers = root / "headers"

    @property
    def host_word(self) -> str:
        """This host's name, made safe for file names; hosts that share the data folder use separate files."""
        import socket

        return _word(socket.gethostname()) or "localhost"

    @property
    def gpu_db(self) -> Path:
        """This host's GPU history file or, if it is missing, the `gpu.db` that all hosts shared in earlier versions."""
        own, of_all = self.own_gpu_db, self.root / "gpu.db"
        return of_all if of_all.exists() and not own.exists() else own

    @property
    def own_gpu_db(self) -> Path:
        return self.root / f"gpu-{self.host_word}.db"

    @property
    def box_file(self) -> Path:
        """The file with this host's measured speeds."""
        return self.root / f"box-{self.host_word}.json"

    def alerts(self, host: str) -> Path:
        """Return the file with a host's alerts; only apps on that host write to it."""
        return self.root / f"alerts-{host}.json"

    @property
    def app_log(self) -> Path:
        """The log of everything that libraries write to standard error while this user's app occupies the terminal."""
        return self.root / f"app-{os.getuid()}.log"

    def queue_lock(self, host: str, user: str) -> Path:
        """Return the file that a user's queue process on a host locks, and touches every 30 s."""
        return self.locks / f"queue-{_word(host)}-{_word(user)}.lock"

    def run(self, job_id: int) -> RunPaths:
        return RunPaths(self.root / "runs" / str(job_id))

    def sae(self, job_id: int) -> Path:
        """Return the folder for a job's finished SAE, or for a sweep's SAEs, each in a subfolder."""
        return self.root / "saes" / str(job_id)

    def last_id(self) -> int:
        """Return the highest job id with files in this folder, even if the store lacks the job; 0 if there are none."""
        folders = (self.root / "runs", self.root / "saes", self.trash)
        names = [entry.name for folder in folders if folder.is_dir() for entry in numbered(folder)]
        return max(map(int, names), default=0)

    def exported_folder(self, job_id: int) -> str | None:
        """Return the folder for a job's SAE or a sweep's SAEs, or None if no SAE has been written yet."""
        folder = self.sae(job_id)
        exists = (folder / "cfg.json").exists() or any(folder.glob("*/cfg.json"))
        return str(folder) if exists else None

    def create(self) -> None:
        """Create the folders with mode 0700 (2770 if a group shares the root); raise `UserError` on failure."""
        self.refuse_links()
        private_folder(self.root)
        for folder in (self.root / "runs", self.root / "saes", self.locks):
            with _explain_failure(folder):
                _make(folder, shared=is_shared(self.root))

    def refuse_links(self, job_id: int | None = None) -> None:
        """Raise `UserError` if a subfolder of the data folder, or a folder of job `job_id`, is a symbolic link."""
        for folder in (self.root / "runs", self.root / "saes", self.locks, self.trash, self.evaluations, self.headers):
            refuse_link(folder)
        if job_id is not None:
            for folder in (self.run(job_id).root, self.sae(job_id), self.trash / str(job_id)):
                refuse_link(folder)
            self.run(job_id).refuse_links()
            for folder in self.sae(job_id).glob("*/"):
                refuse_link(folder)


def _word(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name).lstrip(".")


def free_disk(path: Path) -> tuple[Path, int | None]:
    """Return the nearest existing folder at or above a path, and the number of free bytes on its disk.

    The free space is None if the file system reports no size, as with /proc and some network file systems. This
    function does not check whether a folder can be created there.
    """
    while not os.path.exists(path):
        path = path.parent
    disk = os.statvfs(path)
    return path, disk.f_bavail * disk.f_frsize if disk.f_blocks else None


def numbered(folder: Path) -> list[Path]:
    """List the entries of a folder whose names are job ids (at most nine digits)."""
    return [entry for entry in folder.iterdir() if re.fullmatch("[0-9]{1,9}", entry.name)]


def data_dir(chosen: str | os.PathLike[str] | None = None) -> DataDir:
    """Return the data folder: `chosen`, or $SAE_TUI_DATA_DIR, or the platform's user data folder.

    Raise `UserError` if the home folder is needed but does not exist, for example for a container user without an
    account.
    """
    path = os.path.expanduser(chosen or os.environ.get(ENV_DATA_DIR) or _usual_data_folder())
    if str(path) == "~" or str(path).startswith("~/"):
        raise UserError(f"the data folder cannot be {path}: this user has no home folder; give the full path")
    return DataDir(working_folder() / path)


def _usual_data_folder() -> str:
    import platformdirs

    path = ""
    with contextlib.suppress(RuntimeError):
        path = platformdirs.user_data_dir("sae-tui", appauthor=False)
    if not path or path.startswith("~"):
        who = f"the user with id {os.getuid()} has no home folder, and HOME is not set"
        raise UserError(f"{who}; set HOME, or give a data folder with --data-dir or {ENV_DATA_DIR}")
    return path


def box_file() -> Path | None:
    """Return the path of the file with this machine's measured speeds, or None if the user has no data folder."""
    try:
        return data_dir().box_file
    except UserError:
        return None


def is_shared(folder: Path) -> bool:
    """Return whether `chmod 2770` gave a group access to a folder; the setgid bit shows that this was deliberate."""
    try:
        mode = folder.stat().st_mode
    except OSError:
        return False
    return bool(mode & stat.S_ISGID and mode & stat.S_IWGRP)


def file_mode(folder: Path) -> int:
    """Return the mode for files in a folder: 0600, or 0660 if a group shares it."""
    return 0o660 if is_shared(folder) else 0o600


def follow_no_link_below(root: Path) -> None:
    """Make `open_below` and its callers refuse links under this folder, in this process."""
    _KEPT.add(os.path.abspath(root))


def keep_run(path: Path) -> None:
    """From now on, refuse links under the data folder of a run or SAE, or under the run if it has no data folder.

    `path` is the path of a run, an SAE, or a file in one of them. Any other path is ignored because a folder with a job
    file may contain the user's own links, such as `activations -> /scratch`.
    """
    place = Path(os.path.abspath(path))
    around = (place, *place.parents[:4])
    # Use the outermost match: other users may have created files with these names in an inner folder.
    data = [folder for folder in around if _is_data_folder_of(folder, place)][-1:]
    runs = [folder for folder in around if _is_run_of(folder, place)][-1:]
    for folder in data or runs:
        follow_no_link_below(folder)


def _is_data_folder_of(folder: Path, place: Path) -> bool:
    files = ("control.db", "locks")
    return _inside(folder, place) in ("runs", "saes", "trash") and all(os.path.lexists(folder / one) for one in files)


def _is_run_of(folder: Path, place: Path) -> bool:
    """Return whether `folder` is a started run, and `place` is that folder or is in one of its standard folders."""
    inside = _inside(folder, place)
    is_known = not inside or re.fullmatch(r"checkpoints|logs|sae|attempt\d+", inside)
    files = ("job.toml", "run.lock") if inside else ("job.toml",)
    return bool(is_known) and all(os.path.lexists(folder / one) for one in files)


def _inside(folder: Path, place: Path) -> str:
    """Return the first component of the path from `folder` to `place`; "" if they are the same."""
    return next(iter(place.relative_to(folder).parts), "")


def open_below(path: Path, flags: int, mode: int = 0o777) -> int:
    """Open a file or folder like `os.open`; raise `OSError` if the path contains a link under a folder in `_KEPT`.

    Each folder is opened relative to its parent, so that no folder on the path can be swapped for a link in the
    meantime.
    """
    whole = os.path.abspath(path)
    # Iterate over a copy of `_KEPT` because another thread may add a folder.
    root = min((one for one in tuple(_KEPT) if whole.startswith(f"{one}/")), key=len, default=None)
    if root is None:
        return os.open(path, flags, mode)
    *folders, name = whole[len(root) + 1 :].split("/")
    descriptor = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for depth, folder in enumerate(folders, 1):
            place = "/".join([root, *folders[:depth]])
            inner = _open_in(descriptor, folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, mode, place)
            os.close(descriptor)
            descriptor = inner
        return _open_in(descriptor, name, flags, mode, whole)
    finally:
        os.close(descriptor)


def _open_in(folder: int, name: str, flags: int, mode: int, place: str) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, mode, dir_fd=folder)
    except OSError as error:
        # Linux reports ENOTDIR if a link replaces a folder.
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.islink(place):
            reason = f"{os.path.basename(place)} is a symbolic link, and symbolic links are not followed; remove it"
            raise OSError(errno.ELOOP, reason, place) from None
        error.filename = place
        raise


def refuse_links_on_the_way(path: Path) -> None:
    """Raise `OSError` if a parent of `path` under a folder in `_KEPT` is a link; ignore missing parents and files."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.close(open_below(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))


def open_private(file: Path, flags: int) -> int:
    """Open a file for writing and return its descriptor; a new file gets `file_mode`, regardless of the umask.

    Raise `OSError` for links and anything else that is not a regular file, because opening it could overwrite another
    file.
    """
    flags |= (0 if flags & os.O_RDWR else os.O_WRONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = open_below(file, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _open_existing(file, flags)
    os.fchmod(descriptor, file_mode(file.parent))
    return descriptor


def _open_existing(file: Path, flags: int) -> int:
    """Open an existing file without changing its mode; truncate it only if it is a plain, unshared file."""
    if file.is_symlink():
        reason = f"{file.name} is a symbolic link, and symbolic links are not followed; remove it"
        raise OSError(errno.ELOOP, reason, str(file))
    # Without O_NONBLOCK, opening a pipe without a reader would block.
    descriptor = open_below(file, (flags & ~os.O_TRUNC) | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    # In a folder that other users can write to, refuse files with other hard links too.
    if not stat.S_ISREG(status.st_mode) or (status.st_nlink > 1 and is_shared(file.parent)):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{file.name} is not a plain file or has other hard links; remove it", str(file))
    if flags & os.O_TRUNC:
        os.ftruncate(descriptor, 0)
    os.set_blocking(descriptor, True)
    return descriptor


def refuse_link(folder: Path) -> None:
    """Raise `UserError` if a folder is a symbolic link, because its target may belong to another user."""
    if folder.is_symlink():
        reason = f"{folder} is a symbolic link, and symbolic links are not followed; remove it"
        raise UserError(f"{reason}, or make the data folder itself a link to keep everything on another disk")


def umask_of(root: Path) -> int:
    """Return the umask for processes that write under a data folder: 007 if a group shares it, otherwise 077."""
    return 0o007 if is_shared(root) else 0o077


def keep_own_access() -> None:
    """Clear the owner's bits in the umask, so that this program can access the files and folders that it creates."""
    os.umask(os.umask(0o077) & ~0o700)


def working_folder() -> Path:
    """Return the working folder, or / if it has been deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("/")


def leave_deleted_folder(given: Mapping[str, Path]) -> None:
    """Change to / if the working folder has been deleted, because child processes and torch could not start in it.

    `given` maps command-line arguments to their paths. Raise `UsageError` for a relative path because it can no longer
    be resolved.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        if relative := [name for name, path in given.items() if not path.is_absolute()]:
            way_out = "change to another folder, or give an absolute path"
            raise UsageError(f"{relative[0]}: the working folder was deleted; {way_out}") from None
        os.chdir("/")


def private_folder(path: Path, setting: str = "") -> Path:
    """Create the folder and all missing parents with mode 0700, or 2770 in a data folder that a group shares.

    `mkdir(parents=True)` would leave the parents accessible to other users. Outside data folders, sharing is not
    inherited: lab folders are often writable by a group, but folders created in them should not be. `setting` is the
    name of the setting that specifies the folder; if empty, error messages suggest --data-dir.
    """
    with _explain_failure(path, setting):
        refuse_links_on_the_way(path / "any")
        for folder in (*reversed(path.parents), path):
            if not folder.exists():
                _make(folder, shared=is_shared(folder.parent) and _is_in_data_folder(folder))
    return path


def _make(folder: Path, *, shared: bool) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        # Set the mode afterwards: the umask would remove bits from the `mode` argument, and the parent's setgid bit
        # would be inherited.
        folder.chmod(0o2770 if shared else 0o700)


@contextlib.contextmanager
def _explain_failure(path: Path, setting: str = "") -> Iterator[None]:
    """Convert an `OSError` from creating this folder to a `UserError` with a suggested fix."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        place, cure = (f"{setting}: ", "another") if setting else ("", "another with --data-dir")
        raise UserError(f"{place}cannot create the folder {path}: {reason}; choose {cure}") from None


def _is_in_data_folder(folder: Path) -> bool:
    return any((parent / "control.db").exists() for parent in folder.parents)


def shipped_data() -> Path:
    """Return the folder with sample data and job files: in the installed package, or at the root of a clone."""
    root = Path(__file__).parents[2]
    installed = root / "sae_tui" / "data"
    return installed if installed.exists() else root / "data"
