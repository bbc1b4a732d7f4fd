"""`gpus`, `metrics`, `recommend`."""

from __future__ import annotations

import time

import pytest

GPU_FIELDS = {
    "index", "uuid", "name", "memory_total", "memory_used", "memory_free", "utilization", "temperature", "power_draw",
    "is_busy", "current_job", "current_job_type", "healthy", "reason",
}  # fmt: skip
TOTALS = {
    "gpu_count", "total_memory_used", "total_memory_total", "average_utilization", "max_temperature",
    "total_power_draw",
}  # fmt: skip
GIB = 2**30


def test_gpus_lists_every_card_with_all_its_fields(shell):
    rows = shell.json("gpus")
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    assert all(row.keys() >= GPU_FIELDS for row in rows)
    assert [row["is_busy"] for row in rows] == [False, False, False, True]
    taken = rows[3]
    assert (taken["current_job"], taken["current_job_type"]) == (None, "foreign")
    assert taken["reason"] == "used by mallory (pid 31415, python train.py)"
    assert rows[0]["memory_free"] == rows[0]["memory_total"] - rows[0]["memory_used"]


def test_one_card_is_an_object_and_an_unknown_one_an_error(shell):
    assert shell.json("gpus", 2)["name"].endswith("RTX 3080")
    assert shell.errors("gpus", 9, code=1) == ["sae-tui: error: there is no GPU 9 here; this machine has 0, 1, 2, 3"]


def test_a_sensor_that_is_not_supported_is_null_and_a_lost_card_a_row(shell):
    rows = shell.json("gpus", SAE_TUI_SIMULATED_FAULTS="0:lost,1:no_power")
    assert rows[0]["healthy"] is False
    assert "fallen off the bus" in rows[0]["reason"]
    assert rows[1]["power_draw"] is None
    assert rows[1]["healthy"] is True
    assert shell.json("metrics", SAE_TUI_SIMULATED_FAULTS="0:lost,1:no_power")["gpu_count"] == 4


def test_a_card_that_hangs_is_a_row_after_two_seconds(shell):
    begun = time.monotonic()
    rows = shell.json("gpus", SAE_TUI_SIMULATED_FAULTS="1:hang,2:hang")
    assert time.monotonic() - begun < 4
    assert [row["reason"] for row in rows[:3]] == ["", "did not answer within 2 s", "did not answer within 2 s"]
    assert rows[0]["utilization"] == 0


def test_the_aggregate_sums_over_all_cards(shell):
    totals = shell.json("metrics", "--view", "aggregated")
    assert totals.keys() >= TOTALS
    assert totals["total_memory_total"] == (24 + 24 + 10 + 24) * GIB
    assert 20 < totals["average_utilization"] < 30


def test_the_metrics_of_all_gpus_say_of_how_many_each_is(shell):
    faults = {"SAE_TUI_SIMULATED_FAULTS": "0:lost,1:no_power"}
    totals = shell.json("metrics", **faults)
    assert totals["gpus_with"] == {"memory": 3, "utilization": 3, "power": 2, "temperature": 3}
    assert totals["total_power_limit"] == 320 + 350
    assert "memory 3, utilization 3, power 2, temperature 3" in shell.run("metrics", **faults).stdout


def test_per_gpu_metrics_have_a_history_when_asked(shell):
    rows = shell.json("metrics", "--view", "per_gpu")
    assert len(rows) == 4
    assert all("history" not in row for row in rows)
    assert [row["history"] for row in shell.json("metrics", "--view", "per_gpu", "--since", "10m")] == [[]] * 4


def test_tables_are_aligned_text(shell):
    heading, *rows = shell.run("gpus").stdout.splitlines()
    assert heading.split() == ["GPU", "NAME", "UTIL", "MEMORY", "TEMP", "POWER", "STATE"]
    assert [row[heading.index("STATE") :] for row in rows[:3]] == ["available"] * 3


def test_recommend_takes_the_emptiest_free_cards_and_gives_a_reason_for_each(shell):
    found = shell.json("recommend", shell.job_file, "--count", 2)
    assert found["gpus"] == [0, 1]
    assert found["memory_required"] > 500 * 2**20
    assert found["reasons"]["3"].startswith("used by mallory")
    assert found["shortfall"] == ""
    assert "--gpus 0,1" in shell.run("recommend", shell.job_file, "--count", 2).stdout


def test_recommend_never_takes_an_unhealthy_card_and_says_why_there_are_fewer(shell):
    found = shell.json("recommend", shell.job_file, "--count", 3, SAE_TUI_SIMULATED_FAULTS="0:lost")
    assert found["gpus"] == [1, 2]
    assert found["shortfall"].startswith("only 2 of 3 GPUs can be had (GPU 0: ")


def test_recommend_considers_what_does_not_fit(shell):
    # 11 GB of pre-activations: too much for the RTX 3080.
    big = ("--set", "train.batch_size=3800", "--set", "sae.d_sae=1500000")
    found = shell.json("recommend", shell.job_file, "--count", 3, *big)
    assert found["gpus"] == [0, 1]
    assert found["reasons"]["2"].startswith("needs ")


def test_one_card_is_recommended_where_the_settings_allow_no_more(shell):
    shell.data.create()
    shell.data.settings_file.write_text("multi_gpu_enabled = false\n")
    assert shell.json("recommend", shell.job_file, "--count", 3)["gpus"] == [0]


@pytest.mark.parametrize("command", ["gpus", "metrics"])
def test_a_machine_without_gpus_says_so_and_goes_on(shell, command):
    done = shell.run(command, "--gpu-source", "none")
    assert done.stderr == "sae-tui: GPU monitoring is off; jobs run on the CPU\n"
    assert shell.json("gpus", "--gpu-source", "none") == []
