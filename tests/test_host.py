"""Tests for measuring and showing CPU, memory, disk and network usage."""

from __future__ import annotations

import os

import psutil
import pytest

from sae_tui import host
from sae_tui.host import NOT_READ, Host, HostLoad
from sae_tui.panels.status import load_spans

BUSY = HostLoad(37.4, 2.06, 8 << 30, 24 << 30, 1 << 30, 12.3e6, 0.2e6)


def words(load: HostLoad, capacity: int) -> str:
    return "".join(text for text, _ in load_spans(load, capacity))


def test_host_load_readings_agree_with_the_operating_system() -> None:
    load = Host().load()
    assert load.memory_total_bytes == psutil.virtual_memory().total
    assert abs((load.memory_used_bytes or 0) - (load.memory_total_bytes - psutil.virtual_memory().available)) < 1 << 30
    assert load.load == pytest.approx(os.getloadavg()[0], abs=2)
    # A rate is known only from the second reading on.
    assert (load.cpu_percent, load.disk_bytes_s, load.network_bytes_s) == (None, None, None)


def test_rates_since_the_last_reading_are_computed_at_most_once_per_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, moved = [100.0], [(1_000, None)]
    monkeypatch.setattr(host.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(host, "_bytes_moved", lambda: moved[0])
    machine = Host()
    first = machine.load()
    clock[0], moved[0] = 100.5, (9_999, 5)
    assert machine.load() is first
    clock[0], moved[0] = 102.0, (5_000, 7)
    second = machine.load()
    assert (second.disk_bytes_s, second.network_bytes_s) == (2_000.0, None)
    assert 0 <= (second.cpu_percent or 0) <= 100
    # If a counter is reset, for example because a disk was removed, the rate must not be negative.
    clock[0], moved[0] = 104.0, (0, 107)
    assert (machine.load().disk_bytes_s, machine.load().network_bytes_s) == (0.0, 50.0)


def test_host_values_that_do_not_fit_are_left_out_entirely() -> None:
    assert words(BUSY, 200) == (
        "  CPU  37%  RAM 8.0 GiB of 24.0 GiB  load 2.1  swap 1.0 GiB  disk   12 MB/s  network    0 MB/s"
    )
    assert words(BUSY, 40) == "  CPU  37%  RAM 8.0 GiB of 24.0 GiB"
    assert words(BUSY, 5) == ""


def test_unknown_values_and_unused_swap_are_left_out() -> None:
    assert words(NOT_READ, 200) == ""
    assert "swap" not in words(HostLoad(1.0, 0.0, 1, 2, 0), 200)
