"""Tests for opening a store: each failure produces a one-sentence error, and several processes can open it at once."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from support.new_stores import statements_of, text_of

from trainer.contract.store import database
from trainer.contract.store.database import (
    StoreError,
    check_whole,
    data_version,
    explain_errors,
    open_reader,
    open_writer,
    transaction,
)
from trainer.contract.store.job_store import Control
from trainer.contract.store.migrations import MIGRATIONS, NEW, migrate

TABLES = {
    "control": {"jobs", "ranks", "leases", "requests", "events"},
    "metrics": {"keys", "metrics", "rollups", "heartbeat", "events", "rewinds"},
    "gpu": {"gpu_metrics", "gpu_minutes"},
}
Become = Callable[[], AbstractContextManager[None]]


def tables(connection: sqlite3.Connection) -> set[str]:
    return {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def message(action: Callable[[], object]) -> str:
    """Run a failing action on a store, check that its error message is a single line, and return the message."""
    with pytest.raises(StoreError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def made(tmp_path: Path, copy_store: Callable[..., Path]) -> Path:
    """Create an empty control store and return its path."""
    return copy_store("control", tmp_path / "control.db")


@pytest.fixture
def older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a control store of the first version, with one job."""
    path = tmp_path / "control.db"
    with monkeypatch.context() as before:
        before.setitem(MIGRATIONS, "control", MIGRATIONS["control"][:1])
        migrate(path, "control")
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "INSERT INTO jobs(name, state, config, user, host, device, gpu_source, gpu_ids, gpu_uuids, distributed,"
            " world_size, mode, created) VALUES('old', 'finished', '', 'ada', 'box', 'cuda', 'nvml', '[0]', '[\"a\"]',"
            " 0, 1, 'single', 1.0)"
        )
    return path


def test_an_old_store_with_a_damaged_list_of_gpus_is_migrated(tmp_path: Path) -> None:
    from sqlite_utils import Database

    file = tmp_path / "a.db"
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as connection:
        old = Database(connection)
        for number, step in enumerate(MIGRATIONS["control"][:2], 1):
            step(old)
            connection.execute(f"PRAGMA user_version = {number}")
        for gpu_ids in (None, "[", "[0, 1]"):
            needed = [row[1] for row in connection.execute("PRAGMA table_info(jobs)") if row[3] and row[4] is None]
            old.table("jobs").insert({name: "1" for name in needed if name != "id"} | {"gpu_ids": gpu_ids})
    with contextlib.closing(open_writer(file, "control")) as connection:
        assert [wanted for (wanted,) in connection.execute("SELECT gpus_wanted FROM jobs ORDER BY id")] == [0, 0, 2]


@pytest.mark.parametrize("schema", MIGRATIONS)
def test_a_new_store_has_all_its_tables_and_is_private(tmp_path: Path, schema: Any) -> None:
    with contextlib.closing(open_writer(tmp_path / "a.db", schema)) as connection:
        connection.execute("CREATE TABLE forces_the_wal(x)")
        files = sorted(tmp_path.iterdir())
        assert [file.name for file in files] == ["a.db", "a.db-shm", "a.db-wal"]
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        assert tables(connection) >= TABLES[schema]
        assert connection.execute("PRAGMA user_version").fetchone()[0] == len(MIGRATIONS[schema])
        assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


@pytest.mark.parametrize("schema", MIGRATIONS)
def test_a_new_store_has_the_same_tables_as_a_migrated_one(tmp_path: Path, schema: Any) -> None:
    open_writer(tmp_path / "a.db", schema).close()
    migrate(tmp_path / "by_steps.db", schema)
    assert statements_of(tmp_path / "a.db") == statements_of(tmp_path / "by_steps.db")
    assert (NEW / f"{schema}.sql").read_text() == text_of(schema)


