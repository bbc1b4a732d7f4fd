"""Tests that the trainer reads headers that the app cannot read, and rereads them only if the files change."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from support.environments import stand_in

from sae_tui.jobs.shard_headers import URL_KEPT_S, ShardHeaders, announcing
from trainer.activations import foreign
from trainer.contract.errors import JobFileError
from trainer.contract.extras import OtherInterpreter, judged_by
from trainer.contract.paths import DataDir
from trainer.contract.settings.inspectors import inspecting_by
from trainer.contract.settings.job_file import parse_job, to_table
from trainer.contract.settings.shards import ShardSet, inspect_shards


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Write a shard with `torch.save`."""
    (folder := tmp_path / "acts").mkdir()
    torch.save(torch.randn(20, 8), folder / "a.pt")
    return folder


def read(headers: ShardHeaders, folder: Path | str) -> ShardSet:
    with inspecting_by(headers.inspect):
        return inspect_shards(folder, "data.target_path")


def refusal(headers: ShardHeaders, folder: Path) -> str:
    with pytest.raises(JobFileError) as caught:
        read(headers, folder)
    return str(caught.value)


def answering(folder: Path, shards: Path | str) -> list[str]:
    """Return a command that replaces the trainer: it prints the shards' headers and appends a line to `asked`."""
    with inspecting_by(foreign.inspect):
        (folder / "answer").write_bytes(msgspec.json.encode(inspect_shards(shards), enc_hook=str))
    return failing(folder, f"cat {folder}/answer")


def failing(folder: Path, script: str) -> list[str]:
    return ["sh", "-c", f"echo . >> {folder}/asked; {script}"]


def n_asked(folder: Path) -> int:
    return len((folder / "asked").read_text().splitlines())


@pytest.mark.slow
def test_the_trainer_reads_the_headers_of_every_format_as_it_does_when_training(tmp_path: Path, shards: Path) -> None:
    (arrow := tmp_path / "arrow").mkdir()
    table = pa.table({"x": pa.array(torch.randn(6, 4).tolist(), pa.list_(pa.float32()))})
    with pa.ipc.new_file(str(arrow / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    (arrow / "empty.arrow").touch()
    headers = ShardHeaders(DataDir(tmp_path / "data"))
    for folder in (shards, arrow):
        with inspecting_by(foreign.inspect):
            expected = inspect_shards(folder)
        assert read(headers, folder) == expected


def test_an_error_from_the_trainer_names_the_setting_the_file_and_the_remedy(tmp_path: Path, shards: Path) -> None:
    torch.save({"x": range(3)}, shards / "b.pt")
    message = refusal(ShardHeaders(DataDir(tmp_path / "data")), shards)
    assert message.startswith(f"data.target_path: {shards / 'b.pt'} is not an array of rows [n_tokens, d_in]: it can ")
    assert message.endswith('; save it again with torch.save({"activations": x.contiguous()}, file)')
    assert "\n" not in message


def test_headers_are_read_only_once_even_by_several_processes_until_a_file_changes(
    tmp_path: Path, shards: Path
) -> None:
    data, command = DataDir(tmp_path / "data"), answering(tmp_path, shards)
    first = ShardHeaders(data, command)
    found = [read(headers, shards) for headers in (first, first, ShardHeaders(data, command))]
    assert found == [found[0]] * 3
    assert n_asked(tmp_path) == 1
    (kept,) = data.headers.iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    os.utime(shards / "a.pt", ns=(1, 1))
    read(first, shards)
    assert n_asked(tmp_path) == 2


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"state": [], "shards": {"shards": []}}'])
def test_a_damaged_header_record_is_replaced(content: bytes, tmp_path: Path, shards: Path) -> None:
    data, command = DataDir(tmp_path / "data"), answering(tmp_path, shards)
    found = read(ShardHeaders(data, command), shards)
    (kept,) = data.headers.iterdir()
    kept.write_bytes(content)
    assert read(ShardHeaders(data, command), shards) == found
    assert n_asked(tmp_path) == 2


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo first >&2; echo 'it ran out of memory' >&2; exit 1", "it ran out of memory"),
        ("kill -ABRT $$", "`trainer inspect` exited with code -6 without output"),
        ("echo '{}'", "the output of `trainer inspect` cannot be read: "),
    ],
)
def test_a_failed_header_read_gives_a_one_sentence_reason_and_is_not_retried_at_once(
    script: str, reason: str, tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = ShardHeaders(DataDir(tmp_path / "data"), failing(tmp_path, script))
    for _ in range(2):
        assert refusal(headers, shards).startswith(f"data.target_path: {reason}")
    assert n_asked(tmp_path) == 1
    monkeypatch.setattr("sae_tui.jobs.shard_headers.FAILED_FOR_S", 0)
    refusal(headers, shards)
    assert n_asked(tmp_path) == 2


def test_a_hanging_header_reader_is_ended(tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sae_tui.jobs.shard_headers.LIMIT_S", 0.1)
    headers = ShardHeaders(DataDir(tmp_path / "data"), [sys.executable, "-c", "import time; time.sleep(600)"])
    assert "the trainer has not read the data within 0.1 s; try again" in refusal(headers, shards)


def test_the_python_named_by_a_job_reads_the_headers(tmp_path: Path, shards: Path) -> None:
    answering(tmp_path, shards)
    python = stand_in(tmp_path / "bin", f'echo "$@" >> {tmp_path}/asked; cat {tmp_path}/answer')
    with judged_by(OtherInterpreter(str(python))):
        read(ShardHeaders(DataDir(tmp_path / "data")), shards)
    assert (tmp_path / "asked").read_text() == f"-P -m trainer inspect --headers --json -- {shards}\n"


def test_reading_headers_is_not_announced_if_they_are_already_stored(tmp_path: Path, shards: Path) -> None:
    places: list[Path] = []
    headers = ShardHeaders(DataDir(tmp_path / "data"), answering(tmp_path, shards))
    with announcing(places.append):
        for _ in range(2):
            read(headers, shards)
    assert places == [shards]


def test_headers_are_read_even_if_the_result_cannot_be_stored(tmp_path: Path, shards: Path) -> None:
    (tmp_path / "data").touch()
    headers = ShardHeaders(DataDir(tmp_path / "data"), answering(tmp_path, shards))
    assert read(headers, shards).n_tokens == 20


def test_the_headers_at_a_url_are_asked_for_again_after_some_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder := tmp_path / "acts").mkdir()
    np.save(folder / "a.npy", np.zeros((20, 8), np.float32))
    url = f"file://{folder}"
    job, _ = parse_job({"data": {"path": url}})
    assert job is not None
    assert to_table(job.with_paths([Path("/elsewhere")]))["data"]["path"] == url
    command = answering(tmp_path, url)
    for n_expected, at in ((1, 1000.0), (1, 1010.0), (2, 1000.0 + 2 * URL_KEPT_S)):
        monkeypatch.setattr("sae_tui.jobs.shard_headers.time.time", lambda at=at: at)
        # Each command has its own process.
        assert read(ShardHeaders(DataDir(tmp_path / "data"), command), url).n_tokens == 20
        assert n_asked(tmp_path) == n_expected
