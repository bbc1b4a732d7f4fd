"""Tests for the queue's order among users and for limits, including simulated weeks with many users."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.queue_simulation import (
    BEGIN,
    DAY_S,
    HOUR_S,
    Ran,
    SimJob,
    Simulation,
    crowd,
    oldest_since,
    promised_s,
    shares_by_day,
    sim_row,
)

from sae_tui.jobs.queue import fair, order
from sae_tui.jobs.queue.fair import AGED_S, BACKFILL_S, LEAST_S, WINDOW_S, Standing, gpu_seconds
from sae_tui.jobs.queue.order import QueueGpu, turns
from sae_tui.policy import Limits
from trainer.contract.store.rows import GpuUse, Job, Lease
from trainer.contract.store.states import JobState

NOW = BEGIN + 10 * DAY_S
GIB = 2**30
USERS = ("ann", "bob", "cat")


def job(number: int, user: str = "ann", n_gpus: int = 1, waited_s: float = 1.0, **fields: object) -> Job:
    return sim_row(number, user, n_gpus, NOW - waited_s, **fields)


def used(user: str, gpu_hours: float, **fields: object) -> GpuUse:
    values = {"state": JobState.FINISHED, "started": NOW - gpu_hours * HOUR_S, "ended": NOW, "n_gpus": 1}
    return GpuUse(id=900, user=user, **values | {"queued": NOW - 2 * DAY_S} | fields)


def board(n_gpus: int, *holders: str, frees_in_s: float = 500.0) -> list[QueueGpu]:
    """Return `n_gpus` GPUs; each of these users holds one, starting with the first GPU."""
    gpus = []
    for index in range(n_gpus):
        leases, frees_s = (), 0.0
        if index < len(holders):
            leases, frees_s = (held(index, holders[index]),), frees_in_s
        gpus.append(QueueGpu(index, f"GPU-{index}", 80 * GIB, leases=leases, frees_in_s=frees_s))
    return gpus


def held(index: int, user: str) -> Lease:
    return Lease(
        host="box", gpu_uuid=f"GPU-{index}", gpu_index=index, job_id=800 + index, user=user, pid=7, since=NOW - 60
    )


def starting(line: list[Job], gpus: list[QueueGpu], standing: Standing) -> list[int]:
    return [job_id for job_id, turn in turns(line, gpus, NOW, standing).items() if not turn.waits_for]


def test_the_user_with_less_gpu_time_in_the_last_day_goes_first():
    line = [job(1, "ann", waited_s=900), job(2, "bob", waited_s=60)]
    assert starting(line, board(1), Standing()) == [1]
    assert starting(line, board(1), Standing((used("ann", 2), used("bob", 1)))) == [2]


def test_priority_takes_precedence_over_gpu_time():
    line = [job(1, "ann", priority=1), job(2, "bob", waited_s=900)]
    assert starting(line, board(1), Standing((used("ann", 20),))) == [1]


def test_gpus_that_are_free_at_the_same_time_are_dealt_to_users_in_turn():
    line = [job(number, "ann", waited_s=900 - number) for number in range(1, 9)]
    line += [job(number, "bob", waited_s=60) for number in range(11, 19)]
    line += [job(21, "cat", n_gpus=2)]
    started = starting(line, board(6), Standing())
    assert sorted(started) == [1, 2, 11, 12, 21]


def test_a_running_job_counts_from_its_start_and_an_old_one_only_within_the_window():
    running = {"state": JobState.RUNNING, "ended": None}
    past = [
        used("ann", 0, started=NOW - 2 * DAY_S, n_gpus=2, **running),
        used("bob", 0, started=NOW - 1, n_gpus=3, **running),
        used("cat", 0, started=NOW - 3 * DAY_S, ended=NOW - DAY_S + 300),
    ]
    assert gpu_seconds(past, NOW) == {"ann": 2 * WINDOW_S, "bob": 3 * LEAST_S, "cat": 300}


def test_a_paused_job_counts_only_for_the_time_it_is_known_to_have_held_its_gpus():
    paused = {"state": JobState.QUEUED, "ended": None, "started": NOW - 5 * HOUR_S, "queued": NOW - HOUR_S, "n_gpus": 2}
    measured = [used("ann", 0, energy_s=2 * HOUR_S, **paused), used("bob", 0, energy_s=90 * HOUR_S, **paused)]
    assert gpu_seconds([*measured, used("cat", 0, **paused)], NOW) == {"ann": 2 * HOUR_S, "bob": 8 * HOUR_S, "cat": 0}


def test_gpu_time_is_the_same_for_all_processes_that_plan_in_the_same_minute():
    past = [used("ann", 0, state=JobState.RUNNING, ended=None, started=NOW - HOUR_S)]
    assert gpu_seconds(past, NOW) == gpu_seconds(past, NOW + 59)
    assert gpu_seconds(past, NOW)["ann"] < gpu_seconds(past, NOW + 60)["ann"]


def test_a_users_oldest_job_goes_first_after_a_day_even_if_the_user_used_most_gpu_time():
    waited_s = AGED_S + 60
    line = [job(1, "ann", waited_s=waited_s), job(2, "ann", waited_s=waited_s - 1), job(3, "bob")]
    standing = Standing((used("ann", 20, queued=NOW - 3 * DAY_S, ended=NOW - DAY_S + 60),))
    # Only the oldest job goes ahead of other users' jobs, so submitting many jobs at once brings no further advantage.
    assert starting(line, board(1), standing) == [1]
    assert starting(line, board(2), standing) == [1, 3]


def test_a_users_next_job_goes_first_only_a_day_after_the_previous_one_started():
    line = [job(1, "ann", waited_s=3 * AGED_S), job(2, "bob")]
    older = used("ann", 20, queued=NOW - 4 * DAY_S)
    assert starting(line, board(1), Standing((older,))) == [2]
    younger = used("ann", 20, queued=NOW - 2 * DAY_S)
    assert starting(line, board(1), Standing((younger,))) == [1]


def test_a_job_waits_while_its_user_holds_all_the_gpus_that_the_policy_allows():
    standing = Standing(limits=Limits(gpus_per_user=4))
    found = turns([job(1), job(2, "bob")], board(8, *["ann"] * 4), NOW, standing)
    assert found[1].waits_for == "ann has 4 of 4 GPUs that the policy allows"
    assert found[2].gpus
    found = turns([job(1, n_gpus=2)], board(8, *["ann"] * 3), NOW, standing)
    assert found[1].waits_for == "ann has 3 of 4 GPUs that the policy allows, and this job needs 2"
    found = turns([job(1, n_gpus=5)], board(8), NOW, standing)
    assert found[1].waits_for == "it needs 5 GPUs, but the policy allows each user only 4 now"


def test_gpus_held_by_a_users_jobs_in_other_data_folders_count_towards_the_limit():
    standing = Standing(limits=Limits(gpus_per_user=2), elsewhere={"ann": frozenset({"GPU-7"})})
    assert standing.most_gpus("ann") == 1
    found = turns([job(1)], board(8, "ann"), NOW, standing)
    assert found[1].waits_for == "ann has 2 of 2 GPUs that the policy allows"


def test_a_job_held_back_by_a_limit_reserves_no_gpus():
    line = [job(1, "ann", n_gpus=2, waited_s=2 * BACKFILL_S), job(2, "bob", n_gpus=2)]
    standing = Standing(limits=Limits(gpus_per_user=3))
    assert starting(line, board(4, "ann", "ann"), standing) == [2]
    assert starting(line, board(4, "cat", "cat", "cat"), standing) == []


def test_small_jobs_overtake_a_job_held_back_by_a_limit_for_at_most_an_hour():
    standing = Standing(limits=Limits(gpus_per_user=4))
    for waited_s, started in ((BACKFILL_S - 1, [2]), (BACKFILL_S, [])):
        line = [job(1, n_gpus=2, waited_s=waited_s), job(2)]
        assert starting(line, board(8, "ann", "ann", "ann"), standing) == started
    assert turns(line, board(8, "ann", "ann", "ann"), NOW, standing)[2].waits_for == "job 1 is ahead in the queue"


def test_a_users_reservations_do_not_exceed_the_limit():
    named = {"any_gpus": False, "gpu_uuids": ("GPU-0", "GPU-1")}
    line = [job(1, "ann", n_gpus=2, waited_s=90, **named), job(2, "ann", n_gpus=2, waited_s=80), job(3, "bob")]
    gpus = board(4, "cat", "cat", "cat")
    past = (used("bob", 20),)
    assert turns(line, gpus, NOW, Standing(past))[3].waits_for.endswith("job 2 is ahead in the queue")
    assert starting(line, gpus, Standing(past, limits=Limits(gpus_per_user=2))) == [3]


def test_a_job_waits_if_its_time_limit_is_longer_than_currently_allowed():
    long, short = ('[launch]\ntime_limit = "12:00:00"\n', '[launch]\ntime_limit = "1:00:00"\n')
    standing = Standing(limits=Limits(max_time_s=4 * HOUR_S), largest=Limits(max_time_s=12 * HOUR_S))
    line = [job(1, config=long), job(2, config=short), job(3), job(4, config="[launch]\ntime_limit = 7")]
    assert starting(line, board(4), standing) == [2, 3, 4]
    assert turns(line, board(4), NOW, standing)[1].waits_for == (
        "its time limit is 12 h 00 min, but the policy allows only 4 h 00 min now"
    )
    # A job launched before the policy was changed does not wait forever: its supervisor shortens its time limit.
    always = Limits(max_time_s=4 * HOUR_S)
    assert starting(line, board(4), Standing(limits=always, largest=always)) == [1, 2, 3, 4]


def test_no_more_jobs_of_an_array_run_at_once_than_its_limit_allows():
    line = [job(number, waited_s=90 - number, array=1, array_limit=2) for number in range(1, 5)] + [job(9)]
    assert starting(line, board(8), Standing()) == [1, 2, 9]
    found = turns(line, board(8), NOW, Standing(active={1: 2}))
    assert found[1].waits_for == "2 of at most 2 jobs of array 1 are active"
    assert found[9].gpus
    # Only the jobs that the limit allows to run reserve GPUs.
    found = turns(line, board(2, "bob", "bob"), NOW, Standing(active={1: 1}))
    assert found[2].waits_for == "job 1 is ahead in the queue"


def test_an_arrays_limit_also_applies_to_jobs_without_gpus():
    line = [job(number, n_gpus=0, waited_s=90 - number, array=1, array_limit=2) for number in range(1, 5)]
    assert starting(line, [], Standing()) == [1, 2]
    assert starting(line, [], Standing(active={1: 2})) == []


users = st.sampled_from(USERS)
ages = st.sampled_from([60.0, BACKFILL_S + 60, AGED_S + 60, 2 * AGED_S])


@st.composite
def uses(draw) -> GpuUse:
    return used(draw(users), draw(st.integers(0, 30)), queued=NOW - draw(ages), n_gpus=draw(st.integers(1, 8)))


@st.composite
def cases(draw) -> tuple[list[Job], list[QueueGpu], Standing]:
    holders = draw(st.lists(users, max_size=8))
    line = [
        job(
            number,
            draw(users),
            draw(st.integers(0, 8)),
            waited_s=draw(ages) + number,
            priority=draw(st.integers(0, 1)),
            expected_s=draw(st.sampled_from([None, 60.0, 900.0])),
            array=draw(st.sampled_from([None, 5, 6])),
            array_limit=draw(st.sampled_from([None, 1, 3])),
        )
        for number in range(1, 1 + draw(st.integers(1, 12)))
    ]
    standing = Standing(
        past=tuple(draw(st.lists(uses(), max_size=6))),
        active={5: draw(st.integers(0, 2))},
        elsewhere={"ann": frozenset({"GPU-99"})} if draw(st.booleans()) else {},
        limits=Limits(gpus_per_user=draw(st.sampled_from([None, 1, 4, 8]))),
    )
    return line, board(8, *holders), standing


@given(cases())
def test_no_gpu_is_given_twice_and_no_limit_is_exceeded(case):
    line, gpus, standing = case
    found = turns(line, gpus, NOW, standing)
    assert found.keys() == {one.id for one in line}
    started = [one for one in line if not found[one.id].waits_for]
    given_out = [gpu.uuid for one in started for gpu in found[one.id].gpus]
    assert len(given_out) == len(set(given_out)) == sum(one.gpus_wanted for one in started)
    assert not {gpu.uuid for gpu in gpus if gpu.leases} & set(given_out)
    most = standing.limits.gpus_per_user
    had = Counter(lease.user for gpu in gpus for lease in gpu.leases)
    for user in {one.user for one in started if one.gpus_wanted} if most else ():
        wanted = sum(one.gpus_wanted for one in started if one.user == user)
        assert had[user] + len(standing.elsewhere.get(user, ())) + wanted <= most
    for one in started:
        if (
            one.array is not None
            and one.array_limit
            and not any(other.array == one.array and other.array_limit != one.array_limit for other in line)
        ):
            active = standing.active.get(one.array, 0)
            assert active + sum(other.array == one.array for other in started) <= one.array_limit


@given(cases(), st.randoms())
def test_the_decision_does_not_depend_on_the_order_of_the_rows(case, source):
    line, gpus, standing = case
    found = turns(line, gpus, NOW, standing)
    shuffled = [source.sample(rows, len(rows)) for rows in (line, gpus, list(standing.past))]
    other = Standing(tuple(shuffled[2]), (), standing.active, standing.elsewhere, standing.limits)
    again = turns(shuffled[0], shuffled[1], NOW, other)
    assert list(again.items()) == list(found.items())


@given(cases())
def test_sharing_a_decision_among_similar_jobs_gives_the_same_result_as_deciding_each(case):
    line, gpus, standing = case
    found = turns(line, gpus, NOW, standing)
    with pytest.MonkeyPatch.context() as patch:
        # Make all jobs different, so that no job's decision is reused for another.
        patch.setattr(order._Plan, "_alike", lambda self, one: (one.id,))
        assert turns(line, gpus, NOW, standing) == found


@given(cases())
def test_decisions_for_a_single_user_do_not_depend_on_that_users_past_gpu_time(case):
    line, gpus, standing = case
    alone = [Job(**{name: getattr(one, name) for name in one.__struct_fields__} | {"user": "ann"}) for one in line]
    bare = Standing((), (), standing.active, standing.elsewhere, standing.limits)
    assert turns(alone, gpus, NOW, standing) == turns(alone, gpus, NOW, bare)


def assert_nobody_starved(jobs: list[SimJob], ran: list[Ran]) -> None:
    """Check that every job has run, and that none waited longer than the queue promises."""
    assert {one.row.id for one in ran} == {one.row.id for one in jobs}
    since, n_users = oldest_since(ran), len({one.row.user for one in jobs})
    for one in ran:
        waited_s = one.started - since[one.row.id]
        assert waited_s <= promised_s(one, since[one.row.id], ran, n_users), one


def test_no_user_starves_in_a_crowd():
    jobs = crowd(160, days=1.0)
    assert_nobody_starved(jobs, Simulation(jobs).run())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_no_user_starves_among_a_thousand_jobs_from_eight_users(seed):
    jobs = crowd(1000, seed=seed)
    ran = Simulation(jobs).run()
    assert_nobody_starved(jobs, ran)
    # One job on all GPUs can use a third of a day's GPU time, so compare sums over days when all users were waiting.
    days = [day for day in shares_by_day(ran) if len(day) == 8][:8]
    totals = [sum(day[user] for day in days) for user in days[0]]
    assert len(days) >= 5
    assert max(totals) <= 2 * min(totals)


def small_jobs(n_jobs: int, n_users: int, days: float, seed: int = 0) -> list[SimJob]:
    """Return jobs that take up to 4 h on one or two GPUs; the first user submits half of them at once."""
    source = random.Random(seed)
    jobs = []
    for number in range(1, n_jobs + 1):
        is_flood = number <= n_jobs // 2
        user = "user0" if is_flood else f"user{source.randrange(1, n_users)}"
        runs_s = source.uniform(0.2, 4) * HOUR_S
        comes = BEGIN if is_flood else BEGIN + source.random() * days * DAY_S
        expected_s = runs_s if source.random() < 0.5 else None
        jobs.append(
            SimJob(sim_row(number, user, 1 if is_flood else source.choice((1, 1, 2)), comes, expected_s), runs_s)
        )
    return jobs


@pytest.mark.slow
def test_users_who_always_have_queued_jobs_get_similar_gpu_time_every_day():
    ran = Simulation(small_jobs(320, 4, 0.2)).run()
    days = [day for day in shares_by_day(ran) if len(day) > 1]
    assert days
    for day in days:
        assert max(day.values()) <= 2 * min(day.values()), day


def wait_of_a_large_job() -> float:
    """Return how long a large job waits if its user has used a lot of GPU time and others' small jobs keep arriving."""
    small_s = 0.6 * HOUR_S
    jobs = [SimJob(sim_row(1, "ann", 3, BEGIN - 1), 4 * DAY_S)]
    jobs += [SimJob(sim_row(2, "ann", 5, BEGIN + 5 * HOUR_S), HOUR_S)]
    jobs += [
        SimJob(sim_row(number, f"user{number % 3}", 1, BEGIN + number * 300.0), small_s) for number in range(3, 1000)
    ]
    return next(one.waited_s for one in Simulation(jobs).run() if one.row.id == 2)


@pytest.mark.slow
def test_a_busy_users_large_job_does_not_starve_behind_other_users_small_jobs(monkeypatch):
    assert wait_of_a_large_job() <= AGED_S + 4 * 0.6 * HOUR_S
    monkeypatch.setattr(fair, "AGED_S", float("inf"))
    assert wait_of_a_large_job() > 2 * DAY_S


def test_limits_hold_during_a_simulated_week():
    in_array = {"array": 1, "array_limit": 2}
    rows = [sim_row(number, f"user{number % 2}", 1 + number % 3, BEGIN + number, **in_array) for number in range(1, 40)]
    rows += [sim_row(number, f"user{number % 2}", 1 + number % 4, BEGIN + number) for number in range(50, 99)]
    jobs = [SimJob(row, HOUR_S) for row in rows]
    assert len(Simulation(jobs, limits=Limits(gpus_per_user=4)).run()) == len(jobs)
