"""Tests for the records of attempts that a cluster ended, and for how the next attempt avoids failed nodes."""

from __future__ import annotations

from pathlib import Path

from sae_tui.jobs.launchers import requeues
from sae_tui.jobs.launchers.requeues import Interruption
from sae_tui.jobs.launchers.sbatch import submission
from tests.jobs.launchers.test_sbatch import job, spec
from trainer.contract.paths import RunPaths


def test_only_the_interruptions_directly_before_an_attempt_count(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for attempt, node in ((1, "n1"), (3, "n2"), (4, "n3;rm"), (5, "n4")):
        paths.attempt(attempt).mkdir()
        requeues.record(paths, attempt, Interruption(f"node {node} failed", (node,)))
    assert [one.reason for one in requeues.before(paths, 6)] == [
        "node n4 failed",
        "node n3;rm failed",
        "node n2 failed",
    ]
    # Attempt 7 was started by a user, because there is no record for attempt 6.
    assert requeues.before(paths, 7) == []
    assert requeues.failed_nodes(paths, 6) == ["n2", "n4"]


def test_failed_nodes_are_excluded_in_addition_to_the_users_own() -> None:
    own = job(gpus="auto:2", sbatch_options=["--exclude=n8,n9", "--qos=high"])
    argv = submission(spec(2), own.launch, "job", Path("log"), Path("file"), avoid=["n2"])
    assert argv[-3:] == ["--qos=high", "--exclude=n8,n9,n2", "file"]
