"""Tests for the sampler: threads, deadlines, and GPUs that hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from sae_tui.gpu import faults
from sae_tui.gpu import sampler as module
from sae_tui.gpu.base import GpuSample, SourceUnavailable
from sae_tui.gpu.sampler import Sampler, SamplerStatus, interval_of, until_next
from sae_tui.gpu.simulated import Simulated, uuid_of

Until = Callable[..., Any]
Start = Callable[..., Sampler]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts samplers; they are stopped after the test."""
    started: list[Sampler] = []

    def begin(*arguments: Any, **options: Any) -> Sampler:
        started.append(Sampler(*arguments, **options))
        started[-1].start()
        return started[-1]

    yield begin
    for sampler in started:
        sampler.stop()


class Source(Simulated):
    """A source that records each read of a GPU. A GPU in `hold` does not respond until its event is set."""

    def __init__(self, count: int = 2, **options: Any) -> None:
        super().__init__(count, **options)
        self.asked: list[tuple[int, bool, float]] = []
        self.closed = False
        self.hold: dict[int, threading.Event] = {}

    def sample(self, index: int, *, processes: bool) -> GpuSample:
        self.asked.append((index, processes, time.monotonic()))
        if index in self.hold:
            self.hold[index].wait()
        return super().sample(index, processes=processes)

    def close(self) -> None:
        self.closed = True


def test_every_gpu_is_sampled_and_samples_are_in_index_order(start: Start, until: Until) -> None:
    sampler = start(Simulated(16), 0.02)
    until(lambda: sampler.count == 16 and all(len(sampler.ring(i).column("timestamp")) >= 3 for i in range(16)))
    assert [sample.index for sample in sampler.latest()] == list(range(16))
    assert all(sample.healthy for sample in sampler.latest())
    assert sampler.status is SamplerStatus.READY
    assert sampler.problem is None
    assert sampler.stop()
    assert sampler.status is SamplerStatus.STOPPED


def test_the_first_samples_are_taken_at_once(start: Start, until: Until) -> None:
    begin = time.monotonic()
    sampler = start(Simulated(8), 60.0)
    until(lambda: sampler.count == 8 and all(sample.healthy for sample in sampler.latest()))
    assert time.monotonic() - begin < 0.5  # it takes 5 ms on an otherwise idle machine


def test_starting_a_sampler_twice_has_no_effect(start: Start, until: Until) -> None:
    source = Source(1)
    sampler = start(source, 60.0)
    sampler.start()
    until(lambda: sampler.ring(0).latest())
    assert len(source.asked) == 1


@pytest.mark.parametrize("interval_s", [0.02, 1.0, 60.0])
def test_all_gpus_are_sampled_in_the_same_interval_even_after_an_early_wake_up(interval_s: float) -> None:
    begun = 1_700_000_040.0
    for passed in (0.0, 0.0999, 0.1, 0.3, 0.9999):
        now = begun + passed * interval_s
        due = now + until_next(now, interval_s)
        assert interval_of(due, interval_s) == interval_of(now, interval_s) + 1
        assert interval_of(due - 0.05 * interval_s, interval_s) == interval_of(due, interval_s)


def test_every_interval_gets_a_sample_from_every_gpu(start: Start, until: Until) -> None:
    sampler = start(Simulated(8), 0.1)
    until(lambda: sampler.count and all(len(sampler.ring(i)) > 12 for i in range(8)))
    for index in range(8):
        intervals = {interval_of(stamp, 0.1) for stamp in sampler.ring(index).column("timestamp")}
        assert len(intervals) >= 10