def test_opening_a_store_again_keeps_its_rows(made: Path) -> None:
    for _ in range(2):
        with contextlib.closing(open_writer(made, "control")) as connection:
            connection.execute("INSERT INTO events(message) VALUES('x')")
    with contextlib.closing(open_reader(made, "control")) as connection:
        assert connection.execute("SELECT count(*) FROM events").fetchone()[0] == 2


def test_processes_that_create_a_store_together_can_all_open_it(tmp_path: Path, child: Callable[..., Any]) -> None:
    code = """
import sys
from pathlib import Path
from trainer.contract.store.database import open_writer
print("ready", flush=True)
for path in iter(sys.stdin.readline, ""):
    db = open_writer(Path(path.strip()), "control")
    db.execute("INSERT INTO events(message) VALUES('x')")
    print("done", flush=True)
"""
    children = [child(code) for _ in range(4)]
    assert [one.hear() for one in children] == ["ready"] * 4
    for number in range(3):
        path = tmp_path / f"{number}.db"
        for one in children:
            one.tell(path)
        assert [one.hear() for one in children] == ["done"] * 4
        with contextlib.closing(open_reader(path, "control")) as connection:
            assert connection.execute("SELECT count(*) FROM events").fetchone()[0] == 4
            assert tables(connection) >= TABLES["control"]


def test_a_migration_runs_in_a_child_process_and_imports_no_large_modules(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text("raise SystemExit('a file of the user in the working directory')")
    code = """
import sys
from pathlib import Path
from trainer.contract.store.database import open_writer
open_writer(Path("a.db"), "metrics").execute("SELECT * FROM metrics")
assert not {"torch", "sqlite_utils", "numpy"} & set(sys.modules), sys.modules
"""
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, check=True)


@pytest.mark.parametrize("readonly", [True, False])
def test_a_job_from_an_older_version_lacks_the_newer_fields(older: Path, readonly: bool) -> None:
    with contextlib.closing(Control(older, readonly=readonly)) as control:
        (job,) = control.jobs()
    assert (job.name, job.d_in, job.estimated_memory_bytes, job.peak_memory_bytes) == ("old", None, None, None)


def test_an_imported_sae_from_an_older_version_gets_the_state_imported(older: Path) -> None:
    insert = "INSERT INTO events(job_id, timestamp, level, kind, message) VALUES(1, 1.0, 'info', ?, '')"
    with contextlib.closing(sqlite3.connect(older)) as connection, connection:
        connection.execute(insert, ("imported",))
    with contextlib.closing(Control(older)) as control:
        assert [str(job.state) for job in control.jobs()] == ["imported"]


def test_a_migrated_control_store_records_the_memory_of_jobs(older: Path) -> None:
    with contextlib.closing(Control(older)) as control:
        control.update(1, peak_memory_bytes=3 << 30)
        assert control.job(1).peak_memory_bytes == 3 << 30


def test_a_store_from_a_newer_version_is_refused(made: Path) -> None:
    connection = sqlite3.connect(made)
    connection.execute("PRAGMA user_version=99")
    connection.close()
    messages = {message(lambda: open_writer(made, "control")), message(lambda: open_reader(made, "control"))}
    assert messages == {
        f"the store {made} was made by a newer version (schema 99, this one supports {len(MIGRATIONS['control'])}); "
        "update sae-tui or choose another folder with --data-dir"
    }


@pytest.mark.parametrize("opened", [open_writer, open_reader])
def test_a_file_that_is_not_a_database_is_reported_as_corrupt(tmp_path: Path, opened: Callable[..., object]) -> None:
    path = tmp_path / "control.db"
    path.write_bytes(b"not a database at all" * 1000)
    assert message(lambda: opened(path, "control")).startswith(f"the store {path} is corrupt; `sae-tui repair`")


def test_damage_within_the_file_is_reported_as_corruption_when_read(made: Path) -> None:
    with made.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    with contextlib.closing(Control(made)) as control:
        assert "is corrupt; `sae-tui repair`" in message(control.jobs)


