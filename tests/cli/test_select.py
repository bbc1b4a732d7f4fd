"""Tests for `select` and `gpus --watch`, which other programs and scripts use."""

from __future__ import annotations

import argparse
import itertools
import json
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sae_tui.cli_commands.values import size


def test_free_gpus_are_printed_in_the_format_of_cuda_visible_devices(shell) -> None:
    assert shell.run("select").stdout == "GPU-51a0-sim-0" + "\n"
    assert shell.run("select", "-n", 2, "--free-memory", "20GiB").stdout == "GPU-51a0-sim-0,GPU-51a0-sim-1" + "\n"
    assert shell.run("select", "-n", 3, "--index").stdout == "0,1,2" + "\n"


def test_the_error_about_too_few_gpus_says_why_each_other_gpu_is_unavailable(shell) -> None:
    (error,) = shell.errors("select", "-n", 3, "--free-memory", "20GiB", code=1)
    assert "2 of 3 GPUs are available" in error
    assert "GPU 2: needs 20.0 GiB, 9.1 GiB free" in error
    assert "GPU 3: used by mallory" in error
    done = shell.run("select", "-n", 3, "--free-memory", "20GiB", "--json", code=1)
    answer = json.loads(done.stdout)
    assert [one["index"] for one in answer["gpus"]] == [0, 1]
    assert answer["enough"] is False
    assert answer["reasons"]["3"].startswith("used by mallory")


def test_a_size_without_a_unit_is_rejected(shell) -> None:
    (error,) = shell.errors("select", "--free-memory", "20", code=2)
    assert 'must be a size like 20GiB or 500MB, not "20"' in error


@given(st.integers(0, 10**6), st.sampled_from(["KiB", "MiB", "GiB", "TiB", "G", "g", "kB", "MB", "GB", "B"]))
def test_a_size_is_parsed_by_its_unit(number: int, unit: str) -> None:
    base = 1000 if unit.endswith("B") and "i" not in unit else 1024
    power = "bkmgt".index(unit[0].lower())
    assert size(f"{number}{unit}") == size(f" {number} {unit.lower()} ") == number * base**power


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e3G", "20GiBs", "20", "1" * 400 + "G"])
def test_an_invalid_size_is_rejected(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        size(text)


def test_watching_prints_one_json_line_per_second_until_ctrl_c(shell) -> None:
    process = shell.start("gpus", "--watch", "--json")
    rows = [json.loads(line) for line in itertools.islice(process.stdout, 2)]
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert [[gpu["index"] for gpu in gpus] for gpus in rows] == [[0, 1, 2, 3]] * 2
    assert 0.5 < rows[1][0]["timestamp"] - rows[0][0]["timestamp"] < 10
    assert rows[0][3]["slowed_by"] in ([], ["power limit reached"])
    assert rows[0][3]["performance_state"] == 2


def test_watching_ends_when_the_pipe_is_closed_and_fails_for_a_missing_gpu(shell) -> None:
    process = shell.start("gpus", "0", "--watch")
    assert process.stdout.readline().strip()
    process.stdout.close()
    process.wait(20)
    assert process.stderr.read() == ""
    assert shell.errors("gpus", 9, "--watch", code=1) == [
        "sae-tui: error: there is no GPU 9 here; this machine has 0, 1, 2, 3"
    ]
