"""Prints one sample of each GPU as JSON when run as `python -m sae_tui.gpu.read SOURCE`.

The GPUs are read in this separate process because a driver may hang.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import Future

import msgspec

from sae_tui.gpu import load_source
from sae_tui.gpu.base import SourceUnavailable, samples_of
from sae_tui.gpu.once import open_source, read_all
from sae_tui.threads import on_thread
from trainer.contract.errors import UserError
from trainer.contract.json_file import decode_as

# The delay between the loss of a GPU and the first probe, and the longest delay between probes. The delay doubles after
# each probe because a probe takes 0.3 s of CPU time.
PROBE_EVERY_S, LONGEST_PAUSE_S = 10.0, 60.0
PROBE_LIMIT_S = 30.0


class Probe:
    """Checks in a separate process whether lost GPUs can be read again, for example after a reset.

    Reopening the driver interrupts the other GPUs' history and may hang, so the app's own process reopens it only after
    a probe has read a lost GPU.
    """

    def __init__(self, source_name: str) -> None:
        self._command = [sys.executable, "-P", "-m", "sae_tui.gpu.read", source_name]
        self._answer: Future[set[int]] | None = None
        self._due = self._pause_s = 0.0

    def finds(self, lost: Collection[int], now: float) -> bool:
        """Return whether the latest probe could read one of these lost GPUs; start the next probe if it is due.

        Never block.
        """
        if not lost:
            self._due = 0.0
            return False
        if not self._due:
            self._due, self._pause_s = now + PROBE_EVERY_S, PROBE_EVERY_S
        if self._answer is None and now >= self._due:
            self._answer = on_thread(self._read)
        if self._answer is None or not self._answer.done():
            return False
        found, self._answer = self._answer.result() & set(lost), None
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._due = now + self._pause_s
        return bool(found)

    def _read(self) -> set[int]:
        """Return the indices of the GPUs that a new process can read."""
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
            done = subprocess.run(
                self._command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_LIMIT_S, check=True
            )
            return {one.index for one in samples_of(decode_as(done.stdout, list[msgspec.Raw])) if one.healthy}
        return set()


def main(arguments: Sequence[str]) -> int:
    """Print a sample of each GPU and return the exit code; `SOURCE` may end in `:COUNT` for simulated GPUs."""
    name, _, count = arguments[0].partition(":")
    try:
        source = load_source(name, **({"count": int(count)} if count else {}))
        samples = read_all(source, open_source(source))
    except (SourceUnavailable, UserError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    # A process hung in the driver never closes the pipe, so a newline marks the end of the output.
    sys.stdout.buffer.write(msgspec.json.encode(samples) + b"\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    # A thread hung in the driver would prevent the process from exiting.
    os._exit(main(sys.argv[1:]))
