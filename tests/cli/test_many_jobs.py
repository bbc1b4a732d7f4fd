"""Tests for commands that change many jobs, selected by ids, ranges and tags."""

from __future__ import annotations

import argparse
import os
import pty
import subprocess

import pytest
from support.box import wait_for_store

from sae_tui.cli_commands.completion import ids_and_tags
from sae_tui.cli_commands.values import Selector, array, selector, selector_in
from tests.cli.test_jobs import record
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState


def rows(shell) -> dict[int, dict]:
    return {job["id"]: job for job in shell.json("jobs")}


def held(shell) -> list[int]:
    return sorted(job_id for job_id, job in rows(shell).items() if job["held"])


def requests(shell) -> list[int]:
    control = Control(shell.data.control_db, readonly=True)
    asked = sorted(job.id for job in control.jobs() if control.open_requests(job.id))
    control.close()
    return asked


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("7", Selector(7, 7)),
        ("3-9", Selector(3, 9)),
        ("9..3", Selector(3, 9)),
        ("#sweep", Selector(tag="sweep")),
        ("0", None),
        ("#", None),
        ("3-", None),
        ("-3", None),
        ("sweep", None),
        ("3-9-12", None),
    ],
)
def test_an_id_a_range_or_a_tag_selects_jobs_and_any_other_word_does_not(word, expected):
    assert selector_in(word) == expected
    if expected is None:
        with pytest.raises(argparse.ArgumentTypeError, match="must be a job id, a range like 3-9 or a #tag"):
            selector(word)


def test_ids_ranges_and_tags_can_be_mixed_and_each_job_is_reported_once(shell):
    for number in range(1, 9):
        record(shell, tags=("sweep",) if number > 6 else ())
    done = shell.run("hold", "2-3", 5, "3..4", "#sweep", 2)
    lines = [f"job {job_id} is held until it is released" for job_id in (2, 3, 5, 4, 7, 8)]
    assert done.stdout.splitlines() == [*lines, "6 jobs: 6 held"]
    assert held(shell) == [2, 3, 4, 5, 7, 8]


def test_an_unknown_job_is_refused_before_any_job_is_changed(shell):
    record(shell)
    record(shell)
    (line,) = shell.errors("hold", 1, 9, "20-30", "#none", code=1)
    assert line == (
        "sae-tui: error: there is no job 9, there is no job from 20 to 30 and no job has the tag \"none\";"
        " `sae-tui jobs` lists them"
    )  # fmt: skip
    assert held(shell) == []
    # A range is valid if it contains at least one job.
    assert shell.run("hold", "2-900").stdout == "job 2 is held until it is released\n"


def test_jobs_to_which_a_change_does_not_apply_are_skipped_and_reported(shell):
    record(shell, held=True)
    record(shell, JobState.STOPPED)
    record(shell, held=True)
    record(shell)
    done = shell.run("release", "1-4")
    assert done.stdout == "job 1 starts\njob 3 starts\n"
    assert done.stderr.splitlines() == [
        "sae-tui: skipped: job 2 was stopped; `sae-tui resume 2` resumes it",
        "sae-tui: skipped: job 4 is not held; it starts",
    ]
    assert held(shell) == []
    (line,) = shell.errors("hold", "2-2", code=1)
    assert line == "sae-tui: error: job 2 was stopped; only a queued job can be held"
    record(shell, JobState.STOPPED)
    skipped = shell.json("hold", 2, 5, code=1)
    assert [(one["id"], one["outcome"]) for one in skipped] == [(2, "skipped"), (5, "skipped")]


def test_json_has_an_object_for_one_id_and_a_list_for_several_jobs(shell):
    record(shell)
    record(shell, JobState.FAILED)
    assert shell.json("hold", 1) == {"id": 1, "message": "job 1 is held until it is released"}
    assert shell.json("hold", "1-2") == [
        {"id": 1, "message": "job 1 is held until it is released", "outcome": "done"},
        {"id": 2, "message": "job 2 failed; only a queued job can be held", "outcome": "skipped"},
    ]


