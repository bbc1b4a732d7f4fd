"""Tests, with real processes, what happens to a process when its parent dies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

from trainer.contract.process import ProcessRef

# This program prints the pid of its child, which must die when the program is killed.
PARENT = """
import subprocess, sys
code = "import os, signal, sys; from trainer.contract.prctl import end_with_parent; " \\
       "end_with_parent(int(sys.argv[1])); print(os.getpid(), flush=True); signal.pause()"
import os
subprocess.Popen([sys.executable, "-c", code, str(os.getpid())]).wait()
"""
ORPHANED = """
import os, signal, subprocess, sys
from trainer.contract.prctl import become_subreaper
become_subreaper()
leaver = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!"], stdout=subprocess.PIPE, text=True)
pid = int(leaver.stdout.readline())
leaver.wait()
# The parent has exited, so the orphan now belongs to this process.
os.kill(pid, signal.SIGKILL)
print(os.waitpid(pid, 0)[0] == pid, flush=True)
"""


def test_a_process_exits_with_its_parent(child: Callable[..., Any], eventually: Callable[..., None]) -> None:
    parent = child(PARENT)
    process = ProcessRef.of(int(parent.hear()))
    assert process is not None
    parent.process.kill()
    eventually(lambda: not process.is_alive())


def test_a_process_exits_immediately_if_its_parent_died_before_the_call() -> None:
    code = "from trainer.contract.prctl import end_with_parent; end_with_parent(1 << 22); raise SystemExit(5)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 1


def test_a_subreaper_adopts_the_orphans_among_its_descendants(child: Callable[..., Any]) -> None:
    assert child(ORPHANED).hear() == "True"
