"""Tests for the order in which queued jobs start, with random GPUs and queues, and over weeks of simulated time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sae_tui.jobs.queue import order
from sae_tui.jobs.queue.order import BACKFILL_S, QueueGpu, Turn, in_order, turns
from trainer.contract.planning.gpu_vendors import VENDORS
from trainer.contract.store.rows import Job, Lease

GIB = 2**30
NOW = 10_000_000.0
UUIDS = tuple(f"GPU-{index}" for index in range(5))


def job(job_id: int, **fields) -> Job:
    values = {"name": "job", "config": "", "user": "ann", "host": "box", "device": "cuda", "gpu_source": "auto"}
    return Job(id=job_id, **values | {"queued": NOW - 1, "gpus_wanted": 1, "any_gpus": True} | fields)


def named(job_id: int, *indices: int, **fields) -> Job:
    uuids = tuple(UUIDS[index] for index in indices)
    return job(job_id, any_gpus=False, gpu_ids=indices, gpu_uuids=uuids, gpus_wanted=len(indices), **fields)


def lease(index: int, job_id: int, *, shared: bool = False, memory_bytes: int | None = None) -> Lease:
    return Lease(
        host="box", gpu_uuid=UUIDS[index], gpu_index=index, job_id=job_id, user="bob", pid=7, since=0.0,
        shared=shared, memory_bytes=memory_bytes,
    )  # fmt: skip


def gpu(index: int, **fields) -> QueueGpu:
    return QueueGpu(index, UUIDS[index], **{"free_bytes": 24 * GIB} | fields)


def held_gpu(index: int, frees_in_s: float, job_id: int = 90) -> QueueGpu:
    return gpu(index, leases=(lease(index, job_id),), frees_in_s=frees_in_s)


memory = st.none() | st.integers(1, 24).map(lambda size: size * GIB)
ages = st.integers(0, 7).map(lambda step: NOW - step * 900)
lengths = st.none() | st.integers(1, 20).map(lambda step: step * 600.0)


@st.composite
def jobs(draw, job_id: int, n_gpus: int) -> Job:
    fields = {
        "queued": draw(ages),
        "priority": draw(st.integers(-1, 1)),
        "shares_gpus": draw(st.booleans()),
        "card_memory_bytes": draw(memory),
        "expected_s": draw(lengths),
    }
    if draw(st.booleans()):
        return job(job_id, gpus_wanted=draw(st.integers(1, n_gpus + 1)), **fields)
    indices = draw(st.lists(st.integers(0, len(UUIDS) - 1), min_size=1, max_size=3, unique=True))
    return named(job_id, *indices, **fields)


@st.composite
def boards(draw) -> list[QueueGpu]:
    jobs = []
    for index in range(draw(st.integers(0, len(UUIDS)))):
        shared = draw(st.booleans())
        n_leases = draw(st.integers(0, 2 if shared else 1))
        leases = [lease(index, 90 + number, shared=shared, memory_bytes=draw(memory)) for number in range(n_leases)]
        jobs.append(
            gpu(
                index,
                free_bytes=draw(memory),
                unusable=draw(st.sampled_from(["", "", "", "it is lost"])),
                other_user=draw(st.sampled_from(["", "", "", "used by mallory"])),
                leases=tuple(leases),
                frees_in_s=draw(st.sampled_from([0.0, 600.0, 3000.0, 9000.0, math.inf])) if leases else 0.0,
            )
        )
    return jobs


@st.composite
def boards_and_lines(draw) -> tuple[list[QueueGpu], list[Job]]:
    board = draw(boards())
    return board, [draw(jobs(number, len(board))) for number in range(1, 1 + draw(st.integers(1, 6)))]


def takers(line: Iterable[Job], found: dict[int, Turn]) -> list[tuple[Job, QueueGpu]]:
    return [(one, taken) for one in in_order(line) for taken in found[one.id].gpus]


def could_have(one: Job, where: QueueGpu) -> bool:
    """Return whether the rules allow a job to use a GPU now, regardless of any plan."""
    if where.unusable or not (one.any_gpus or where.uuid in one.gpu_uuids):
        return False
    if where.other_user and not one.shares_gpus:
        return False
    need, free = one.card_memory_bytes, where.free_bytes
    if one.any_gpus and free is None:
        return False
    if need is not None and free is not None and need > free:
        return False
    if not where.leases:
        return True
    taken = [held.memory_bytes for held in where.leases]
    if not one.shares_gpus or not all(held.shared for held in where.leases):
        return False
    return None not in (need, free, *taken) and sum(taken) + need <= free


@given(boards_and_lines())
def test_a_gpu_has_either_one_exclusive_job_or_only_jobs_sharing_it(case):
    board, line = case
    for where in board:
        holders = [(held.job_id, held.shared) for held in where.leases]
        holders += [
            (one.id, one.shares_gpus)
            for one, taken in takers(line, turns(line, board, NOW))
            if taken.uuid == where.uuid
        ]
        assert len(holders) <= 1 or all(shares for _, shares in holders)


@given(boards_and_lines())
def test_jobs_sharing_a_gpu_never_need_more_memory_than_it_has(case):
    board, line = case
    given_out = takers(line, turns(line, board, NOW))
    for where in board:
        needs = [one.card_memory_bytes for one, taken in given_out if taken.uuid == where.uuid]
        beside = [held.memory_bytes for held in where.leases] + needs
        if not needs or where.free_bytes is None or beside == [None]:
            continue
        assert None not in beside
        assert sum(beside) <= where.free_bytes


@given(boards_and_lines())
def test_a_job_gets_either_all_its_gpus_from_the_allowed_ones_or_a_reason_for_waiting(case):
    board, line = case
    decisions = turns(line, board, NOW)
    assert decisions.keys() == {one.id for one in line}
    for one in line:
        turn = decisions[one.id]
        assert bool(turn.gpus) != bool(turn.waits_for)
        assert len({taken.uuid for taken in turn.gpus}) in (0, one.gpus_wanted)
        by_uuid = {where.uuid: where for where in board}
        assert all(could_have(one, by_uuid[taken.uuid]) for taken in turn.gpus)


@given(boards_and_lines())
def test_the_first_job_starts_if_enough_gpus_are_available(case):
    board, line = case
    first = in_order(line)[0]
    fitting = [where for where in board if could_have(first, where)]
    assert bool(turns(line, board, NOW)[first.id].gpus) == (len(fitting) >= first.gpus_wanted)


@given(boards_and_lines(), st.randoms())
def test_every_supervisor_makes_the_same_plan_whatever_the_order_of_its_input(case, source):
    board, line = case
    decisions = turns(line, board, NOW)
    source.shuffle(board)
    source.shuffle(line)
    assert turns(line, board, NOW) == decisions


@given(boards_and_lines())
def test_equal_jobs_start_in_order_of_priority_and_age(case):
    board, line = case
    alike = [
        msgspec.structs.replace(one, any_gpus=True, gpus_wanted=1, shares_gpus=False, card_memory_bytes=None)
        for one in line
    ]
    decisions = turns(alike, board, NOW)
    started = [
        bool(decisions[one.id].gpus) for one in sorted(alike, key=lambda one: (-one.priority, one.queued, one.id))
    ]
    assert started == sorted(started, reverse=True)


def soonest_start_s(large: Job, board: Sequence[QueueGpu], started: Iterable[tuple[Job, QueueGpu]]) -> float:
    """Return the time until the large job can start if all jobs end as expected, considering every choice of GPUs."""
    free_in = {where.uuid: where.frees_in_s if where.leases else 0.0 for where in board}
    for one, taken in started:
        free_in[taken.uuid] = max(free_in[taken.uuid], math.inf if one.expected_s is None else one.expected_s)
    possible = [free_in[where.uuid] for where in board if large.any_gpus or where.uuid in large.gpu_uuids]
    choices = itertools.combinations(possible, large.gpus_wanted)
    return min((max(choice) for choice in choices), default=math.inf)


@given(boards_and_lines())
def test_backfilled_jobs_do_not_delay_the_first_waiting_job(case):
    board, line = case
    # If all jobs are exclusive and all GPUs are usable, the availability of a GPU depends only on the time.
    board = [msgspec.structs.replace(where, free_bytes=1000 * GIB, unusable="", other_user="") for where in board]
    line = [msgspec.structs.replace(one, shares_gpus=False, queued=NOW - one.id) for one in line]
    decisions = turns(line, board, NOW)
    waiting = next((one for one in in_order(line) if not decisions[one.id].gpus), None)
    if waiting is None:
        return
    ahead = in_order(line)[: in_order(line).index(waiting)]
    before = [pair for pair in takers(line, decisions) if pair[0] in ahead]
    assert soonest_start_s(waiting, board, takers(line, decisions)) <= soonest_start_s(waiting, board, before)


@given(boards_and_lines())
def test_a_job_that_has_waited_too_long_is_not_overtaken_on_its_gpus(case):
    board, line = case
    board = [msgspec.structs.replace(where, free_bytes=1000 * GIB, unusable="", other_user="") for where in board]
    line = [msgspec.structs.replace(one, shares_gpus=False, queued=NOW - BACKFILL_S - 1 + one.id / 10) for one in line]
    first = in_order(line)[0]
    possible = [where for where in board if could_have(first, msgspec.structs.replace(where, leases=()))]
    # The job requests every GPU that it could use; usually, some of them are leased.
    all_of_them = msgspec.structs.replace(first, gpus_wanted=len(possible))
    line = [all_of_them if one.id == first.id else one for one in line]
    decisions = turns(line, board, NOW)
    if decisions[first.id].gpus:
        return
    assert {taken.uuid for _, taken in takers(line, decisions)}.isdisjoint(where.uuid for where in possible)


def test_a_job_is_backfilled_only_if_it_ends_before_the_waiting_job_can_start():
    board = [held_gpu(0, 500.0), gpu(1), gpu(2)]
    large = job(1, gpus_wanted=3, queued=NOW - 60)
    short, long, unknown = (job(number, expected_s=length) for number, length in ((2, 400.0), (3, 600.0), (4, None)))
    decisions = turns([large, short, long, unknown], board, NOW)
    assert [bool(decisions[number].gpus) for number in (1, 2, 3, 4)] == [False, True, False, False]
    assert decisions[1].waits_for == "3 GPUs: GPU 0 is held by job 90 (bob)"
    assert "job 1 is ahead in the queue" in decisions[3].waits_for


def test_a_job_that_starts_in_this_plan_holds_its_gpus_for_its_expected_duration():
    board = [gpu(0), gpu(1)]
    first, large, endless = job(1, expected_s=10.0), job(2, gpus_wanted=2), job(3, expected_s=1e6)
    decisions = turns([first, large, endless], board, NOW)
    assert [bool(decisions[number].gpus) for number in (1, 2, 3)] == [True, False, False]


def test_a_job_waiting_for_another_users_gpu_does_not_block_other_gpus():
    board = [gpu(0, other_user="used by mallory"), gpu(1)]
    decisions = turns([named(1, 0, 1), job(2)], board, NOW)
    assert [where.index for where in decisions[2].gpus] == [1]
    assert decisions[1].waits_for == "GPU 0 is used by mallory"


def test_a_job_that_shares_gpus_may_use_another_users_gpu_with_enough_memory():
    board = [gpu(0, other_user="used by mallory", free_bytes=8 * GIB)]
    line = [
        named(1, 0, shares_gpus=True, card_memory_bytes=9 * GIB),
        named(2, 0, shares_gpus=True, card_memory_bytes=7 * GIB),
    ]
    decisions = turns(line, board, NOW)
    assert decisions[1].waits_for == "GPU 0 has 8.0 GiB free of 9.0 GiB needed"
    assert decisions[2].gpus


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (named(1, 0), "GPU 0 is held by job 90 (bob)"),
        (named(1, 0, shares_gpus=True), "GPU 0 is held by job 90 (bob), which does not share it"),
        (named(1, 1), "GPU 1 cannot be used (it is lost)"),
        (named(1, 4), "1 GPU of this job cannot be read"),
        (named(1, 0, 1), "GPU 0 is held by job 90 (bob) and GPU 1 cannot be used (it is lost)"),
        (job(1, gpus_wanted=4), "4 GPUs: GPU 0 is held by job 90 (bob) and GPU 1 cannot be used (it is lost)"),
    ],
)
def test_a_reason_for_waiting_names_every_unavailable_gpu(one, said):
    board = [held_gpu(0, 60.0), gpu(1, unusable="it is lost")]
    assert turns([one], board, NOW)[1].waits_for == said


def test_mig_slices_are_given_only_to_single_gpu_jobs_and_independent_processes():
    cut = [msgspec.structs.replace(gpu(index), uuid=f"MIG-{index}") for index in (0, 1)]
    alone, connected, apart = job(1), job(1, gpus_wanted=2, mode="ddp"), job(1, gpus_wanted=2, mode="single")
    assert [len(turns([one], cut, NOW)[1].gpus) for one in (alone, connected, apart)] == [1, 0, 2]
    reason = "2 GPUs: GPU 0 is a MIG slice and GPU 1 is a MIG slice"
    assert turns([connected], cut, NOW)[1].waits_for == reason


def test_a_job_waits_if_there_are_too_few_gpus_or_none_can_be_read():
    assert turns([job(1, gpus_wanted=2)], [gpu(0)], NOW)[1].waits_for == "2 GPUs: this machine has fewer GPUs"
    assert turns([job(1)], [], NOW)[1].waits_for == "1 GPU: no GPU can be read"
    assert turns([named(1, 0)], [], NOW)[1].waits_for == "1 GPU of this job cannot be read"


class Cluster:
    """Simulates a machine: jobs arrive and end, and the queue is planned after every change.

    Jobs run for `late` times their expected duration, and report their remaining time unless `silent` is set.
    """

    def __init__(self, n_gpus: int, late: float = 1.0, *, silent: bool = False) -> None:
        self.now = NOW
        self.started: dict[int, float] = {}
        self._gpus, self._late, self._silent = UUIDS[:n_gpus], late, silent
        self._line: list[Job] = []
        self._running: dict[str, tuple[Job, float]] = {}
        self._ends: list[float] = []

    def until(self, at: float) -> None:
        """Advance the time to `at`, replanning whenever a job ends."""
        while self._ends and self._ends[0] <= at:
            self.now = heapq.heappop(self._ends)
            self._running = {uuid: pair for uuid, pair in self._running.items() if pair[1] > self.now}
            self._plan()
        self.now = at

    def comes(self, one: Job) -> float:
        self._line.append(msgspec.structs.replace(one, queued=self.now))
        self._plan()
        return self.now

    def _board(self) -> list[QueueGpu]:
        return [self._gpu(index, *self._running.get(uuid, (None, 0.0))) for index, uuid in enumerate(self._gpus)]

    def _gpu(self, index: int, holder: Job | None, end: float) -> QueueGpu:
        if holder is None:
            return gpu(index)
        return held_gpu(index, holder.expected_s if self._silent else (end - self.now) / self._late, holder.id)

    def _plan(self) -> None:
        decisions = turns(self._line, self._board(), self.now)
        for one in [one for one in self._line if decisions[one.id].gpus]:
            self._line.remove(one)
            self.started[one.id] = self.now
            end = self.now + self._late * one.expected_s
            for taken in decisions[one.id].gpus:
                assert taken.uuid not in self._running
                self._running[taken.uuid] = (one, end)
            heapq.heappush(self._ends, end)


LARGE = 1000


@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(60, 5400), st.integers(1, 3)), min_size=20, max_size=60),
    st.integers(0, 10),
    st.integers(2, 4),
    st.sampled_from([0.5, 1.0, 2.0, 5.0]),
    st.booleans(),
)
def test_a_large_job_in_a_queue_of_small_jobs_waits_no_longer_than_promised(stream, comes_at, wanted, late, silent):
    box, lengths = Cluster(4, late, silent=silent), [late * length for _, length, _ in stream]
    for number, (pause, length, n_gpus) in enumerate(stream):
        if number == comes_at:
            arrived = box.comes(job(LARGE, gpus_wanted=wanted, expected_s=60.0))
        box.comes(job(number + 1, gpus_wanted=n_gpus, expected_s=float(length)))
        box.until(box.now + pause)
    box.until(box.now + 1e7)
    # All jobs that arrived earlier may have to run first.
    ahead = sum(lengths[:comes_at])
    assert box.started[LARGE] - arrived <= ahead + BACKFILL_S + max(lengths)
    assert len(box.started) == len(stream) + 1


def wait_in_a_stream_of_silent_jobs() -> float:
    """Return how long a large job waits behind jobs that are always expected to end soon but run longer."""
    box = Cluster(2, late=3.0, silent=True)
    box.comes(job(1, expected_s=600.0))
    box.until(box.now + 900)
    box.comes(job(2, expected_s=600.0))
    arrived = box.comes(job(LARGE, gpus_wanted=2, expected_s=60.0))
    for number in range(3, 60):
        box.comes(job(number, expected_s=600.0))
        box.until(box.now + 300)
    box.until(box.now + 1e7)
    return box.started[LARGE] - arrived


def test_jobs_with_an_unknown_end_time_do_not_starve_other_jobs(monkeypatch):
    promised = BACKFILL_S + 3 * 600
    assert wait_in_a_stream_of_silent_jobs() <= promised
    monkeypatch.setattr(order, "BACKFILL_S", math.inf)
    assert wait_in_a_stream_of_silent_jobs() > 3 * promised


def test_a_gpu_with_unknown_free_memory_is_given_only_to_jobs_that_name_it():
    board = [gpu(0, free_bytes=None)]
    message = "1 GPU: GPU 0 does not report its free memory; name it in launch.gpus to use it"
    assert turns([job(1)], board, NOW)[1].waits_for == message
    assert [taken.index for taken in turns([named(1, 0, card_memory_bytes=5 * GIB)], board, NOW)[1].gpus] == [0]


def test_each_job_takes_only_gpus_that_its_environment_makes_visible():
    board = [gpu(index) for index in range(4)]
    line = [
        job(1, visible_devices="3,GPU-2", gpus_wanted=1),
        job(2, visible_devices="2,3", gpus_wanted=2),
        job(3, visible_devices="GPU-1"),
        job(4),
    ]
    decisions = turns(line, board, NOW)
    assert [[taken.index for taken in decisions[one.id].gpus] for one in line] == [[3], [], [1], [0]]
    assert decisions[2].waits_for == "2 GPUs: job 1 is ahead in the queue"


def test_a_second_vendors_driver_does_not_change_which_gpus_a_job_can_see(monkeypatch, tmp_path):
    for name, vendor in VENDORS.items():
        here = msgspec.structs.replace(vendor, driver_files=(str(tmp_path),))
        monkeypatch.setitem(VENDORS, name, here)
    board = [gpu(index, vendor="nvml") for index in (1, 2, 3)]
    (turn,) = turns([job(1, visible_devices="1", gpus_wanted=1)], board, NOW).values()
    # GPU indices start at 0 for each vendor. This vendor's GPU 1 is the machine's GPU 2.
    assert [taken.index for taken in turn.gpus] == [2]
    (turn,) = turns([job(1, visible_devices="2", gpus_wanted=1)], board, NOW).values()
    assert [taken.index for taken in turn.gpus] == [3]
