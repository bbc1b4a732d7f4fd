"""Tests for `metrics`, which streams the stored history of each GPU or of all GPUs together."""

from __future__ import annotations

import csv
import io
import json
import socket
import subprocess
import sys
import time
from contextlib import closing

import pytest

from sae_tui.gpu.history import ROLL_UP
from sae_tui.gpu.simulated import uuid_of
from trainer.contract.store.database import open_writer

# Reads VmHWM instead of calling getrusage, whose peak includes the test process from which this process was forked.
MEASURED = """
import sys
from pathlib import Path
from sae_tui.cli import main
code = main(sys.argv[1:])
(peak,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(peak) // 1024, file=sys.stderr)
sys.exit(code)
"""
GIB = 2**30


def store(shell, index: int, begin: float, n: int, *, uuid: str | None = None, percent: int = 50, watts=100.0) -> None:
    """Store one sample per second, as the app does."""
    shell.data.create()
    host, uuid = socket.gethostname(), uuid or uuid_of(index)
    with closing(open_writer(shell.data.gpu_db, "gpu")) as db:
        db.execute("BEGIN")
        db.execute(
            "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < ? - 1)"
            " INSERT INTO gpu_metrics SELECT ?, ?, ? + i, ?, ?, ?, ?, 40, ?, NULL, NULL FROM n",
            (n, host, index, begin, uuid, percent, 8 * GIB, 24 * GIB, watts),
        )
        db.execute(ROLL_UP, (host, index, begin // 60 * 60, uuid))
        db.execute("COMMIT")


@pytest.fixture
def minute() -> float:
    """Return the start time of the minute that began ten minutes ago."""
    return time.time() // 60 * 60 - 600


def test_history_appears_only_on_request_and_is_empty_without_samples(shell):
    rows = shell.json("metrics", "--view", "per_gpu")
    assert len(rows) == 4
    assert all("history" not in row for row in rows)
    assert "history" not in shell.json("metrics")
    assert [row["history"] for row in shell.json("metrics", "--view", "per_gpu", "--since", "10m")] == [[]] * 4
    assert shell.json("metrics", "--since", "10m")["history"] == []
    lines = shell.run("metrics", "--since", "10m").stdout.splitlines()
    assert lines[-1].startswith("All GPUs: no stored samples since 20")


def test_a_gpus_history_follows_its_uuid_from_one_index_to_another(shell, minute):
    store(shell, 0, minute, 3, uuid="GPU-another")
    store(shell, 0, minute + 60, 2, uuid=uuid_of(1), percent=10)
    store(shell, 1, minute + 120, 1, percent=20)
    first, second, *_ = shell.json("metrics", "--view", "per_gpu", "--since", "1h")
    assert first["history"] == []
    assert [(row["timestamp"] - minute, row["utilization"]) for row in second["history"]] == [
        (60, 10), (61, 10), (120, 20),
    ]  # fmt: skip
    assert second["history"][0] == {
        "timestamp": minute + 60, "samples": 1, "utilization": 10, "memory_used": 8 * GIB, "memory_total": 24 * GIB,
        "temperature": 40, "power_draw": 100, "job_id": None,
    }  # fmt: skip


def test_intervals_average_samples_or_minute_means_where_samples_were_deleted(shell, minute):
    store(shell, 0, minute, 60, percent=10)
    store(shell, 0, minute + 60, 30, percent=90)
    with closing(open_writer(shell.data.gpu_db, "gpu")) as db:
        db.execute("DELETE FROM gpu_metrics WHERE timestamp < ?", (minute + 60,))
    asked = ("metrics", "--view", "per_gpu", "--since", "1h", "--every")
    (half, *_) = shell.json(*asked, "30s")
    assert [(row["timestamp"] - minute, row["samples"], row["utilization"]) for row in half["history"]] == [
        (0, 60, 10), (60, 30, 90),
    ]  # fmt: skip
    (long, *_) = shell.json(*asked, "1d")
    assert [(row["samples"], round(row["utilization"], 1)) for row in long["history"]] in (
        [(90, 36.7)],
        [(60, 10), (30, 90)],
    )
    lines = shell.run(*asked, "1m").stdout.splitlines()
    begin = lines.index("GPU 0: means over 60 s")
    assert lines[begin + 1].split() == ["TIME", "UTIL", "MEMORY", "TEMP", "POWER", "JOB"]
    assert [line.split()[2:] for line in lines[begin + 2 : begin + 4]] == [
        ["10%", "8.0", "GiB", "40", "°C", "100", "W", "-"],
        ["90%", "8.0", "GiB", "40", "°C", "100", "W", "-"],
    ]


def test_the_aggregated_history_says_how_many_gpus_it_counts(shell, minute):
    store(shell, 0, minute, 60, percent=10)
    store(shell, 1, minute, 120, percent=30)
    answer = shell.json("metrics", "--since", "1h", "--every", "1m")
    assert answer["every_s"] == 60
    assert answer["gpu_count"] == 4
    both, one = answer["history"]
    assert both == {
        "timestamp": minute, "gpu_count": 4, "gpus_counted": 2, "total_memory_used": 16 * GIB,
        "total_memory_total": 48 * GIB, "average_utilization": 20, "max_temperature": 40, "total_power_draw": 200,
    }  # fmt: skip
    assert (one["gpus_counted"], one["total_memory_total"], one["average_utilization"]) == (1, 24 * GIB, 30)
    assert len(shell.json("metrics", "--since", "1m")["history"]) == 0
    lines = shell.run("metrics", "--view", "aggregated", "--since", "15m").stdout.splitlines()
    begin = lines.index("All GPUs: means over 30 s")
    assert lines[begin + 1].split() == ["TIME", "GPUS", "UTIL", "MEMORY", "TEMP", "POWER"]
    assert [line[21:] for line in lines[begin + 2 :]] == [
        "  2 of 4    20%    16.0 GiB / 48.0 GiB   40 °C    200 W"
    ] * 2 + ["  1 of 4    30%     8.0 GiB / 24.0 GiB   40 °C    100 W"] * 2


def test_history_from_real_gpus_is_not_added_to_history_from_simulated_gpus(shell, minute):
    store(shell, 0, minute, 60, uuid="GPU-real")
    store(shell, 1, minute, 60)
    assert {row["gpus_counted"] for row in shell.json("metrics", "--since", "1h")["history"]} == {1}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--every", "1m"), "--every: needs --since; add for example --since 24h"),
        (("--since", "1h", "--every", "0"), '--every: must be a step of whole seconds like 10s, 1m or 1h, not "0"'),
        (("--since", "1h", "--every", "0.5s"), "must be a step of whole seconds like 10s, 1m or 1h"),
        (("--since", "1h", "--every", "often"), 'must be a time like 90s, 10m, 2h or 1d, not "often"'),
    ],
)
def test_an_invalid_interval_is_reported_in_one_line(shell, flags, said):
    (line,) = shell.errors("metrics", *flags, code=2)
    assert said in line