def test_a_priority_follows_a_single_job_id_or_is_given_with_a_flag_for_several(shell):
    for _ in range(3):
        record(shell)
    shell.run("priority", 1, 5)
    shell.run("priority", 2, -5)
    assert [rows(shell)[job_id]["priority"] for job_id in (1, 2, 3)] == [5, -5, 0]
    shell.run("priority", "1-2", 3, "--to", 7)
    assert [rows(shell)[job_id]["priority"] for job_id in (1, 2, 3)] == [7, 7, 7]
    shell.run("priority", 1, "--to", -1)
    assert rows(shell)[1]["priority"] == -1


def test_a_reason_shared_by_several_jobs_is_given_once(shell):
    record(shell)
    record(shell)
    (line,) = shell.errors("note", "1-2", "a\x01b", code=1)
    assert line.startswith("sae-tui: failed: names, tags and notes cannot contain control characters")
    assert [one["id"] for one in shell.json("note", "1-2", "a\x01b", code=1)] == [1, 2]


def test_a_job_that_is_not_being_evaluated_or_has_not_ended_is_skipped(shell):
    record(shell)
    record(shell)
    for command in (("stop", "1-2", "--evaluation"), ("resume", "1-2")):
        assert all(line.startswith("sae-tui: skipped: job ") for line in shell.errors(*command, code=1))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["1-2", "--to", "500"], "--to: 500 is out of range; give a priority from -100 to 100"),
        (["1"], "N: the priority is missing"),
        (["1-2", "3"], "--to: the priority for several jobs is missing"),
        (["1", "2", "3"], "--to: the priority for several jobs is missing"),
        (["x", "3"], 'ID: must be a job id, a range like 3-9 or a #tag, not "x"'),
        (["x", "--to", "3"], 'ID: must be a job id, a range like 3-9 or a #tag, not "x"'),
    ],
)
def test_an_unclear_priority_is_refused_in_one_line(shell, arguments, said):
    record(shell)
    (line,) = shell.errors("priority", *arguments, code=2)
    assert line.startswith(f"sae-tui: error: {said}")
    assert rows(shell)[1]["priority"] == 0


def test_words_that_do_not_select_jobs_are_tags(shell):
    for _ in range(3):
        record(shell)
    shell.run("tag", 1, "baseline", "paper")
    shell.run("tag", "#paper", "3-3", "sweep")
    assert [rows(shell)[job_id]["tags"] for job_id in (1, 2, 3)] == [["baseline", "paper", "sweep"], [], ["sweep"]]
    shell.run("tag", "#sweep", "--add", "2026", "--remove", "sweep")
    assert [rows(shell)[job_id]["tags"] for job_id in (1, 3)] == [["2026", "baseline", "paper"], ["2026"]]
    (line,) = shell.errors("tag", "baseline", code=2)
    assert line.startswith("sae-tui: error: ID: no job is given")
    (line,) = shell.errors("tag", "1-3", "two words", code=1)
    assert line.startswith("sae-tui: error: a tag is one word")


def test_a_note_can_be_added_to_several_jobs(shell):
    for _ in range(2):
        record(shell)
    shell.run("note", 1, 2, "wrong seed")
    assert [rows(shell)[job_id]["note"] for job_id in (1, 2)] == ["wrong seed", "wrong seed"]


def test_stopping_several_jobs_skips_ended_jobs(shell):
    for state in (JobState.QUEUED, JobState.STOPPED, JobState.QUEUED):
        record(shell, state)
    done = shell.run("stop", "1-3")
    assert done.stdout == "job 1 is removed from the queue\njob 3 is removed from the queue\n"
    assert done.stderr == "sae-tui: skipped: job 2 was stopped already\n"
    assert requests(shell) == [1, 3]
    # Stopping a single job that has already ended is not an error.
    assert shell.run("stop", 2).stdout == "job 2 was stopped already\n"
    assert shell.run("pause", "2-2").stdout == "job 2 was stopped already\n"
    record(shell, JobState.STOPPED)
    assert shell.run("pause", 2, 4, code=1).stdout == ""