def test_a_missing_folder_is_reported_with_a_fix(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "control.db"
    assert message(lambda: open_writer(path, "control")) == (
        f"the store {path} cannot be opened: No such file or directory; choose another folder with --data-dir"
    )
    assert message(lambda: open_reader(path, "control")) == f"there is no store at {path}"


def test_opening_a_store_for_reading_creates_no_file(tmp_path: Path) -> None:
    message(lambda: open_reader(tmp_path / "control.db", "control"))
    assert list(tmp_path.iterdir()) == []


def test_opening_a_store_again_keeps_the_locks_of_open_connections(made: Path) -> None:
    # POSIX releases all of a process's locks on a file as soon as the process closes any of its descriptors for that
    # file. Another process could then delete the WAL.
    first = Control(made)
    assert first.jobs() == []
    second = Control(made)
    ask = (
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); print(*db.execute(sys.argv[2]).fetchone()); db.close()"
    )

    def elsewhere(query: str) -> str:
        """Return the result of a query in another process.

        If that process did not see this process's lock, it would conclude that it is the last user of the store, and
        delete the WAL.
        """
        return subprocess.check_output([sys.executable, "-c", ask, str(made), query], text=True)

    elsewhere("PRAGMA user_version")
    first.request(1, "stop")
    assert elsewhere("SELECT count(*) FROM requests") == "1\n"
    first.close()
    second.close()


def test_a_file_without_tables_is_not_treated_as_a_store(tmp_path: Path) -> None:
    path = tmp_path / "control.db"
    path.touch()
    assert message(lambda: open_reader(path, "control")) == f"there is no store at {path} yet"


def test_a_reader_cannot_write_to_a_store(made: Path) -> None:
    control = Control(made, readonly=True)
    assert "is read-only" in message(lambda: control.request(1, "stop"))
    assert control.jobs() == []
    control.close()


def test_a_read_only_file_is_reported(
    open_folder: Path, ordinary_user: Become, copy_store: Callable[..., Path]
) -> None:
    path = copy_store("control", open_folder / "control.db")
    path.chmod(0o444)
    with ordinary_user():
        text = message(lambda: open_writer(path, "control"))
    assert text.startswith(f"the store {path} is read-only; make it ")


def test_a_read_only_folder_is_reported(
    open_folder: Path, ordinary_user: Become, copy_store: Callable[..., Path]
) -> None:
    path = copy_store("control", open_folder / "control.db")
    path.chmod(0o666)
    open_folder.chmod(0o555)
    with ordinary_user():
        messages = {message(lambda: open_writer(path, "control")), message(lambda: open_reader(path, "control"))}
    assert messages == {
        f"the store {path} is read-only; make it and its folder writable or choose another folder with --data-dir"
    }


def test_an_unreadable_store_is_reported(
    open_folder: Path, ordinary_user: Become, copy_store: Callable[..., Path]
) -> None:
    path = copy_store("control", open_folder / "control.db")
    path.chmod(0)
    with ordinary_user():
        text = message(lambda: open_reader(path, "control"))
    assert text == f"the store {path} cannot be opened; make it readable or choose another folder with --data-dir"


HOLDS_THE_LOCK = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_locked_store_is_reported_and_works_once_the_lock_is_released(
    made: Path, child: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.2)
    with contextlib.closing(Control(made)) as control:
        holder = child(HOLDS_THE_LOCK, made)
        assert holder.hear() == "locked"
        text = message(lambda: control.request(1, "stop"))
        pid, begins = holder.process.pid, f"the store {made} has been locked by another process for more than 0.2 s: "
        assert re.match(rf"{re.escape(begins)}\S+'s process {pid} \(python\S* -c ", text)
        assert text.endswith(f"run `kill {pid}` if it hangs, which undoes only its unfinished change")
        holder.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        assert message(lambda: control.request(1, "stop")).endswith(
            f", which is halted; `kill -CONT {pid}` continues it"
        )
        holder.process.send_signal(signal.SIGCONT)
        assert control.jobs() == []  # readers in WAL mode do not wait for locks
        holder.finish()
        control.request(1, "stop")
        assert control.open_requests(1) == {"stop"}


