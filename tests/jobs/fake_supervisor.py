"""Runs the real supervisor with ranks that do not need torch."""

import os
import sys
from pathlib import Path

from sae_tui import policy
from sae_tui.jobs.gpus import idle
from sae_tui.jobs.launchers import early_ranks, local
from sae_tui.jobs.supervisor import supervise
from sae_tui.jobs.supervisor.supervise import main

FAKE_RANK = Path(__file__).with_name("fake_rank.py")


def plant_a_mistake() -> None:
    """Make the supervisor's code raise an error after the ranks have taken a few steps."""
    from sae_tui.jobs.supervisor import attempt, follow_run

    class Buggy(follow_run.Watch):
        def poll(self) -> bool:
            if self._heartbeat and self._heartbeat.step > 3:
                raise ZeroDivisionError("division by zero")
            return super().poll()

    attempt.Watch = Buggy


def shorten_idle_times(idle_s: float) -> None:
    """Report a job whose GPUs have been idle for `idle_s` seconds, and check every quarter of that time."""
    policy.IDLE_S = idle_s
    idle.CHECK_EVERY_S = idle_s / 4


def run(arguments: list[str]) -> int:
    if idle_s := os.environ.get("FAKE_IDLE_S"):
        shorten_idle_times(float(idle_s))
    if os.environ.get("FAKE_BUG"):
        plant_a_mistake()
    if not os.environ.get("FAKE_EARLY"):
        early_ranks.NEEDED_BYTES = 2**62
    supervise.RESTART_AFTER_S = 0.1
    local.KILL_AFTER_S = float(os.environ.get("FAKE_KILL_AFTER_S", local.KILL_AFTER_S))
    return main(arguments, command=lambda spec: [sys.executable, str(FAKE_RANK), str(spec)])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
