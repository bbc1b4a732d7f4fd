"""Tests for the exit codes of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from trainer.contract.exits import Exit, in_short


def end_of(*arguments: str, **environ: str) -> int:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], stdin=subprocess.DEVNULL, capture_output=True, env=os.environ | environ
    )
    return done.returncode


def test_each_exit_code_is_unique_and_described_in_a_full_sentence() -> None:
    assert len({one.value for one in Exit}) == len(Exit)
    assert all(one.short and one.meaning.endswith(".") for one in Exit)
    assert in_short(Exit.DONE, Exit.STOPPED) == "Exit codes: 0 done, 3 stopped."


def test_both_programs_use_the_documented_exit_codes(tmp_path) -> None:
    data = {"SAE_TUI_DATA_DIR": str(tmp_path / "data")}
    assert end_of("sae_tui", "jobs", **data) == Exit.DONE
    assert end_of("sae_tui", "job", "7", **data) == Exit.FAILED
    assert end_of("sae_tui", "job", "no-number", **data) == Exit.USAGE
    assert end_of("trainer", "resume", str(tmp_path / "nothing")) == Exit.USAGE


def test_exit_codes_for_signals_follow_the_shell_convention() -> None:
    signals = {Exit.HUNG_UP: signal.SIGHUP, Exit.INTERRUPTED: signal.SIGINT, Exit.UNREAD: signal.SIGPIPE}
    signals[Exit.TERMINATED] = signal.SIGTERM
    assert all(one == 128 + number for one, number in signals.items())