def test_a_new_store_locked_by_another_process_is_reported(
    tmp_path: Path, child: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.2)
    path = tmp_path / "control.db"
    holder = child(HOLDS_THE_LOCK, path)
    assert holder.hear() == "locked"
    assert f"'s process {holder.process.pid} " in message(lambda: open_writer(path, "control"))


def test_a_writer_waits_for_a_lock_that_is_released_in_time(made: Path, child: Callable[..., Any]) -> None:
    code = HOLDS_THE_LOCK.replace("sys.stdin.read()", "import time; time.sleep(0.3); db.execute('COMMIT')")
    with contextlib.closing(Control(made)) as control:
        assert child(code, made).hear() == "locked"
        control.request(1, "stop")
        assert control.open_requests(1) == {"stop"}


def test_a_reader_detects_that_another_process_has_written(made: Path, child: Callable[..., Any]) -> None:
    code = """
import sys
from pathlib import Path
from trainer.contract.store.job_store import Control
control = Control(Path(sys.argv[1]))
for line in sys.stdin:
    control.request(1, "stop")
    print("written", flush=True)
"""
    with contextlib.closing(open_reader(made, "control")) as reader:
        before = data_version(reader)
        assert data_version(reader) == before
        writer = child(code, made)
        writer.tell()
        assert writer.hear() == "written"
        assert data_version(reader) != before
        assert reader.execute("SELECT count(*) FROM requests").fetchone()[0] == 1


def test_a_failed_write_is_rolled_back_and_the_next_one_works(made: Path) -> None:
    with contextlib.closing(open_writer(made, "control")) as connection:
        with contextlib.suppress(ZeroDivisionError), transaction(connection):
            connection.execute("INSERT INTO events(message) VALUES('x')")
            raise ZeroDivisionError
        with transaction(connection):
            assert connection.execute("SELECT count(*) FROM events").fetchone()[0] == 0


