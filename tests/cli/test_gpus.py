"""Tests for `gpus`, `metrics` and `recommend`."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from support.driver import environment

from sae_tui.cli_commands.job_files import read_job
from sae_tui.gpu.simulated import Simulated
from sae_tui.jobs.gpus.availability import Holders, choices, fit
from sae_tui.jobs.launch import job_form
from sae_tui.jobs.launch.launching import fields_of
from sae_tui.jobs.launch.placement import place, propose_here
from sae_tui.panels.headline import memory_words
from trainer.contract.settings.consent import Consent
from trainer.contract.settings.job_file import to_table
from trainer.contract.store.rows import Job

GPU_FIELDS = {
    "index", "uuid", "name", "memory_total", "memory_used", "memory_free", "utilization", "temperature", "power_draw",
    "is_busy", "current_job", "current_job_type", "healthy", "reason",
}  # fmt: skip
TOTALS = {
    "gpu_count", "total_memory_used", "total_memory_total", "average_utilization", "max_temperature",
    "total_power_draw",
}  # fmt: skip
GIB = 2**30


def test_gpus_lists_every_gpu_with_all_its_fields(shell):
    rows = shell.json("gpus")
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    assert all(row.keys() >= GPU_FIELDS for row in rows)
    assert [row["is_busy"] for row in rows] == [False, False, False, True]
    taken = rows[3]
    assert (taken["current_job"], taken["current_job_type"]) == (None, "foreign")
    assert taken["reason"] == "used by mallory (pid 31415, python train.py)"
    assert rows[0]["memory_free"] == rows[0]["memory_total"] - rows[0]["memory_used"]


def test_json_for_one_gpu_is_an_object_and_an_unknown_gpu_is_an_error(shell):
    assert shell.json("gpus", 2)["name"].endswith("RTX 3080")
    assert shell.errors("gpus", 9, code=1) == ["sae-tui: error: there is no GPU 9 here; this machine has 0, 1, 2, 3"]


def test_the_only_flag_limits_every_view_to_the_given_gpus(shell):
    assert [row["index"] for row in shell.json("gpus", "--only", "1,3")] == [1, 3]
    assert [row["index"] for row in shell.json("--only", "3", "gpus")] == [3]
    assert shell.json("metrics", "--only", "0,1")["gpu_count"] == 2
    assert [row["index"] for row in shell.json("metrics", "--view", "per_gpu", "--only", "2")] == [2]


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("gpus", "--only", "0,9"), 1, "--only: there is no GPU 9 here; this machine has GPUs 0-3"),
        (("gpus", "--only", "a"), 2, '--only: must be GPU indices like 0,1, not "a"; see sae-tui gpus --help'),
        (("--only", "0", "jobs"), 2, "--only: works only in the app, in gpus and in metrics; leave it out"),
        (("metrics", "--only", "0", "--since", "10m"), 2, "--only: the stored totals cover all GPUs"),
    ],
)
def test_the_only_flag_is_refused_in_one_sentence_where_it_cannot_apply(shell, words, code, sentence):
    (error,) = shell.errors(*words, code=code)
    assert error.startswith(f"sae-tui: error: {sentence}")


def test_an_unsupported_sensor_is_null_and_a_lost_gpu_is_listed_with_its_reason(shell):
    rows = shell.json("gpus", SAE_TUI_SIMULATED_FAULTS="0:lost,1:no_power")
    assert rows[0]["healthy"] is False
    assert "fallen off the bus" in rows[0]["reason"]
    assert rows[1]["power_draw"] is None
    assert rows[1]["healthy"] is True
    assert shell.json("metrics", SAE_TUI_SIMULATED_FAULTS="0:lost,1:no_power")["gpu_count"] == 4


def test_a_hanging_gpu_is_listed_with_its_error_after_a_timeout(shell):
    done = shell.run("gpus", "--json", SAE_TUI_SIMULATED_FAULTS="1:hang,2:hang")
    assert done.stderr == "sae-tui: asking the NVIDIA driver…\n"
    rows = json.loads(done.stdout)
    assert [row["reason"] for row in rows[:3]] == ["", "did not respond within 5 s", "did not respond within 5 s"]
    assert rows[0]["utilization"] == 0


def test_the_aggregate_sums_over_all_gpus(shell):
    totals = shell.json("metrics", "--view", "aggregated")
    assert totals.keys() >= TOTALS
    assert totals["total_memory_total"] == (24 + 24 + 10 + 24) * GIB
    assert 20 < totals["average_utilization"] < 30


def test_aggregated_metrics_say_how_many_gpus_report_each_value(shell):
    faults = {"SAE_TUI_SIMULATED_FAULTS": "0:lost,1:no_power"}
    totals = shell.json("metrics", **faults)
    assert totals["gpus_with"] == {"memory": 3, "utilization": 3, "power": 2, "temperature": 3}
    assert totals["total_power_limit"] == 320 + 350
    assert "memory 3, utilization 3, power 2, temperature 3" in shell.run("metrics", **faults).stdout


def test_tables_are_aligned_text(shell):
    heading, *rows = shell.run("gpus").stdout.splitlines()
    assert heading.split() == ["GPU", "NAME", "UTIL", "MEMORY", "TEMP", "POWER", "STATE"]
    assert [row[heading.index("STATE") :] for row in rows[:3]] == ["available"] * 3


def test_recommend_selects_the_gpus_with_the_most_free_memory_and_explains_why(shell):
    answer = shell.json("recommend", shell.job_file, "--count", 2)
    assert answer["gpus"] == [0, 1]
    assert answer["memory_required"] > 500 * 2**20
    assert answer["reasons"]["3"].startswith("used by mallory")
    assert answer["shortfall"] == ""
    assert "--gpus 0,1" in shell.run("recommend", shell.job_file, "--count", 2).stdout


def test_recommend_without_a_count_picks_the_fewest_gpus_that_suffice_and_says_why(shell):
    answer = shell.json("recommend", shell.job_file)
    assert answer["gpus"] == [0]
    assert answer["why"].startswith("1 GPU suffices; 2 GPUs ")
    assert f"--gpus 0: {answer['why']}" in shell.run("recommend", shell.job_file).stdout
    for wanted in (("--count", 2), ("--set", "launch.gpus=auto:2")):
        answer = shell.json("recommend", shell.job_file, *wanted)
        assert (answer["gpus"], answer["why"]) == ([0, 1], "")


def test_a_gpu_count_that_a_launch_would_refuse_is_not_recommended(shell):
    odd = ("--set", "parallel.mode=hybrid", "--set", "parallel.latent_ranks=3")
    refused = shell.errors("launch", shell.job_file, *odd, "--gpus", "0,1", code=1)[0].removeprefix("sae-tui: error: ")
    answer = shell.json("recommend", shell.job_file, *odd, "--count", 2, code=1)
    assert (answer["gpus"], answer["shortfall"]) == ([], refused)
    assert shell.json("recommend", shell.job_file, *odd, "--count", 3)["gpus"] == [0, 1, 2]


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--set", "sae.d_sae=200000"),
        ("--set", "sae.k=[1,2,4]", "--set", "sae.d_sae=100000"),
        ("--set", "parallel.mode=ddp", "--set", "train.batch_size=512"),
    ],
)
@pytest.mark.parametrize("gpus", ["0", "0,1"])
def test_the_form_the_job_screen_and_the_commands_show_the_same_memory(shell, flags, gpus):
    here = Simulated(4)
    free = choices([here.sample(index, processes=True) for index in range(4)], Holders())
    job = read_job(shell.job_file, flags[1::2], gpus, Consent(to_all=True))
    draft = job_form.Draft(job_form.flatten(to_table(job)), {}, job.launch.gpus)
    review = job_form.review(draft, free, shell.data, [], cuda=False)
    placed = place(propose_here(job, free, shell.data, cuda=False), free)
    row = Job(id=1, name="a", user="ada", host="box", gpu_source="simulated", **fields_of(shell.data, job, placed, []))
    in_words = (
        review.summary,
        memory_words(row)[0],
        shell.run("validate", shell.job_file, "--gpus", gpus, *flags).stdout,
        shell.run("recommend", shell.job_file, "--count", gpus.count(",") + 1, *flags).stdout,
        fit(msgspec.structs.replace(free[0], memory_free_bytes=0), review.needed_bytes),
    )
    figures = [re.search(r"[\d.]+ [MG]iB", text.partition("needs ")[2] or text)[0] for text in in_words]
    assert len(set(figures)) == 1, in_words


def test_recommend_skips_an_unhealthy_gpu_and_explains_the_shortfall(shell):
    answer = shell.json("recommend", shell.job_file, "--count", 3, SAE_TUI_SIMULATED_FAULTS="0:lost")
    assert answer["gpus"] == [1, 2]
    assert answer["shortfall"].startswith("only 2 of 3 GPUs are available (GPU 0: ")


def test_recommend_skips_gpus_that_are_too_small(shell):
    # The job needs 11 GiB for pre-activations, too much for the RTX 3080.
    big = ("--set", "train.batch_size=1900", "--set", "sae.d_sae=3000000", "--set", "parallel.mode=ddp")
    answer = shell.json("recommend", shell.job_file, "--count", 3, *big)
    assert answer["gpus"] == [0, 1]
    assert answer["reasons"]["2"].startswith("needs ")


def test_one_gpu_is_recommended_if_the_settings_allow_no_more(shell):
    shell.data.create()
    shell.data.settings_file.write_text("multi_gpu_enabled = false\n")
    assert shell.json("recommend", shell.job_file, "--count", 3)["gpus"] == [0]


def test_gpus_recommended_for_a_command_have_enough_free_memory_or_are_idle(shell):
    file = shell.folder / "command.toml"
    file.write_text('kind = "command"\n[command]\nargv = ["sleep", "1"]\n')
    idle = shell.json("recommend", file, "--count", 3)
    assert (idle["gpus"], idle["memory_required"], idle["memory_measured"]) == ([0, 1, 2], None, None)
    assert shell.run("recommend", file).stdout.startswith("memory unknown, so it gets idle GPUs\n")
    wanted = ("--set", "command.memory=15GiB")
    large = shell.json("recommend", file, "--count", 3, *wanted)
    assert (large["gpus"], large["memory_required"], large["mode"]) == ([0, 1], 15 * GIB, "single")
    assert large["reasons"]["2"].startswith("needs 15.0 GiB, ")
    assert shell.run("recommend", file, "--count", 2, *wanted).stdout.startswith("needs 15.0 GiB on each GPU\n")


@pytest.mark.parametrize("command", ["gpus", "metrics"])
def test_a_machine_without_gpus_is_reported_and_is_not_an_error(shell, command):
    done = shell.run(command, "--gpu-source", "none")
    assert done.stderr == "sae-tui: GPU monitoring is off; jobs run on the CPU\n"
    assert shell.json("gpus", "--gpu-source", "none") == []


# Tests with a fake NVIDIA driver


def on_nvml(shell, drivers, command, *arguments, code=0, driver="new", **variables):
    """Run a command with a fake version of NVML; CUDA_VISIBLE_DEVICES, if given, is passed on unchanged."""
    own = {name: variables.pop(name) for name in ("CUDA_VISIBLE_DEVICES",) if name in variables}
    env = environment(drivers, driver, **variables) | own
    return shell.run(command, *arguments, "--gpu-source", "nvml", code=code, **env)


def rows_on_nvml(shell, drivers, **variables):
    return json.loads(on_nvml(shell, drivers, "gpus", "--json", **variables).stdout)


@pytest.mark.slow
def test_a_gpu_used_by_an_invisible_process_is_busy_and_not_recommended(shell, drivers):
    setting = {"GPUS": 4, "PIDS": "", "FAULTS": "2:idle,3:idle,3:perm_procs"}
    used, _, idle, unlisted = rows_on_nvml(shell, drivers, **setting)
    assert used["is_busy"]
    words = f"in use ({used['utilization']} %, {used['memory_used'] / GIB:.1f} GiB) by an unseen process"
    assert (used["reason"], used["current_job_type"]) == (words, "foreign")
    assert (idle["is_busy"], idle["reason"]) == (False, "")
    assert (unlisted["is_busy"], unlisted["reason"]) == (False, "0.0 GiB in use, its processes cannot be listed")
    output = on_nvml(shell, drivers, "recommend", shell.job_file, "--count", 4, "--json", **setting).stdout
    assert json.loads(output)["gpus"] == [2, 3]


def test_free_memory_excludes_the_drivers_reserved_memory(shell, drivers):
    for driver in ("new", "old"):
        (row,) = rows_on_nvml(shell, drivers, GPUS=1, driver=driver, FAULTS="0:idle")
        assert row["memory_free"] == row["memory_total"] - (600 << 20)


def test_gpus_with_mig_or_unknown_memory_are_not_recommended(shell, drivers):
    setting = {"GPUS": 3, "PIDS": "", "FAULTS": "*:idle,0:mig,1:no_memory_info"}
    split, hiding, *_ = rows_on_nvml(shell, drivers, **setting)
    assert not split["healthy"]
    assert split["reason"].startswith("it is split into MIG slices")
    assert (hiding["memory_free"], hiding["healthy"], hiding["is_busy"]) == (None, True, False)
    answer = json.loads(on_nvml(shell, drivers, "recommend", shell.job_file, "--count", 3, "--json", **setting).stdout)
    assert answer["gpus"] == [2]
    assert answer["reasons"]["1"].endswith("free memory unknown")


def test_commands_wait_for_a_slow_driver_and_print_a_message(shell, drivers):
    done = on_nvml(shell, drivers, "gpus", "--json", GPUS=2, INIT_MS=2500)
    assert done.stderr == "sae-tui: asking the NVIDIA driver…\n"
    assert [row["healthy"] for row in json.loads(done.stdout)] == [True, True]


def test_a_slow_gpu_is_still_read(shell, drivers):
    rows = rows_on_nvml(shell, drivers, GPUS=2, FAULTS="1:slow=200")
    assert [row["healthy"] for row in rows] == [True, True]
    assert rows[1]["processes"] == []


@pytest.mark.parametrize(("code", "said"), [(9, "is not loaded"), (18, "have different versions"), (999, "error 999")])
def test_a_broken_driver_is_reported_in_one_line(shell, drivers, code, said):
    for command in (("gpus", "--json"), ("metrics",), ("recommend", shell.job_file, "--json")):
        done = on_nvml(shell, drivers, *command, code=1, INIT_ERROR=code)
        told, other = (done.stdout, done.stderr) if "--json" in command else (done.stderr, done.stdout)
        assert said in told
        assert len(told.splitlines()) == 1
        assert other == ""


def test_without_a_driver_no_gpus_are_listed_and_one_line_is_printed(shell, drivers):
    done = on_nvml(shell, drivers, "gpus", "--json", driver="none")
    assert (done.stdout.strip(), len(done.stderr.splitlines())) == ("[]", 1)


def test_only_gpus_in_cuda_visible_devices_are_shown_under_their_own_indices(shell, drivers):
    setting = {"GPUS": 4, "PIDS": "", "FAULTS": "*:idle"}
    done = on_nvml(shell, drivers, "gpus", "--json", CUDA_VISIBLE_DEVICES="2,GPU-0", **setting)
    assert done.stderr == "sae-tui: 1 of 4 GPUs, by CUDA_VISIBLE_DEVICES\n"
    assert [row["index"] for row in json.loads(done.stdout)] == [2]
    done = on_nvml(shell, drivers, "recommend", shell.job_file, "--json", CUDA_VISIBLE_DEVICES="3,1", **setting)
    assert json.loads(done.stdout)["gpus"] == [1]
    done = on_nvml(shell, drivers, "gpus", "--json", CUDA_VISIBLE_DEVICES="", **setting)
    assert done.stdout.strip() == "[]"
    assert done.stderr == 'sae-tui: CUDA_VISIBLE_DEVICES="" hides all 4 GPUs; unset it, or list GPUs in it\n'


@pytest.mark.slow
def test_commands_work_in_a_locale_without_a_degree_sign(shell):
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = shell.run("gpus", **plain)
    assert " 33 C " in done.stdout
    assert done.stdout.isascii()
    shell.run("doctor", **plain)
    assert shell.run("--help", **plain).stdout.isascii()


def test_a_running_command_has_closed_the_driver(shell, drivers, tmp_path):
    """Check that the driver is closed. Otherwise, GPUs could not be reset while `launch --wait` waits."""
    on_nvml(shell, drivers, "gpus", "--json", GPUS=2, OPEN=tmp_path / "open")
    (file,) = tmp_path.glob("open.*")
    assert file.read_text() == "0\n"
