"""Tests for small JSON files with arbitrary content, and for TOML files that far exceed the limits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sae_tui.jobs.ending import read_ending
from sae_tui.jobs.files import LogFollower
from sae_tui.jobs.launch.clone import clone_settings
from sae_tui.jobs.launchers.cluster import SlurmJob
from sae_tui.jobs.launchers.ingest import Ingest
from sae_tui.jobs.record import read_record
from sae_tui.jobs.upkeep import trash
from sae_tui.jobs.upkeep.repair import repair
from sae_tui.settings import load_settings
from trainer.contract import files
from trainer.contract.errors import JobFileError, UserError
from trainer.contract.paths import DataDir, RunPaths
from trainer.contract.planning.hardware import MeasuredHardware, read_box, write_box
from trainer.contract.planning.plan import read_plan
from trainer.contract.runs.checkpoint_manifest import STATE, damage, read_state
from trainer.contract.runs.log_tail import tail
from trainer.contract.runs.rank_spec import read_spec
from trainer.contract.runs.remote_rank_status import read_mark
from trainer.contract.runs.resume import stored_job
from trainer.contract.settings.job_file import apply_override, read_toml
from trainer.contract.settings.typed import parse_value
from trainer.contract.store.metrics_store import Heartbeat
from trainer.contract.store.progress_line import ProgressLine, decode, encode

BAD = [
    b"", b"\xff", b'{"cards": "\xff"}', b'{"x": "\xff"}', b"[" * 100_000, b'{"x":' * 100_000, b"1" * 6000, b"null",
    b'{"job": null}', b'"\\ud800"', b"\0" * 4096,
    b'{"cards": {"a": {"flops_per_s": {"a": 0}, "memory_bytes_per_s": 1}}}',
    b'{"host": "a", "process": {"pid": 99999999999, "start_ticks": 1, "boot_id": ""}}',
    b'{"files": {"a": ' + b"[" * 50_000,
]  # fmt: skip


def read_every_kind(file: Path, content: bytes) -> None:
    folder = file.parent
    for name in (file.name, STATE, "manifest.json", "record.json"):
        (folder / name).write_bytes(content)
    assert read_box(file) == MeasuredHardware()
    assert (read_plan(file), read_mark(file), read_ending(file), decode(content)) in [
        (None, None, None, None),
        (None, None, None, ProgressLine()),
    ]
    assert read_record(RunPaths(folder)) is None
    assert damage(folder)
    with pytest.raises(UserError, match="is not a checkpoint"):
        read_state(folder)
    with pytest.raises(ValueError, match=r"."):
        read_spec(file)


@pytest.mark.parametrize("content", BAD, ids=lambda content: repr(content[:12]))
def test_reading_a_small_file_with_bad_content_yields_none_or_a_one_sentence_error(tmp_path, content):
    read_every_kind(tmp_path / "file.json", content)


@settings(max_examples=100, database=None, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=200))
def test_reading_a_small_file_with_random_bytes_yields_none_or_a_one_sentence_error(tmp_path, content):
    read_every_kind(tmp_path / "file.json", content)


@pytest.mark.parametrize("content", BAD, ids=lambda content: repr(content[:12]))
def test_a_run_in_the_trash_with_an_unreadable_row_keeps_its_files(tmp_path, content):
    data = DataDir(tmp_path)
    data.create()
    (data.trash / "1" / "run").mkdir(parents=True)
    (data.trash / "1" / "row.json").write_bytes(content)
    (data.trash / "2").mkdir()
    (data.trash / "2" / "rest").write_bytes(b"rest of one that was emptied")
    trash.empty(data)
    assert data.run(1).root.is_dir()
    assert not (data.trash / "2" / "rest").exists()


def test_an_invalid_progress_line_does_not_affect_other_lines(tmp_path):
    file = tmp_path / "progress.jsonl"
    heartbeat = Heartbeat("training", 5, 10, 50, 1.0)
    bad = [b'{"rows": "\xff', b"[" * 100_000, b'{"rows": [["a", 99999999999999999999, 1.0, 0]]}', b"\r\0"]
    file.write_bytes(b"\n".join([*bad, encode(ProgressLine(heartbeat=heartbeat))]))
    ingest = Ingest(file, tmp_path / "metrics.db")
    assert ingest.poll()
    assert ingest._writer is not None
    (stored,) = ingest._writer._db.execute("SELECT step FROM heartbeat").fetchall()
    assert stored["step"] == 5
    ingest.close()


BEYOND = {
    "dots": "a" + ".a" * 100_000 + " = 1",
    "quoted dots": '"a"' + '."a"' * 100_000 + " = 1",
    "heading": "[a" + ".a" * 100_000 + "]",
    "lists": "a = " + "[" * 20_000,
    "tables": "a = " + "{a = " * 20_000,
    "digits": "a = " + "9" * 5000,
    "hex": "a = 0x" + "f" * 5000,
    "size": "#" * 2_000_000,
    "not closed": 'a = """' + 'x\\"' * 300_000,
    "quotes": '"""x' * 200_000,
}


