"""Tests for drivers that respond slowly or never."""

from __future__ import annotations

import threading

import pytest

from sae_tui import threads
from sae_tui.gpu.base import GpuSample, SourceUnavailable
from sae_tui.gpu.once import open_source, read_all
from sae_tui.gpu.simulated import Simulated
from sae_tui.threads import warn_when_slow


def test_a_driver_that_never_opens_is_reported_as_broken() -> None:
    released = threading.Event()

    class Hanging(Simulated):
        def open(self) -> int:
            released.wait()
            return 0

    with pytest.raises(
        SourceUnavailable, match=r"did not respond within 0\.05 s; see whether nvidia-smi does"
    ) as error:
        open_source(Hanging(), 0.05)
    assert error.value.is_broken
    released.set()


def test_the_queues_gpu_reader_reports_why_it_read_nothing(on_nvml) -> None:
    script = """
import contextlib, io, json
from sae_tui.gpu import once, read
once.OPEN_LIMIT_S = 0.05
once.open_source.__defaults__ = (0.05,)
said = io.StringIO()
with contextlib.redirect_stderr(said):
    code = read.main(["nvml"])
print(json.dumps([code, said.getvalue()]), flush=True)
import os; os._exit(0)
"""
    code, output = on_nvml(script, INIT_MS=2000)
    assert code == 1
    assert output == "the GPU driver did not respond within 0.05 s; see whether nvidia-smi does, or reboot\n"


def test_only_a_slow_operation_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = threading.Event()
    monkeypatch.setattr(threads, "SLOW_AFTER_S", 60.0)
    with warn_when_slow(reported.set):
        pass
    assert not reported.is_set()
    monkeypatch.setattr(threads, "SLOW_AFTER_S", 0.0)
    with warn_when_slow(reported.set):
        assert reported.wait(10)


def test_a_hanging_gpu_is_listed_with_the_reason_and_the_others_are_read() -> None:
    samples = read_all(Simulated(3, faults={1: "hang"}), 3, 0.1)
    assert [sample.reason for sample in samples] == ["", "did not respond within 0.1 s", ""]


@pytest.mark.parametrize(
    ("used", "utilization", "processes", "unseen"),
    [
        (922, 0, (), False),
        (1025, 0, (), True),
        (300, 40, (), True),
        # The driver has just woken up the GPU.
        (4, 100, (), False),
        (300, 3, (), False),
        (None, 40, (), True),
        (None, 0, (), False),
        (5000, 90, None, True),
        (300, 90, None, True),
    ],
)
def test_use_by_hidden_processes_is_detected_from_memory_and_utilisation(used, utilization, processes, unseen):
    in_bytes = None if used is None else used << 20
    sample = GpuSample(
        0, "GPU-0", "A", 0.0, memory_used_bytes=in_bytes, memory_total_bytes=80 << 30, utilization=utilization,
        processes=processes,
    )  # fmt: skip
    assert sample.is_used_unseen == unseen
