"""Tests for the exit code of a process that continues in the background."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from sae_tui.jobs.background import go_on
from trainer.contract.prctl import become_subreaper

def rest():
    {rest}

become_subreaper()
first = os.getpid()
assert go_on(lambda: rest) == 0
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize(
    ("rest", "code", "said"),
    [
        ("pass", 0, ""),
        ("raise ValueError('a mistake')", 1, "ValueError: a mistake"),
        ("from trainer.contract.errors import UserError; raise UserError('no store')", 1, "no store"),
    ],
)
def test_a_background_process_that_fails_has_exit_code_1(rest, code, said):
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(rest=rest)], capture_output=True, text=True)
    assert done.stdout.split() == [str(code)], done.stderr
    assert said in done.stderr