@pytest.mark.parametrize("text", BEYOND.values(), ids=BEYOND)
def test_toml_beyond_the_limits_is_rejected_in_one_sentence(tmp_path, text):
    file = tmp_path / "job.toml"
    file.write_text(text)
    with pytest.raises(JobFileError) as refused:
        read_toml(file)
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"{file}: is not valid TOML: ")
    assert len(line) < 300


def test_a_value_beyond_the_limits_is_read_as_a_string_or_rejected():
    for text in ("[" * 20_000, "{a" + ".a" * 50_000 + " = 1}", "9" * 5000):
        assert parse_value(text) == text
    with pytest.raises(JobFileError, match=r"--set: expects UTF-8, not 'name=\\udcff'"):
        apply_override({}, "name=\udcff")


CUT_OFF = """
import os, sys
from pathlib import Path
from trainer.contract import files
files.os.fsync = lambda _: os.kill(os.getpid(), 9)
files.write_whole(Path(sys.argv[1]), b"half")
"""


def temporaries(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.name.startswith(".")]


def test_leftovers_of_a_killed_write_are_removed_by_a_later_write_and_by_repair(tmp_path, monkeypatch):
    data = DataDir(tmp_path / "data")
    data.run(1).create()
    data.create()
    for file in (data.box_file, data.run(1).exit_file):
        subprocess.run([sys.executable, "-c", CUT_OFF, file], check=False)
    (left,) = temporaries(data.root)
    os.symlink(left, data.root / ".box.json.0123456789abcdef")
    (data.root / ".other.json.0123456789abcdef").touch()
    (data.root / ".box.json.mine").touch()
    write_box(data.box_file, MeasuredHardware())
    assert left.exists(), "the file of an unfinished write was removed"
    monkeypatch.setattr(files, "CUT_OFF_AFTER_S", -1.0)
    write_box(data.box_file, MeasuredHardware())
    assert {file.name for file in temporaries(data.root)} == {
        ".box.json.0123456789abcdef", ".other.json.0123456789abcdef", ".box.json.mine",
    }  # fmt: skip
    list(repair(data))
    assert {file.name for file in temporaries(data.root)} == {".box.json.0123456789abcdef", ".box.json.mine"}
    assert not temporaries(data.run(1).root)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_users_unfinished_write_is_left_alone(tmp_path, monkeypatch):
    theirs = tmp_path / ".box.json.0123456789abcdef"
    theirs.touch()
    os.chown(theirs, 12345, 12345)
    monkeypatch.setattr(files, "CUT_OFF_AFTER_S", -1.0)
    write_box(tmp_path / "box.json", MeasuredHardware())
    assert theirs.exists()


def test_a_pipe_in_place_of_a_file_does_not_block_readers(tmp_path):
    data, pipe = DataDir(tmp_path / "data"), tmp_path / "pipe"
    data.run(1).create()
    data.create()
    for place in (pipe, data.settings_file, data.run(1).job_file, pipe.with_suffix(".offset")):
        os.mkfifo(place)
    assert (tail(pipe, 5), LogFollower(pipe).new_lines(), read_mark(pipe)) == ([], [], None)
    assert not Ingest(pipe, tmp_path / "metrics.db").poll()
    with pytest.raises(UserError, match="not a plain file"):
        SlurmJob.read(pipe)
    _, (problem,) = load_settings(data.settings_file)
    assert str(problem) == f"{data.settings_file}: is not a plain file; remove it"
    assert list(repair(data)) == []
    for read in (lambda: stored_job(data.run(1).root, []), lambda: clone_settings(data, 1)):
        with pytest.raises(JobFileError, match="cannot be read: it is not a plain file"):
            read()


def test_a_rank_marker_with_a_number_that_no_store_accepts_is_ignored(tmp_path):
    process = '{"pid": 1, "start_ticks": 1, "boot_id": ""}'
    (tmp_path / "mark").write_text(f'{{"host": "a", "process": {process}, "exit_code": {2**70}}}')
    assert read_mark(tmp_path / "mark") is None
