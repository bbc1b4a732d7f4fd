from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sae_tui.jobs import edits
from sae_tui.jobs.states import describe_state
from sae_tui.jobs.view.find import architectures, filter_jobs, find, orders, waits
from trainer.contract.errors import UserError
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState

TOPK = dump_job(parse_job({"data": {"path": "data/sample"}})[0])
SWEEP = dump_job(parse_job({"data": {"path": "x"}, "sae": {"architecture": ["gated", "batch_topk"]}})[0])


def job(number: int = 1, name: str = "run", **fields) -> Job:
    usual = {"config": TOPK, "user": "ada", "host": "here", "device": "cpu", "gpu_source": "none"}
    return Job(id=number, name=name, **(usual | fields))


def ids(jobs: list[Job]) -> list[int]:
    return [one.id for one in jobs]


JOBS = [
    job(
        1,
        "MiniLM base",
        tags=("good", "paper"),
        state=JobState.FINISHED,
        fvu=0.2,
        heldout_fvu=0.3,
        l0=32.0,
        heldout_l0=36.0,
        loss=3.0,
    ),
    job(2, "minilm wide", tags=("goodish",), state=JobState.FAILED, user="bob", heldout_fvu=0.1, loss=5.0),
    job(3, "gpt2", note="minilm was better", state=JobState.RUNNING, config=SWEEP, heldout_fvu=0.2, heldout_l0=8.0),
    job(4, "Gemma", state=JobState.QUEUED, queued=20.0, fvu=0.01, l0=1.0),
    job(12, "gemma 4", state=JobState.QUEUED, queued=30.0, priority=5),
]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", [1, 2, 3, 4, 12]),
        ("minilm", [1, 2, 3]),
        ("MINILM wide", [2]),
        ("#good", [1, 2]),
        ("tag:paper", [1]),
        ("state:f", [1, 2]),
        ("failed", [2]),
        ("arch:batch_topk", [3]),
        ("gated", [3]),
        ("user:bob", [2]),
        ("bob", [2]),
        ("note:better", [3]),
        ("id:4", [4]),
        ("4", [4, 12]),
        ("12", [12]),
        ("minilm nothing", []),
        ("#", [1, 2, 3, 4, 12]),
        ("state:", [1, 2, 3, 4, 12]),
        ("k:32", []),
    ],
)
def test_a_filter_finds_the_jobs_that_match_all_its_words(text, found) -> None:
    assert ids(filter_jobs(JOBS, text)) == found


@pytest.mark.parametrize(
    ("by", "found"),
    [
        ("newest", [12, 4, 3, 2, 1]),
        ("name", [4, 12, 3, 1, 2]),
        ("state", [3, 12, 4, 2, 1]),
        ("fvu", [1, 2, 3, 12, 4]),
        ("loss", [1, 2, 12, 4, 3]),
        ("l0", [3, 1, 12, 4, 2]),
        ("queue", [12, 4, 3, 2, 1]),
    ],
)
def test_sorting_puts_low_values_of_finished_jobs_first_and_missing_values_last(by, found) -> None:
    assert ids(find(JOBS, by=by)) == found


def test_sorting_by_fvu_ignores_batch_fvus() -> None:
    jobs = [job(1, fvu=0.01), job(2, fvu=0.05, heldout_fvu=0.3), job(3), job(4, fvu=0.2, heldout_fvu=0.25)]
    assert ids(find(jobs, by="fvu")) == [4, 2, 3, 1]


def test_the_error_for_an_unknown_order_lists_the_known_orders() -> None:
    with pytest.raises(UserError, match="newest, name, state, fvu"):
        find(JOBS, by="speed")


def test_a_limit_keeps_the_first_matches() -> None:
    assert ids(find(JOBS, "minilm", "fvu", 2)) == [1, 2]


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@given(text=words, name=words, tags=st.lists(words, max_size=2))
def test_a_filter_finds_exactly_the_jobs_that_match_each_of_its_words(text, name, tags) -> None:
    jobs = [job(1, name, tags=tuple(tags)), job(2, "other")]
    each = [set(ids(filter_jobs(jobs, word))) for word in text.split()]
    assert set(ids(filter_jobs(jobs, text))) == set.intersection({1, 2}, *each)


@given(
    st.lists(st.tuples(st.floats(0, 9) | st.none(), st.sampled_from(JobState)), max_size=30),
    st.sampled_from(list(orders())),
)
def test_every_order_keeps_all_jobs_and_does_not_depend_on_the_input_order(values, by) -> None:
    jobs = [job(number, heldout_fvu=fvu, loss=fvu, state=state) for number, (fvu, state) in enumerate(values, 1)]
    matches = find(jobs, by=by)
    assert sorted(ids(matches)) == ids(jobs)
    assert find(jobs[::-1], by=by) == matches


def test_a_thousand_jobs_are_filtered_and_sorted_in_twenty_milliseconds() -> None:
    jobs = [job(number, f"run {number}", tags=("a",), config=f"{TOPK}# {number % 50}") for number in range(1000)]
    taken = []
    for _ in range(5):
        start = time.process_time()
        find(jobs, "run #a topk ada queued", "fvu")
        taken.append(time.process_time() - start)
    assert min(taken) < 0.020


def test_the_architectures_in_a_job_file_are_found_without_parsing_the_file() -> None:
    assert architectures(job()) == "topk"
    assert architectures(job(config=SWEEP)) == "gated batch_topk"
    assert architectures(job(config="")) == ""


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "in the queue"),
        ({"waits_for": "GPU 0 is held by job 3 (ann)"}, "GPU 0 is held by job 3 (ann)"),
        ({"held": True, "waits_for": "GPU 0"}, "until released"),
        ({"held": True, "waits_for": "held"}, "until released"),
        ({"held": True, "after": (4, 7)}, "until released; comes after job 4 and job 7"),
        (
            {"held": True, "after": (4,), "waits_for": "held; comes after job 4, which failed"},
            "until released; comes after job 4, which failed",
        ),
        ({"held": True, "attempt": 1, "step": 501, "waits_for": "paused"}, "at step 501, until resumed"),
        ({"priority": -2, "waits_for": "GPU 0"}, "priority -2 · GPU 0"),
        ({"state": JobState.RUNNING, "waits_for": "GPU 0"}, ""),
    ],
)
def test_a_queued_job_shows_its_reason_for_waiting(fields, said) -> None:
    assert waits(job(**fields)) == said


def test_a_held_or_paused_job_is_shown_as_such_and_found_by_that_word() -> None:
    jobs = [job(1), job(2, held=True), job(3, held=True, attempt=1), job(4, attempt=1), job(5, state=JobState.RUNNING)]
    assert [describe_state(one).word for one in jobs] == ["queued", "held", "paused", "queued", "running"]
    assert len({describe_state(one)[:2] for one in jobs}) == 4
    assert ids(filter_jobs(jobs, "state:queued")) == [1, 4]
    assert ids(filter_jobs(jobs, "state:held")) == [2]
    assert ids(filter_jobs(jobs, "paused")) == [3]
    assert ids(find(jobs, by="state")) == [5, 4, 1, 3, 2]


def test_plus_and_minus_signs_add_and_remove_tags() -> None:
    assert edits.tag_words("+good new, -bad") == (["good", "new"], ["bad"])
    assert edits.tag_words("  ") == ([], [])


def test_numbers_in_names_are_sorted_numerically() -> None:
    named = [job(1, "k=16 d_sae=1536"), job(2, "k=16 d_sae=768"), job(3, "k=8"), job(4, "8"), job(5, "K=24")]
    assert ids(find(named, by="name")) == [4, 3, 2, 1, 5]
