"""Tests for copying a folder from a rented machine that is not trusted."""

from __future__ import annotations

import io
import stat
import tarfile
from pathlib import Path

import pytest

from sae_tui.jobs.skypilot.client import SkyCommand
from sae_tui.jobs.skypilot.fetch import fetch_words


def archive(*entries: tuple[str, bytes | str]) -> bytes:
    """Return a tar archive; an entry with a text instead of bytes is a link."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in entries:
            member = tarfile.TarInfo(name)
            member.mode = 0o4777
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that copies what a machine sends, and returns the exit code and the last line of errors."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs), prepend=":")

    def copy(content: bytes, code: int = 0) -> tuple[int | None, str]:
        (tmp_path / "sent.tar").write_bytes(content)
        (programs / "ssh").write_text(f"#!/bin/sh\ncat {tmp_path}/sent.tar\nexit {code}\n")
        (programs / "ssh").chmod(0o755)
        answer = SkyCommand(fetch_words("box", "there", tmp_path / "here" / "sae")).wait()
        return answer.code, answer.last_line

    return copy


def test_files_are_copied_with_private_modes_and_links_are_left_out(sent, tmp_path: Path) -> None:
    content = archive(("./a/cfg.json", b"{}"), ("./link", "/etc"), ("./link/passwd", b"x"), ("./../b", b"y"))
    code, why = sent(archive(("./a/cfg.json", b"{}"), ("./link", "/etc"), ("./link/x", b"x")))
    assert (code, why) == (0, "")
    here = tmp_path / "here" / "sae"
    assert sorted(str(path.relative_to(here)) for path in here.rglob("*")) == ["a", "a/cfg.json", "link", "link/x"]
    assert not (here / "link").is_symlink()
    assert stat.S_IMODE((here / "a" / "cfg.json").stat().st_mode) == 0o600
    assert stat.S_IMODE((here / "a").stat().st_mode) == 0o700
    code, why = sent(content)
    assert code == 1
    assert "outside" in why
    assert not (tmp_path / "here" / "b").exists()


def test_a_cut_off_or_failed_copy_is_reported(sent) -> None:
    whole = archive(("./big", b"x" * 100_000))
    assert sent(whole[:50_000])[0] == 1
    assert sent(b"Permission denied")[0] == 1
    assert sent(whole, code=255) == (1, "ssh ended with exit code 255")