def test_a_full_disk_is_reported_and_writing_works_once_there_is_space_again(made: Path) -> None:
    code = """
import resource, signal, sys
from pathlib import Path
from trainer.contract.store.job_store import Control
from trainer.contract.store.database import StoreError
control = Control(Path(sys.argv[1]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
try:
    for _ in range(100):
        control.add_event(1, "kind", "x" * 1000)
except StoreError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
control.add_event(2, "kind", "room again")
print(len(control.events(2)))
"""
    done = subprocess.run([sys.executable, "-c", code, str(made)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"the disk with {made} is full or failing (disk I/O error); free some space",
        "1",
    ]


@pytest.mark.parametrize("schema", ["control", "metrics", "gpu"])
def test_a_full_disk_leaves_no_partial_store(tmp_path: Path, schema: Any) -> None:
    code = """
import resource, signal, sys
from pathlib import Path
from trainer.contract.store.database import StoreError, open_writer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
for room in (0, 1024, 4096, 8192, 16384):
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    try:
        open_writer(path, sys.argv[2])
    except StoreError as error:
        print(room, "is full or failing" in str(error), *path.parent.iterdir())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
open_writer(path, sys.argv[2]).close()
"""
    path = tmp_path / "new.db"
    done = subprocess.run([sys.executable, "-c", code, path, schema], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{space} True" for space in (0, 1024, 4096, 8192, 16384)]
    assert list(tmp_path.iterdir()) == [path]
    check_whole(path, schema)


def test_a_store_that_cannot_be_used_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "control.db"
    path.write_bytes(b"not a database at all" * 1000)
    with pytest.raises(StoreError) as caught:
        open_writer(path, "control")
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert caught.value.__traceback__ is not None  # the traceback's frames could keep the connection open
    assert str(path) not in links


def test_a_store_on_a_network_file_system_uses_no_wal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "network_file_system", lambda path: "NFS")
    with contextlib.closing(open_writer(tmp_path / "a.db", "control")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "delete"
        with transaction(connection):
            connection.execute("INSERT INTO events(message) VALUES('x')")


@pytest.mark.parametrize("reader", [open_reader, open_writer])
def test_the_next_reader_rolls_back_the_partial_write_of_a_killed_writer(tmp_path, monkeypatch, reader) -> None:
    path = leave_hot_journal(tmp_path, monkeypatch)
    with contextlib.closing(reader(path, "control")) as connection:
        assert {row[0] for row in connection.execute("SELECT message FROM events")} == {"kept"}
    assert not path.with_name("control.db-journal").exists()


def test_a_reader_without_write_permission_names_the_owner_who_can_repair_the_store(tmp_path, monkeypatch) -> None:
    path = leave_hot_journal(tmp_path, monkeypatch)
    monkeypatch.setattr(database, "_connect", read_only_connect(database._connect))
    said = "half written, and it is read-only here; any command run by its owner repairs it"
    with pytest.raises(StoreError, match=said):
        open_reader(path, "control")


def read_only_connect(connect):
    """Return a connect function that behaves as if the file system were read-only."""
    return lambda uri: connect(uri.replace("mode=rw", "mode=ro"))


def leave_hot_journal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kill a writer that has no WAL and has changed pages of the file in an open transaction."""
    monkeypatch.setattr(database, "network_file_system", lambda path: "NFS")
    path = folder / "control.db"
    with contextlib.closing(open_writer(path, "control")) as connection:
        connection.executemany("INSERT INTO events(message) VALUES(?)", [("kept",)] * 100)
    child = os.fork()
    if not child:
        writer = open_writer(path, "control")
        writer.execute("PRAGMA cache_size=2")
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("UPDATE events SET message = hex(randomblob(3000))")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert path.with_name("control.db-journal").exists()
    return path


@pytest.mark.parametrize("name", ["a b", "50%", "what?", "#1", "%3f"])
def test_the_name_of_a_stores_folder_may_contain_special_characters(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    migrate(folder / "control.db", "control")
    open_writer(folder / "control.db", "control").close()
    open_reader(folder / "control.db", "control").close()
    assert (folder / "control.db").exists()
    assert list(tmp_path.iterdir()) == [folder]


def test_a_failed_store_migration_is_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(db: Any) -> None:
        db.table("half").create({"id": int}, pk="id")
        raise sqlite3.OperationalError("database or disk is full")

    path = tmp_path / "gpu.db"
    monkeypatch.setitem(MIGRATIONS, "gpu", (*MIGRATIONS["gpu"], half))
    with pytest.raises(StoreError, match="is full or failing"), explain_errors(path):
        migrate(path, "gpu")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert tables(connection) == TABLES["gpu"]
        assert connection.execute("PRAGMA user_version").fetchone()[0] == len(MIGRATIONS["gpu"]) - 1


def test_an_older_store_is_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpu.db"
    migrate(path, "gpu")
    monkeypatch.setitem(MIGRATIONS, "gpu", (*MIGRATIONS["gpu"], lambda db: db.table("more").create({"id": int})))
    migrate(path, "gpu")
    with contextlib.closing(open_writer(path, "gpu")) as connection:
        assert tables(connection) == TABLES["gpu"] | {"more"}


def test_a_new_store_on_a_full_disk_is_either_complete_or_missing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", disk], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    store, filler, page = disk / "control.db", disk / "filler", os.sysconf("SC_PAGE_SIZE")
    ends = set()
    try:
        for n_pages in range(8, 64, 2):
            filler.write_bytes(bytes(os.statvfs(disk).f_bavail * page - n_pages * page))
            with contextlib.suppress(StoreError):
                open_writer(store, "control").close()
            ends.add(tuple(sorted(file.name for file in disk.iterdir())))
            if store.exists():
                check_whole(store, "control")
                store.unlink()
            filler.unlink()
    finally:
        subprocess.run(["umount", disk], check=True)
    assert ends == {("filler",), ("control.db", "filler")}
