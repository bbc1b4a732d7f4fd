from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from jobs.conftest import wait_for

from sae_tui.jobs.launch.editor import edit_by_hand

# An editor that waits up to 20 s for the signal handler to run.
EDITOR = """#!/bin/sh
touch {folder}/open
for _ in $(seq 200); do [ -e {folder}/handled ] && exit 0; sleep 0.1; done
exit 1
"""


def test_a_signal_that_does_not_interrupt_the_wait_is_handled_before_the_editor_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (editor := tmp_path / "editor").write_text(EDITOR.format(folder=tmp_path))
    editor.chmod(0o700)
    monkeypatch.setenv("VISUAL", str(editor))

    def send() -> None:
        wait_for((tmp_path / "open").exists, "the editor to open")
        # A signal sent to another thread does not interrupt the main thread's system call, nor does one that arrives
        # just before the call.
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: (tmp_path / "handled").touch())
    thread = threading.Thread(target=send)
    try:
        thread.start()
        assert edit_by_hand("[sae]\nk = 32\n") is None
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
