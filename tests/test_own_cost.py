"""Tests for the app's measurement of its own CPU time and memory."""

from __future__ import annotations

import platform
import subprocess
import sys

import psutil
import pytest

from sae_tui.own_cost import OwnCost, cost_lines, own_cost


def text(cost: OwnCost) -> list[str]:
    return ["".join(part for part, _ in line).strip() for line in cost_lines(cost, 80)]


def test_the_cpu_time_and_memory_are_measured_for_this_process() -> None:
    cost, me = own_cost(1000, {0: 0.002}), psutil.Process()
    assert 0 < cost.cpu_s <= sum(me.cpu_times()[:2])
    assert abs(cost.memory_bytes - me.memory_info().rss) < 64 << 20
    assert cost.n_threads == me.num_threads()
    assert cost.elapsed_s > 0


def test_cpu_time_is_shown_per_minute_and_a_slow_gpu_is_marked() -> None:
    lines = text(OwnCost(120.0, 3.0, 54 << 20, 9, 240_000, {0: 0.0021, 3: 0.21}))
    assert [line.split(maxsplit=1)[0] for line in lines[:4]] == ["run", "CPU", "memory", "threads"]
    assert "1.50 s per minute" in lines[1]
    assert "54 MiB" in lines[2]
    assert "2000 bytes per second" in lines[4]
    assert "2.1 ms" in lines[5]
    assert "slow" not in lines[5]
    assert "210.0 ms (slow)" in lines[6]


FREED_BY_THREADS = """
import threading
import psutil
from sae_tui.start import _return_freed_memory

def use():
    for _ in range(2):
        bytearray(b"x") * 5_000_000
    gate.wait()

_return_freed_memory()
gate, process = threading.Barrier(9), psutil.Process()
before = process.memory_info().rss
threads = [threading.Thread(target=use) for _ in range(8)]
for thread in threads:
    thread.start()
gate.wait()
print(process.memory_info().rss - before)
"""


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="only glibc keeps memory for each thread")
def test_memory_that_threads_have_freed_is_returned_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", FREED_BY_THREADS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8 << 20