def test_help_shows_an_example_of_intervals(shell):
    assert "--since 24h --every 5m" in " ".join(shell.run("metrics", "--help").stdout.split())


@pytest.mark.slow
def test_a_long_history_is_printed_as_valid_json_and_never_entirely_in_memory(shell, tmp_path):
    n = 150_000
    store(shell, 0, time.time() - n, n)
    asked = shell.argv("metrics", "--view", "per_gpu", "--since", "48h", "--json")
    output = tmp_path / "out.json"
    with output.open("w") as stream:
        argv = [sys.executable, "-c", MEASURED, *asked[3:]]
        done = subprocess.run(argv, stdout=stream, stderr=subprocess.PIPE, env=shell.env, cwd=shell.folder, check=True)
    assert int(done.stderr) < 80  # the command needs 30 MiB, and would need 200 MiB if it read all rows at once
    assert len(json.loads(output.read_text())[0]["history"]) == n


def test_a_reader_that_closes_the_pipe_ends_the_command_quietly(shell):
    store(shell, 0, time.time() - 20_000, 20_000)
    process = shell.start("metrics", "--view", "per_gpu", "--since", "6h", "--json")
    assert process.stdout.readline() == "[\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(30) == 141


def test_the_history_is_printed_as_csv_per_gpu_or_for_all_gpus_together(shell, minute):
    store(shell, 0, minute, 2)
    store(shell, 2, minute, 1, percent=20)
    per_gpu = shell.run("metrics", "--view", "per_gpu", "--since", "1h", "--csv").stdout
    rows = list(csv.DictReader(io.StringIO(per_gpu)))
    assert [(row["gpu_index"], row["gpu_uuid"], float(row["timestamp"]) - minute) for row in rows] == [
        ("0", uuid_of(0), 0), ("0", uuid_of(0), 1), ("2", uuid_of(2), 0),
    ]  # fmt: skip
    assert [row["job_id"] for row in rows] == [""] * 3
    (row,) = csv.DictReader(io.StringIO(shell.run("metrics", "--since", "1h", "--every", "1m", "--csv").stdout))
    assert (row["gpus_counted"], row["average_utilization"]) == ("2", "35.0")
    assert "--csv: needs --since; add for example --since 24h" in shell.run("metrics", "--csv", code=2).stderr
