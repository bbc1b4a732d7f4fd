from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from sae_tui.doctor import storage
from sae_tui.doctor.storage import check_file_locks, check_file_system, check_folder, check_sqlite, has_wal_reset_bug
from trainer.contract.paths import DataDir


def test_a_writable_folder_is_ok_and_stays_unchanged(sandbox) -> None:
    sandbox.data.root.mkdir()
    (finding,) = check_folder(sandbox.box())
    assert (finding.level, finding.sentence) == ("ok", str(sandbox.data.root))
    assert list(sandbox.data.root.iterdir()) == []


def test_a_missing_folder_is_ok_and_is_not_created(sandbox) -> None:
    (finding,) = check_folder(sandbox.box())
    assert finding.level == "ok"
    assert "which the first job creates" in finding.sentence
    assert not sandbox.data.root.exists()


def test_an_unwritable_folder_is_an_error(sandbox) -> None:
    sandbox.data = DataDir(Path("/proc/sae-tui"))
    (finding,) = check_folder(sandbox.box())
    assert finding.level == "error"
    assert finding.sentence.startswith("nothing can be written to /proc: ")
    assert "--data-dir" in finding.remedy


@pytest.fixture
def mounted(in_process, sandbox, mounts):
    """Return a function that mounts a file system at the data folder, runs a check, and returns its finding."""

    def find(check: str, options: str):
        sandbox.data.root.mkdir()
        mount = f"mount -t {options} none {sandbox.data.root}"
        (finding,) = in_process(f"storage:{check}", data=sandbox.data.root, mount=mount)
        return finding

    return find


def test_a_read_only_mount_is_an_error(mounted) -> None:
    finding = mounted("check_folder", "tmpfs -o ro")
    assert finding["level"] == "error"
    assert "Read-only file system" in finding["sentence"]


@pytest.mark.parametrize(("size", "level"), [("64m", "error"), ("2g", "warning")])
def test_little_free_space_is_reported(mounted, size: str, level: str) -> None:
    finding = mounted("check_space", f"tmpfs -o size={size}")
    assert (finding["level"], finding["subject"]) == (level, "disk")


def test_a_file_system_not_known_to_be_local_is_a_warning(mounted) -> None:
    finding = mounted("check_file_system", "ramfs")
    assert finding["level"] == "warning"
    assert "is on ramfs, where SQLite's WAL does not work" in finding["sentence"]


def test_a_local_disk_is_ok(sandbox) -> None:
    (finding,) = check_file_system(sandbox.box())
    assert finding.level == "ok"


def test_a_file_system_with_locks_passes(sandbox) -> None:
    (finding,) = check_file_locks(sandbox.box())
    assert finding.level == "ok"


def test_doctor_and_store_report_a_file_system_without_locks(sandbox, without_locks) -> None:
    sandbox.data.root.mkdir()
    script = f"""
from sae_tui.doctor.base import CheckedMachine
from sae_tui.doctor.storage import check_file_locks
from sae_tui.gpu.none import NoGpus
from trainer.contract.paths import DataDir
from trainer.contract.store import database
data = DataDir(database.Path({str(sandbox.data.root)!r}))
(finding,) = check_file_locks(CheckedMachine(data, NoGpus()))
print(finding.level, finding.sentence, finding.remedy)
database.BUSY_TIMEOUT_S = 0.1
try:
    database.open_writer(data.control_db, "control")
except database.StoreError as error:
    print(error)
"""
    doctor, store = without_locks(script).splitlines()
    assert doctor.startswith(f"error the file system of {sandbox.data.root} has no locks (No locks available) mount")
    assert store.startswith(f"the store {sandbox.data.control_db} cannot be locked: the file system of ")


@pytest.mark.parametrize("version", ["3.7.0", "3.40.1", "3.44.5", "3.45.0", "3.50.6", "3.51.0", "3.51.2"])
def test_sqlite_versions_with_the_wal_reset_bug_are_recognised(version: str) -> None:
    assert has_wal_reset_bug(tuple(map(int, version.split("."))))


@pytest.mark.parametrize("version", ["3.6.23", "3.44.6", "3.50.7", "3.51.3", "3.52.0", "4.0.0"])
def test_sqlite_versions_without_the_wal_reset_bug_are_recognised(version: str) -> None:
    assert not has_wal_reset_bug(tuple(map(int, version.split("."))))


def test_the_sqlite_used_by_this_python_is_checked(sandbox) -> None:
    (finding,) = check_sqlite(sandbox.box())
    assert sqlite3.sqlite_version in finding.sentence
    assert (finding.level == "warning") == storage.has_wal_reset_bug(sqlite3.sqlite_version_info)
