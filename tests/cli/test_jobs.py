"""Tests for `validate`, `launch`, `jobs`, `job`, `stop` and `logs`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import signal
import struct
import subprocess
from collections.abc import Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest
from support import box
from support.answers import check_answer
from support.commands import command_file
from support.environments import answer, answering
from support.tui import record_job

from trainer.contract.exits import Exit
from trainer.contract.settings.job_file import dump_job, job_of
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesWriter
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState

JOB_FIELDS = {
    "id", "name", "state", "step", "total_steps", "tokens", "loss", "fvu", "l0", "heldout_fvu", "heldout_l0",
    "tokens_per_s", "gpu_ids",
    "distributed", "world_size", "mode", "created", "started", "ended", "error", "output_path",
}  # fmt: skip


def wait_for_state(shell, job_id: int, *states: str) -> dict:
    box.wait_for_state(shell.data, job_id, *states)
    return shell.json("job", job_id)


def record(shell, state: JobState = JobState.QUEUED, **fields) -> int:
    shell.data.create()
    control = Control(shell.data.control_db)
    values = {"config": "", "user": "me", "host": "elsewhere", "device": "cpu", "gpu_source": "none", "name": "row"}
    job_id = control.create_job(Job(**(values | fields)))
    if state != JobState.QUEUED:
        assert control.transition(job_id, state)
    control.close()
    return job_id


# validate


def test_a_valid_job_passes_validation(shell):
    answer = shell.json("validate", shell.job_file, "--gpus", "0,1")
    assert answer.pop("memory_required") > 500 * 2**20
    assert answer == {
        "valid": True,
        "errors": [],
        "warnings": [],
        "mode": "ddp",
        "memory_measured": None,
        "start": None,
    }


def test_validate_shows_when_slurm_would_start_the_job_or_why_it_would_not(shell):
    program, line = shell.folder / "bin" / "sbatch", "Job 7 to start at 2026-12-01T04:23:55 using 2 processors on n1"
    program.parent.mkdir()
    answers = {
        "gpu": f"echo 'sbatch: {line}' >&2",
        "nowhere": "echo 'allocation failure: Invalid partition' >&2; exit 1",
    }
    cases = "".join(f"*--partition={name}\\ *) {answer};;\n" for name, answer in answers.items())
    program.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}esac\n')
    program.chmod(0o755)
    flags = ("validate", shell.job_file, "--set", "launch.backend=slurm", "--set")
    path = f"{program.parent}:{os.environ['PATH']}"
    start = "SLURM would start it at 2026-12-01 04:23 on node n1"
    assert shell.json(*flags, "launch.partition=gpu", PATH=path)["start"] == start
    assert f"\n{start}\n" in shell.run(*flags, "launch.partition=gpu", PATH=path).stdout
    refused = shell.json(*flags, "launch.partition=nowhere", PATH=path, code=1)
    assert refused["errors"] == ["launch.partition: SLURM would refuse the job: Invalid partition"]
    assert refused["start"] is None


def test_all_errors_in_a_job_are_reported_together(shell):
    text = shell.job_file.read_text().replace("k = 4", 'k = "four"\nk_axu = 2')
    shell.job_file.write_text(text)
    answer = shell.json("validate", shell.job_file, "--gpus", "0,7", "--set", "train.batch_size=5000", code=1)
    assert answer["valid"] is False
    named = {error.partition(":")[0]: error for error in answer["errors"]}
    assert named.keys() == {"sae.k", "sae.k_axu", "launch.gpus", "train.batch_size"}
    assert 'did you mean "k_aux"?' in named["sae.k_axu"]


def test_with_an_unknown_architecture_and_source_all_other_errors_are_reported_too(shell):
    text = shell.job_file.read_text().replace("k = 4", "k = -4\narchitecture = 'topkk'\nsparsity_coefficient = 1.0")
    shell.job_file.write_text(text)
    answer = shell.json("validate", shell.job_file, "--gpus", "0,7", "--set", "data.path=/none", code=1)
    assert sorted(error.partition(":")[0] for error in answer["errors"]) == [
        "data.path", "launch.gpus", "sae.architecture", "sae.k",
    ]  # fmt: skip
    synthetic = text.partition("[data]")[0] + "[data]\nsource = 'synthetik'\n[train]" + text.partition("[train]")[2]
    shell.job_file.write_text(synthetic)
    answer = shell.json("validate", shell.job_file, "--gpus", "0,7", code=1)
    assert [error.partition(":")[0] for error in answer["errors"]] == ["data.source", "launch.gpus"]


def test_busy_gpus_and_too_little_memory_cause_only_warnings(shell):
    answer = shell.json(
        "validate", shell.job_file, "--gpus", "3", "--set", "train.batch_size=3800", "--set", "sae.d_sae=300000"
    )
    assert answer["valid"] is True
    assert any("GPU 3 is busy: used by mallory" in warning for warning in answer["warnings"])
    assert any("GPU 3 has 2.1 GiB free of " in warning for warning in answer["warnings"])


def test_every_command_resolves_auto_to_the_same_parallel_mode(shell):
    wide = ("--set", "sae.d_sae=15000000", "--set", "train.batch_size=64")
    answer = shell.json("validate", shell.job_file, "--gpus", "0,1", *wide)
    job = shell.json("doctor", shell.job_file, "--gpus", "0,1", *wide, code=None)["job"]
    (row,) = [row for row in job["rows"] if row["chosen"] and row["n_gpus"] == 2]
    assert (row["mode"], row["memory_bytes"]) == (answer["mode"], answer["memory_required"])
    recommended = shell.json("recommend", shell.job_file, "--count", 2, *wide)
    assert (recommended["mode"], recommended["memory_required"]) == (answer["mode"], answer["memory_required"])
    launched = shell.json("launch", shell.job_file, "--gpus", "0,1", "--hold", *wide)["id"]
    assert shell.json("job", launched)["mode"] == answer["mode"]
    with contextlib.closing(Control(shell.data.control_db, readonly=True)) as control:
        assert control.job(launched).card_memory_bytes == answer["memory_required"]


def test_memory_is_not_estimated_for_a_job_with_a_rejected_value(shell):
    answer = shell.json("validate", shell.job_file, "--gpus", "cpu", "--set", "train.n_tokens=1e99", code=1)
    assert answer["errors"] == ["train.n_tokens: must be at most 9,223,372,036,854,775,807, not 1e+99"]
    assert (answer["warnings"], answer["memory_required"], answer["mode"]) == ([], None, None)


def test_a_job_too_large_for_its_gpus_is_not_launched(shell):
    huge = ("--gpus", "2", "--set", "sae.d_sae=30000000", "--set", "train.batch_size=64")
    (error,) = [line for line in shell.json("validate", shell.job_file, *huge, code=1)["errors"] if "sae.d_sae" in line]
    assert " GiB, and GPU 2 has 10.0 GiB in total; " in error
    assert any(error in line for line in shell.errors("launch", shell.job_file, *huge, code=1))
    assert shell.json("jobs") == []


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ("7", "launch.gpus: there is no GPU 7 here"),
        ("auto:9", "launch.gpus: asks for 9 GPUs, but this machine has 4"),
        ("auto:9 --gpu-source none", 'launch.gpus: asks for 9 GPUs, but this machine has none; use "cpu:9"'),
        ("gpu0", "launch.gpus: must be"),
        ("0,0", "launch.gpus: GPU 0 is given twice in [0, 0]"),
    ],
)
def test_unavailable_gpus_are_named(shell, gpus, said):
    (error,) = shell.json("validate", shell.job_file, "--gpus", *gpus.split(), code=1)["errors"]
    assert error.startswith(said)


# launch


def test_an_invalid_job_is_not_launched_and_each_problem_gets_its_own_line(shell):
    lines = shell.errors("launch", shell.job_file, "--set", "train.lr=fast", "--set", "sae.width=3", code=1)
    assert len(lines) == 2
    assert lines[0].startswith("sae-tui: error: sae.width: is not a known setting")
    assert lines[1].startswith("sae-tui: error: train.lr: must be a number above 0")
    assert shell.json("jobs") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        ("name = ", "is not valid TOML"),
        ("[data]\n", "data.path: is missing"),
        ('[data]\npath = "nowhere"\n', "data.path: there is nothing at"),
    ],
)
def test_an_unusable_job_file_is_reported_in_one_line(shell, text, said):
    path = shell.folder / "bad.toml"
    if text is not None:
        path.write_text(text)
    (line,) = shell.errors("launch", path, code=1)
    assert said in line


@pytest.mark.timeout(200)
def test_a_launched_job_finishes_with_its_result_and_memory_recorded(shell):
    launched = shell.json("launch", shell.job_file, "--gpus", "0,1", "--set", "name=pair")
    assert launched["id"] == 1
    assert shell.json("gpus", 0)["reason"] in ("job 1 (pair)", "")
    job = wait_for_state(shell, 1, "finished", "failed")
    assert job.keys() >= JOB_FIELDS
    assert (job["state"], job["error"], job["name"]) == ("finished", None, "pair")
    assert (job["step"], job["total_steps"], job["tokens"]) == (5, 5, 640)
    assert (job["gpu_ids"], job["world_size"], job["distributed"], job["mode"]) == ([0, 1], 2, True, "ddp")
    assert job["dropped"] == 0
    assert job["created"] <= job["started"] <= job["ended"]
    assert (Path(job["output_path"]) / "cfg.json").exists()
    (listed,) = shell.json("jobs")
    only_in_job = ("events", "ranks", "cause", "card", "passes", "best_step", "best_heldout_fvu", "forecast", "twice")
    only_in_job += ("mirrored",)
    expected = {name: value for name, value in job.items() if name not in only_in_job}
    assert listed == expected | {"phase": "", "dropped": None}
    assert [event["kind"] for event in job["events"]][-1] == "finished"
    assert all(row["current_job"] is None for row in shell.json("gpus"))
    # Both the measurement and the estimate include PyTorch's own memory in a rank process.
    measured = job["peak_memory_bytes"]
    assert measured > 100 * 2**20
    assert job["estimated_memory_bytes"] > 100 * 2**20
    assert shell.json("validate", shell.job_file, "--gpus", "2,3")["memory_measured"] == measured
    assert shell.json("recommend", shell.job_file, "--count", 2)["memory_measured"] == measured
    assert shell.json("recommend", shell.job_file, "--count", 1)["memory_measured"] is None
    wider = ("--gpus", "0,1", "--set", "sae.d_sae=64")
    assert shell.json("validate", shell.job_file, *wider)["memory_measured"] is None
    assert "in job 1, libraries included" in shell.run("validate", shell.job_file, "--gpus", "0,1").stdout
    assert re.search(r"^peak_memory +0\.", shell.run("job", 1).stdout, re.MULTILINE)


def record_curve(shell, state: JobState, k: int, *curve: float, seeds: Sequence[int] = ()) -> int:
    """Record a job with a held-out FVU after every quarter of its steps, for each value in `curve`.

    The last of several seeds diverges.
    """
    train = {"n_steps": 100, "batch_size": 64} | ({"seed": seeds} if seeds else {})
    raw = {"data": {"path": "/rows"}, "sae": {"d_sae": 64, "k": k}, "train": train}
    fields = {"step": 25 * len(curve), "total_steps": 100, "heldout_fvu": curve[-1], "d_in": 8}
    # Commands cannot tell whether a supervisor on another host is alive, so they keep the job's state.
    job_id = record_job(shell.data, "run", JobState.QUEUED, host="elsewhere", config=dump_job(job_of(raw)), **fields)
    with closing(Control(shell.data.control_db)) as control:
        assert control.transition(job_id, JobState.STARTING)
        assert control.transition(job_id, JobState.RUNNING)
        assert state is JobState.RUNNING or control.transition(job_id, state)
    shell.data.run(job_id).create()
    names = {f"heldout_fvu@seed={seed}": 2.0 if seed == seeds[-1] else 1.0 for seed in seeds} or {"heldout_fvu": 1.0}
    rows = [
        MetricRow(name, 25 * place, factor * value)
        for name, factor in names.items()
        for place, value in enumerate(curve, 1)
    ]
    with closing(SeriesWriter(shell.data.run(job_id).metrics_db)) as writer:
        writer.write(rows, Heartbeat("training", fields["step"], 100, 64 * fields["step"], 0.0))
    return job_id


def test_the_mean_over_seeds_is_not_forecast_if_a_seed_has_diverged(shell):
    shell.data.create()
    for final in (0.3, 0.31, 0.32):
        record_curve(shell, JobState.FINISHED, 4, 0.5, 0.4, 0.35, final)
    assert shell.json("job", record_curve(shell, JobState.RUNNING, 4, 0.45, 0.4, seeds=[0, 1]))["forecast"]
    diverged = record_curve(shell, JobState.RUNNING, 4, 0.65, 0.6, seeds=[0, 1])
    assert shell.json("job", diverged)["forecast"] is None
    assert "expected at the end" not in shell.run("job", diverged).stdout


def test_a_job_shows_the_quality_expected_from_past_runs(shell):
    shell.data.create()
    first = record_curve(shell, JobState.RUNNING, 4, 0.4, 0.3)
    assert shell.json("job", first)["forecast"] is None
    assert "no forecast from the past runs here; it needs at least 3 similar ones" in shell.run("job", first).stdout
    assert "twice" not in shell.run("job", first).stdout
    for k in (2, 3, 4, 6, 8):
        record_curve(shell, JobState.FINISHED, k, 0.5 + k / 1000, 0.4, 0.35, 0.32 - k / 1000)
    job = shell.json("job", first)
    assert job["forecast"] == {"heldout_fvu": pytest.approx(0.3 * 0.316 / 0.4, rel=0.01), "past_runs": 5} | {
        limit: job["forecast"][limit] for limit in ("low", "high")
    }
    assert job["forecast"]["low"] < job["forecast"]["heldout_fvu"] < job["forecast"]["high"]
    assert job["twice"]["k"]["heldout_fvu"] < job["forecast"]["heldout_fvu"]
    assert (job["twice"]["tokens"], job["twice"]["d_sae"]) == (None, None)
    text = shell.run("job", first).stdout
    assert re.search(
        r"^forecast +held-out FVU 0\.23\d \(.*\) expected at the end, from 5 past runs$", text, re.MULTILINE
    )
    assert re.search(
        r"^twice k +held-out FVU 0\.23\d → 0\.23\d \(.* fitted to 5 runs on this data$", text, re.MULTILINE
    )


ENDLESS = ("--gpus", "cpu", "--set", "train.n_steps=100000000", "--wait")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_waiting_for_a_job_that_is_stopped_exits_with_3(shell):
    waiting = shell.start("launch", shell.job_file, *ENDLESS, "--json")
    box.wait_for_store(shell.data, lambda control: bool(control.jobs()))
    wait_for_state(shell, 1, "running")
    assert shell.json("stop", 1)["message"] == "job 1 saves a checkpoint and stops at its next step"
    assert waiting.wait(60) == 3
    assert '"state": "stopped"' in waiting.stdout.read()
    shell.run("job", 1, "--wait", "--cards", code=3)


@pytest.mark.timeout(200)
def test_ctrl_c_while_waiting_leaves_the_job_running(shell):
    waiting = shell.start("launch", shell.job_file, *ENDLESS)
    assert waiting.stdout.readline() == "job 1 is launched; Ctrl-C leaves it running\n"
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(10) == 130
    assert "Traceback" not in waiting.stderr.read()
    assert shell.json("job", 1)["state"] in ("queued", "starting", "running")


@pytest.mark.timeout(200)
def test_waiting_for_a_job_that_fails_exits_with_4_and_the_reason_is_recorded(shell):
    shard = shell.folder / "acts.safetensors"
    n_bytes = shard.stat().st_size
    with shard.open("r+b") as stream:
        stream.seek(n_bytes - 4 * 8 * 2000)
        stream.write(struct.pack("<f", math.nan) * 8 * 2000)
    shell.run("launch", shell.job_file, "--gpus", "cpu", "--set", "train.n_steps=100", "--wait", code=4)
    job = shell.json("job", 1)
    assert job["state"] == "failed"
    assert "data.path" in job["error"]


# jobs, job, stop, logs


def test_without_jobs_the_list_is_empty_and_a_hint_is_printed(shell):
    assert shell.json("jobs") == []
    assert shell.run("jobs").stdout == "no jobs yet; `sae-tui launch JOB.toml` starts one\n"
    assert not shell.data.root.exists()


@pytest.mark.parametrize("command", ["job", "stop", "logs"])
def test_an_unknown_job_is_an_error(shell, command):
    expected = ["sae-tui: error: there is no job 5; `sae-tui jobs` lists them"]
    assert [line.partition(": there")[0] for line in shell.errors(command, 5, code=1)] == ["sae-tui: error"]
    record(shell)
    assert shell.errors(command, 5, code=1) == expected


def test_a_lost_job_is_shown_with_the_reason(shell):
    job_id = record(shell, host=os.uname().nodename, created=1.0)
    job = shell.json("job", job_id)
    assert (job["state"], job["error"]) == ("lost", "its supervisor never started")
    assert shell.json("stop", job_id) == {"id": job_id, "state": "lost", "message": f"job {job_id} was lost already"}


def test_a_jobs_energy_is_shown_with_its_cost_or_is_null_if_unknown(shell):
    names = ("energy_wh", "energy_share", "energy_from", "cost", "currency", "co2_g")
    measured = record(shell, energy_wh=1500.0, energy_s=10.0, energy_known_s=10.0, energy_counted_s=0.0)
    unknown = record(shell)
    shell.data.settings_file.write_text('price_per_kwh = 0.2\ncurrency = "CHF"\n')
    job = shell.json("job", measured)
    assert [job[name] for name in names] == [1500, 1, "power samples", pytest.approx(0.3), "CHF", None]
    assert [shell.json("job", unknown)[name] for name in names] == [None] * 6
    assert "1.5 kWh, 0.30 CHF (from power samples)" in shell.run("job", measured).stdout


def test_job_names_cannot_move_the_cursor(shell):
    record(shell, name="evil\x1b[2J\nname\tof")
    assert "evil�[2J�name of" in shell.run("jobs").stdout


def test_a_jobs_output_cannot_control_the_terminal(shell):
    job_id = record(shell, JobState.STARTING)
    paths = shell.data.run(job_id)
    paths.create()
    paths.log(0).write_text("a\tb\x1b]0;title\x07 \x9b2J\n")
    assert shell.run("logs", job_id).stdout == "a\tb�]0;title� �2J\n"


def test_a_failure_reason_cannot_control_the_terminal_of_a_waiting_command(shell):
    waiting = shell.start("launch", shell.job_file, *ENDLESS)
    assert waiting.stdout.readline() == "job 1 is launched; Ctrl-C leaves it running\n"
    control = Control(shell.data.control_db)
    assert control.transition(1, JobState.FAILED, error="rank 0: \x1b[31mbad")
    control.close()
    assert waiting.stdout.readline() == "job 1 failed: rank 0: �[31mbad\n"
    assert waiting.wait(10) == 4


def test_launch_warns_about_an_unknown_file_system_and_does_not_use_wal_mode(shell):
    root = shell.data.root
    root.mkdir(parents=True, exist_ok=True)
    launch = shlex.join(shell.argv("launch", shell.job_file, "--gpus", "cpu", "--hold"))
    stop = shlex.join(shell.argv("stop", 1))
    script = f"mount -t ramfs none {root} && chmod 700 {root} && {launch} && {stop} && ls {root}"
    namespace = ["unshare", "-rm", "sh", "-c", script]
    done = subprocess.run(namespace, capture_output=True, text=True, env=shell.env, timeout=60)
    if done.stderr.startswith(("unshare:", "mount:")):
        pytest.skip("mounting needs user namespaces")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"sae-tui: warning: {root} is on ramfs")
    assert "control.db" in done.stdout.split()
    assert not {"control.db-wal", "control.db-shm"} & set(done.stdout.split())


def test_logs_show_the_last_lines_from_a_rank(shell):
    job_id = record(shell, JobState.STARTING, world_size=2)
    paths = shell.data.run(job_id)
    paths.create()
    paths.log(1).write_text("one\ntwo\nthree\n")
    assert shell.run("logs", job_id, "--rank", 1, "-n", 2).stdout == "two\nthree\n"
    assert shell.json("logs", job_id, "--rank", 1)["lines"] == ["one", "two", "three"]
    (line,) = shell.errors("logs", job_id, "--rank", 2, code=1)
    assert line == f"sae-tui: error: job {job_id} has no rank 2; give --rank 0 to 1"


def test_a_command_has_one_log_without_ranks_and_no_report_cards(shell):
    job_id = record(shell, JobState.FAILED, config=command_file("sh"), world_size=2, error="its program failed")
    paths = shell.data.run(job_id)
    paths.create()
    assert shell.errors("logs", job_id, code=0) == [f"sae-tui: the program of job {job_id} has written nothing"]
    prefix, no_sae = "sae-tui: error: ", f"job {job_id} runs a command and has no SAE"
    for arguments, said in (
        (("logs", job_id, "--rank", 1), f"job {job_id} has no rank 1; leave --rank out"),
        (("logs", job_id, "--evaluation"), f"--evaluation: {no_sae}"),
        (("features", job_id), no_sae),
    ):
        assert shell.errors(*arguments, code=1) == [prefix + said]
    assert shell.run("job", job_id, "--cards").stdout == f"{no_sae}\n"
    assert shell.json("job", job_id, "--cards") == []
    paths.log(0).write_text("last words\n")
    shown = shell.run("job", job_id).stdout
    assert "\nLast lines of the program:\n  last words\n" in shown
    assert "rank" not in shown


def test_resuming_a_command_reports_no_step(shell):
    shell.run("run", "--gpus", "0", "--wait", "--", "true")
    assert shell.json("resume", 1) == {"id": 1, "step": None, "notes": []}
    box.wait_for_state(shell.data, 1, "finished")


def test_following_a_log_ends_with_the_job(shell):
    job_id = record(shell, JobState.STARTING)
    paths = shell.data.run(job_id)
    paths.create()
    paths.log(0).write_text("before\n")
    following = shell.start("logs", job_id, "-f")
    assert following.stdout.readline() == "before\n"
    with paths.log(0).open("a") as log:
        log.write("after\n")
    assert following.stdout.readline() == "after\n"
    control = Control(shell.data.control_db)
    control.transition(job_id, JobState.FINISHED)
    control.close()
    assert following.wait(5) == 0


# usage


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["metrics", "--since", "soon"], '--since: must be a time like 90s, 10m, 2h or 1d, not "soon"'),
        (["metrics", "--view", "all"], "--view: invalid choice: 'all'"),
        (["recommend", "x.toml", "--count", "0"], '--count: must be an integer of at least 1, not "0"'),
        (["launch"], "the following arguments are required: JOB.toml"),
        (["lunch"], "COMMAND: invalid choice: 'lunch'"),
        (["logs", "1", "--rank", "-1"], '--rank: must be an integer of at least 0, not "-1"'),
        (["job", "x"], 'ID: must be an integer of at least 1, not "x"'),
    ],
)
def test_a_usage_error_is_reported_in_one_line_and_exits_with_2(shell, arguments, said):
    (line,) = shell.errors(*arguments, code=2)
    assert line.startswith("sae-tui: error: ")
    assert said in line


def test_a_malformed_override_is_a_usage_error(shell):
    (line,) = shell.errors("launch", shell.job_file, "--set", "lr", code=2)
    assert line == 'sae-tui: error: --set: expects section.key=value, like train.lr=3e-4, not "lr"'


def test_a_data_folder_that_cannot_be_created_is_reported(shell):
    (shell.folder / "file").touch()
    (line,) = shell.errors("launch", shell.job_file, "--data-dir", shell.folder / "file", code=1)
    assert line == f"sae-tui: error: {shell.folder / 'file'} is not a folder; choose another with --data-dir"
    (line,) = shell.errors("launch", shell.job_file, "--data-dir", "/proc/none", code=1)
    assert line.startswith("sae-tui: error: cannot create the folder /proc/none")
    assert line.endswith("choose another with --data-dir")


def test_a_corrupt_store_is_reported(shell):
    shell.data.create()
    shell.data.control_db.write_bytes(b"no database" * 1000)
    (line,) = shell.errors("jobs", code=1)
    assert "is corrupt" in line
    assert len(shell.json("gpus")) == 4


def test_the_app_needs_a_terminal(shell):
    (line,) = shell.errors(code=1)
    assert "needs a terminal" in line


def test_version_is_printed_and_help_shows_examples(shell):
    assert shell.run("--version").stdout == f"sae-tui {version('sae-tui')}\n"
    assert "examples:" in shell.run("--help").stdout
    assert "--gpus" in shell.run("launch", "--help").stdout


def test_a_failed_job_is_shown_with_its_cause_remedy_and_last_log_lines(shell):
    last = "12:35:35  step 10/1465  loss 0.8312"
    error = f"rank 0 was killed (SIGKILL); its last log line: {last}"
    shell.data.create()
    with closing(Control(shell.data.control_db)) as control:
        job = Job(name="x", config="", user="me", host="here", device="cpu", gpu_source="none", error=error, attempt=1)
        job_id = control.create_job(job)
        control.transition(job_id, JobState.FAILED)
        control.add_event(job_id, "failed", error, "error")
    paths = shell.data.run(job_id)
    paths.create()
    paths.job_file.touch()
    paths.log(0).write_text(f"begins\n{last}\n")
    output = shell.run("job", job_id).stdout
    assert (output.count("SIGKILL"), output.count(last)) == (1, 1)
    assert "\nWhat to do: often the kernel's OOM killer" in output
    assert f"`sae-tui resume {job_id}` starts it again, because it has not saved a checkpoint\n" in output
    assert f"\nLast lines of rank 0:\n  begins\n  {last}\n" in output
    assert shell.json("job", job_id)["error"] == error


def test_a_reader_that_closes_the_pipe_early_causes_no_error_output(shell):
    record(shell)
    reading, writing = os.pipe()
    os.close(reading)
    listing = subprocess.run(shell.argv("jobs"), stdout=writing, stderr=subprocess.PIPE, text=True, env=shell.env)
    os.close(writing)
    assert (listing.returncode, listing.stderr) == (141, "")


def test_an_unwritable_output_is_reported_in_one_line(shell):
    record(shell)
    for arguments in (("jobs",), ("jobs", "--json"), ("completion", "bash")):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                shell.argv(*arguments), stdout=full, stderr=subprocess.PIPE, text=True, env=shell.env, timeout=60
            )
        assert done.stderr == "sae-tui: error: the output cannot be written: No space left on device\n"
        assert done.returncode == 1


def test_quantities_and_lists_are_printed_in_readable_form(shell):
    first = record(shell, tokens_per_s=34120.0, gpu_ids=(0, 1), gpu_uuids=("GPU-a", "GPU-b"), held=True)
    record(shell, after=(first,), fvu=0.1234)
    values = dict(line.split(maxsplit=1) for line in shell.run("job", first).stdout.splitlines() if line)
    assert (values["tokens/s"], values["gpu_ids"], values["gpu_uuids"]) == ("34.1k", "0, 1", "GPU-a, GPU-b")
    assert (values["state"], values["held"], values["after"], values["progress"]) == ("held", "yes", "-", "0%")
    assert shell.json("job", first)["gpu_ids"] == [0, 1]
    card = dict(line.split(maxsplit=1) for line in shell.run("gpus", 2).stdout.splitlines())
    assert (card["memory_total"], card["is_busy"], card["timestamp"][:2]) == ("10.0 GiB", "no", "20")
    assert card["temperature"].endswith("°C")
    listed = shell.run("jobs").stdout.splitlines()
    assert listed[2].split()[2] == "held"
    assert listed[2].endswith("until released")


def test_the_held_out_fvu_is_listed_or_else_the_batch_fvu_with_a_mark(shell):
    config = "[sae]\nk = [8, 32]\nd_sae = 1536\ndead_after_tokens = 20000\n"
    values = {"step": 10, "total_steps": 10, "tokens": 1000, "l0": 32.0, "dead_fraction": 0.004}
    fresh = record(shell, JobState.FAILED, config=config, fvu=0.08, **values)
    overfits = "held-out FVU was best at step 5 (0.1200; 0.1341 at the end)"
    of_end = {"heldout_fvu": 0.1341, "heldout_l0": 36.4, "overfitting": overfits}
    done = record(shell, JobState.STOPPED, fvu=0.08, **of_end, **values)
    heading, *rows = (line.split() for line in shell.run("jobs", "--sort", "fvu").stdout.splitlines())
    shown = [dict(zip(heading, row, strict=False)) for row in rows]
    assert [(row["ID"], row["FVU"], row["L0"]) for row in shown] == [
        (str(done), "0.1341", "36.4"),
        (str(fresh), "~0.08", "~32"),
    ]
    assert (shown[1]["K"], shown[1]["D_SAE"], shown[1]["DEAD"]) == ("8…32", "1,536", "0.4%")
    listed = {job["id"]: tuple(job[name] for name in ("fvu", *of_end)) for job in shell.json("jobs")}
    assert listed == {fresh: (0.08, None, None, None), done: (0.08, 0.1341, 36.4, overfits)}
    assert re.search(rf"^overfitting +{re.escape(overfits)}$", shell.run("job", done).stdout, re.MULTILINE)
    text = shell.run("job", fresh).stdout
    assert "overfitting" not in text
    assert re.search(r"^held-out FVU +-\nbatch FVU +0\.08$", text, re.MULTILINE)
    assert re.search(r"^dead +0\.4% \(silent for 20\.0k tokens\)$", text, re.MULTILINE)


def test_every_command_has_examples_and_lists_the_common_flags_once(shell):
    from sae_tui.cli_commands.parser import COMMAND_EXAMPLES, make_parser

    parser = make_parser(lambda *_: 0)
    (commands,) = (action.choices for action in parser._actions if isinstance(action.choices, dict))
    assert commands.keys() == COMMAND_EXAMPLES.keys()
    for name, command in commands.items():
        help_text = command.format_help()
        assert f"\nexamples:\n  sae-tui {name}" in help_text
        assert help_text.count("--demo-gpus") == help_text.count("--data-dir") == 1


def test_commands_import_no_torch_numpy_or_textual(shell):
    program = (
        "import sys; sys.argv[1:] = ['--demo', 'gpus']\nfrom sae_tui.cli import main\nmain()\n"
        "print([name for name in ('torch', 'numpy', 'textual', 'rich', 'pynvml', 'psutil') if name in sys.modules])"
    )
    argv = [shell.argv()[0], "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, env=shell.env, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


# GPUs used by others


@pytest.mark.usefixtures("fake_ranks")
def test_a_job_waits_for_a_gpu_in_use_unless_it_may_share_it(shell):
    output = shell.run("launch", shell.job_file, "--gpus", "3").stdout
    assert output.startswith("job 1 waits: GPU 3 is used by mallory (pid 31415, python train.py); `sae-tui job 1`")
    shared = shell.json("launch", shell.job_file, "--gpus", "3", "--share")["id"]
    wait_for_state(shell, shared, "finished")
    assert shell.json("job", 1)["state"] == "queued"
    assert "mallory" in shell.json("job", 1)["waits_for"]
    shell.run("stop", 1)
    wait_for_state(shell, 1, "stopped")


@pytest.mark.slow
def test_a_waiting_job_names_the_job_it_waits_for(shell):
    first = shell.json("launch", shell.job_file, "--gpus", "0", "--set", "train.n_steps=100000000")["id"]
    wait_for_state(shell, first, "running")
    output = shell.run("launch", shell.job_file, "--gpus", "0").stdout
    assert output.startswith(f"job 2 waits: GPU 0 is in use by job {first} (from-the-shell); ")
    shell.run("stop", first)
    wait_for_state(shell, first, "stopped")
    wait_for_state(shell, 2, "finished")


def test_a_data_dir_that_is_a_file_is_reported_in_one_line(shell, tmp_path):
    file = tmp_path / "file"
    file.touch()
    (line,) = shell.errors("jobs", code=1, SAE_TUI_DATA_DIR=str(file))
    assert "not a folder" in line


def test_launch_python_is_not_taken_from_a_job_file_that_others_can_write(shell) -> None:
    python = answering(shell.folder / "env", answer(torch=None, torch_error="libc10.so"))
    shell.job_file.write_text(shell.job_file.read_text() + f'[launch]\ngpus = "cpu"\npython = "{python}"\n')
    (broken,) = shell.json("validate", shell.job_file, "--allow-code", code=1)["errors"]
    assert broken.startswith("launch.python: its torch cannot be imported: libc10.so; run `")
    shell.job_file.chmod(0o666)
    others = f"launch.python: is not taken from a file, only from --set, because others may write to {shell.job_file}"
    assert others in shell.json("validate", shell.job_file, code=1)["errors"][0]
    assert others in shell.errors("launch", shell.job_file, "--allow-code", code=1)[-1]
    told = shell.json("validate", shell.job_file, "--set", f"launch.python={python}", code=1)
    assert told["errors"] == [broken]
    assert shell.json("validate", shell.job_file, "--set", "launch.python=")["valid"] is True


def test_a_command_in_a_job_file_is_named_after_its_command_line_without_secrets(shell) -> None:
    table = 'kind = "command"\n[command]\nargv = ["python3", "/x/probe.py", "--token", "s3cret", "\\u001b[2J"]\n'
    shell.job_file.write_text(table + '[launch]\ngpus = "cpu"\n')
    for more in ([], ["--set", "name=mine"], ["--grid", "launch.priority=1,2"]):
        shell.run("launch", shell.job_file, "--hold", "--allow-code", *more)
    derived = "probe.py --token … \ufffd[2J"
    names = [row["name"] for row in reversed(shell.json("jobs"))]
    assert names == [derived, "mine", f"{derived} priority=1", f"{derived} priority=2"]


def test_validating_a_command_mentions_no_python_for_training(shell) -> None:
    python = answering(shell.folder / "env")
    shell.job_file.write_text(f'kind = "command"\n[command]\nargv = ["true"]\n[launch]\npython = "{python}"\n')
    done = shell.run("validate", shell.job_file, "--gpus", "cpu", "--allow-code")
    assert done.stdout == f"{shell.job_file} is valid\nmemory unknown\n"


def test_a_job_file_runs_no_code_without_consent_from_outside_the_file(shell) -> None:
    python = answering(shell.folder / "given")
    ran = python.parents[1] / "asked"
    orders = f'python = "{python}"\nsbatch_options = ["--mem=1G", "--exp=ALL,BASH_ENV=/evil"]'
    shell.job_file.write_text(f'{shell.job_file.read_text()}[launch]\ngpus = "cpu"\n{orders}\n')
    report = shell.json("validate", shell.job_file, code=1)
    assert [line.partition(";")[0] for line in report["errors"]] == [
        f"launch.python: runs `{python} -P -m trainer rank ...` as you",
        'launch.sbatch_options: passes "--exp=ALL,BASH_ENV=/evil" to sbatch, which can run code as you',
    ]
    assert report["memory_required"]
    for command in ("launch", "doctor"):
        first, second = shell.errors(command, shell.job_file, code=1)
        assert str(python) in first
        assert "--allow-code" in second
    assert not ran.exists()
    assert not shell.data.control_db.exists()
    # Overriding another setting does not grant consent, and consent to a setting applies only to that setting.
    one = shell.json("validate", shell.job_file, "--set", f"launch.python={python}", "--set", "sae.k=2", code=1)
    assert [line.partition(":")[0] for line in one["errors"]] == ["launch.sbatch_options"]
    assert ran.exists()
    assert shell.json("validate", shell.job_file, "--allow-code")["valid"] is True
    shell.data.settings_file.parent.mkdir(parents=True)
    shell.data.settings_file.write_text(f'trusted_code = ["{python}", "--exp=ALL,BASH_ENV=/evil"]\n')
    shell.data.settings_file.chmod(0o600)
    assert shell.json("launch", shell.job_file, "--hold")["id"] == 1
    shell.data.settings_file.chmod(0o666)
    assert "launch.python: runs" in shell.errors("launch", shell.job_file, code=1)[-2]


def test_new_jobs_use_the_configured_python_and_clones_use_their_parents_python(shell) -> None:
    python = answering(shell.folder / "env")

    def launched(*words: object) -> bool:
        job_id = shell.json(*words, "--gpus", "cpu", "--hold")["id"]
        return f'python = "{python}"' in shell.data.run(job_id).job_file.read_text()

    assert not launched("launch", shell.job_file)
    shell.data.settings_file.write_text(f'python = "{python}"\n')
    shell.data.settings_file.chmod(0o600)
    assert launched("launch", shell.job_file)
    assert launched("clone", 2)
    assert not launched("clone", 1)
    shell.job_file.write_text(shell.job_file.read_text() + '[launch]\npython = ""\n')
    assert not launched("launch", shell.job_file)
    # Other users could have written the file.
    shell.data.settings_file.chmod(0o666)
    said = shell.errors("launch", shell.job_file, "--gpus", "cpu", "--hold", code=0)
    assert any("settings.toml: python: will not be run, because others may write to" in line for line in said)


# Watching


@pytest.mark.usefixtures("fake_ranks")
def test_watching_jobs_prints_a_line_per_change_and_ends_when_the_pipe_is_closed(shell):
    process = shell.start("jobs", "--watch", "--json")
    assert json.loads(process.stdout.readline()) == []
    job_id = shell.json("launch", shell.job_file, "--gpus", "cpu", "--hold")["id"]
    (job,) = json.loads(process.stdout.readline())
    assert (job["id"], job["held"]) == (job_id, True)
    check_answer("jobs", [job])
    shell.run("release", job_id)
    assert shell.json("job", job_id, "--wait")["state"] == "finished"
    while job["state"] != "finished":
        before, (job,) = job, json.loads(process.stdout.readline())
        assert job != before
    # No job changes any more, so the process must notice the closed pipe without writing a line.
    process.stdout.close()
    assert process.wait(60) == Exit.UNREAD
    assert process.stderr.read() == ""


def test_watching_jobs_ends_on_ctrl_c(shell):
    process = shell.start("jobs", "--watch")
    assert process.stdout.readline().startswith("20")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == Exit.INTERRUPTED


def test_waiting_for_a_job_exits_with_the_code_for_its_final_state(shell):
    job_id = shell.json("launch", shell.job_file, "--gpus", "cpu", "--hold")["id"]
    waiting = shell.start("job", job_id, "--wait", "--json")
    shell.run("stop", job_id)
    told = json.loads(waiting.communicate(timeout=60)[0])
    assert (waiting.returncode, told["state"]) == (Exit.STOPPED, "stopped")
    check_answer("job", told)