def test_many_running_jobs_are_stopped_only_after_confirmation(shell):
    for _ in range(6):
        record(shell, JobState.STARTING)
    (line,) = shell.errors("stop", "1-6", code=1)
    assert line == "sae-tui: error: stop asks for confirmation, which needs a terminal; in a script add --yes"
    assert requests(shell) == []
    leader, terminal = pty.openpty()
    with subprocess.Popen(
        shell.argv("stop", "1-6"), stdin=terminal, stdout=terminal, stderr=subprocess.PIPE, text=True, env=shell.env
    ) as asked:
        os.write(leader, b"n\n")
        _, errors = asked.communicate(timeout=60)
    said = os.read(leader, 10_000).decode()
    os.close(terminal)
    os.close(leader)
    assert "Stop 6 running jobs (1-6)? [y/N]" in said + errors
    assert errors.endswith("sae-tui: error: no job was stopped\n")
    assert requests(shell) == []
    shell.run("stop", "1-5")
    assert requests(shell) == [1, 2, 3, 4, 5]
    shell.run("stop", "1-6", "--yes")
    assert requests(shell) == [1, 2, 3, 4, 5, 6]


def test_rm_skips_active_jobs_in_a_range_but_refuses_an_active_job_named_by_id(shell):
    for state in (JobState.STOPPED, JobState.QUEUED, JobState.FAILED):
        record(shell, state)
    (line,) = shell.errors("rm", 2, "1-3", "--yes", code=1)
    assert line.endswith("job 2 is queued; stop it before you delete it")
    assert len(rows(shell)) == 3
    done = shell.run("rm", "1-3", "--yes")
    assert done.stdout.startswith("jobs 1 and 3 deleted, ")
    assert done.stderr == "sae-tui: skipped: job 2 has not ended; stop it first\n"
    assert [*rows(shell)] == [2]
    (line,) = shell.errors("rm", "1-9", "--yes", code=1)
    assert line == "sae-tui: error: no job was deleted, because none of these jobs has ended; stop them first"


def test_several_held_jobs_are_resumed_by_one_command(shell):
    shell.run("run", "--gpus", 0, "--array", "0-2", "--hold", "--", "true")
    record(shell, JobState.STOPPED)
    done = shell.run("resume", "1-4", code=1)
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["1", "2", "3"]
    assert done.stderr == "sae-tui: failed: job 4 cannot be resumed: its run folder was deleted; clone it\n"
    wait_for_store(shell.data, lambda control: [job.state for job in control.jobs()[1:]] == ["finished"] * 3)


def test_completion_offers_ids_and_tags(shell):
    record(shell, tags=("sweep",))
    record(shell, tags=("sweep", "wide"))
    flags = argparse.Namespace(data_dir=str(shell.data.root.parent), demo=True)
    assert ids_and_tags(flags) == {
        "2": "row (queued)",
        "1": "row (queued)",
        "#sweep": "2 jobs",
        "#wide": "1 job",
    }


@pytest.mark.parametrize(
    ("text", "indices", "limit"),
    [
        ("0-3", (0, 1, 2, 3), None),
        ("0-7:3", (0, 3, 6), None),
        ("1,3,7", (1, 3, 7), None),
        ("5", (5,), None),
        ("1-3,2,9%4", (1, 2, 3, 9), 4),
    ],
)
def test_arrays_use_slurms_syntax(text, indices, limit):
    assert (array(text).indices, array(text).at_once) == (indices, limit)


@pytest.mark.parametrize(
    "text", ["", "3-1", "a", "1-", "-1", "1-3:0", "1-3%", "1-3%0", "1-3%x", "1,,2", "1-2-3", "٣", "1%٣", "1%²"]
)
def test_an_invalid_array_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be like 0-31, 0-31:2, 1,3,7 or 0-31%4"):
        array(text)


def test_an_array_has_at_most_a_thousand_jobs():
    with pytest.raises(argparse.ArgumentTypeError, match="has 1,000,000,000 jobs, but at most 1,000 are possible"):
        array("0-999999999")
