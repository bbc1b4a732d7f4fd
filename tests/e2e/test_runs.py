"""Tests for a run's screens: the best SAE in a sweep, the settings, the log, and the reason for a failure."""

from __future__ import annotations

from contextlib import closing

import pytest
from support.box import ENTER, ESC, Box

from sae_tui.jobs.ending import JobEnding, RankEnding, write_ending
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesWriter
from trainer.contract.store.states import JobState

NAME = "a sweep whose name is so long that it has no space next to anything else"
LAST = "12:35:35  step 10/1465  loss 0.8312  fvu 0.5123  l0 32.0  dead 12.1%  lr 1.0e-03  12,345 tok/s"


def job_file(**sae: object) -> str:
    return dump_job(parse_job({"name": "x", "data": {"path": "data/sample"}, "sae": sae})[0])


@pytest.fixture
def sweep(box: Box) -> int:
    """Record a sweep with three SAEs. The last SAE is the best, but the job's row contains the first SAE's values."""
    config, note = job_file(k=[8, 16, 32]), "look at the dead latents before Friday"
    job_id = box.record_job(
        NAME, JobState.FINISHED, config=config, fvu=0.11, heldout_fvu=0.2184, note=note, tags=("good",)
    )
    box.data.run(job_id).create()
    held_out = {"k=8": 0.2184, "k=16": 0.1801, "k=32": 0.1463}
    with closing(SeriesWriter(box.data.run(job_id).metrics_db)) as writer:
        rows = [MetricRow(f"fvu@{label}", step, 0.11) for label in held_out for step in (10, 20)]
        rows += [MetricRow(f"heldout_fvu@{label}", 20, value) for label, value in held_out.items()]
        writer.write([*rows, MetricRow("fvu", 20, 0.11)], Heartbeat("finished", 20, 20, 9, 0.0))
    return job_id


def test_a_sweep_shows_its_best_sae_first_with_its_settings_and_log(box: Box, sweep: int) -> None:
    terminal = box.app(80, 24)
    terminal.wait_for("0.1463")
    assert "0.2184" not in terminal.text
    terminal.send(ENTER)
    screens = [terminal.wait_for("(3 of 3, the best)")]
    for label, place, fvu in (("k=8", 1, 0.2184), ("k=16", 2, 0.1801), ("k=32", 3, 0.1463)):
        terminal.send("m")
        # A screen's output may arrive in two chunks.
        shows = (f"{label} ({place} of 3", f"held-out FVU {fvu}")
        screens.append(terminal.wait_for(lambda text, shows=shows: all(word in text for word in shows)))
    assert "✓ finished" in screens[0]
    terminal.send("M")
    terminal.wait_for("k=16 (2 of 3)")
    terminal.send("i")
    settings = terminal.wait_for(lambda text: " Settings" in text and "dead latents before Friday" in text)
    assert "[8, 16, 32]" in settings
    assert "#good" in settings
    terminal.send("i")
    terminal.wait_for(lambda text: "dead latents before Friday" not in text)
    terminal.send("l")
    assert f"Job {sweep} · log of rank 0 · finished · a sweep" in terminal.wait_for("rank 0 has written nothing")
    terminal.send("r")
    terminal.wait_for("the supervisor has written nothing")
    assert box.shell("job", str(sweep))["best_sae"] == "k=32"


def test_a_failure_is_shown_only_once_and_in_full_with_a_remedy_at_80_by_24(box: Box) -> None:
    error = f"rank 1 was killed (SIGKILL); its last log line: {LAST}"
    job_id = box.record_job("quick", JobState.FAILED, config=job_file(k=16), error=error, world_size=2, attempt=1)
    paths = box.data.run(job_id)
    paths.create()
    paths.attempt(1).mkdir()
    paths.job_file.write_text(job_file(k=16))
    paths.log(1).write_text(f"begins\n{LAST}\n")
    ranks = (RankEnding(0, None, 15), RankEnding(1, None, 9, error))
    write_ending(paths.exit_file, JobEnding(JobState.FAILED, 1.0, error, None, ranks, first_failed=1))
    with closing(Control(box.data.control_db)) as control:
        control.add_event(job_id, "failed", error, "error")
    terminal = box.app(80, 24)
    terminal.wait_for("✗ failed")
    terminal.send(ENTER)
    text = terminal.wait_for(
        lambda text: "✗ rank 1 was killed" in text and "Log of rank 1" in text and LAST[:40] in text
    )
    assert text.count("SIGKILL") == 1
    assert text.count(LAST[:40]) == 1
    flowing = " ".join(text.split())
    assert "→ often the kernel's OOM killer" in flowing
    assert "dmesg -T | grep -i oom" in flowing
    assert "→ g starts it again" in flowing
    assert "tok/s" not in text.split("Log of rank 1")[1]
    terminal.send("\x1b[C\x1b[C")  # right, right
    assert terminal.wait_for("12,345 tok/s")
    terminal.send(ESC)
    terminal.wait_for("PROGRESS")
