"""Small JSON files with any bytes in them, and TOML beyond all bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sae_tui.jobs import trash
from sae_tui.jobs.ending import read_ending
from sae_tui.jobs.launchers.ingest import Ingest
from sae_tui.jobs.record import read_record
from trainer.contract.box import Box, read_box
from trainer.contract.config import apply_override, read_toml
from trainer.contract.manifest import STATE, damage, read_state
from trainer.contract.marks import read_mark
from trainer.contract.paths import DataDir, RunPaths
from trainer.contract.plan import read_plan
from trainer.contract.problems import JobFileError, UserError
from trainer.contract.progress_line import ProgressLine, decode, encode
from trainer.contract.ranks import read_spec
from trainer.contract.series import Heartbeat
from trainer.contract.typed import parse_value

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
    assert read_box(file) == Box()
    assert (read_plan(file), read_mark(file), read_ending(file), decode(content)) in [
        (None, None, None, None),
        (None, None, None, ProgressLine()),
    ]
    assert read_record(RunPaths(folder)) is None
    assert damage(folder)
    with pytest.raises(UserError, match="is no checkpoint"):
        read_state(folder)
    with pytest.raises(ValueError, match=r"."):
        read_spec(file)


@pytest.mark.parametrize("content", BAD, ids=lambda content: repr(content[:12]))
def test_a_small_file_with_any_bytes_is_none_or_a_sentence(tmp_path, content):
    read_every_kind(tmp_path / "file.json", content)


@settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=200))
def test_a_small_file_of_chance_is_none_or_a_sentence(tmp_path, content):
    read_every_kind(tmp_path / "file.json", content)


@pytest.mark.parametrize("content", BAD, ids=lambda content: repr(content[:12]))
def test_a_row_in_the_trash_that_cannot_be_read_keeps_its_files(tmp_path, content):
    data = DataDir(tmp_path)
    data.create()
    (data.trash / "1" / "run").mkdir(parents=True)
    (data.trash / "1" / "row.json").write_bytes(content)
    (data.trash / "2").mkdir()
    (data.trash / "2" / "rest").write_bytes(b"rest of one that was emptied")
    trash.empty(data)
    assert data.run(1).root.is_dir()
    assert not (data.trash / "2" / "rest").exists()


def test_a_bad_line_of_progress_loses_itself_alone(tmp_path):
    file = tmp_path / "progress.jsonl"
    beat = Heartbeat("training", 5, 10, 50, 1.0)
    bad = [b'{"rows": "\xff', b"[" * 100_000, b'{"rows": [["a", 99999999999999999999, 1.0, 0]]}', b"\r\0"]
    file.write_bytes(b"\n".join([*bad, encode(ProgressLine(heartbeat=beat))]))
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
def test_toml_beyond_all_bounds_is_refused_in_one_sentence(tmp_path, text):
    file = tmp_path / "job.toml"
    file.write_text(text)
    with pytest.raises(JobFileError) as refused:
        read_toml(file)
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"{file}: is not valid TOML: ")
    assert len(line) < 300


def test_a_value_beyond_all_bounds_is_a_text_or_refused():
    for text in ("[" * 20_000, "{a" + ".a" * 50_000 + " = 1}", "9" * 5000):
        assert parse_value(text) == text
    with pytest.raises(JobFileError, match=r"--set: takes UTF-8, not 'name=\\udcff'"):
        apply_override({}, "name=\udcff")
