"""Tests for how the commands that launch jobs apply the machine's policy."""

from __future__ import annotations

import socket

from sae_tui.jobs.gpus.availability import GpuChoice
from sae_tui.jobs.launch import job_form
from sae_tui.jobs.user import user_name
from trainer.contract.settings.job_file import load_any, to_table
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState


def set_policy(shell, text: str) -> None:
    shell.data.create()
    shell.data.root.chmod(0o2770)
    file = shell.data.root / "policy.toml"
    file.write_text(text)
    file.chmod(0o644)


def test_validate_and_launch_refuse_a_job_that_the_policy_never_allows(shell):
    set_policy(shell, 'gpus_per_user = 1\nmax_time = "4h"\n')
    answer = shell.json("validate", shell.job_file, "--gpus", "0,1", "--set", "launch.time_limit=5:00:00", code=1)
    assert answer["errors"] == [
        "launch.time_limit: is 5 h 00 min, but this machine's policy allows at most 4 h 00 min; lower it",
        "launch.gpus: asks for 2 GPUs, but this machine's policy allows each user only 1; ask for fewer",
    ]
    refused = shell.run("launch", shell.job_file, "--gpus", "0,1", code=1)
    assert "allows each user only 1; ask for fewer" in refused.stderr


def test_validate_and_the_launch_screen_warn_about_a_job_that_has_to_wait(shell):
    set_policy(shell, "gpus_per_user = 1\n")
    row = Job(name="other", config="", user=user_name(), host=socket.gethostname(), device="cpu",
              gpu_source="simulated", state=JobState.RUNNING, gpu_uuids=("GPU-x",), gpus_wanted=1)  # fmt: skip
    Control(shell.data.control_db).create_job(row)
    waits = f"launch.gpus: {user_name()} has 1 of 1 GPU that the policy allows, so the job waits"
    values, past = job_form.flatten(to_table(load_any(shell.job_file))), Control(shell.data.control_db).jobs()
    gpu = GpuChoice(0, "GPU-0", "card", 80 << 30, 80 << 30, "available")
    for gpus, is_warned in (("cpu", False), ([0], True)):
        draft = job_form.Draft(values, {}, gpus)
        reviewed = job_form.review(draft, [gpu], shell.data, past, cuda=False)
        assert (waits in map(str, reviewed.warnings)) == is_warned
    assert waits in shell.json("validate", shell.job_file, "--gpus", "1")["warnings"]


def test_the_launch_screen_says_when_the_policy_will_stop_a_job(shell):
    set_policy(shell, 'max_time = "90m"\n')
    draft = job_form.Draft(job_form.flatten(to_table(load_any(shell.job_file))), {}, "cpu")
    reviewed = job_form.review(draft, [], shell.data, [], cuda=False)
    assert reviewed.summary.endswith("stops after 1:30:00, as this machine's policy requires")


def test_a_damaged_policy_causes_a_warning_at_launch_and_blocks_no_job(shell):
    set_policy(shell, "gpus_per_user = 0\n")
    done = shell.run("launch", shell.job_file, "--gpus", "cpu", "--hold")
    assert "gpus_per_user: must be an integer of at least 1" in done.stderr
    assert "is held" in done.stdout