def test_processes_are_read_less_often_than_sensors_and_reused_in_between(
    start: Start, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROCESSES_EVERY_S", 0.09)
    source = Source(4)
    sampler = start(source, 0.03)
    readings = []
    until(lambda: (readings.append(sampler.latest()[3:]), len(source.asked) > 60)[1])
    asked = [processes for index, processes, _ in list(source.asked) if index == 3]
    assert asked[0]
    assert 0.2 < sum(asked) / len(asked) < 0.55
    assert all(len(sample.processes) == 1 for (sample,) in filter(None, readings) if sample.healthy)


def test_a_process_list_error_is_kept_until_the_list_is_read_again(
    start: Start, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shy(Source):
        def sample(self, index: int, *, processes: bool) -> GpuSample:
            sample = super().sample(index, processes=processes)
            return GpuSample(
                index, sample.uuid, sample.name, sample.timestamp, failed={"processes": "no"} if processes else {}
            )

    source = Shy(1)
    sampler = start(source, 0.01)
    until(lambda: len(source.asked) > 5)
    assert [processes for _, processes, _ in source.asked][:4] == [True, False, False, False]
    assert sampler.latest()[0].failed == {"processes": "no"}


def test_a_hanging_gpu_never_stops_the_others_and_is_reported(
    start: Start, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENT_AFTER_S", 0.2)
    source = Source(3)
    sampler = start(source, 0.02)
    until(lambda: sampler.count and all(sample.healthy for sample in sampler.latest()))
    samples = sampler.latest()[1]
    source.hold[1] = threading.Event()
    until(lambda: not sampler.latest()[1].healthy)
    silent = sampler.latest()[1]
    assert silent.reason.startswith("has not responded for ")
    assert (silent.uuid, silent.name, silent.utilization) == (samples.uuid, samples.name, None)
    before = len(source.asked)
    until(lambda: len(source.asked) > before + 20)
    assert [sample.healthy for sample in sampler.latest()] == [True, False, True]
    until(lambda: sampler.ring(1).column("utilization", 1) == [None])  # the history of this GPU shows a gap
    assert sampler.ring(0).column("utilization", 1) == [0]
    begin = time.monotonic()
    assert not sampler.stop(timeout=0.3)
    assert time.monotonic() - begin < 0.6
    source.hold[1].set()


def test_a_silent_gpu_that_answers_again_is_healthy(
    start: Start, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENT_AFTER_S", 0.1)
    source = Source(1)
    sampler = start(source, 0.02)
    until(lambda: sampler.count and sampler.latest()[0].healthy)
    source.hold[0] = threading.Event()
    until(lambda: not sampler.latest()[0].healthy)
    source.hold.pop(0).set()
    until(lambda: sampler.latest()[0].healthy)


def test_a_gpu_that_has_not_answered_yet_is_listed_without_values(start: Start, until: Until) -> None:
    source = Source(2)
    source.hold[1] = threading.Event()
    sampler = start(source, 0.02)
    until(lambda: sampler.ring(0).latest())
    first, second = sampler.latest()
    assert first.healthy
    assert (second.index, second.healthy, second.reason) == (1, False, "no response yet")
    source.hold[1].set()


def test_a_silent_gpu_is_unhealthy_in_the_history_even_if_no_gpu_answers(
    start: Start, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENT_AFTER_S", 0.1)
    source = Source(1)
    sampler = start(source, 0.02)
    until(lambda: sampler.count and sampler.latest()[0].healthy)
    source.hold[0] = threading.Event()
    until(lambda: not sampler.latest()[0].healthy)
    until(lambda: not sampler.ring(0).latest().healthy)
    source.hold[0].set()


def test_a_gpu_whose_reading_raises_an_exception_is_listed_and_read_again(start: Start, until: Until) -> None:
    class Broken(Source):
        def sample(self, index: int, *, processes: bool) -> GpuSample:
            if index == 1 and len(self.asked) < 20:
                self.asked.append((index, processes, 0.0))
                raise ValueError("odd answer")
            return super().sample(index, processes=processes)

    sampler = start(Broken(2), 0.01)
    until(lambda: sampler.count and "odd answer" in sampler.latest()[1].reason)
    until(lambda: all(sample.healthy for sample in sampler.latest()))


def test_opening_a_source_is_retried_until_it_succeeds(until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REOPEN_EVERY_S", 0.02)
    attempts: list[tuple[SamplerStatus, str]] = []

    class Late(Source):
        def open(self) -> int:
            attempts.append((sampler.status, str(sampler.problem)))
            if len(attempts) < 5:
                raise SourceUnavailable("the NVIDIA driver is not loaded", "load it")
            return super().open()

    sampler = Sampler(Late(), 60.0)
    sampler.start()
    until(lambda: sampler.status is SamplerStatus.READY)
    until(lambda: sampler.ring(1).latest())
    assert attempts[1:] == [(SamplerStatus.UNAVAILABLE, "the NVIDIA driver is not loaded; load it")] * 4
    assert sampler.problem is None
    assert sampler.stop()


def test_a_source_hanging_while_being_opened_blocks_neither_start_nor_stop(start: Start) -> None:
    class Stuck(Source):
        def open(self) -> int:
            threading.Event().wait()
            return 0

    begin = time.monotonic()
    sampler = start(Stuck())
    assert (sampler.status, sampler.count, sampler.latest()) == (SamplerStatus.OPENING, 0, ())
    assert not sampler.stop(timeout=0.2)
    assert time.monotonic() - begin < 0.5


def test_stopping_a_sampler_ends_all_its_threads_and_closes_the_source(start: Start, until: Until) -> None:
    source, before = Source(8), set(threading.enumerate())
    sampler = start(source, 60.0)
    until(lambda: len(source.asked) == 8)
    assert len(set(threading.enumerate()) - before) == 9
    begin = time.monotonic()
    assert sampler.stop()
    assert time.monotonic() - begin < 0.4
    assert source.closed
    assert set(threading.enumerate()) <= before


def test_a_paused_sampler_has_closed_the_source_and_shows_no_old_values(start: Start, until: Until) -> None:
    source = Source()
    sampler = start(source, 0.02)
    until(lambda: sampler.count == 2 and all(sample.healthy for sample in sampler.latest()))
    uuids = [sample.uuid for sample in sampler.latest()]
    assert sampler.pause(10)
    assert source.closed
    n_asked, source.closed = len(source.asked), False
    assert [sample.reason for sample in sampler.latest()] == [faults.NO_ANSWER_YET] * 2
    assert [sample.uuid for sample in sampler.latest()] == uuids
    assert sampler.pause(10)
    assert len(source.asked) == n_asked
    sampler.resume()
    until(lambda: all(sample.healthy for sample in sampler.latest()))
    assert sampler.stop()


def test_a_source_hanging_while_being_closed_does_not_block_a_pause(start: Start, until: Until) -> None:
    source, held = Source(), threading.Event()
    source.close = held.wait  # type: ignore[method-assign]
    sampler = start(source, 0.02)
    until(lambda: sampler.count == 2)
    assert not sampler.pause(0.05)
    sampler.resume()
    until(lambda: all(sample.healthy for sample in sampler.latest()))
    held.set()


def test_history_can_be_added_to_a_ring_before_the_source_is_open(until: Until) -> None:
    from sae_tui.gpu.ring import RingReading

    sampler = Sampler(Simulated(1), 0.01)
    sampler.ring(0).extend_history([RingReading(1.0, 77)], uuid_of(0))
    sampler.start()
    until(lambda: len(sampler.ring(0).column("utilization")) > 3)
    assert sampler.ring(0).column("utilization")[:2] == [77, 0]
    assert sampler.stop()


def test_the_drivers_buffer_is_read_again_for_another_gpu_at_the_same_index(until: Until) -> None:
    from sae_tui.gpu.ring import RingReading

    class Exchanged(Simulated):
        uuid = "GPU-a"

        def sample(self, index: int, *, processes: bool) -> GpuSample:
            return replace(super().sample(index, processes=processes), uuid=self.uuid)

        def buffered(self, index: int) -> tuple[RingReading, ...]:
            return (RingReading(1.0 if self.uuid == "GPU-a" else 2.0, 50),)

    source = Exchanged(1)
    sampler = Sampler(source, 0.01)
    sampler.start()
    until(lambda: sampler.count and sampler.buffered(0))
    source.uuid = "GPU-b"
    until(lambda: sampler.buffered(0) == (RingReading(2.0, 50),))
    assert sampler.buffered(1) == ()
    assert sampler.stop()


def test_an_error_in_must_reopen_does_not_end_the_sampler(until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REOPEN_AFTER_S", 0.0)

    class Failing(Simulated):
        n_opened = n_asked = 0
        is_fixed = False

        def open(self) -> int:
            self.n_opened += 1
            return super().open()

        @property
        def must_reopen(self) -> bool:
            self.n_asked += 1
            if not self.is_fixed:
                raise ZeroDivisionError
            return self.n_opened < 2

    source = Failing(1)
    sampler = Sampler(source, 0.01)
    sampler.start()
    until(lambda: source.n_asked > 1)
    source.is_fixed = True
    until(lambda: source.n_opened == 2)
    assert sampler.stop()


def test_the_time_when_a_gpu_became_unreadable_is_kept_while_the_driver_is_away(
    until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REOPEN_EVERY_S", 0.01)
    monkeypatch.setattr(module, "_REOPEN_AFTER_S", 0.0)

    class Reloaded(Simulated):
        is_lost = must_reopen = is_away = False

        def open(self) -> int:
            self.must_reopen = False
            if self.is_away:
                raise SourceUnavailable("the driver is not loaded", "", is_broken=True)
            return super().open()

        def sample(self, index: int, *, processes: bool) -> GpuSample:
            sample = super().sample(index, processes=processes)
            return replace(sample, healthy=False, reason="lost") if self.is_lost else sample

    source = Reloaded(1)
    sampler = Sampler(source, 0.01)
    sampler.start()
    until(lambda: sampler.count and sampler.latest()[0].healthy)
    source.is_lost = source.is_away = source.must_reopen = True
    until(lambda: sampler.status is SamplerStatus.UNAVAILABLE and "not loaded" in sampler.latest()[0].reason)
    since = sampler.latest()[0].unread_since
    assert since is not None
    source.is_away = False
    until(lambda: sampler.latest()[0].reason == "lost")
    assert sampler.latest()[0].unread_since == since
    assert sampler.stop()


HANGING = """
import json, sys, time
from sae_tui.gpu.nvml import Nvml
from sae_tui.gpu.sampler import Sampler
sampler = Sampler(Nvml(), 0.02)
sampler.start()
deadline = time.monotonic() + 20
others = [index for index in range(4) if index != 2]
while not (sampler.count and all(len(sampler.ring(i).column("timestamp")) > 20 for i in others)):
    assert time.monotonic() < deadline
    time.sleep(0.01)
latest = sampler.latest()
begin = time.monotonic()
ended = sampler.stop()
stopped = time.monotonic()
print(json.dumps({"healthy": [s.healthy for s in latest], "reason": latest[2].reason, "ended": ended,
                  "stop_s": stopped - begin, "left": time.time()}))
"""


def test_a_process_keeps_sampling_and_ends_despite_a_gpu_hanging_in_the_driver(on_nvml: Callable[..., Any]) -> None:
    answer = on_nvml(HANGING, GPUS=4, FAULTS="2:hang")
    assert time.time() - answer["left"] < 1.0
    assert answer["healthy"] == [True, True, False, True]
    assert answer["reason"] == "no response yet"
    assert answer["ended"] is False
    assert answer["stop_s"] < 0.9


def test_a_slow_gpu_does_not_slow_down_other_gpus(on_nvml: Callable[..., Any]) -> None:
    script = HANGING.replace("[index for index in range(4) if index != 2]", "[0, 1, 3]").replace(
        "latest = sampler.latest()",
        "latest = sampler.latest(); n = len(sampler.ring(2).column('timestamp')); assert n < 10, n",
    )
    answer = on_nvml(script, GPUS=4, FAULTS="2:slow=60")
    assert answer["healthy"][0] is answer["healthy"][1] is answer["healthy"][3] is True
    assert answer["ended"] is True


def test_the_gpu_shares_of_processes_are_read_only_while_they_are_requested(until) -> None:
    sampler = Sampler(Simulated(4), 0.05)
    sampler.start()
    until(lambda: sampler.count == 4 and all(sample.healthy for sample in sampler.latest()))
    assert sampler.shares(3) == {}
    sampler.want_shares(True)
    assert 90 <= until(lambda: sampler.shares(3))[31415].sm <= 100
    sampler.want_shares(False)
    assert sampler.shares(3) == {}
    assert sampler.stop()


def test_the_gpu_shares_of_processes_are_read_with_every_sample_on_request(until) -> None:
    n_read = 0

    class Counted(Simulated):
        def shares(self, index, sample):
            nonlocal n_read
            n_read += 1
            return super().shares(index, sample)

    sampler = Sampler(Counted(4), 0.05)
    sampler.start()
    until(lambda: sampler.count == 4 and all(sample.healthy for sample in sampler.latest()))
    sampler.want_shares(True, every_sample=True)
    # If shares were read only with the process list, the GPU with a process would be read four times within the limit.
    until(lambda: n_read >= 100)
    assert sampler.stop()


def test_all_gpus_and_their_processes_are_read_at_once_on_request(start: Start, until: Until) -> None:
    sampler = start(Simulated(4), 3600.0)
    until(lambda: sampler.count and all(sample.healthy for sample in sampler.latest()))
    before = [sample.timestamp for sample in sampler.latest()]
    sampler.read_now()
    until(lambda: all(new.timestamp > old for new, old in zip(sampler.latest(), before, strict=True)))


REMEMBERED = """
import json, time
from sae_tui.gpu.nvml import Nvml
from sae_tui.gpu.sampler import Sampler
sampler = Sampler(Nvml(), 0.05)
sampler.start()
while not sampler.count or not all(sample.healthy for sample in sampler.latest()[:1]) or not sampler.buffered(0):
    time.sleep(0.01)
time.sleep(0.1)
print(json.dumps([time.time(), [[list(one) for one in sampler.buffered(index)] for index in range(3)]]))
sampler.stop()
"""


def test_the_gpu_shares_of_processes_are_read_at_once_when_they_are_requested(start: Start, until: Until) -> None:
    sampler = start(Simulated(1), 3600.0)
    until(lambda: sampler.count and all(sample.healthy for sample in sampler.latest()))
    n_read = len(sampler.ring(0))
    sampler.want_shares(True)
    until(lambda: len(sampler.ring(0)) > n_read)


def test_the_drivers_buffer_is_read_with_the_first_sample(on_nvml) -> None:
    now, (gpu, dumb, lost) = on_nvml(REMEMBERED, GPUS=3, FAULTS="1:no_samples,2:lost")
    assert 15 <= len(gpu) <= 20
    for timestamp, utilization, memory, temperature, power, *_ in gpu:
        assert now - 20 <= timestamp <= now
        assert 0 <= utilization <= 100
        assert 70 <= power <= 700
        assert memory is temperature is None
    assert (dumb, lost) == ([], [])


def test_a_gpu_without_shares_is_not_asked_for_them_with_every_sample(start: Start, until: Until) -> None:
    n_read = 0

    class Blank(Simulated):
        def shares(self, index, sample):
            nonlocal n_read
            n_read += 1
            return {}

    sampler = start(Blank(4), 0.02)
    until(lambda: sampler.count == 4 and all(sample.healthy for sample in sampler.latest()))
    sampler.want_shares(True)
    until(lambda: n_read)
    n_samples, n_read = len(sampler.ring(3)), 0
    until(lambda: len(sampler.ring(3)) >= n_samples + 40)
    assert n_read < 10


def test_the_processes_of_a_gpu_used_by_an_unlisted_process_are_read_at_intervals(start: Start, until: Until) -> None:
    class Unlisted(Source):
        def sample(self, index: int, *, processes: bool) -> GpuSample:
            used = 0 if len(self.asked) < 5 else 20 << 30
            return replace(super().sample(index, processes=processes), processes=(), memory_used_bytes=used)

    source = Unlisted(1)
    sampler = start(source, 0.02)
    until(lambda: len(source.asked) >= 40)
    assert sampler.latest()[0].is_used_unseen
    assert [listed for _, listed, _ in source.asked[:8]] == [True, *[False] * 5, True, False]
