"""Tests that the manual pages are up to date with the parsers, and that groff accepts them."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from support.man_pages import man_pages


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse in Python 3.13 formats flags differently")
def test_the_manual_pages_are_up_to_date_with_the_parsers() -> None:
    assert [file.name for file, text in man_pages().items() if file.read_text(encoding="utf-8") != text] == []


@pytest.mark.skipif(not shutil.which("groff"), reason="groff is not installed")
def test_groff_formats_the_pages_without_warnings() -> None:
    for file in (file for file, text in man_pages().items() if not text.startswith(".so ")):
        done = subprocess.run(["groff", "-man", "-Tutf8", str(file)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert "which it can be resumed" in " ".join(done.stdout.split())
